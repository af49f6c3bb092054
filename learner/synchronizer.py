"""Plans each step boundary of a learner once for all its hosts, and carries the plan out on each.

Nothing here waits for the network: `Background` has a thread for it. (A learner in lockstep does
wait for versions; that mode is for tests and baselines.)

A learner of one host plans each boundary when it comes. With several hosts, host 0 plans some
boundaries ahead (`lookahead`) and sends the plans to the other hosts: all hosts do the same at the
same boundary, and no host waits for its plan. A plan also says whether a step follows. So the core
(`sync.py`) can count steps that are not taken yet: they are done when their boundary comes.
"""

import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from diloco.common.process.health import HealthView, step_limit_s
from diloco.common.protocol import wire
from diloco.common.protocol.errors import DilocoError, DivergedError
from diloco.common.protocol.wire import METRIC_NAME, MOST_METRICS
from diloco.learner.background import TrafficCounts
from diloco.learner.core import sync
from diloco.learner.core.carry import Unsent, snapshot
from diloco.learner.core.events import (
    Adopt,
    Changed,
    Effect,
    Finished,
    Leave,
    Ready,
    Republish,
    Send,
    Stepped,
    SyncRules,
)
from diloco.learner.core.handover import Arrived, Boundary, Decoded, Done, Outbox, Outgoing, Then
from diloco.learner.task import Params
from diloco.learner.tensors.send_and_adopt import Delta, PendingView, Replica
from diloco.learner.wire.checkpoint_save_and_restore import Saver, TrainingProgress, UnsentWork

# Weight of the newest step in the averages of loss, metrics and step time.
EMA = 0.1
# The number of last updates over which heartbeats report the delay.
DELAYS = 16
_METRIC = re.compile(METRIC_NAME)
# Steps whose losses are remembered; an update of more steps has the mean of these.
REMEMBERED = 1 << 16


