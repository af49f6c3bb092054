"""README and docs: the example is the file, links lead somewhere, dependencies are explained."""

import re
import tomllib
from pathlib import Path

import pytest

from diloco.common.process.config import make_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("runbooks/*.md")])


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_readme_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 70
    assert "docs/tutorial.md" in text
    assert len(blocks("README.md", "sh")[0].splitlines()) == 2


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "digits.py").read_text().splitlines()) < 40


@pytest.mark.parametrize("page", ["docs/start.md", "docs/continue.md"])
def test_the_configuration_loads(page: str) -> None:
    for text in blocks(page, "toml"):
        make_config(tomllib.loads(text), source=page)


def anchors(page: Path) -> set[str]:
    """Returns the anchors by which links name a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    rows = re.findall(
        r"^\| ([\w, -]+) \|", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE
    )
    named = {name.strip() for row in rows for name in row.split(",")} - {
        "package",
        "extra",
        "setuptools",
    }
    assert named - {"---"} == {re.split(r"[<>=]", requirement)[0] for requirement in wanted}
