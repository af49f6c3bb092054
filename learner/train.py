"""The training loop of one learner, top to bottom.

    inner step  ->  adopt what has arrived  ->  send what is due  ->  read the previous step's loss

Nothing here waits for the network: `Background` has a thread for it. What to adopt and to send at a
boundary is planned (`planner.py`). A learner of several hosts runs this loop on each of them, with
the same boundaries. (A learner in lockstep does wait for versions; that mode is for tests and
baselines.)
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from diloco.common import wire
from diloco.common.clock import Clock
from diloco.common.errors import DivergedError
from diloco.learner import sync, tree
from diloco.learner.boundary import Boundary, Done, Outbox, Outgoing
from diloco.learner.checkpoint import copied
from diloco.learner.context import Traffic
from diloco.learner.recovery import Checkpoints, Progress
from diloco.learner.replica import Delta, Replica, View
from diloco.learner.task import Batch, Params, Task

# Weight of the newest step in the averages of loss and step time.
EMA = 0.1
InnerStep = Callable[[Params, Any, Batch, Any], tuple[Params, Any, jax.Array]]


def make_inner_step(
    task: Task,
    constants: Params,
    *,
    shardings: tuple[Params, Any] | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """The jitted inner step, an `InnerStep`; parameters and optimizer state are donated.

    Its last argument is the run's global step, which the learning rate follows: a learner that
    is slow or joined late is where the run is.

    Args:
        task: the run's.
        constants: leaves that are not trained.
        shardings: of the parameters and of the optimizer's state, which stay as they are.
        compiler_options: of XLA.
    """

    def inner_step(
        trained: Params, optimizer_state: Any, batch: Batch, global_step: jax.Array
    ) -> tuple[Params, Any, jax.Array]:
        def loss_of(trained: Params) -> jax.Array:
            return task.loss(tree.join(trained, constants), batch)

        loss, gradient = jax.value_and_grad(loss_of)(trained)
        direction, optimizer_state = task.optimizer.update(gradient, optimizer_state, trained)
        learning_rate = task.schedule(global_step)
        trained = jax.tree.map(
            lambda leaf, step: (leaf - learning_rate * step).astype(leaf.dtype), trained, direction
        )
        return trained, optimizer_state, loss

    options: dict[str, Any] = {"donate_argnums": (0, 1)}
    if compiler_options:
        options["compiler_options"] = compiler_options
    if shardings is not None:
        options["out_shardings"] = (*shardings, None)
    return jax.jit(inner_step, **options)


def _finite(loss: float) -> float:
    """The loss.

    Raises:
        DivergedError: it is infinite or not a number; the parameters are lost with it.
    """
    if not math.isfinite(loss):
        raise DivergedError(
            f"the training loss is {loss}: this learner's parameters have diverged",
            hint="restart it: it resumes from the run's newest version; if it diverges again, "
            "lower the learning rate or clip gradients",
        )
    return loss


@dataclass
class Meter:
    """What a learner knows of its own work; read by the heartbeat from another thread.

    `local_step` goes on from a checkpoint, and so does the sum of `earlier_tokens` and `tokens`.
    `stall_s` is the training thread's time in synchronization, `data_s` that in waiting for
    batches; `run_s` all its time since the first step.
    """

    learner: str
    traffic: Traffic
    state: str = "starting"
    local_step: int = 0
    global_step: int = 0
    tokens: int = 0
    earlier_tokens: int = 0
    loss: float = 0.0
    step_time_s: float = 0.0
    tokens_per_s: float = 0.0
    stall_s: float = 0.0
    data_s: float = 0.0
    run_s: float = 0.0
    _began_s: float = field(default_factory=time.perf_counter)

    def stepped(self, took_s: float, tokens: int, loss: float | None) -> None:
        """Count a step; the first one, which may compile, gives no time."""
        self.local_step += 1
        self.tokens += tokens
        self.run_s = time.perf_counter() - self._began_s
        if loss is not None:
            self.loss += (loss - self.loss) * (EMA if self.loss else 1.0)
            self.step_time_s += (took_s - self.step_time_s) * (EMA if self.step_time_s else 1.0)
            self.tokens_per_s = tokens / self.step_time_s

    def heartbeat(self, incarnation: int, trouble: str = "") -> wire.Heartbeat:
        """The newest figures as a message."""
        return wire.Heartbeat(
            learner=self.learner,
            incarnation=incarnation,
            local_step=self.local_step,
            global_step=self.global_step,
            tokens=self.tokens,
            loss=self.loss,
            tokens_per_s=self.tokens_per_s,
            step_time_s=self.step_time_s,
            stall_s=self.stall_s,
            data_s=self.data_s,
            run_s=self.run_s,
            bytes_up=self.traffic.bytes_up,
            bytes_down=self.traffic.bytes_down,
            updates_sent=self.traffic.updates_sent,
            state=self.state,
            trouble=trouble,
        )


class Boundaries(Protocol):
    """Where they come from: this host's `Planner`, or that of host 0."""

    def first_step(self) -> int:
        """The run's clock for the step before the first boundary."""

    def next(self) -> Boundary:
        """The next boundary."""

    def payload(self, fragment: int, record_seq: int) -> Delta | View | None:
        """What a record brought, on the devices; once."""


