"""Reports failures of a command or daemon: on standard error, in the journal, and to systemd."""

import errno
import os
import sys
import traceback

from rich.console import Console

from diloco.common.process import log
from diloco.common.process.config import service_manager
from diloco.common.process.health import tell_error
from diloco.common.protocol.errors import DilocoError


def as_failure(error: OSError) -> DilocoError | None:
    """Returns the failure to report for a full disk or an unusable path.

    None: the error names no path, so that it may be a bug.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename!r}" if error.filename else ""
        return DilocoError(
            f"a disk is full{where}: {error.strerror}",
            hint="free space there, or use another folder: runbooks/disk-full.md",
        )
    if error.filename is None or error.errno is None:
        return None
    return DilocoError(
        f"cannot use {os.fsdecode(error.filename)!r}: {error.strerror}",
        hint="check the path, and that you may read and write there",
    )


def full_output(error: Exception) -> DilocoError | None:
    """Returns the failure to report if standard output is on a full disk; None: another error."""
    if isinstance(error, OSError) and error.filename is None:
        return as_failure(error)
    return None


def tell_failure(error: DilocoError) -> None:
    """Prints an error and its hint on standard error; reports it to systemd, if that is there."""
    tell_error(service_manager(), error.message, error.hint)
    # Not wrapped: a path must stay in one piece.
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    console.print(log.errors(f"error: {error.message}"), style="red")
    if error.hint:
        console.print(log.errors(f"hint: {error.hint}"))


def tell_bug(error: Exception) -> None:
    """Prints an unexpected exception's traceback on standard error; reports it to systemd."""
    tell_error(service_manager(), f"{type(error).__name__}: {error}", "its trace is in the journal")
    text = "".join(traceback.format_exception(error)).rstrip()
    print(log.errors(text), file=sys.stderr, flush=True)  # noqa: T201 - the last words
