"""Makes the plan of each step boundary, once for all hosts of a learner.

A learner of one host makes each plan at its boundary. Of several hosts, host 0 makes it some
boundaries ahead (`lookahead`) and tells the others: all do the same at the same boundary, and none
waits for word. Since a plan says that steps follow, the core (`sync.py`) can run ahead: what it
counts as trained at a boundary is trained when the boundary comes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.common.process.service import Clock
from diloco.learner.core import sync
from diloco.learner.core.boundary import Arrived, Boundary, Decoded, Then

# How long a boundary without a step before it waits for something to arrive.
HOLD_S = 0.05


class Inbox(Protocol):
    """The source of events."""

    def events(self, wait_s: float = 0.0) -> list[Arrived]:
        """As `Background.events`."""


@dataclass
class Planner:
    """Makes the boundaries of one life of a learner; only the training loop's thread calls this.

    Attributes:
        rules: of the core, and its `state`, `lookahead` boundaries ahead of the training.
        tokens_per_step: of all hosts together.
        lookahead: 0 for a learner of one host.
        drain_timeout_s: how long one that was asked to leave goes on sending what is unsent. A
            run's end is waited for, since others wait for this learner's word.
        checkpoint_due: whether one should be made.
        tell: given each boundary as it is planned.
        turned: told of each look at a boundary, also of those without a step.
    """

    rules: sync.SyncRules
    state: sync.State
    inbox: Inbox
    tokens_per_step: int
    asked_to_leave: Callable[[], bool] = lambda: False
    lookahead: int = 0
    drain_timeout_s: float = 0.0
    clock: Callable[[], float] = field(default_factory=Clock)
    checkpoint_due: Callable[[], bool] = lambda: False
    tell: Callable[[Boundary], None] = lambda _boundary: None
    turned: Callable[[], None] = lambda: None
    _then: Then = "step"
    _flushing_since_s: float | None = None
    _planned: deque[Boundary] = field(default_factory=deque)
    _payloads: dict[tuple[int, int], Decoded] = field(default_factory=dict)

    def first_step(self) -> int:
        """The run's clock for the step before the first boundary."""
        return sync.clock(self.rules, self.state)

    def payload(self, fragment: int, record_seq: int) -> Any:
        """Take the tensors that a record brought, once: this makes room for others."""
        payload = self._payloads.pop((fragment, record_seq))
        payload.release()
        return payload.tensors

    def give_up(self) -> None:
        """The loop has ended before the step that was planned: that is no step to count."""
        assert not self.lookahead
        if self._then == "step":
            self._then = "hold"

    def next(self) -> Boundary:
        """The next boundary."""
        self.turned()
        while len(self._planned) <= self.lookahead and self._then != "end":
            boundary = self._plan()
            self.tell(boundary)
            self._planned.append(boundary)
        return self._planned.popleft()

    def _plan(self) -> Boundary:
        stepped = self._then == "step"
        self._take_events(0.0 if stepped else HOLD_S)
        now_s = self.clock()
        tokens = self.tokens_per_step if stepped else 0
        self.state, effects = sync.step(
            self.rules, self.state, sync.Stepped(now_s, tokens, steps=int(stepped))
        )
        self._then = self._after(now_s)
        return Boundary(
            effects,
            self._then,
            sync.clock(self.rules, self.state),
            self._doing(),
            stepped and (self._ending() or self._checkpoint_due()),
        )

    def _checkpoint_due(self) -> bool:
        """Whether one is due that is not planned yet: it stays due until its boundary comes."""
        planned = any(boundary.checkpoint for boundary in self._planned)
        return not planned and self.checkpoint_due()

    def _take_events(self, wait_s: float) -> None:
        for event, payload in self.inbox.events(wait_s):
            if isinstance(event, sync.Ready):
                self._payloads[event.fragment, event.record_seq] = payload
            elif isinstance(event, sync.Changed):
                self.rules = event.rules
            self.state, _ = sync.step(self.rules, self.state, event)
        if self.asked_to_leave() and not self.state.leaving:
            self.state, _ = sync.step(self.rules, self.state, sync.Leave())

    def _doing(self) -> str:
        if self._ending():
            return "flushing"
        return "paused" if self.rules.paused else "training"

    def _ending(self) -> bool:
        return self.state.stopping or self.state.leaving

    def _after(self, now_s: float) -> Then:
        if not self._ending():
            waits = self.rules.paused or sync.must_wait(self.rules, self.state)
            return "hold" if waits else "step"
        if self._flushing_since_s is None:
            self._flushing_since_s = now_s
        late = not self.state.stopping and now_s - self._flushing_since_s > self.drain_timeout_s
        return "end" if late or sync.flushed(self.state) else "hold"