def compile_programs(
    replica: Replica,
    inner_step: InnerStep,
    init: Callable[[Params], Any],
    batch: Batch,
) -> None:
    """Compile step and synchronization on copies, before anybody waits for this learner."""
    replica.warm_up()
    copies = copied(replica.trained)
    jax.block_until_ready(inner_step(copies, init(copies), batch, np.int32(0)))


@dataclass
class Trainer:
    """One life of a learner: its tensors and its place in the data.

    Attributes:
        optimizer_state: the inner optimizer's, where the parameters lie.
        batches: this host's rows of them, the one at `position` first.
        tokens_per_step: of all hosts together.
        boundaries: what to do at each.
        outbox: takes updates, and what else the learner has to say.
        saver: of its checkpoints.
        speed: share of full speed.
    """

    replica: Replica
    inner_step: InnerStep
    optimizer_state: Any
    batches: Iterator[Batch]
    position: int
    tokens_per_step: int
    boundaries: Boundaries
    outbox: Outbox
    meter: Meter
    saver: Checkpoints
    speed: float = 1.0
    clock: Callable[[], float] = field(default_factory=Clock)
    _loss: jax.Array | None = None

    def train(self) -> None:
        """Train until the run stops or this learner is asked to leave, and send what is unsent."""
        meter = self.meter
        meter.state = "training"
        boundary = Boundary((), "step", self.boundaries.first_step())
        while boundary.then != "end":
            began_s = time.perf_counter()
            loss = self.step(boundary.global_step) if boundary.then == "step" else None
            boundary = self.turn()
            if loss is not None:
                read = None if self._loss is None else _finite(float(self._loss))
                self._loss = loss
                self._slow_down(began_s)
                meter.stepped(time.perf_counter() - began_s, self.tokens_per_step, read)
            if boundary.checkpoint:
                self.saver.save(self.optimizer_state, self.progress())
            meter.state = boundary.state

    def progress(self) -> Progress:
        """How far this learner is."""
        meter = self.meter
        tokens = meter.earlier_tokens + meter.tokens
        return Progress(meter.local_step, tokens, self.position, meter.global_step)

    def step(self, global_step: int) -> jax.Array:
        """Dispatch one inner step on the next batch; its loss, still being computed."""
        asked_s = time.perf_counter()
        batch = next(self.batches)
        self.meter.data_s += time.perf_counter() - asked_s
        self.meter.global_step = global_step
        self.replica.trained, self.optimizer_state, loss = self.inner_step(
            self.replica.trained, self.optimizer_state, batch, np.int32(global_step)
        )
        self.position += 1
        return loss

    def turn(self) -> Boundary:
        """A step boundary: ask what is to be done, and do it."""
        began_s = time.perf_counter()
        boundary = self.boundaries.next()
        for effect in boundary.effects:
            self._perform(effect)
        self.meter.stall_s += time.perf_counter() - began_s
        return boundary

    def _perform(self, effect: sync.Effect) -> None:
        match effect:
            case sync.Adopt(ready, resolved):
                payload = self.boundaries.payload(ready.fragment, ready.record_seq)
                if ready.rolled_back:
                    assert isinstance(payload, View)
                    self.replica.roll_back(ready.fragment, payload)
                else:
                    self.replica.adopt(ready.fragment, payload, resolved=resolved)
            case sync.Send():
                self.outbox(
                    Outgoing(
                        send=effect,
                        codes=self.replica.send(effect.fragment),
                        position=self.position,
                        local_step=self.meter.local_step,
                        loss=self.meter.loss,
                        step_time_s=self.meter.step_time_s,
                        dispatched_at_s=self.clock(),
                    )
                )
            case sync.Republish():
                self.outbox(effect)
            case sync.Finished(fragments):
                self.outbox(Done(self.position, fragments))

    def _slow_down(self, began_s: float) -> None:
        """Sleep so that the step takes 1 / speed of its time, as a slower machine would."""
        if self.speed < 1:
            jax.block_until_ready(self.replica.trained)
            time.sleep((time.perf_counter() - began_s) * (1 / self.speed - 1))