def scalar_of(value: Any, what: str) -> float:
    """Converts a scalar from the training loop to a float; waits if it is still computing.

    Args:
        value: a number, or an array of one element.
        what: names the value in errors.

    Raises:
        DilocoError: the value is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        came = f"an array of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
        raise DilocoError(
            f"{what} must be one number, and is {came[:200]}",
            hint="give a scalar, such as the mean over the batch",
        ) from error


def loss_of(value: Any) -> float:
    """Returns the training loss of a step as a float; waits if the loss is still computing.

    Raises:
        DilocoError: the loss is not a scalar.
        DivergedError: the loss is infinite or not a number.
    """
    loss = scalar_of(value, "the loss of a step")
    if not math.isfinite(loss):
        raise DivergedError(
            f"the training loss is {loss}: this learner's parameters have diverged",
            hint="restart it: it resumes from the run's newest version; if it diverges again, "
            "lower the learning rate or clip gradients",
        )
    return loss


def figures_of(figures: Mapping[str, Any], when: str = "") -> dict[str, float]:
    """Converts a training loop's figures to floats, by name; error messages begin with `when`.

    Raises:
        DilocoError: the figures have no names, or one is not a number.
    """
    if not isinstance(figures, Mapping):
        raise DilocoError(
            f"figures must come by name, and are {figures!r:.200}",
            hint='give a dictionary, such as {"accuracy": 0.9}',
        )
    return {name: scalar_of(value, f"{when}the figure {name!r}") for name, value in figures.items()}


# States other than training, as health checks show them.
WHY_NOT = {
    "starting": "it loads versions and compiles",
    "paused": "the run is paused",
    "flushing": "it sends what is unsent, and trains no more",
    "leaving": "it says that it leaves",
    "failed": "an error ends it",
}


def mean_and_worst(
    times: Sequence[tuple[float, float]],
) -> tuple[float, float, float, float]:
    """Returns (mean seconds, most seconds, mean steps, most steps) of (steps, seconds) pairs.

    All are 0 if there are no pairs.
    """
    steps, times_s = zip(*(times or ((0.0, 0.0),)), strict=True)
    return fmean(times_s), max(times_s), fmean(steps), max(steps)


class Losses:
    """The training losses of the newest `REMEMBERED` steps that a learner has done or taken over.

    The loss of the newest step may still be computing on the devices.

    Args:
        carried: the steps of the life before with whose unsent work this one goes on.
        mean: the mean loss of these steps.
    """

    def __init__(self, carried: int = 0, mean: float = 0.0) -> None:
        self._known = deque([mean] * min(carried, REMEMBERED), maxlen=REMEMBERED)
        # Of this life's newest step; None: it has none.
        self._newest: Any = None

    def stepped(self, before: float | None, newest: Any) -> None:
        """Adds a step's loss.

        Args:
            before: the loss of the step before, which is computed by now; None: there is none.
            newest: the loss of the step, a scalar that may still be computing.
        """
        if before is not None:
            self._known.append(before)
        self._newest = newest

    def mean(self, steps: int) -> Callable[[], float]:
        """Returns a function that computes the mean loss of the last `steps` steps.

        The function waits if the newest loss is still computing. It raises a DivergedError for a
        loss that is infinite or NaN, so that such an update is never announced.
        """
        newest = [] if self._newest is None else [self._newest]
        known = list(self._known)[max(0, len(self._known) + len(newest) - steps) :]
        return lambda: fmean([*known, *map(loss_of, newest)])


@dataclass
class Meter:
    """Counters of a learner's work since it joined; heartbeats read them from another thread.

    Attributes:
        learner: the learner's name.
        traffic: bytes and updates that the background has counted.
        state: one of `LEARNER_STATES`.
        local_step: inner steps of this learner; resumes from a checkpoint.
        global_step: the run's clock, as far as the learner knows it.
        version: the newest adopted version of any fragment.
        tokens: tokens trained since the join.
        earlier_tokens: tokens trained before the join, from a checkpoint.
        loss: moving average of the training loss; None before the first is known.
        metrics: moving averages of further scalars, by name.
        step_time_s: moving average of the seconds of an inner step; 0 if unknown.
        tokens_per_s: tokens a second, by `step_time_s`.
        stall_s: seconds that the training thread spent in synchronization.
        data_s: seconds that the training thread waited for batches.
        run_s: seconds since this meter was made, shortly before the first step, without pauses.
        full_tokens_per_s: the tokens a second of the devices at their peak; 0 if unknown.
        delays: (steps, seconds) from the boundary that sent an update to the boundary that adopted
            the record which resolves the update; of the last `DELAYS` updates.
        adoptions: (steps, seconds) from the making of a version to its adoption; of the last
            `DELAYS` versions.
    """

    learner: str
    traffic: TrafficCounts
    state: str = "starting"
    local_step: int = 0
    global_step: int = 0
    version: int = 0
    tokens: int = 0
    earlier_tokens: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    step_time_s: float = 0.0
    tokens_per_s: float = 0.0
    stall_s: float = 0.0
    data_s: float = 0.0
    run_s: float = 0.0
    full_tokens_per_s: float = 0.0
    delays: tuple[tuple[int, float], ...] = ()
    adoptions: tuple[tuple[float, float], ...] = ()
    _began_s: float = field(default_factory=time.perf_counter)

    def stepped(self, took_s: float, tokens: int, loss: float | None) -> None:
        """Counts an inner step.

        Args:
            took_s: seconds that the step took.
            tokens: the step's tokens.
            loss: the loss of the step before; None for the first step, whose time is not averaged
                since it may compile.
        """
        self.local_step += 1
        self.tokens += tokens
        self.run_s = time.perf_counter() - self._began_s
        if loss is not None:
            self.loss = loss if self.loss is None else self.loss + (loss - self.loss) * EMA
            self.step_time_s += (took_s - self.step_time_s) * (EMA if self.step_time_s else 1.0)
            self.tokens_per_s = tokens / self.step_time_s
            if self.full_tokens_per_s:
                self.show({"mfu": self.tokens_per_s / self.full_tokens_per_s})

    def measured(self, metrics: Mapping[str, Any]) -> None:
        """Adds the previous step's scalars other than the loss to their moving averages.

        Raises:
            DilocoError: a scalar is not a number, or a heartbeat cannot hold its name.
        """
        averages = {}
        for name, value in figures_of(metrics, f"at step {self.local_step}, ").items():
            before = self.metrics.get(name)
            averages[name] = value if before is None else before + EMA * (value - before)
        self.show(averages)

    def show(self, figures: Mapping[str, float]) -> None:
        """Adds `figures` to the metrics of heartbeats; leaves out figures that are not finite.

        Raises:
            DilocoError: a name is invalid, or there are more than `MOST_METRICS` metrics.
        """
        if not figures:
            return
        fit = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
        # A new one, since the heartbeat may be reading the old.
        every = {**self.metrics, **fit}
        wrong = [name for name in fit if _METRIC.fullmatch(name) is None]
        if wrong or len(every) > MOST_METRICS:
            raise DilocoError(
                f"heartbeats cannot hold the metrics {', '.join(wrong[:4]) or len(every)}",
                hint=f"name at most {MOST_METRICS}, in letters, digits and _, at most 50, a letter"
                " first",
            )
        self.metrics = every

    def answered(self, steps: int, took_s: float) -> None:
        """Adds a delay: steps and seconds from an update's send to the adoption of its verdict."""
        # A new one, since the heartbeat may be reading the old.
        self.delays = (*self.delays[1 - DELAYS :], (steps, max(0.0, took_s)))

    def adopted(self, took_s: float) -> None:
        """Adds the seconds from the making of a version to its adoption."""
        steps = took_s / self.step_time_s if self.step_time_s else 0.0
        self.adoptions = (*self.adoptions[1 - DELAYS :], (max(0.0, steps), max(0.0, took_s)))

    def stalled(self, took_s: float) -> None:
        """Adds seconds for which training waited for synchronization, also after the last step."""
        self.stall_s += took_s
        self.run_s = time.perf_counter() - self._began_s

    def paused(self, took_s: float) -> None:
        """Excludes seconds in which the run was paused from the measured time."""
        self._began_s += took_s

    def view(self) -> HealthView:
        """Returns the learner's state for health checks, and the reason if it does not train."""
        why = (WHY_NOT[self.state],) if self.state in WHY_NOT else ()
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return HealthView(f"{self.state}: step {self.local_step:,}{loss}", why)

    def turn_limit_s(self, watchdog_timeout_s: float) -> float:
        """Returns the seconds after which a turn of the training loop counts as hanging.

        They are at least `watchdog_timeout_s`, and many times the usual step time.
        """
        return step_limit_s(watchdog_timeout_s, self.step_time_s)

    def heartbeat(self, incarnation: int, trouble: str = "") -> wire.Heartbeat:
        """Returns a heartbeat with the newest figures.

        Args:
            incarnation: the sequence of this learner's join in the stream.
            trouble: a problem that an operator should look at; empty: none.
        """
        delay, adoption = mean_and_worst(self.delays), mean_and_worst(self.adoptions)
        return wire.Heartbeat(
            learner=self.learner,
            incarnation=incarnation,
            local_step=self.local_step,
            global_step=self.global_step,
            tokens=self.tokens,
            loss=self.loss,
            metrics=dict(self.metrics),
            tokens_per_s=self.tokens_per_s,
            step_time_s=self.step_time_s,
            stall_s=self.stall_s,
            data_s=self.data_s,
            run_s=self.run_s,
            delay_s=delay[0],
            worst_delay_s=delay[1],
            delay_steps=delay[2],
            worst_delay_steps=int(delay[3]),
            adoption_s=adoption[0],
            worst_adoption_s=adoption[1],
            adoption_steps=adoption[2],
            worst_adoption_steps=adoption[3],
            bytes_up=self.traffic.bytes_up,
            bytes_down=self.traffic.bytes_down,
            updates_sent=self.traffic.updates_sent,
            state=self.state,
            trouble=trouble,
        )


