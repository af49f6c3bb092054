"""The training loop of one learner, top to bottom.

    inner step  ->  adopt what has arrived  ->  send what is due  ->  read the previous step's loss

Nothing here waits for the network: `Background` has a thread for it. (A learner in lockstep does
wait for versions; that mode is for tests and baselines.)
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common import wire
from common.errors import TaskError
from learner import sync, tree
from learner.background import Background
from learner.checkpoint import copied
from learner.publish import Outgoing, Traffic
from learner.recovery import Progress, Saver
from learner.replica import Replica
from learner.task import Batch, Params, Task

# Weight of the newest step in the averages of loss and step time.
EMA = 0.1
InnerStep = Callable[[Params, Any, Batch, Any], tuple[Params, Any, jax.Array]]


def make_inner_step(task: Task, constants: Params) -> InnerStep:
    """The jitted inner step; parameters and optimizer state are donated.

    Its last argument is the run's global step, which the learning rate follows: a learner that
    is slow or joined late is where the run is.
    """

    @partial(jax.jit, donate_argnums=(0, 1))
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

    return inner_step


def _finite(loss: float) -> float:
    """The loss.

    Raises:
        TaskError: it is infinite or not a number; the parameters are lost with it.
    """
    if not math.isfinite(loss):
        raise TaskError(
            f"the training loss is {loss}: this learner's parameters have diverged",
            hint="start it again, it begins from the run's newest version; if that repeats, "
            "lower the learning rate or clip gradients",
        )
    return loss


@dataclass
class Meter:
    """What a learner knows of its own work; read by the heartbeat from another thread.

    `local_step` goes on from a checkpoint, and so does the sum of `earlier_tokens` and `tokens`.
    `stall_s` is the training thread's time in synchronization; `run_s` all its time since the
    first step.
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

    def heartbeat(self, incarnation: int) -> wire.Heartbeat:
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
            run_s=self.run_s,
            bytes_up=self.traffic.bytes_up,
            bytes_down=self.traffic.bytes_down,
            updates_sent=self.traffic.updates_sent,
            state=self.state,
        )


@dataclass
class Trainer:
    """One life of a learner: its tensors, its core's state, its place in the data.

    `turned` is told of each turn of the loop, also of those that only wait.
    """

    task: Task
    replica: Replica
    inner_step: InnerStep
    batches: Iterator[Batch]
    position: int
    background: Background
    rules: sync.SyncRules
    state: sync.State
    meter: Meter
    asked_to_leave: Callable[[], bool]
    speed: float = 1.0
    clock: Callable[[], float] = time.time
    turned: Callable[[], None] = lambda: None
    optimizer_state: Any = None
    saver: Saver | None = None
    _loss: jax.Array | None = None
    _payloads: dict[tuple[int, int], Any] = field(default_factory=dict)

    def compile(self) -> None:
        """Compile step and synchronization on copies, before anybody waits for this learner."""
        self.replica.warm_up()
        copies = jax.tree.map(jnp.copy, self.replica.trained)
        batch = next(self.task.batches(self.meter.learner, self.position))
        optimizer_state = self.task.optimizer.init(copies)
        step = self._global_step()
        jax.block_until_ready(self.inner_step(copies, copied(optimizer_state), batch, step))

    def seek(self, position: int) -> None:
        """Go on with the data from `position`."""
        self.position = position
        self.batches = self.task.batches(self.meter.learner, position)

    def train(self) -> None:
        """Train until the run stops or this learner is asked to leave."""
        if self.optimizer_state is None:
            self.optimizer_state = self.task.optimizer.init(self.replica.trained)
        self.meter.state = "training"
        while not (self.state.stopping or self.state.leaving):
            began_s = time.perf_counter()
            loss = self.step()
            self.synchronize(sync.Stepped(self.clock(), self.task.tokens_per_batch))
            read = None if self._loss is None else _finite(float(self._loss))
            self._loss = loss
            self._slow_down(began_s)
            took_s = time.perf_counter() - began_s
            self.meter.stepped(took_s, self.task.tokens_per_batch, read)
            if self.saver is not None:
                self.saver.offer(self.optimizer_state, self.progress)
        if self.saver is not None:
            self.saver.save(self.optimizer_state, self.progress())

    def progress(self) -> Progress:
        """How far this learner is."""
        meter = self.meter
        tokens = meter.earlier_tokens + meter.tokens
        return Progress(meter.local_step, tokens, self.position, meter.global_step)

    def step(self) -> jax.Array:
        """Dispatch one inner step on the next batch; its loss, still being computed."""
        batch = next(self.batches)
        self.replica.trained, self.optimizer_state, loss = self.inner_step(
            self.replica.trained, self.optimizer_state, batch, self._global_step()
        )
        self.position += 1
        return loss

    def flush(self, within_s: float) -> None:
        """Send what is unsent, after the stop or before leaving.

        A run's end is waited for, since others wait for this learner's word; a learner that only
        leaves gives up after `within_s`: the record that it waits for may be long in coming.
        """
        self.meter.state = "flushing"
        began_s = time.perf_counter()
        while not sync.flushed(self.state):
            if not self.state.stopping and time.perf_counter() - began_s > within_s:
                return
            self.exchange(sync.Stepped(self.clock(), 0, steps=0), wait_s=0.05)

    def _global_step(self) -> np.int32:
        self.meter.global_step = sync.clock(self.rules, self.state)
        return np.int32(self.meter.global_step)

    def synchronize(self, stepped: sync.Stepped) -> None:
        """A step boundary: tell the core what came, do what it says."""
        began_s = time.perf_counter()
        self.exchange(stepped)
        while sync.must_wait(self.rules, self.state) and not self.state.leaving:
            self.exchange(sync.Stepped(self.clock(), 0, steps=0), wait_s=0.05)
        self.meter.stall_s += time.perf_counter() - began_s

    def exchange(self, stepped: sync.Stepped, wait_s: float = 0.0) -> None:
        """Tell the core what arrived and that a step was taken, and do what it says."""
        self.turned()
        for event, payload in self.background.events(wait_s):
            if isinstance(event, sync.Ready):
                self._payloads[event.fragment, event.record_seq] = payload
            elif isinstance(event, sync.Changed):
                self.rules = event.rules
            self.state, _ = sync.step(self.rules, self.state, event)
        if self.asked_to_leave() and not self.state.leaving:
            self.state, _ = sync.step(self.rules, self.state, sync.Leave())
        self.state, effects = sync.step(self.rules, self.state, stepped)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: sync.Effect) -> None:
        match effect:
            case sync.Adopt(ready, resolved):
                payload = self._payloads.pop((ready.fragment, ready.record_seq))
                if ready.restored:
                    self.replica.restore(ready.fragment, payload)
                else:
                    self.replica.adopt(ready.fragment, payload, resolved=resolved)
            case sync.Send():
                self.background.send(
                    Outgoing(
                        send=effect,
                        parts=self.replica.send(effect.fragment),
                        position=self.position,
                        local_step=self.meter.local_step,
                        loss=self.meter.loss,
                        step_time_s=self.meter.step_time_s,
                        dispatched_at_s=self.clock(),
                    )
                )
            case sync.Republish():
                self.background.republish(effect)
            case sync.Finished(fragments):
                self.background.finished(self.position, fragments)

    def _slow_down(self, began_s: float) -> None:
        """Sleep so that the step takes 1 / speed of its time, as a slower machine would."""
        if self.speed < 1:
            jax.block_until_ready(self.replica.trained)
            time.sleep((time.perf_counter() - began_s) * (1 / self.speed - 1))
