"""Every command in a block of the pages exists, with these options; the tutorial's task is one."""

import re
import sys
from pathlib import Path

import pytest
from runbook_pages import ROOT, words_of
from test_runbooks import check_diloco
from typer.exceptions import TyperException

from diloco.learner.contract import load_task

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
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