# --- The plan of each boundary

# Seconds that a boundary without a step waits for events.
HOLD_S = 0.05


class Inbox(Protocol):
    """The source of a planner's events, such as `Background`."""

    def events(self, wait_s: float = 0.0) -> list[Arrived]:
        """Returns the events that have arrived; with none, waits up to `wait_s` for the first."""


def never() -> bool:
    """Returns False, as a predicate for `asked_to_leave` or `checkpoint_due`."""
    return False


@dataclass
class Planner:
    """Plans the step boundaries of a learner from its join to its end, by the core (`sync.py`).

    Only the training loop's thread may call the methods.

    Attributes:
        rules: the core's rules.
        state: the core's state, which is `lookahead` boundaries ahead of training.
        inbox: the source of events.
        tokens_per_step: tokens of one inner step, of all hosts together.
        clock: returns the time in seconds, by the same clock as the events of `inbox`.
        asked_to_leave: returns whether this learner was asked to leave.
        lookahead: the number of boundaries to plan ahead; 0 for a learner of one host.
        drain_timeout_s: seconds for which a learner that was asked to leave continues to send. At
            the run's end there is no limit, since the aggregator waits for this learner.
        checkpoint_due: returns whether a checkpoint is due.
        snapshot_steps: the steps between two snapshots; an update makes one due at once. 0: none.
        saver_idle: returns whether no checkpoint is being made.
        tell: is called with each boundary when it is planned.
        turned: is called at each boundary, also at boundaries without a step.
    """

    rules: SyncRules
    state: sync.State
    inbox: Inbox
    tokens_per_step: int
    clock: Callable[[], float]
    asked_to_leave: Callable[[], bool] = never
    lookahead: int = 0
    drain_timeout_s: float = 0.0
    checkpoint_due: Callable[[], bool] = never
    snapshot_steps: int = 0
    saver_idle: Callable[[], bool] = never
    tell: Callable[[Boundary], None] = lambda _boundary: None
    turned: Callable[[], None] = lambda: None
    _then: Then = "step"
    _flushing_since_s: float | None = None
    _since_snapshot: int = 0
    _planned: deque[Boundary] = field(default_factory=deque)
    _payloads: dict[tuple[int, int], Decoded] = field(default_factory=dict)

    def snapshot_soon(self) -> None:
        """Makes a snapshot due at the first step.

        Until then nobody can go on with the work that this life took over.
        """
        self._since_snapshot = self.snapshot_steps

    def first_step(self) -> int:
        """Returns the run's clock (global step) for the step before the first boundary."""
        return sync.clock(self.rules, self.state)

    def payload(self, fragment: int, record_seq: int) -> Any:
        """Returns the tensors of a record, and gives their room on the devices to other records.

        Must be called once for each record; returns None if the record needs no tensors.
        """
        payload = self._payloads.pop((fragment, record_seq))
        payload.release()
        return payload.tensors

    def give_up(self) -> None:
        """Takes back the planned step, since the training loop ended before that step."""
        assert not self.lookahead
        if self._then == "step":
            self._then = "hold"

    def next(self) -> Boundary:
        """Returns the plan of the next step boundary."""
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
            self.rules, self.state, Stepped(now_s, tokens, steps=int(stepped))
        )
        self._then = self._after(now_s)
        self._since_snapshot += self.snapshot_steps if _sends(effects) else int(stepped)
        due = stepped and (self._ending() or self._checkpoint_due())
        return Boundary(
            effects,
            self._then,
            sync.clock(self.rules, self.state),
            self._doing(),
            due,
            self.state.stopping,
            self._snapshot() if due else (),
        )

    def _checkpoint_due(self) -> bool:
        """True if a checkpoint is due, and no boundary that is planned ahead makes one."""
        if any(boundary.checkpoint for boundary in self._planned):
            return False
        wanted = 0 < self.snapshot_steps <= self._since_snapshot and self.saver_idle()
        return wanted or self.checkpoint_due()

    def _snapshot(self) -> tuple[Unsent, ...]:
        """Returns the unsent work for a snapshot; nothing if none are made.

        At the run's end all of it is sent, so that nothing is left to go on with. Who was asked to
        leave may have no time to send all.
        """
        if not self.snapshot_steps or self.state.stopping:
            return ()
        self._since_snapshot = 0
        return snapshot(self.state)

    def _take_events(self, wait_s: float) -> None:
        for event, payload in self.inbox.events(wait_s):
            if isinstance(event, Ready):
                self._payloads[event.fragment, event.record_seq] = payload
            elif isinstance(event, Changed):
                self.rules = event.rules
            self.state, _ = sync.step(self.rules, self.state, event)
        if self.asked_to_leave() and not self.state.leaving:
            self.state, _ = sync.step(self.rules, self.state, Leave())

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


