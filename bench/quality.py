"""Held-out loss at equal steps per learner: alone, the whole system, data-parallel, synchronous.

    .venv/bin/python -m bench.quality [--steps 400] [--learners 4] [--preset 1m] [--seeds 0]
        [--set KEY=VALUE] [--speed 1,1,0.5,1] [--rows a,b,c,d,e]

    a  one learner alone
    b  the learners through the whole system: processes, NATS, store, int4 both ways
    c  data-parallel: the learners' batches in one, same optimizer and schedule
    d  synchronous DiLoCo: a plain loop in float32, outer Nesterov 0.7 / 0.9, same H
    e  the same as b in virtual time (`bench/emulate.py`)

All of a seed begin with the same parameters and draw the same batches. (b) must beat (a).

    .venv/bin/python -m bench.quality wire [--learners 2] [--steps 60] [--preset 1m]

Bytes on the wire: a short real run, against float32 data-parallel.

The baselines are plain loops in one process. They share the task, its inner step and its schedule
with the system, and nothing else of it.
"""

import argparse
import asyncio
import json
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench import emulate, tasks
from bench.emulate import Begun, Pause, first, never
from bench.harness import run_local, run_part
from diloco.common.process.config import Config, RunSettings, load_config, make_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import names, wire
from diloco.common.protocol.layout import Layout, parse_layout
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import open_store
from diloco.common.storage.tape import load_specification
from diloco.learner.task import Batch, Params, Task, held_out_loss
from diloco.learner.tensors.inner_step import InnerStep

# --- Baselines


def learner_names(count: int) -> list[str]:
    """The names that `diloco local` gives, so that the same batches are drawn."""
    return [f"learner-{index}" for index in range(count)]


def copy(params: Params) -> Params:
    """A copy, since the inner step donates what it is given."""
    return jax.tree.map(jnp.copy, params)


def together(iterators: list[Iterator[Batch]]) -> Iterator[Batch]:
    """The learners' batches in one."""
    while True:
        batches = [next(iterator) for iterator in iterators]
        yield jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


@dataclass
class DataParallel:
    """The learners' batches in one, to `steps`; a look at the held-out loss each `look_steps`."""

    task: Task
    began: Begun
    learners: int
    steps: int
    look_steps: int = 0
    step: int = 0
    state: tuple[Params, Any] | None = None
    looks: list[tuple[int, float]] = field(default_factory=list)

    def run(self, pause: Pause = never) -> float | None:
        """Held-out loss at the end; None if it has paused before, and is to go on."""
        names, task = learner_names(self.learners), self.task
        batches = together([task.batches(name, self.step) for name in names])
        trained, state = self.state or (self.began.params, task.optimizer.init(self.began.params))
        while self.step < self.steps and not pause():
            trained, state, _ = self.began.inner_step(
                trained, state, next(batches), np.int32(self.step)
            )
            self.state, self.step = (trained, state), self.step + 1
            if self.look_steps and self.step % self.look_steps == 0:
                self.looks.append((self.step * self.learners, self._loss(trained)))
        return self._loss(trained) if self.step == self.steps else None

    @property
    def params(self) -> Params:
        """The parameters after the steps so far."""
        return self.began.params if self.state is None else self.state[0]

    def _loss(self, trained: Params) -> float:
        return held_out_loss(self.task, trained)


def data_parallel(
    task: Task, *, steps: int, seed: int, learners: int, began: Begun | None = None
) -> float:
    """Held-out loss after `steps` with the learners' batches in one; one learner trains alone.

    `began`: where it begins, if not where the task's seed says.
    """
    loss = DataParallel(task, began or first(task, seed), learners, steps).run()
    assert loss is not None
    return loss


class Nesterov(NamedTuple):
    """DiLoCo's outer optimizer (arXiv 2311.08105)."""

    learning_rate: float
    momentum: float


