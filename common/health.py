"""Whether a daemon lives and can work: asked by /healthz, and told to systemd.

*Live*: the main loop has turned within a time that no work of its takes. It is what a restart
mends. *Ready*: the daemon does its work; else `why` has sentences. What waits for NATS or the
store is live, and ready: it goes on by itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

# The main loop of an aggregator, an event loop, does nothing that takes longer than moments.
EVENT_LOOP_S = 30.0
# A learner's step may be slow, but not so many times slower than its other steps.
SLOW_STEPS = 20.0
# What a daemon does before it can do its work.
STARTING = "starting"


class Answer(NamedTuple):
    """Whether a daemon lives, whether it can work, and what is in the way.

    `waiting` names calls that transient faults keep waiting; `state` says what it does.
    """

    live: bool
    ready: bool
    why: tuple[str, ...]
    waiting: tuple[str, ...]
    state: str


class View(NamedTuple):
    """What a daemon says of itself: what it does, and why it cannot do its work."""

    state: str
    why_not: tuple[str, ...] = ()


@dataclass
class Health:
    """The health of one daemon; any thread may ask.

    Attributes:
        limit_s: so long may the main loop take for one turn.
        view: what the daemon does; replaced as it gets on.
        waiting: what transient faults keep waiting.
    """

    limit_s: Callable[[], float] = lambda: EVENT_LOOP_S
    view: Callable[[], View] = lambda: View(STARTING, ("it has not started yet",))
    waiting: Callable[[], tuple[str, ...]] = tuple
    clock: Callable[[], float] = time.monotonic
    _turned_at_s: float | None = field(default=None, init=False)

    def turned(self) -> None:
        """The main loop has come round."""
        self._turned_at_s = self.clock()

    def answer(self) -> Answer:
        """How the daemon fares; one whose main loop has not begun lives."""
        view = self.view()
        why = list(view.why_not)
        since_s = 0.0 if self._turned_at_s is None else self.clock() - self._turned_at_s
        live = since_s <= self.limit_s()
        if not live:
            why.insert(0, f"the main loop has not turned for {since_s:.0f} s")
        return Answer(live, live and not why, tuple(why), self.waiting(), view.state)


def step_limit_s(watchdog_timeout_s: float, step_time_s: float) -> float:
    """How long a learner's training loop may take for a turn: a slow step is not a hung one."""
    return max(watchdog_timeout_s, SLOW_STEPS * step_time_s)
