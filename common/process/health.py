"""The liveness and readiness of a daemon, for /livez and /readyz and for systemd.

*Live*: the main loop has begun an iteration (a *turn*) within a time limit that no turn of a
working daemon exceeds, or has not begun its first turn yet, as a start may take long. A daemon that
is not live needs a restart. *Ready*: the daemon does its work; if not, sentences say why. A daemon
that waits for NATS or the store is live and ready, as it needs no help to continue.

systemd gets READY=1 once the daemon works, STATUS with the daemon's state, and WATCHDOG=1. During
the start a thread reports the phase of the start, and asks for more time as long as the start
progresses; once it stops asking, systemd ends the daemon. Afterwards WATCHDOG=1 is sent as long as
the daemon is live; without it, systemd restarts the daemon. In a process that systemd did not
start, notifications do nothing.
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
# The longest phase of a start, in seconds: large models compile for the better part of an hour.
PHASE_S = 3600.0
# The most characters of a heartbeat's text.
LINE = 2000
# An aggregator's main loop, an event loop, does nothing that takes longer than moments.
EVENT_LOOP_S = 30.0
# A learner's step that takes this many times longer than its other steps counts as hung.
SLOW_STEPS = 20.0


class Answer(NamedTuple):
    """The answer of a probe: a daemon's liveness and readiness.

    Attributes:
        why: sentences that say why the daemon is not live or not ready; empty if it is both.
        waiting: names of calls that are retried after a transient fault.
        state: what the daemon does now, in words such as "training".
        troubles: sentences about problems for an operator although the daemon works.
    """

    live: bool
    ready: bool
    why: tuple[str, ...]
    waiting: tuple[str, ...]
    state: str
    troubles: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Returns `state`, `why`, `waiting` and `troubles` in one line, joined by "; "."""
        waits = (f"waits: {', '.join(self.waiting)}",) if self.waiting else ()
        return "; ".join((self.state, *self.why, *waits, *self.troubles))


class HealthView(NamedTuple):
    """A daemon's state in words, and sentences that say why it cannot work, if it cannot."""

    state: str
    why_not: tuple[str, ...] = ()


@dataclass
class Health:
    """The health of one daemon; any thread may ask.

    Attributes:
        limit_s: returns the seconds that one turn of the main loop may take.
        view: returns the daemon's present state; each phase of the daemon sets another function.
        waiting: returns the names of calls that are retried after a transient fault.
        clock: returns monotonic seconds.
        troubles: component -> a sentence about its problem, for an operator; a component without
            problems has no entry.
    """

    limit_s: Callable[[], float] = lambda: EVENT_LOOP_S
    view: Callable[[], HealthView] = lambda: HealthView("starting", NOT_YET)
    waiting: Callable[[], tuple[str, ...]] = tuple
    clock: Callable[[], float] = time.monotonic
    troubles: dict[str, str] = field(default_factory=dict)
    _turned_at_s: float | None = field(default=None, init=False)
    _phases: list[tuple[str, float]] = field(default_factory=list, init=False)

    def trouble(self) -> tuple[str, ...]:
        """Returns the sentences of `troubles`, sorted by the components' names."""
        return tuple(sentence for _, sentence in sorted(self.troubles.copy().items()))

    def line(self) -> str:
        """Returns the troubles in one line of at most `LINE` characters, for a heartbeat.

        If the daemon is not live, the line begins with the reason.
        """
        answer = self.answer()
        return "; ".join((*answer.why[: not answer.live], *answer.troubles))[:LINE]

    def begin_phase(self, what: str) -> None:
        """Begins a phase of the daemon's start; `what` describes the phase, for people."""
        self.view = lambda: HealthView(what, NOT_YET)
        self._phases.append((what.partition(" ")[0], self.clock()))

    def phases(self) -> dict[str, float]:
        """Returns the seconds that the start's phases took so far, by each phase's first word."""
        ends_s = [*(at_s for _, at_s in self._phases[1:]), self.clock()]
        took_s: dict[str, float] = {}
        for (word, at_s), end_s in zip(self._phases, ends_s, strict=True):
            took_s[word] = round(took_s.get(word, 0.0) + end_s - at_s, 3)
        return took_s

    def progresses(self) -> bool:
        """True if the start's phase is younger than `PHASE_S`, or a call is being retried."""
        if not self._phases or self.waiting():
            return True
        return self.clock() - self._phases[-1][1] <= PHASE_S

    def turned(self) -> None:
        """Notes that the main loop has begun a turn."""
        self._turned_at_s = self.clock()

    def answer(self) -> Answer:
        """Returns the daemon's health; before the first turn of its main loop, a daemon is live."""
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
    """Returns the seconds after which a learner's inner step counts as hung.

    Args:
        watchdog_timeout_s: `learner.watchdog_timeout_s`, the least result.
        step_time_s: the learner's usual step time.
    """
    return max(watchdog_timeout_s, SLOW_STEPS * step_time_s)


# Seconds between two reports to systemd, unless the watchdog needs more of them.
LOOK_S = 1.0
# The seconds that a start asks for each time, enough for a busy machine.
EXTEND_S = 60.0
# Whether the daemon waits for NATS or the store, "1" or "0". systemd ignores what begins with "X_".
WAITS = "X_DILOCO_WAITS"
# Whether the process waits for those of the learner's other hosts, "1" or "0".
MEETS = "X_DILOCO_MEETS"
# The longest shutdown, with the end of the interpreter, in seconds.
END_S = 600.0


def tell(manager: ServiceManager, **fields: str) -> None:
    """Sends assignments such as READY="1" to systemd; ignores a socket that nobody reads."""
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
    """Tells systemd that the daemon shuts down, and sets the watchdog's time to `END_S` seconds."""
    watchdog = {"WATCHDOG_USEC": str(int(END_S * 1e6))} if manager.watchdog_s else {}
    tell(manager, STOPPING="1", **watchdog)


def tell_error(manager: ServiceManager, message: str, hint: str | None) -> None:
    """Sends systemd the error that ends the process, in one line, for `systemctl status`."""
    sentence = f"error: {message}; hint: {hint}" if hint else f"error: {message}"
    tell(manager, STATUS=" ".join(sentence.split()))


class Starting:
    """Reports the start of a daemon to systemd, from a thread of its own.

    The main thread cannot report, as it may compile for an hour.
    """

    def __init__(self, health: Health, manager: ServiceManager) -> None:
        self._health = health
        self._manager = manager
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="starting", daemon=True)

    def begin(self) -> None:
        """Starts the thread that reports."""
        self._thread.start()

    def over(self) -> None:
        """Ends the reports; to be called when the daemon is ready or has failed."""
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
    """Reports the daemon's health to systemd, for ever; run it on the daemon's event loop."""
    said = ""
    while True:
        answer = health.answer()
        if answer.live and manager.watchdog_s:
            tell(manager, WATCHDOG="1")
        status = answer.sentence()
        if status != said:
            tell(manager, STATUS=status, **{WAITS: str(int(bool(answer.waiting)))})
            said = status
        await asyncio.sleep(min(LOOK_S, manager.watchdog_s / 4 or LOOK_S))
