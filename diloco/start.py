"""The `diloco` command's first step: Ctrl-C while the rest is being loaded is no bug either."""

import sys

# As a shell has it of what Ctrl-C ends.
INTERRUPTED = 130


def main() -> None:
    """Load the command and run it."""
    try:
        from diloco.program import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