@partial(jax.jit, donate_argnums=(0, 1))
def _outer_step(
    theta: Params, moment: Params, learners: list[Params], learning_rate: float, momentum: float
) -> tuple[Params, Params]:
    """Plain average of the learners' outer gradients, and one Nesterov step."""

    def gradient(old: jax.Array, *new: jax.Array) -> jax.Array:
        return old - sum(new[1:], new[0]) / len(new)

    merged = jax.tree.map(gradient, theta, *learners)
    moment = jax.tree.map(lambda m, g: momentum * m + g, moment, merged)
    theta = jax.tree.map(
        lambda old, g, m: old - learning_rate * (g + momentum * m), theta, merged, moment
    )
    return theta, moment


def synchronous(
    task: Task, *, steps: int, seed: int, learners: int, interval: int, outer: Nesterov
) -> float:
    """Held-out loss of synchronous DiLoCo: float32, one fragment, no overlap, no staleness."""
    began = first(task, seed)
    theta, moment = began.params, jax.tree.map(jnp.zeros_like, began.params)
    states = [task.optimizer.init(theta) for _ in range(learners)]
    batches = [task.batches(name, 0) for name in learner_names(learners)]
    step = 0
    while step < steps:
        until = min(step + interval, steps)
        replicas = []
        for index in range(learners):
            run = _rounds(began.inner_step, batches[index])
            replica, states[index] = run(copy(theta), states[index], step, until)
            replicas.append(replica)
        theta, moment = _outer_step(theta, moment, replicas, *outer)
        step = until
    return held_out_loss(task, theta)


def _rounds(
    inner_step: InnerStep, batches: Iterator[Batch]
) -> Callable[[Params, Any, int, int], tuple[Params, Any]]:
    """A function that trains a replica from one step to another."""

    def run(trained: Params, state: Any, first: int, until: int) -> tuple[Params, Any]:
        for step in range(first, until):
            trained, state, _ = inner_step(trained, state, next(batches), np.int32(step))
        return trained, state

    return run


# --- Rows


