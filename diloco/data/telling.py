"""Progress in bytes: a bar on a terminal, and a line now and then in a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from diloco.cli.units import human_bytes

# Between two lines.
LINE_S = 30.0
# Is told how many bytes of how many are done.
Hear = Callable[[int, int], None]


@contextmanager
def progress_told(what: str) -> Iterator[Hear]:
    """Show progress on stderr for as long as the block lasts."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, what)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    more = (TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, *more, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(console: Console, what: str) -> Hear:
    said_at = time.monotonic()

    def hear(done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= LINE_S:
            said_at = time.monotonic()
            text = f"{what}: {human_bytes(done)} of {human_bytes(total)}"
            console.print(text, highlight=False, soft_wrap=True)

    return hear
