"""The output of commands: sentences, tables, and colours."""

import json
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from diloco.common.protocol.errors import ConfigError

# Of a learner's state, and of a finding's severity.
STATE_STYLES = {
    "training": "green", "paused": "cyan", "flushing": "cyan", "done": "dim", "starting": "yellow",
    "left": "dim", "quarantined": "bold red",
}  # fmt: skip
SEVERITY_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that something takes its time: on standard error, and gone afterwards."""
    with Console(stderr=True).status(f"{what} ..."):
        yield


def say(text: str) -> None:
    """Print a sentence that may have rich's markup; never wrapped, so that paths stay whole."""
    Console().print(text, soft_wrap=True, highlight=False)


def say_plainly(text: str) -> None:
    """Print a sentence as it is, brackets and all."""
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def say_json(document: Any) -> None:
    """Print a result for scripts, on a line of its own."""
    print(json.dumps(document), flush=True)  # noqa: T201 - the result itself


def confirm(question: str) -> None:
    """Ask, and go on only after yes.

    Raises:
        ConfigError: there is nobody to answer.
        typer.Abort: the answer is no.
    """
    try:
        agreed = typer.confirm(question)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        print()  # noqa: T201 - ends the question's line
        raise ConfigError(
            "nothing was done, for want of an answer", hint="say it with --yes"
        ) from None
    if not agreed:
        raise typer.Abort


def plain_table(
    *columns: str, words: Container[str] = (), title: str | None = None, wraps: bool = False
) -> Table:
    """A table without lines.

    Args:
        columns: their titles. The first one, and those that `words` has, stand at the left; all
            others are figures.
        words: titles of further columns that hold names or sentences.
        title: of the table.
        wraps: whether long cells go on in a next line, rather than be cut off.
    """
    made = Table(
        title=title, title_justify="left", title_style="bold", caption_justify="left", box=None,
        header_style="bold", padding=(0, 1, 0, 0),
    )  # fmt: skip
    for place, column in enumerate(columns):
        left = place == 0 or column in words
        made.add_column(
            column, justify="left" if left else "right", no_wrap=not wraps, overflow="fold"
        )
    return made
