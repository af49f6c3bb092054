"""A part of the work in a process that ends with it: what it loads is not kept until the end.

A user's task brings JAX and more, some 170 MiB, and its first evaluation another 50; drawing brings
matplotlib. The doctor and the report need the first for a moment, `diloco replay` the second, and
themselves they read a tape of any length.
"""

import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import active_children, get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from diloco.common.errors import TaskError

P = ParamSpec("P")
T = TypeVar("T")
# Hears how much of how much is done.
Hear = Callable[[int, int], None]
_LISTEN_S = 0.1
_SPAWN: Final = get_context("spawn")


def beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function of a user's task gives, in another process unless JAX is loaded here already.

    Raises:
        TaskError: the process ended by itself, as by a library that aborts.
    """
    if "jax" in sys.modules:
        return function(*args, **kwargs)
    return _of_task(lambda: apart(function, *args, **kwargs))


def beside_heard(
    hear: Hear, function: Callable[Concatenate[Hear, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """As `beside`, of a function that tells its first argument how far it has come."""
    if "jax" in sys.modules:
        return function(hear, *args, **kwargs)
    reader, writer = _SPAWN.Pipe(duplex=False)
    with reader, writer:
        begin = partial(_Telling.begin, writer)
        listen = partial(_listen, reader, hear)
        work: Callable[[], T] = partial(_Telling.work, function, *args, **kwargs)
        return _of_task(lambda: _in_process(work, begin, listen))


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What a function gives, computed in another process.

    Raises:
        BrokenProcessPool: the process ended by itself.
    """
    return _in_process(partial(function, *args, **kwargs))


def _of_task(work: Callable[[], T]) -> T:
    """What work in another process gives; if that ends by itself, it was the task."""
    try:
        return work()
    except BrokenProcessPool as error:
        raise TaskError(
            "the process that was to run the task ended by itself",
            hint="try it with `diloco task check`",
        ) from error


def _in_process(
    work: Callable[[], T],
    begin: Callable[[], None] | None = None,
    meanwhile: Callable[[Future[Any]], None] | None = None,
) -> T:
    """What work gives in a process that `begin` has prepared, while `meanwhile` goes on in this."""
    # Ctrl-C is for this process: the other one inherits that it is blocked, and ends with this.
    # The helper of multiprocessing unblocks it where it starts, so that has to be before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with ProcessPoolExecutor(1, mp_context=_SPAWN, initializer=begin) as pool:
            working = pool.submit(work)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            try:
                if meanwhile is not None:
                    meanwhile(working)
                return working.result()
            except KeyboardInterrupt:
                for child in active_children():
                    child.terminate()
                raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Telling:
    """The other process's end of the pipe: it can be given to it only where it starts."""

    writer: Connection | None = None

    @classmethod
    def begin(cls, writer: Connection) -> None:
        """Keep the end of the pipe."""
        cls.writer = writer

    @classmethod
    def work(
        cls, function: Callable[Concatenate[Hear, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What the function gives; how far it has come goes into the pipe."""
        assert cls.writer is not None
        writer = cls.writer
        return function(lambda done, total: writer.send((done, total)), *args, **kwargs)


def _listen(reader: Connection, hear: Hear, working: Future[Any]) -> None:
    """Hear all that comes out of a pipe, until the work at its other end is done."""
    while not working.done() or reader.poll():
        if reader.poll(_LISTEN_S):
            hear(*reader.recv())
