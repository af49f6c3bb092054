"""Ctrl-C waits while JAX is being loaded."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """For as long as the block lasts Ctrl-C waits: amid JAX's loading it aborts, or is lost.

    To block the signal would not do: it would reach a thread of a library that has it unblocked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came.is_set():
        raise KeyboardInterrupt
