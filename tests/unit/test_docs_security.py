"""docs/security.md names, for each threat, tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)(?:\.\.\.)?`", PAGE))))
def test_a_named_test_exists(name: str) -> None:
    assert any(known == name or (name.endswith("_") and known.startswith(name)) for known in TESTS)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:tests|bench)/[\w/.]+)`", PAGE))))
def test_a_named_file_exists(path: str) -> None:
    assert (ROOT / path).is_file()


def test_every_row_says_what_shows_it() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert len(rows) > 25
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))
