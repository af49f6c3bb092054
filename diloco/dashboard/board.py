"""Where what a page shows hangs: written by the loop that follows the run, read by the server.

What is written once is read by all: a page more costs no work but its bytes.
"""

import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from diloco.dashboard.frames import Learners


class Frame(NamedTuple):
    """An event's bytes; `number` rises from one to the next."""

    number: int
    data: bytes


class Board:
    """Newest frames, by the event's name."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: dict[str, Frame] = {}
        self._number = 0
        self._readers = 0
        self._closed = False
        # Replaced as a whole, never changed.
        self.learners = Learners()
        self.settings: bytes = b"[]"

    @property
    def watched(self) -> bool:
        """Whether a page is open."""
        return self._readers > 0

    def show(self, event: str, data: bytes) -> None:
        """Hang a frame up in place of the one before."""
        with self._changed:
            self._number += 1
            self._frames[event] = Frame(self._number, data)
            self._changed.notify_all()

    def clear(self) -> None:
        """Take all down: what hangs for long with nobody looking is not what is."""
        with self._changed:
            self._frames.clear()

    def close(self) -> None:
        """Let all readers go."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def enter(self, most: int) -> bool:
        """Begin to read; False if that would be more than so many."""
        with self._changed:
            if self._readers >= most or self._closed:
                return False
            self._readers += 1
            return True

    def leave(self) -> None:
        """End to read."""
        with self._changed:
            self._readers -= 1

    def after(self, number: int, within_s: float) -> Mapping[str, Frame] | None:
        """Frames newer than one; none if that takes longer. None once the board is closed."""
        ends_s = time.monotonic() + within_s
        with self._changed:
            while True:
                if self._closed:
                    return None
                found = {key: one for key, one in self._frames.items() if one.number > number}
                left_s = ends_s - time.monotonic()
                if found or left_s <= 0:
                    return found
                self._changed.wait(left_s)
