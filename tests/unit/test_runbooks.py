"""Every runbook that code and alerts name exists, and no other does; each has its parts."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "aggregator", "learner", "diloco")
RUNBOOKS = sorted((ROOT / "runbooks").glob("*.md"))


def test_runbooks_are_those_that_are_named() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files += (ROOT / "infra").rglob("*.yml")
    named = {
        name for path in files for name in re.findall(r"runbooks/([\w-]+\.md)", path.read_text())
    }
    assert named == {path.name for path in RUNBOOKS}


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_says_what_to_do(path: Path) -> None:
    parts = re.findall(r"^## (\w+)", path.read_text(), re.MULTILINE)
    assert [part for part in parts if part in ("Symptom", "Meaning", "Act", "Verify")] == [
        "Symptom",
        "Meaning",
        "Act",
        "Verify",
    ]
