"""A process that has imported what training needs, and waits to be told what to run.

`python -P -m diloco.spare` is started by the supervisor of a host (`learner/hosts/supervisor.py`)
while a training process runs: the imports take seconds of a processor, and are then no part of the
pause that begins when slices come or go. It touches no device before it is told.

A function does the imports, since processes that a task's code spawns import this file again. It
imports nothing that only some tasks need: a task may set variables before such an import.
"""

import json
import os
import sys
from collections.abc import Callable

from diloco.common.process.config import change_environment
from diloco.common.protocol.errors import Exit


def main() -> None:
    """Reads arguments and changed variables from standard input, and runs `diloco` with these.

    Both are JSON: a list, and an object, in which null unsets a variable. All other variables stay:
    libraries have added some as they were imported. Ends with `Exit.PASSING` if standard input ends
    without them, as when the supervisor dies.
    """
    run = prepared()
    if not (given := sys.stdin.buffer.read()):
        sys.exit(Exit.PASSING)
    arguments, changes = json.loads(given)
    change_environment(changes)
    sys.argv = ["diloco", *arguments]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    run()


def prepared() -> Callable[[], object]:
    """Imports what every training process does; returns the function that runs `diloco`."""
    import diloco.learner.daemon
    import diloco.program  # noqa: F401
    from diloco.start import main as run

    return run


if __name__ == "__main__":
    main()
