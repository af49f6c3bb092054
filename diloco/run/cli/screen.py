"""Prints the output of commands: sentences, tables, progress."""

import json
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from diloco.common.protocol.errors import ConfigError
from diloco.run.cli.format_numbers import human_bytes

# Colours of a learner's state, and of a finding's severity.
STATE_STYLES = {
    "training": "green", "paused": "cyan", "flushing": "cyan", "done": "dim", "starting": "yellow",
    "left": "dim", "quarantined": "bold red",
}  # fmt: skip
SEVERITY_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}

# Seconds between two lines on progress.
LINE_S = 10.0
# Takes the amount done, and the amount in all.
Hear = Callable[[int, int], None]


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on standard error that `what` is in progress, until the block ends."""
    with Console(stderr=True).status(f"{what} ..."):
        yield


@contextmanager
def progress(what: str, *, in_bytes: bool = False) -> Iterator[Hear]:
    """Shows progress on standard error: as a bar, or without a terminal as a line at intervals.

    Args:
        what: the work in progress.
        in_bytes: whether the work is counted in bytes.

    Yields:
        A function that takes the amount done, and the amount in all. Called after the block's end,
        by a thread that still works, it raises KeyboardInterrupt.
    """
    left, console = threading.Event(), Console(stderr=True, soft_wrap=True, highlight=False)
    said_at, count = time.monotonic(), human_bytes if in_bytes else "{:,}".format

    def hear(done: int, total: int) -> None:
        nonlocal said_at
        if left.is_set():
            raise KeyboardInterrupt
        bar.update(task, completed=done, total=total)
        if bar.disable and time.monotonic() - said_at >= LINE_S:
            said_at = time.monotonic()
            console.print(f"{what}: {count(done)} of {count(total)}")

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        try:
            yield hear
        finally:
            left.set()


def say(text: str) -> None:
    """Prints a sentence with rich's markup; it is not wrapped, so that paths stay whole."""
    Console().print(text, soft_wrap=True, highlight=False)


def say_plainly(text: str) -> None:
    """Prints a sentence without reading brackets as rich's markup; it is not wrapped."""
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def say_json(document: Any) -> None:
    """Prints a result for scripts: JSON on one line."""
    print(json.dumps(document), flush=True)  # noqa: T201 - the result itself


def confirm(question: str) -> None:
    """Asks a question on the terminal; returns only if the answer is yes.

    Raises:
        ConfigError: there is no terminal to answer on.
        typer.Abort: the answer is no.
    """
    try:
        agreed = typer.confirm(question)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        print()  # noqa: T201 - ends the question's line
        raise ConfigError(
            "nothing was done: the question got no answer", hint="answer yes with --yes"
        ) from None
    if not agreed:
        raise typer.Abort


def plain_table(
    *columns: str, words: Container[str] = (), title: str | None = None, wraps: bool = False
) -> Table:
    """Returns a table without lines.

    Args:
        columns: titles of the columns. The first column, and those in `words`, are aligned left;
            all others have numbers, and are aligned right.
        words: titles of further columns that have names or sentences.
        title: title of the table.
        wraps: whether long cells wrap to a next line, rather than be cut.
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
