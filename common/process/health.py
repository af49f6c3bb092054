"""Whether a daemon lives and can work: asked by /livez and /readyz, and told to systemd.

*Live*: the main loop has turned within a time that no work of its takes, or has not begun: a start
may take long. It is what a restart mends. *Ready*: the daemon does its work; else `why` has
sentences. What waits for NATS or the store is live, and ready: it goes on by itself.

systemd is told READY=1 once the daemon works, STATUS with what it does, and WATCHDOG=1. Until it is
ready a thread tells the phase of its start, and asks for more time as it goes: who is stopped asks
no more, and is ended soon. Afterwards the watchdog hears from a daemon for as long as its main loop
turns; when it does not, systemd ends the daemon and starts it again. For a process that systemd did
not start, all of this does nothing.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common.process.config import ServiceManager

NOT_YET = ("it has not started yet",)
# So long may one phase of a start take: the largest models compile for the better part of an hour.
PHASE_S = 3600.0
# Of a heartbeat's text.
LINE = 2000
# The main loop of an aggregator, an event loop, does nothing that takes longer than moments.
EVENT_LOOP_S = 30.0
# A learner's step may be slow, but not so many times slower than its other steps.
SLOW_STEPS = 20.0


class Answer(NamedTuple):
    """Whether a daemon lives, whether it can work, and what is in the way.

    `waiting` names calls that transient faults keep waiting; `state` says what it does, `troubles`
    what somebody should look at although the daemon works.
    """

    live: bool
    ready: bool
    why: tuple[str, ...]
    waiting: tuple[str, ...]
    state: str
    troubles: tuple[str, ...] = ()

    def sentence(self) -> str:
        """State, reasons, waits and troubles in one line."""
        waits = (f"waits: {', '.join(self.waiting)}",) if self.waiting else ()
        return "; ".join((self.state, *self.why, *waits, *self.troubles))


class HealthView(NamedTuple):
    """A daemon's state, and the reasons why it cannot do its work."""

    state: str
    why_not: tuple[str, ...] = ()


@dataclass
class Health:
    """The health of one daemon; any thread may ask.

    Attributes:
        limit_s: seconds that the main loop may take for one turn.
        view: the daemon's present work; replaced by the next.
        waiting: the calls that transient faults keep waiting.
        troubles: sentences for an operator although the daemon works, by the part in trouble.
    """

    limit_s: Callable[[], float] = lambda: EVENT_LOOP_S
    view: Callable[[], HealthView] = lambda: HealthView("starting", NOT_YET)
    waiting: Callable[[], tuple[str, ...]] = tuple
    clock: Callable[[], float] = time.monotonic
    troubles: dict[str, str] = field(default_factory=dict)
    _turned_at_s: float | None = field(default=None, init=False)
    _phase_at_s: float | None = field(default=None, init=False)

    def trouble(self) -> tuple[str, ...]:
        """The present troubles, by the names of the parts that have them."""
        return tuple(sentence for _, sentence in sorted(self.troubles.copy().items()))

    def line(self) -> str:
        """The present troubles in one line for heartbeats, sent even if the main loop hangs."""
        answer = self.answer()
        return "; ".join((*answer.why[: not answer.live], *answer.troubles))[:LINE]

    def begin_phase(self, what: str) -> None:
        """Begin a phase of the daemon's start; the daemon is not ready yet."""
        self.view = lambda: HealthView(what, NOT_YET)
        self._phase_at_s = self.clock()

    def progresses(self) -> bool:
        """Whether a start gets on, or waits for others: no phase takes for ever."""
        if self._phase_at_s is None or self.waiting():
            return True
        return self.clock() - self._phase_at_s <= PHASE_S

    def turned(self) -> None:
        """Note that the main loop has begun a turn."""
        self._turned_at_s = self.clock()

    def answer(self) -> Answer:
        """The daemon's health; a daemon whose main loop has not begun counts as live."""
        view = self.view()
        why = list(view.why_not)
        since_s = 0.0 if self._turned_at_s is None else self.clock() - self._turned_at_s
        live = since_s <= self.limit_s()
        if not live:
            why.insert(0, f"the main loop has not turned for {since_s:.0f} s")
        return Answer(
            live, live and not why, tuple(why), self.waiting(), view.state, self.trouble()
        )


def step_limit_s(watchdog_timeout_s: float, step_time_s: float) -> float:
    """Seconds that a learner's training loop may take for a turn: a slow step is not a hung one."""
    return max(watchdog_timeout_s, SLOW_STEPS * step_time_s)


# Between two looks at the daemon, unless the watchdog wants more of them.
LOOK_S = 1.0
# A start asks for so much more time, often enough that a busy machine does not end it.
EXTEND_S = 60.0
# The last work of a daemon, and the end of its interpreter.
END_S = 600.0


def tell(manager: ServiceManager, **fields: str) -> None:
    """Send assignments such as READY="1"; that nobody listens is no fault of the daemon's."""
    if not manager.address:
        return
    # A name that begins with "@" is in the kernel's abstract namespace.
    abstract = manager.address.startswith("@")
    address = "\0" + manager.address[1:] if abstract else manager.address
    message = "\n".join(f"{name}={value}" for name, value in fields.items())
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        sender.sendto(message.encode(), address)


def tell_stopping(manager: ServiceManager) -> None:
    """Tell systemd that the daemon shuts down: its main loop stops, the watchdog waits longer."""
    watchdog = {"WATCHDOG_USEC": str(int(END_S * 1e6))} if manager.watchdog_s else {}
    tell(manager, STOPPING="1", **watchdog)


def tell_error(manager: ServiceManager, message: str, hint: str | None) -> None:
    """Show the error that ends the process in `systemctl status`, in one line as systemd asks."""
    sentence = f"error: {message}; hint: {hint}" if hint else f"error: {message}"
    tell(manager, STATUS=" ".join(sentence.split()))


class Starting:
    """The start of a daemon, as systemd hears of it; from a thread, since main threads compile."""

    def __init__(self, health: Health, manager: ServiceManager) -> None:
        self._health = health
        self._manager = manager
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="starting", daemon=True)

    def begin(self) -> None:
        """Begin to tell."""
        self._thread.start()

    def over(self) -> None:
        """End the telling: the daemon is ready, or has failed."""
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        said = ""
        while not self._over.is_set():
            more = {"EXTEND_TIMEOUT_USEC": str(int(EXTEND_S * 1e6))}
            sentence = self._health.answer().sentence()
            status = {"STATUS": sentence} if sentence != said else {}
            if fields := {**status, **(more if self._health.progresses() else {})}:
                tell(self._manager, **fields)
            said = sentence
            self._over.wait(LOOK_S)


async def report(health: Health, manager: ServiceManager) -> None:
    """Tell systemd how the daemon fares, for ever; run it on the daemon's event loop."""
    said = ""
    while True:
        answer = health.answer()
        if answer.live and manager.watchdog_s:
            tell(manager, WATCHDOG="1")
        status = answer.sentence()
        if status != said:
            tell(manager, STATUS=status)
            said = status
        await asyncio.sleep(min(LOOK_S, manager.watchdog_s / 4 or LOOK_S))
