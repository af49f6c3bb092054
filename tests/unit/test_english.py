"""The English of help texts, errors and pages: words of the field, no phrase on the kept lists.

A phrase comes onto a list when it was found in a text and made readers stop; the comment beside it
is what to write. Errors are found in the source: what is raised, and its hint, and findings.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from diloco.program import app

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("common", "learner", "aggregator", "infra", "diloco")
    for path in sorted((ROOT / folder).glob("**/*.py"))
    if not any(part.is_symlink() for part in path.parents)
]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]
# Read in an emergency.
RUNBOOKS = sorted((ROOT / "runbooks").glob("*.md"))

# Nowhere.
BANNED = {
    r"taken for so many": "emulate N devices",
    r"to try a mesh": "emulate N devices",
    r"what of its data": "tokens consumed",
    r"\bof then\b": "at that point",
    r"gone on from": "resumed from",
    r"that are there\b": "existing",
    r"on the mean\b": "on average",
    r"cannot be understood": "invalid",
    r"second word\b": "second signal",
    r"is (?:there|here) already": "already exists",
    r"is none (?:of|that)": "is not a",
    r"\bpassing (?:fault|error)": "transient fault",
    r"\bwhat it is behind\b": "its lag",
    r"\bnot there any more\b": "no longer stored",
    r"\bshut out\b|\bshut this\b": "quarantine",
    r"\bhow freely\b": "sampling temperature",
    r"\bthe likeliest\b": "greedy",
    r"\bstands? still\b": "stalled",
    r"\bbegins? again\b": "restart, resume",
    r"\banew\b": "recreate",
    r"\bheard of\b": "silent, liveness timeout",
}
# Not in help, errors and runbooks, which are read in haste; other pages may have an aside.
BANNED_IN_HASTE = {
    r"\bso (?:many|long|often)\b": "the number, the time",
    r"\b(?:are|is) away\b": "unreachable",
    r"\b(?:nobody|somebody|everybody|anybody|whoever)\b": "who it is: a learner, an operator",
    r"\b(?:goes|go|going|went) on\b": "continue, resume",
    r"\bmade? again\b|\bmake again\b": "recompute",
    r"(?<!there )\bis no (?!longer)\w+": "is not a",
    r"\blook whether\b": "check whether",
    r"\bpicture\b": "figure",
    r"\bby themselves\b": "automatically",
    r"\bstandard error\b": "stderr",
}


def test_the_lists_would_find_what_they_are_for() -> None:
    old = "train on the CPU, taken for so many devices: to try a mesh"
    assert list(hits(old, BANNED | BANNED_IN_HASTE))
    assert not list(hits("emulate N devices on the CPU", BANNED | BANNED_IN_HASTE))


def hits(text: str, phrases: dict[str, str]) -> Iterator[str]:
    plain = " ".join(text.split())
    for phrase, instead in phrases.items():
        for found in re.finditer(phrase, plain, re.IGNORECASE):
            around = plain[max(0, found.start() - 40) : found.end() + 40]
            yield f"{found[0]!r} in {around!r}: write {instead!r}"


# Help


def commands(command: object, *before: str) -> Iterator[tuple[str, object]]:
    yield " ".join(before), command
    if isinstance(command, TyperGroup):
        for name, part in command.commands.items():
            yield from commands(part, *before, name)


COMMANDS = dict(commands(get_command(app), "diloco"))


TYPERS_OWN = ("help", "install_completion", "show_completion")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_explains_itself(name: str) -> None:
    command = COMMANDS[name]
    assert command.help, "a command says what it does"
    assert command.help.splitlines()[0].endswith(".")
    texts = [command.help]
    for parameter in command.params:
        if parameter.name not in TYPERS_OWN:
            assert parameter.help, f"{name}: {parameter.opts} has no help"
            assert not parameter.help.endswith("."), f"{name}: {parameter.opts}"
            texts.append(parameter.help)
    found = [hit for text in texts for hit in hits(text, BANNED | BANNED_IN_HASTE)]
    assert not found, f"{name}: {found}"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_is_cut_on_a_terminal_of_80_columns(name: str) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*name.split()[1:], "--help"])
    assert shown.exit_code == 0
    assert "…" not in shown.output


# Errors


def words(node: ast.expr | None) -> str:
    """The text of a literal, with {} for what is filled in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part) or "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    if isinstance(node, ast.IfExp):
        return f"{words(node.body)} / {words(node.orelse)}"
    return ""


def errors(source: str) -> Iterator[str]:
    """Returns the texts of raised errors, hints, and findings of the doctor."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name.endswith("Error"):
            yield from map(words, node.args)
        for keyword in node.keywords:
            if keyword.arg in ("hint", "sentence", "advice"):
                yield words(keyword.value)


def test_errors_are_found_in_the_source() -> None:
    assert len(SOURCES) > 100
    assert sum(1 for path in SOURCES for text in errors(path.read_text()) if text) > 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_errors_are_plain_english(path: Path) -> None:
    texts = errors(path.read_text())
    found = [hit for text in texts for hit in hits(text, BANNED | BANNED_IN_HASTE)]
    assert not found


# Pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_no_banned_phrase(page: Path) -> None:
    assert not list(hits(page.read_text(), BANNED))


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.name)
def test_runbooks_are_plain_english(page: Path) -> None:
    assert not list(hits(page.read_text(), BANNED | BANNED_IN_HASTE))


def test_pages_and_runbooks_are_found() -> None:
    assert len(PAGES) > 25
    assert len(RUNBOOKS) > 25
