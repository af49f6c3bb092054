"""A bar of progress for work in a thread."""

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diloco.judge import remake


@contextlib.contextmanager
def progress_bar(console: Console, what: str) -> Iterator[remake.Progress]:
    """A bar, where the output is a terminal; work in a thread ends when its block is left."""
    left = threading.Event()

    def hear(done: int, total: int) -> None:
        if left.is_set():
            raise KeyboardInterrupt
        bar.update(task, completed=done, total=total)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=None)
        try:
            yield hear
        finally:
            left.set()
