"""Defers Ctrl-C while JAX is being loaded."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Holds back a Ctrl-C until the block ends; then raises `KeyboardInterrupt`.

    A Ctrl-C while JAX is being loaded would abort the process, or be lost. Blocking the signal in
    this thread would not help: a thread of a library that does not block it would receive it.
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