DILOCO = Nesterov(0.7, 0.9)
LABELS = {
    "a": "alone",
    "b": "system, int4",
    "c": "data-parallel",
    "d": "synchronous DiLoCo",
    "e": "virtual time",
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The parameters of a comparison; `settings` are of `--set`, `speeds` shares of full speed."""

    steps: int
    preset: str
    settings: tuple[str, ...]
    speeds: tuple[float, ...]

    @property
    def learners(self) -> int:
        """How many train."""
        return len(self.speeds)

    def task(self, seed: int) -> Task:
        """The task of a seed."""
        return tasks.build(steps=self.steps, seed=seed, preset=self.preset, **self._options())

    def run_settings(self, seed: int) -> RunSettings:
        """Settings of a run, as `diloco local` would make them."""
        document: dict[str, Any] = {"store": {"url": "/nowhere"}}
        for key, value in self._assignments():
            section, _, name = key.partition(".")
            if section != "task":
                document.setdefault(section, {})[name] = value
        document["run"] = {"name": "bench", "steps": self.steps, "seed": seed}
        return make_config(document, source="the options").settings()

    def _assignments(self) -> list[tuple[str, Any]]:
        return [_assignment(text) for text in self.settings]

    def _options(self) -> dict[str, Any]:
        prefix = "task.options."
        return {k.removeprefix(prefix): v for k, v in self._assignments() if k.startswith(prefix)}


def _assignment(text: str) -> tuple[str, Any]:
    """ "section.key=value", the value as TOML or plain text, as `diloco local` reads it."""
    key, _, value = text.partition("=")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _alone(plan: Comparison, seed: int) -> float:
    """(a)."""
    return data_parallel(plan.task(seed), steps=plan.steps, seed=seed, learners=1)


def _data_parallel(plan: Comparison, seed: int) -> float:
    """(c)."""
    return data_parallel(plan.task(seed), steps=plan.steps, seed=seed, learners=plan.learners)


def _synchronous(plan: Comparison, seed: int) -> float:
    """(d)."""
    return synchronous(
        plan.task(seed),
        steps=plan.steps,
        seed=seed,
        learners=plan.learners,
        interval=plan.run_settings(seed).sync.interval_steps,
        outer=DILOCO,
    )


def _virtual(plan: Comparison, seed: int) -> float:
    """(e)."""
    settings = plan.run_settings(seed)
    start = emulate.begin(settings, plan.task(seed))
    outcome = emulate.emulate(settings, start, emulate.Weather(plan.speeds))
    print(f"  virtual time: {outcome}")
    return outcome.loss


def _system(plan: Comparison, seed: int) -> float:
    """(b)."""
    settings = [f"run.seed={seed}", f'task.options.preset="{plan.preset}"', *plan.settings]
    with tempfile.TemporaryDirectory(prefix="bench-quality-") as folder:
        summary = run_local(
            Path(folder) / "run",
            learners=plan.learners,
            steps=plan.steps,
            settings=settings,
            speed=",".join(map(str, plan.speeds)),
        )
    tokens = plan.task(seed).tokens_per_batch
    print(f"  system: {summary['tokens'] / tokens / plan.learners:.0f} steps a learner, {summary}")
    return float(summary["eval_loss_last"])


ROWS: dict[str, Callable[[Comparison, int], float]] = {
    "a": _alone,
    "b": _system,
    "c": _data_parallel,
    "d": _synchronous,
    "e": _virtual,
}


def show(losses: dict[str, list[float]], seeds: list[int]) -> None:
    """Print the table: losses, and their ratios to data-parallel and to one learner alone."""
    columns = "".join(f"{f'seed {seed}':>10}" for seed in seeds)
    print(f"{'':22}{columns}{'mean':>10}{'/ (c)':>9}{'/ (a)':>9}")
    for row, values in losses.items():
        cells = "".join(f"{value:10.4f}" for value in values)
        ratios = "".join(
            f"{mean(values) / mean(losses[base]):9.4f}" if base in losses else f"{'':9}"
            for base in ("c", "a")
        )
        print(f"{f'({row}) {LABELS[row]}':22}{cells}{mean(values):10.4f}{ratios}")
    if "a" in losses and "b" in losses:
        beats = mean(losses["b"]) < mean(losses["a"])
        print("(b) beats (a)" if beats else "(b) DOES NOT BEAT (a)")


def quality_main() -> None:
    """Compare the loss of DiLoCo with that of data-parallel training, and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--preset", default="1m", help="of the built-in task, or tiny")
    parser.add_argument("--seeds", default="0", help="joined by commas")
    parser.add_argument("--speed", default=None, help="shares of full speed, joined by commas")
    parser.add_argument("--rows", default="a,b,c,d", help="which of a to e")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    speeds = [float(s) for s in options.speed.split(",")] if options.speed else None
    plan = Comparison(
        steps=options.steps,
        preset=options.preset,
        settings=tuple(options.settings),
        speeds=tuple(speeds or [1.0] * options.learners),
    )
    seeds = [int(seed) for seed in options.seeds.split(",")]
    losses: dict[str, list[float]] = {}
    for row in options.rows.split(","):
        losses[row] = [ROWS[row](plan, seed) for seed in seeds]
        print(f"({row}) {LABELS[row]}: {json.dumps(losses[row])}", flush=True)
    show(losses, seeds)


# --- On the wire


FLOAT32_BYTES = 4
FLOOR = 0.55


@dataclass
class Direction:
    """Traffic one way: objects and messages, in bytes; parameters that the objects cover."""

    objects_bytes: int = 0
    messages_bytes: int = 0
    count: int = 0
    parameters: int = 0

    def add(self, objects_bytes: int, messages_bytes: int, parameters: int) -> None:
        """Count an update or a delta with the message that announces it."""
        self.objects_bytes += objects_bytes
        self.messages_bytes += messages_bytes
        self.count += 1
        self.parameters += parameters

    def per_parameter(self, *, messages: bool) -> float:
        """Bytes per parameter and round."""
        total = self.objects_bytes + (self.messages_bytes if messages else 0)
        return total / self.parameters


@dataclass
class TapeTraffic:
    """A run's traffic, from its tape.

    `up` sums over all learners; `down` is what one learner reads; `steps` are inner steps by
    learner.
    """

    parameters: int
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    steps: dict[str, int] = field(default_factory=dict)

    def note_update(self, payload: bytes, layout: Layout) -> None:
        """Count a manifest of the tape and its shards."""
        manifest = wire.decode(wire.Manifest, payload)
        size = sum(shard.size_bytes for shard in manifest.shards)
        if manifest.attempt == 0:
            self.up.add(size, len(payload), layout.fragments[manifest.fragment].elements)
        else:
            self.up.messages_bytes += len(payload)
        known = self.steps.get(manifest.learner, 0)
        self.steps[manifest.learner] = max(known, manifest.position)

    def note_record(self, payload: bytes, layout: Layout) -> None:
        """Count a record of the tape and its delta."""
        record = wire.decode_record(payload)
        if isinstance(record, wire.Record) and record.delta is not None:
            elements = layout.fragments[record.fragment].elements
            self.down.add(record.delta.size_bytes, len(payload), elements)
        else:
            self.down.messages_bytes += len(payload)

    def of_data_parallel(self, direction: Direction, learners: int) -> float:
        """Bytes, messages included, over those of data-parallel for the same steps."""
        steps = sum(self.steps.values()) / len(self.steps) * learners
        ours = direction.objects_bytes + direction.messages_bytes
        return ours / (FLOAT32_BYTES * self.parameters * steps)


async def read_traffic(config: Config, url: str) -> TapeTraffic:
    """Read the traffic of a finished run from its tape."""
    bus = await jetstream.connect(url, name="bench-wire")
    try:
        return await _read(config, bus)
    finally:
        await bus.close()


async def _read(config: Config, bus: Bus) -> TapeTraffic:
    run = config.run.name
    specification = await load_specification(bus, run)
    stored = open_store(config.store.url).get(names.layout_object(run, specification.layout))
    layout = parse_layout(stored, specification.layout)
    traffic = TapeTraffic(sum(fragment.elements for fragment in layout.fragments))
    subjects = [names.update(run, "*", "*"), names.record(run, "*"), names.end(run)]
    async for message in bus.read(names.tape_stream(run), subjects, 1):
        match names.parse_subject(message.subject):
            case names.Subject(kind="update"):
                traffic.note_update(message.payload, layout)
            case names.Subject(kind="record"):
                traffic.note_record(message.payload, layout)
            case _:
                break
    return traffic


def measure_wire(folder: Path, *, learners: int, steps: int, settings: list[str]) -> TapeTraffic:
    """Run the system in a folder and read its tape."""
    run_dir = folder / "run"
    run_local(run_dir, learners=learners, steps=steps, settings=settings)
    config = load_config(run_dir / "run.toml")
    with NatsServer(run_dir / "nats") as server:
        return asyncio.run(read_traffic(config, server.url))


def show_wire(traffic: TapeTraffic) -> None:
    """Print the table, and whether the floor is held."""
    steps = sum(traffic.steps.values()) / len(traffic.steps)
    print(
        f"{traffic.parameters:,} parameters, {len(traffic.steps)} learners, {steps:.0f} steps each"
    )
    print(f"{'':24}{'up':>10}{'down':>10}   bytes per parameter and round (floor: {FLOOR})")
    ways = (traffic.up, traffic.down)
    for label, messages in (("objects", False), ("objects and messages", True)):
        values = [way.per_parameter(messages=messages) for way in ways]
        print(f"{label:24}{values[0]:10.4f}{values[1]:10.4f}")
    print(f"{'bytes a message':24}" + "".join(f"{w.messages_bytes / w.count:10.0f}" for w in ways))
    ratios = [
        traffic.of_data_parallel(traffic.up, len(traffic.steps)),
        traffic.of_data_parallel(traffic.down, 1),
    ]
    print(
        f"{'of data-parallel':24}{ratios[0]:10.5f}{ratios[1]:10.5f}   per step, messages included"
    )
    held = all(way.per_parameter(messages=False) <= FLOOR for way in ways)
    print("floor held" if held else "FLOOR MISSED")


def wire_main() -> None:
    """Measure the bytes of a run's messages and objects, and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--preset", default="1m")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    settings = [f'task.options.preset="{options.preset}"', *options.settings]
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as folder:
        show_wire(
            measure_wire(
                Path(folder), learners=options.learners, steps=options.steps, settings=settings
            )
        )


if __name__ == "__main__":
    run_part({"quality": quality_main, "wire": wire_main})