def _sends(effects: Sequence[Effect]) -> bool:
    return any(isinstance(effect, Send) for effect in effects)


# --- Carrying it out


class Boundaries(Protocol):
    """The source of the plans of step boundaries: `Planner` on host 0, `Worker` on other hosts."""

    def first_step(self) -> int:
        """Returns the run's clock (global step) for the step before the first boundary."""

    def next(self) -> Boundary:
        """Returns the plan of the next step boundary."""

    def payload(self, fragment: int, record_seq: int) -> Delta | PendingView | None:
        """Returns the tensors of a record, which were waiting on the devices; once per record.

        Returns None if the record needs no tensors.
        """


@dataclass
class Synchronizer:
    """Carries out the step boundaries of a learner from its join to its end, on one host.

    Attributes:
        replica: the learner's tensors.
        position: the learner's position in its data, in batches.
        tokens_per_step: tokens of one inner step, of all hosts together.
        boundaries: the source of plans.
        outbox: takes the learner's outgoing messages.
        meter: counts steps, tokens and times.
        saver: makes the learner's checkpoints; None: it keeps none.
        clock: returns the time in seconds, by the same clock as `Planner.clock`.
        losses: losses of the learner's steps.
        check_interval_versions: updates report the digest of the learner's own view once in so many
            versions of a fragment; 0: never.
    """

    replica: Replica
    position: int
    tokens_per_step: int
    boundaries: Boundaries
    outbox: Outbox
    meter: Meter
    saver: Saver | None
    clock: Callable[[], float]
    losses: Losses = field(default_factory=Losses)
    check_interval_versions: int = 0
    _check_at: dict[int, int] = field(default_factory=dict)
    _sent: dict[int, tuple[int, float]] = field(default_factory=dict)

    def progress(self) -> TrainingProgress:
        """Returns the learner's steps, tokens and data position, and the run's clock."""
        meter = self.meter
        tokens = meter.earlier_tokens + meter.tokens
        return TrainingProgress(meter.local_step, tokens, self.position, meter.global_step)

    def turn(self, trained: Callable[[], Params] | None = None) -> Boundary:
        """Gets the plan of the next step boundary, carries it out, and returns it.

        Args:
            trained: returns the loop's synchronized parameters after the step; None: the replica
                has them already.
        """
        began_s = time.perf_counter()
        boundary = self.boundaries.next()
        if boundary.effects and trained is not None:
            self.replica.trained = trained()
        for effect in boundary.effects:
            self._perform(effect)
        if boundary.stopping and self.saver is not None:
            self.saver.release()
        took_s = time.perf_counter() - began_s
        if boundary.state == "paused":
            self.meter.paused(took_s)
        else:
            self.meter.stalled(took_s)
        return boundary

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Adopt(ready, resolved, blended):
                payload = self.boundaries.payload(ready.fragment, ready.record_seq)
                if resolved and (sent := self._sent.pop(ready.fragment, None)) is not None:
                    step, at_s = sent
                    self.meter.answered(self.meter.local_step - step, self.clock() - at_s)
                if payload is not None and ready.made_at_s:
                    self.meter.adopted(self.clock() - ready.made_at_s)
                self.meter.version = max(self.meter.version, ready.version)
                if ready.rolled_back:
                    assert isinstance(payload, PendingView)
                    self.replica.roll_back(ready.fragment, payload)
                else:
                    self.replica.adopt(ready.fragment, payload, resolved=resolved, blended=blended)
            case Send():
                self._sent[effect.fragment] = (self.meter.local_step, self.clock())
                self.outbox(
                    Outgoing(
                        send=effect,
                        codes=self.replica.send(effect.fragment),
                        position=self.position,
                        local_step=self.meter.local_step,
                        loss=self.losses.mean(effect.steps),
                        step_time_s=self.meter.step_time_s,
                        dispatched_at_s=self.clock(),
                        digest=self._digest(effect),
                        covered=self._covered(effect),
                    )
                )
            case Republish():
                self.outbox(effect)
            case Finished(fragments):
                self.outbox(Done(self.position, fragments))

    def checkpoint(self, state: Any, boundary: Boundary) -> None:
        """Makes the checkpoint that a boundary asks for, if this learner keeps checkpoints.

        Args:
            state: the contents of the checkpoint, a tree of arrays.
            boundary: the boundary, which was carried out.
        """
        if self.saver is None:
            return
        if not boundary.unsent:
            self.saver.save(state, self.progress())
            return
        steps = max(one.work.steps + one.flying.steps for one in boundary.unsent)
        unsent = UnsentWork(boundary.unsent, self.replica.unsent(), self.losses.mean(steps))
        self.saver.save(state, self.progress(), unsent)

    def _covered(self, send: Send) -> Callable[[], Awaitable[None]] | None:
        # A life's last updates leave nothing to go on with.
        if self.saver is None or send.final:
            return None
        return partial(self.saver.cover, self.meter.local_step)

    def _digest(self, send: Send) -> Callable[[], str] | None:
        """Returns a function that computes the digest of the fragment's view; None if none is due.

        The first digest is due after a version was adopted: before that nothing was decoded.
        """
        every = self.check_interval_versions
        if not every or send.base_version < self._check_at.get(send.fragment, 1):
            return None
        self._check_at[send.fragment] = send.base_version + every
        return self.replica.digest(send.fragment)
