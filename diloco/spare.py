"""A process that has imported what training needs, and waits to be told what to run.

`python -P -m diloco.spare` is started by the supervisor of a host (`learner/hosts/supervisor.py`)
while a training process runs: the imports take seconds of a processor, and are then no part of the
pause that begins when slices come or go. It touches no device before it is told.
"""

import json
import os
import sys

import flax  # noqa: F401 - what built-in tasks import
import optax  # noqa: F401

import diloco.learner.daemon
import diloco.program  # noqa: F401
from diloco.common.process.config import replace_environment
from diloco.start import main as run


def main() -> None:
    """Reads arguments and environment of `diloco` from standard input, and runs it with these.

    Both are JSON: a list, and an object. Ends if standard input does without them.
    """
    if not (given := sys.stdin.buffer.read()):
        return
    arguments, environment = json.loads(given)
    replace_environment(environment)
    sys.argv = ["diloco", *arguments]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    run()


if __name__ == "__main__":
    main()
