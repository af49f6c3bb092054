"""Nothing cites a page, a file or a folder that is not in the repository."""

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
            installed = "node_modules" in inside
            passed_over = path == Path(__file__) or _linked(inside) or installed
            if path.suffix in KINDS and path.is_file() and not passed_over:
                yield path
    tops = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
    yield from (ROOT / name for name in tops)


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


# Files and folders


PLACE = re.compile(rf"(?<![\w./{{}}*$-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)(?![\w{{*/<$])")
ALONE = re.compile(r"`([\w-]+\.py)`")
INSIDE = re.compile(r"((?:`\w+`(?:, | and ))*`\w+`) in `([\w/]+\.py)`")
DRAWING = re.compile(r"[\w/]+\.py|[\w/]+/(?= )")
# What an operator, or a user, makes: no files of the repository.
MADE = {"infra/terraform/terraform.tfvars.json", "diloco/manifest.json"}
USERS = {"spirals.py", "common.py"}


def pages() -> Iterator[Path]:
    yield from (path for path in files() if path.suffix == ".md" and path.name != "CHANGELOG.md")


def absent_places(text: str) -> Iterator[str]:
    """Files and folders, named from the top of the repository, that are not there.

    A name without a suffix is one only in backticks; else it may be prose, as in docs/design.
    """
    for found in PLACE.finditer(text):
        name, quoted = found[1], text[found.start() - 1] == "`"
        if not ("." in name.rpartition("/")[2] or quoted) or name in MADE:
            continue
        if not (ROOT / name).exists():
            yield name


def absent_neighbours(line: str, names: set[str]) -> Iterator[str]:
    """Files named without a folder: they lie beside the one that the line named before them."""
    before = PLACE.search(line)
    for found in ALONE.finditer(line):
        places = [place for place in PLACE.finditer(line) if place.end() < found.start()]
        if before is None or not places:
            beside = found[1] in names
        else:
            folder = ROOT / places[-1][1]
            beside = ((folder if folder.is_dir() else folder.parent) / found[1]).is_file()
        if not beside and found[1] not in USERS:
            yield found[1]


def absent_symbols(text: str) -> Iterator[str]:
    """Returns the names that a page cites from a file without them."""
    for quoted, file in INSIDE.findall(text):
        code = (ROOT / file).read_text()
        for symbol in re.findall(r"\w+", quoted.replace(" and ", " ")):
            if not re.search(
                rf"^\s*(?:async )?(?:def |class |import |from )?{symbol}\b", code, re.MULTILINE
            ):
                yield f"{symbol} in {file}"


def test_every_file_and_folder_that_is_named_exists() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(set(absent_places(path.read_text())))
        for path in files()
        if path.suffix in (".md", ".py") and "tests" not in path.parts
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_every_file_that_a_page_names_without_its_folder_exists() -> None:
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in pages()
        for line in path.read_text().splitlines()
        for name in absent_neighbours(line, names)
    }
    assert found == set()


def test_everything_that_a_page_says_to_be_in_a_file_is_there() -> None:
    found = {str(path): list(absent_symbols(path.read_text())) for path in pages()}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_file_of_the_drawing_exists() -> None:
    """Learners on its left, the aggregator on its right."""
    drawing = (ROOT / "docs" / "architecture.md").read_text().split("```")[1].split("====")[0]
    left = {name for line in drawing.splitlines() for name in DRAWING.findall(line[:50])}
    right = {name for line in drawing.splitlines() for name in DRAWING.findall(line[50:])}
    assert {"library.py", "sync.py"} <= left
    assert {"tenure.py", "core/rounds.py", "arrays/"} <= right
    assert [name for name in left if not list((ROOT / "learner").rglob(name))] == []
    assert [name for name in right if not list((ROOT / "aggregator").rglob(name))] == []


def test_what_is_not_there_is_found() -> None:
    assert list(absent_places("see `learner/trian.py` and `common/bsu`")) == [
        "learner/trian.py",
        "common/bsu",
    ]
    line = "| x | `learner/train.py`, `machine.py` |"
    assert list(absent_neighbours(line, {"machine.py"})) == ["machine.py"]
    assert list(absent_symbols("`swop` in `aggregator/owner/committer.py`")) == [
        "swop in aggregator/owner/committer.py"
    ]
