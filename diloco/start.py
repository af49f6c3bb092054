"""The `diloco` command's first step: Ctrl-C while the rest is being loaded is no bug either."""

import contextlib
import sys

from diloco import __version__

# As a shell has it of what Ctrl-C ends.
INTERRUPTED = 130


def main() -> None:
    """Load the command and run it; the version is told without."""
    if sys.argv[1:] == ["--version"]:
        # Where it cannot be written, the program says so.
        with contextlib.suppress(OSError):
            print(f"diloco {__version__}", flush=True)  # noqa: T201 - what the command is for
            return
    try:
        from diloco.program import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
