"""Entry point of the `diloco` command: handles Ctrl-C also while the other modules are imported."""

import contextlib
import sys

from diloco import __version__

# The exit status that shells give to a command that Ctrl-C ended.
INTERRUPTED = 130


def main() -> None:
    """Imports the program and runs it; for `--version` alone, prints that without the imports.

    Ctrl-C ends the process with status `INTERRUPTED`.
    """
    if sys.argv[1:] == ["--version"]:
        # If standard output fails, the program below reports it.
        with contextlib.suppress(OSError):
            print(f"diloco {__version__}", flush=True)  # noqa: T201 - what the command is for
            return
    try:
        from diloco.program import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
