"""Every command in a block of the pages exists, with these options; the tutorial's task is one."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from runbook_pages import ROOT, words_of
from test_runbooks import check_diloco
from typer.exceptions import TyperException
from typer.main import get_command

from diloco.learner.load_and_check_task import load_task
from diloco.program import app

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"<!-- generated: example [a-z ]+ -->\n\n```python\n(.*?)```", re.DOTALL)
TUTORIAL = DOCS / "tutorial.md"


def block_commands(page: Path) -> list[list[str]]:
    """The commands of a page's blocks, without what they are piped into."""
    lines = [
        line.partition(" | ")[0]
        for block in BLOCK.findall(page.read_text())
        for line in block.replace("\\\n", " ").splitlines()
    ]
    found = [words for line in lines if (words := words_of(line)) and "--help" not in words]
    return [words for words in found if Path(words[0]).name == "diloco"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_exists(page: Path) -> None:
    for words in block_commands(page):
        try:
            check_diloco(words)
        except (TyperException, AssertionError) as error:
            raise AssertionError(f"{' '.join(words)}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_that_a_sentence_names_exists(page: Path) -> None:
    named = re.findall(r"`diloco ([a-z][a-z-]*)", page.read_text())
    assert set(named) <= set(get_command(app).commands)  # type: ignore[attr-defined]


def test_there_are_commands_to_check() -> None:
    assert sum(len(block_commands(page)) for page in PAGES) > 50


def test_the_tutorials_task_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    (tmp_path / "spirals.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "spirals", raising=False)
    task = load_task("spirals:build", steps=10, seed=0, options={})
    assert task.tokens_per_batch == 64
    monkeypatch.delitem(sys.modules, "spirals", raising=False)


def needed(code: str) -> set[str]:
    """Returns the packages of an example that `pip install diloco` does not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {re.split(r"[\[>=]", one)[0].replace("_", "-") for one in project["dependencies"]}
    modules = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else names_of(node))
    } - {*sys.stdlib_module_names, "diloco"}
    found = {PACKAGES.get(module, module) for module in modules}
    return found - brought


def names_of(node: ast.Import) -> list[str]:
    return [alias.name for alias in node.names]


# Where a module is not named as its package.
PACKAGES = {"sklearn": "scikit-learn"}


@pytest.mark.parametrize("page", ["data.md", "library.md", "tasks.md"])
def test_a_page_says_what_its_examples_need(page: str) -> None:
    text = (DOCS / page).read_text()
    examples = EXAMPLE.findall(text)
    installed = " ".join(re.findall(r"pip install ([^\n`#]*)", text))
    assert examples
    for package in set().union(*map(needed, examples)):
        assert re.search(rf"(?<![a-z-]){package}(?![a-z-])", installed), package
