"""Processes that make pieces: they end with the one that started them, however that ends."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.connection import wait as wait_for
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from diloco.common.config import encode_on_one_thread
from diloco.common.errors import DilocoError
from diloco.data.piece import Maker, PieceNote, Setup
from diloco.data.places import writer
from diloco.data.plan import Span
from diloco.data.tokenizer import TextTokenizer

_SPAWN = get_context("spawn")
_LOOK_S = 0.2
Pieces = Mapping[int, Sequence[Span]]
Notes = Iterator[tuple[int, PieceNote]]


def maker_of(setup: Setup, hear: Callable[[int], None]) -> Maker:
    """What makes pieces in this process."""
    return Maker(
        store=writer(setup.place),
        tokenizer=TextTokenizer(
            setup.tokenizer, setup.ends, special=setup.identity.options.special
        ),
        identity=setup.identity,
        hear=hear,
    )


def make_here(setup: Setup, pieces: Pieces, hear: Callable[[int], None]) -> Notes:
    """Make all pieces in this process."""
    maker = maker_of(setup, hear)
    for number, spans in pieces.items():
        yield number, maker.make(number, spans)


def make_beside(setup: Setup, pieces: Pieces, hear: Callable[[int], None], workers: int) -> Notes:
    """Make all pieces in processes, as they become free; notes come in any order.

    Raises:
        DilocoError: what stopped a piece; or a process ended by itself.
    """
    heard: Synchronized[int] = _SPAWN.Value("q", 0)
    told = 0
    with ProcessPoolExecutor(workers, _SPAWN, _Worker.begin, (setup, heard)) as pool:
        try:
            waiting, working = iter(pieces.items()), dict[Future[PieceNote], int]()
            while True:
                # So many that none waits for work, and not all: there may be very many.
                while len(working) < 2 * workers and (next_one := next(waiting, None)):
                    working[pool.submit(_Worker.make, *next_one)] = next_one[0]
                if not working:
                    return
                done, _ = wait(working, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                hear(heard.value - told)
                told = heard.value
                for future in done:
                    yield working.pop(future), future.result()
        except BrokenProcessPool as error:
            raise DilocoError(
                "a process that encodes ended by itself, perhaps for want of memory",
                hint="run the same command again, which continues, with fewer --workers",
            ) from error
        except BaseException:
            for child in active_children():
                child.terminate()
            raise


class _Worker:
    """What one of the processes has."""

    maker: Maker | None = None

    @classmethod
    def begin(cls, setup: Setup, heard: "Synchronized[int]") -> None:
        """Prepare the process. Ctrl-C is for the one that started it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        encode_on_one_thread()

        def hear(count: int) -> None:
            with heard.get_lock():
                heard.value += count

        cls.maker = maker_of(setup, hear)

    @classmethod
    def make(cls, number: int, spans: Sequence[Span]) -> PieceNote:
        """Make a piece."""
        assert cls.maker is not None
        return cls.maker.make(number, spans)


def _end_with_parent() -> None:
    """End this process when the one that started it has, by a SIGKILL too."""
    parent: Any = parent_process()
    wait_for([parent.sentinel])
    os._exit(1)
