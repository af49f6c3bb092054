"""Runs functions and objects of a user's task in another process.

A task loads JAX and other packages, some 170 MiB, and its first evaluation takes 50 MiB more. A
command such as the doctor needs the task briefly, and then memory for a tape of any length; the end
of the other process frees the task's memory.
"""

import contextlib
import importlib
import pickle
import signal
import sys
import threading
import typing
from collections.abc import Callable, Sequence
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from diloco.common.protocol.errors import TaskError
from diloco.run.cli.screen import Hear

P = ParamSpec("P")
T = TypeVar("T")
_SPAWN: Final = get_context("spawn")


def call_isolated(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function of a user's task in another process; in this one if JAX is loaded already.

    Function, arguments and result must be picklable. An exception of the function is raised here.

    Raises:
        TaskError: the process ended without a result, as when a library aborts.
    """
    if "jax" in sys.modules:
        return function(*args, **kwargs)
    return _in_process(None, function, args, kwargs)


def call_isolated_heard(
    hear: Hear, function: Callable[Concatenate[Hear, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Calls a function as `call_isolated` does, and passes on its progress.

    Args:
        hear: called here with each (amount done, amount in all) that the function reports.
        function: takes, before `args`, a function to which it reports its progress.
        args: further arguments of the function.
        kwargs: named arguments of the function.
    """
    if "jax" in sys.modules:
        return function(hear, *args, **kwargs)
    return _in_process(hear, function, args, kwargs)


def _in_process(
    hear: Hear | None, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    process, pipe = _started(_answer, hear is not None, function, args, kwargs)
    try:
        with pipe:
            return typing.cast("T", _heard(pipe, hear))
    except KeyboardInterrupt:
        process.terminate()
        raise
    finally:
        process.join()


def _started(work: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Starts a process that calls `work(pipe, *args)`; returns it, and this end of the pipe."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=work, args=(theirs, *args))
    # Ctrl-C is for this process: the other inherits the blocked signal, and ends with this one.
    # multiprocessing's helper unblocks the signal when it starts, so it must be started before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return process, ours


def _heard(pipe: Connection, hear: Hear | None = None) -> Any:
    """Waits for the other process's result, and returns it; raises the exception it sent instead.

    Args:
        pipe: this end of the pipe.
        hear: called with each report of progress.

    Raises:
        TaskError: the process ended without a result.
    """
    try:
        while isinstance(word := pipe.recv(), tuple):
            if hear is not None:
                hear(*word)
    except (EOFError, OSError) as error:
        raise TaskError(
            "the process that was to run the task ended by itself",
            hint="try it with `diloco check FILE`",
        ) from error
    made, raised = word
    if raised is not None:
        raise raised
    return made


def _answer(
    pipe: Connection,
    heard: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Calls a function in the other process; sends its progress as tuples, then [result, error]."""
    first = [lambda done, total: pipe.send((done, total))] if heard else []
    pipe.send(_result(function, *first, *args, **kwargs))


def _result(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Calls a function; returns [its result, None], or [None, its exception]."""
    try:
        return [function(*args, **kwargs), None]
    except Exception as error:  # noqa: BLE001 - raised where it is waited for
        return [None, _sendable(error)]


class Isolated:
    """An object of a user's task that is in another process, or in this one if JAX is loaded.

    Args:
        kind: the object's class, as "module:name"; it is imported where the object is made.
        args: arguments of the class.
    """

    def __init__(self, kind: str, *args: Any) -> None:
        self._kind, self._args = kind, args
        self._lock = threading.Lock()
        self._made: Any = None
        self._process: BaseProcess | None = None
        if "jax" not in sys.modules:
            self._process, self._pipe = _started(_serve, kind, args)

    def call(self, method: str, *args: Any, within_s: float | None = None) -> Any:
        """Calls a method of the object, and returns its result; blocks.

        Args:
            method: the method's name.
            args: the method's arguments.
            within_s: seconds after which the other process is killed; None: no limit. A call in
                this process has no limit.

        Raises:
            TaskError: the process ended, or did not answer in time and was killed.
        """
        with self._lock:
            if self._process is None:
                self._made = self._made or _made(self._kind, self._args)
                return getattr(self._made, method)(*args)
            with contextlib.suppress(OSError):  # A process that has ended is reported below.
                self._pipe.send((method, args))
            if not self._pipe.poll(within_s):
                self._process.kill()
                raise TaskError(f"the task did not answer within {within_s:g} s")
            return _heard(self._pipe)

    def close(self) -> None:
        """Kills the other process, if there is one; a `call` that waits raises `TaskError`."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()


def _made(kind: str, args: Sequence[Any]) -> Any:
    module, _, name = kind.partition(":")
    return getattr(importlib.import_module(module), name)(*args)


def _serve(pipe: Connection, kind: str, args: Sequence[Any]) -> None:
    """Makes an object in the other process, and answers its calls until the pipe ends."""
    made, raised = _result(_made, kind, args)
    with contextlib.suppress(EOFError):
        while True:
            method, given = pipe.recv()
            failed = [None, raised]
            pipe.send(failed if raised is not None else _result(getattr(made, method), *given))


def _sendable(error: Exception) -> Exception:
    """Returns the error, or a `TaskError` with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - its own bytes
    except Exception:  # noqa: BLE001 - the class is the task's, and may do anything
        return TaskError(f"the task fails: {type(error).__name__}: {error}")
    return error
