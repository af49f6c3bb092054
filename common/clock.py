"""Time for the daemons: the wall clock as it was at the start, and what has passed since.

Somebody may set a machine's clock at any time, by hours and either way. Whatever waits, or says how
long something took, follows this clock, which nobody can set; what it shows beside other machines'
times is as right as the wall clock was at the start.
"""

import time
from collections.abc import Callable


class Clock:
    """Seconds since the epoch when it was made, and the seconds that have passed since.

    Args:
        wall: seconds since the epoch, read once.
        monotonic: seconds since some moment, which only grow.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._began_s = wall() - monotonic()
        self._monotonic = monotonic

    def __call__(self) -> float:
        """Now."""
        return self._began_s + self._monotonic()
