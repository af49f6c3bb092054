"""Nothing cites a page that is not in the repository."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("aggregator", "bench", "common", "diloco", "docs", "examples", "infra", "learner",
           "runbooks", "tests")  # fmt: skip
KINDS = {".py", ".md", ".toml", ".yml", ".json", ".service", ".timer", ".conf", ".tf", ".txt"}
CITED = re.compile(r"(?<![\w./{}*-])((?:[\w-]+/|\.\./)*[\w-]+\.md)\b")


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT).parts
            passed_over = path == Path(__file__) or _linked(inside)
            if path.suffix in KINDS and path.is_file() and not passed_over:
                yield path
    yield from (ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml"))


def _linked(parts: tuple[str, ...]) -> bool:
    """Reached by one of the links in diloco/, so a second time."""
    return (ROOT / parts[0] / parts[1]).is_symlink() if len(parts) > 1 else False


def missing(path: Path) -> Iterator[str]:
    for name in CITED.findall(path.read_text()):
        places = (ROOT, path.parent, ROOT / "docs", ROOT / "runbooks", ROOT / "docs" / "design")
        if not any((place / name).is_file() for place in places):
            yield name


def test_every_cited_page_exists() -> None:
    found = {str(path.relative_to(ROOT)): sorted(set(missing(path))) for path in files()}
    assert {path: names for path, names in found.items() if names} == {}


def test_many_pages_are_cited() -> None:
    assert sum(len(CITED.findall(path.read_text())) for path in files()) > 200


@pytest.mark.parametrize("text", ["see a-page.md", "(docs/a-page.md)", "`../a-page.md`: x"])
def test_a_page_that_is_not_there_is_found(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(text)
    assert list(missing(tmp_path / "x.py"))
