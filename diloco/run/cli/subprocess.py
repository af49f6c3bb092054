"""Work in a process of its own, which frees the memory of all that it loads.

A user's task brings JAX and more, some 170 MiB, and its first evaluation another 50. The doctor and
the report need it for a moment, and themselves they read a tape of any length.
"""

import pickle
import signal
import sys
import typing
from collections.abc import Callable
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from diloco.common.protocol.errors import TaskError
from diloco.run.cli.screen import Hear

P = ParamSpec("P")
T = TypeVar("T")
_SPAWN: Final = get_context("spawn")


def call_isolated(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of a user's task, in another process unless JAX is loaded here already.

    Raises:
        TaskError: the process ended by itself, as by a library that aborts.
    """
    if "jax" in sys.modules:
        return function(*args, **kwargs)
    return _in_process(None, function, args, kwargs)


def call_isolated_heard(
    hear: Hear, function: Callable[Concatenate[Hear, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """As `call_isolated`, of a function that tells its first argument how far it has come."""
    if "jax" in sys.modules:
        return function(hear, *args, **kwargs)
    return _in_process(hear, function, args, kwargs)


def _in_process(
    hear: Hear | None, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    reader, writer = _SPAWN.Pipe(duplex=False)
    given = (writer, hear is not None, function, args, kwargs)
    process = _SPAWN.Process(target=_answer, args=given)
    # Ctrl-C is for this process: the other one inherits that it is blocked, and ends with this.
    # The helper of multiprocessing unblocks it where it starts, so that has to be before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        writer.close()
    try:
        with reader:
            while isinstance(word := reader.recv(), tuple):
                if hear is not None:
                    hear(*word)
    except EOFError as error:
        raise TaskError(
            "the process that was to run the task ended by itself",
            hint="try it with `diloco check FILE`",
        ) from error
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        process.join()
    made, raised = word
    if raised is not None:
        raise raised
    return typing.cast("T", made)


def _answer(
    writer: Connection,
    heard: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """In the other process: send tuples of how far it is, and at last [result, error]."""
    made, raised = None, None
    first = [lambda done, total: writer.send((done, total))] if heard else []
    try:
        made = function(*first, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - raised where it is waited for
        raised = _sendable(error)
    writer.send([made, raised])


def _sendable(error: Exception) -> Exception:
    """The error, or its words where it cannot be made again of its bytes, as a task's own may."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - its own bytes
    except Exception:  # noqa: BLE001 - the class is the task's, and may do anything
        return TaskError(f"the task fails: {type(error).__name__}: {error}")
    return error
