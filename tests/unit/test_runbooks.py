"""Runbooks: every page is found, has its parts, and every command in it exists with its options."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from runbook_pages import INDEX, ROOT, RUNBOOKS, commands, words_of
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from diloco.program import app

PACKAGES = ("common", "aggregator", "learner", "diloco")
PARTS = ["Symptom", "Meaning", "Check", "Act", "Verify", "Aftermath"]
UNITS = {path.name for path in (ROOT / "infra" / "systemd").glob("*.*")}
SYSTEMCTL = {
    "status",
    "start",
    "stop",
    "restart",
    "reload",
    "enable",
    "disable",
    "list-timers",
    "daemon-reload",
}
JOURNALCTL = {"-u", "-n", "--disk-usage", "--vacuum-size=1G"}


def check_diloco(words: list[str]) -> None:
    """The command exists, and takes these options and arguments."""
    command, rest = get_command(app), words[1:]
    known = {name for parameter in command.params for name in parameter.opts}
    while len(rest) > 1 and rest[0].startswith("--"):
        assert rest[0] in known
        rest = rest[2:]
    while isinstance(command, TyperGroup) and rest:
        assert rest[0] in command.commands
        command, rest = command.commands[rest[0]], rest[1:]
    # A command that is only spoken of needs no arguments.
    if rest:
        command.make_context(command.name, list(rest))


def check_systemctl(words: list[str]) -> None:
    verb, *rest = words[1:]
    assert verb in SYSTEMCTL
    if verb == "daemon-reload":
        assert not rest
        return
    units = [word for word in rest if word != "--now"]
    assert units
    for unit in units:
        check_unit(unit)


def check_journalctl(words: list[str]) -> None:
    options = [word for word in words[1:] if word.startswith("-")]
    assert options
    assert set(options) <= JOURNALCTL
    if "-u" in words:
        check_unit(words[words.index("-u") + 1])


def check_unit(unit: str) -> None:
    """One of `infra/systemd`; a template's instance stands for the template."""
    name = re.sub(r"@\w+", "@", unit)
    assert (name if "." in name else f"{name}.service") in UNITS


CHECKS = {"diloco": check_diloco, "systemctl": check_systemctl, "journalctl": check_journalctl}


def links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in target:
            yield target


def named() -> set[str]:
    """The pages that code and alerts name."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files += (ROOT / "infra").rglob("*.yml")
    return {
        name for path in files for name in re.findall(r"runbooks/([\w-]+\.md)", path.read_text())
    }


def test_every_page_that_is_named_exists_and_the_index_has_all() -> None:
    pages = {path.name for path in RUNBOOKS}
    assert named() <= pages
    assert set(links(INDEX)) == pages


def test_a_page_that_nothing_names_is_a_task_of_an_operator() -> None:
    """A runbook that no daemon and no alert names is listed in the index as a task."""
    tasks = INDEX.read_text().partition("## By what you want")[2]
    seen = INDEX.read_text().partition("## By what you want")[0]
    for page in {path.name for path in RUNBOOKS} - named():
        assert f"({page})" in tasks or f"({page})" in seen


@pytest.mark.parametrize("path", [*RUNBOOKS, INDEX], ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in links(path):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_page_has_its_parts(path: Path) -> None:
    found = re.findall(r"^## (.+)", path.read_text(), re.MULTILINE)
    assert found in (PARTS, PARTS[:-1]), "only an aftermath may be absent"


@pytest.mark.parametrize("path", [*RUNBOOKS, INDEX], ids=lambda path: path.stem)
def test_every_command_exists(path: Path) -> None:
    for words in commands(path):
        try:
            CHECKS[Path(words[0]).name](words)
        except (TyperException, AssertionError) as error:
            raise AssertionError(f"{' '.join(words)}: {error}") from error


def test_there_are_commands_to_check() -> None:
    found = Counter(Path(words[0]).name for path in RUNBOOKS for words in commands(path))
    assert found["diloco"] > 60
    assert found["systemctl"] > 20
    assert found["journalctl"] > 5


@pytest.mark.parametrize(
    "line",
    [
        "diloco frobnicate RUN",
        "diloco doctor RUN --deeper",
        "diloco run rollback RUN",
        "diloco run frobnicate",
        "diloco --stores URL doctor RUN",
        "systemctl explode nats-server",
        "systemctl start nats",
        "journalctl -u diloco-nobody",
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    words = words_of(line)
    with pytest.raises((TyperException, AssertionError)):
        CHECKS[words[0]](words)
