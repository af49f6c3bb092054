"""A part of the work in a process that ends with it: what it loads is not kept until the end.

A user's task brings JAX and more, some 170 MiB, and its first evaluation another 50: the doctor and
the report need it for a moment, and themselves read a tape of any length.
"""

import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, resource_tracker
from typing import ParamSpec, TypeVar

from diloco.common.errors import TaskError

P = ParamSpec("P")
T = TypeVar("T")


def beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function gives, computed in another process, unless JAX is loaded here already.

    Raises:
        TaskError: the process ended by itself, as by a library that aborts.
    """
    if "jax" in sys.modules:
        return function(*args, **kwargs)
    # Ctrl-C is for this process: the other one inherits that it is blocked, and ends with this.
    # The helper of multiprocessing unblocks it where it starts, so that has to be before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            working = pool.submit(function, *args, **kwargs)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            try:
                return working.result()
            except KeyboardInterrupt:
                for child in active_children():
                    child.terminate()
                raise
    except BrokenProcessPool as error:
        raise TaskError(
            "the process that was to run the task ended by itself",
            hint="try it with `diloco task check`",
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
