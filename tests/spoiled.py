"""A run with one bad learner among four, of known making: what finds causes must find this one.

The aggregator is the real one, on a bus in memory and a store in a folder; learners are hands that
take real gradients of a small task. The bad one does its harm from `SPOILED_FROM` on:
  - "labels": it trains on the targets of other inputs;
  - "rate": its learning rate is fifty times the others';
  - "noise": it sends noise as long as its honest updates.
Or nobody is bad, and the outer step is far too long: "step".
"""

import asyncio
import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from forged import write_tape

from diloco.aggregator.context import Context
from diloco.aggregator.daemon import aggregate
from diloco.common.process import log
from diloco.common.process.config import BusSection, RunSettings
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.storage.bus import MemoryBus
from diloco.common.storage.store import open_store
from diloco.common.storage.tape import last_record, messages_of
from diloco.common.storage.views import load_view
from diloco.learner.task import Task
from diloco.learner.tensors import tree
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.learner.tensors.send_and_adopt_kernels import vector_of
from diloco.operate.create import create_run
from diloco.replay.bundle import run_bundle
from diloco.replay.options import BundleOptions
from diloco.run.cli.opening import RunLocation, use_place
from diloco.run.model.view import GlobalModel

FEATURES, HIDDEN, BATCH, STEPS = 12, 48, 16, 8
FRAGMENTS = 2
LEARNERS = ("island-a", "island-b", "island-c", "island-d")
CULPRIT = "island-c"
# Noise does nothing to a model that is trained already.
SPOILED_FROM = {"": 0, "labels": 5, "rate": 5, "noise": 1, "step": 1 << 30}
OUTER = {"learning_rate": 0.5, "momentum": 0.5}
LONG = {"learning_rate": 6.0, "momentum": 0.9}
VERSIONS = 10
RATE = 0.3
PATIENCE_S = 300.0


def build(*, steps: int, seed: int) -> Task:
    """A regression; held-out data are batches that no learner draws."""
    truth = np.random.default_rng(seed).normal(size=(FEATURES, 3)).astype(np.float32)

    def init(key):
        first, second = jax.random.split(key)
        return {
            "first": jax.random.normal(first, (FEATURES, HIDDEN)) / 4,
            "bias": jnp.zeros(HIDDEN),
            "second": jax.random.normal(second, (HIDDEN, 3)) / 16,
        }

    def loss(params, batch, key=None):
        inputs, targets = batch
        outputs = jnp.tanh(inputs @ params["first"] + params["bias"]) @ params["second"]
        return jnp.square(outputs - targets).mean(), {}

    def batches(learner, position) -> Iterator[Any]:
        while True:
            rng = np.random.default_rng([seed, zlib.crc32(learner.encode()), position])
            inputs = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
            yield inputs, np.tanh(inputs @ truth)
            position += 1

    held_out = [next(batches("held-out", position)) for position in range(8)]

    def evaluate(params):
        return float(np.mean([loss(params, part)[0] for part in held_out]))

    return Task(
        init=init, loss=loss, batches=batches, evaluate=evaluate, tokens_per_batch=BATCH,
        optimizer=optax.identity(), schedule=optax.constant_schedule(RATE),
    )  # fmt: skip


@dataclass
class Run:
    """A finished run: its tape in a file, and its store."""

    name: str
    tape: Path
    store: Path


def make_run(
    folder: Path,
    spoiled: str = "",
    *,
    store: Path | None = None,
    versions: int = VERSIONS,
    norm_clip: float = 10.0,
) -> Run:
    """Train a run of four learners, and keep its tape and objects in a folder.

    `norm_clip` is that of the run's settings; without it a learning rate fifty times the others'
    does little.
    """
    fleet = _Fleet(folder, spoiled, store or folder / "store", norm_clip)
    return asyncio.run(fleet.train(versions))


def bundled(folder: Path, spoiled: str = "", *, versions: int) -> Path:
    """The bundle of such a run, made of its files as an operator would make it."""
    run = make_run(folder, spoiled, versions=versions)
    use_place(RunLocation(None, str(run.store)))
    try:
        run_bundle(str(run.tape), folder / "run.bundle", BundleOptions())
    finally:
        use_place(RunLocation())
    return folder / "run.bundle"


class _Fleet:
    def __init__(self, folder: Path, spoiled: str, store: Path, norm_clip: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.spoiled, self.store = folder, spoiled, store
        self.name = f"spoiled-{spoiled}" if spoiled else "honest"
        settings = RunSettings.model_validate(
            {
                "run": {"name": self.name, "steps": 1 << 20},
                "task": {"build": "spoiled:build"},
                "sync": {
                    "fragments": FRAGMENTS, "interval_steps": STEPS, "block": 16,
                    "snapshot_interval_versions": 3,
                },
                "outer": LONG if spoiled == "step" else OUTER,
                # What they did is the same however busy the machine is: nobody's steps are credited
                # by the time that passed between two rounds.
                "bounds": {
                    "norm_clip": norm_clip,
                    "learners": {
                        name: {"max_steps_per_s": 1e9, "max_tokens_per_step": BATCH}
                        for name in LEARNERS
                    },
                },
                "quorum": {
                    "pace": 0.0, "min_learners": 4, "deadline_s": 30.0, "liveness_timeout_s": 60.0,
                },
            }
        )  # fmt: skip
        self.task = build(steps=1, seed=settings.run.seed)
        self.bus = MemoryBus()
        self.context = Context(
            name="aggregator",
            settings=settings,
            layout=tree.task_layout(self.task, settings.sync),
            epoch=0,
            bus=self.bus,
            store=open_store(str(store), create=True),
            runtime=Runtime(),
            logger=log.get(),
        )
        self.lives: dict[str, int] = {}
        self.sent: dict[tuple[str, int], int] = {}
        self.rng = np.random.default_rng(7)
        self.gradient = jax.jit(jax.value_and_grad(self.task.loss, has_aux=True))

    async def train(self, versions: int) -> Run:
        context, params = self.context, self.task.init(jax.random.key(0))
        await create_run(
            context.settings, BusSection(), context.layout, params, self.bus, context.store,
            context.runtime,
        )  # fmt: skip
        self.model = await GlobalModel.of_run(context, self.task)
        work = asyncio.ensure_future(aggregate(context))
        try:
            for learner in LEARNERS:
                join = wire.Join(
                    run=self.name, learner=learner, layout=context.layout.digest, host="here"
                )
                self.lives[learner] = await self.bus.publish(
                    names.join(self.name, learner), wire.encode(join)
                )
            for version in range(versions):
                for fragment in range(FRAGMENTS):
                    await self._round(version, fragment)
        finally:
            await cancel(work)
            with contextlib.suppress(asyncio.CancelledError):
                work.result()
        tape = self.folder / "run.tape"
        subjects = names.tape_subjects(self.name)
        found = [message async for message in messages_of(self.bus, context.tape, subjects)]
        write_tape(tape, self.name, found)
        return Run(self.name, tape, self.store)

    async def _round(self, version: int, fragment: int) -> None:
        loaded = [await load_view(self.context, index) for index in range(FRAGMENTS)]
        layout = self.context.layout
        views = [item.view for item in loaded]
        base = loaded[fragment].record
        params = self.model.params(views)
        for learner in LEARNERS:
            loss, trained = self._work(learner, version, params)
            vector = vector_of(layout, fragment, tree.by_name(trained))
            update = views[fragment] - np.asarray(vector)
            if self.spoiled == "noise" and self._spoils(learner, version):
                noise = self.rng.normal(size=update.shape).astype(np.float32)
                update = noise * np.linalg.norm(update) / np.linalg.norm(noise)
            await self._send(learner, fragment, base, update, loss)
        async with asyncio.timeout(PATIENCE_S):
            newest = base
            while newest.version <= base.version:
                await asyncio.sleep(0.002)
                newest, _ = await last_record(self.context, fragment)

    def _spoils(self, learner: str, version: int) -> bool:
        return learner == CULPRIT and version >= SPOILED_FROM[self.spoiled]

    def _work(self, learner: str, version: int, params: Any) -> tuple[float, Any]:
        """Some inner steps."""
        bad = self._spoils(learner, version)
        rate = RATE * (50 if bad and self.spoiled == "rate" else 1)
        total = 0.0
        batches = self.task.batches(learner, version * STEPS)
        for _ in range(STEPS):
            inputs, targets = next(batches)
            if bad and self.spoiled == "labels":
                targets = -np.roll(targets, 1, axis=-1)
            (loss, _), gradient = self.gradient(params, (inputs, targets))
            norm = float(optax.tree.norm(gradient))
            gradient = jax.tree.map(lambda leaf: leaf / max(1.0, norm), gradient)  # noqa: B023
            params = jax.tree.map(lambda leaf, by: leaf - rate * by, params, gradient)
            total += float(loss) / STEPS
        return total, params

    async def _send(
        self, learner: str, fragment: int, base: wire.Record, update: np.ndarray, loss: float
    ) -> None:
        context, sync, life = self.context, self.context.settings.sync, self.lives[learner]
        seq = self.sent[learner, fragment] = self.sent.get((learner, fragment), 0) + 1
        data = shards.pack(
            sync.codec, encode(sync.codec, jnp.asarray(update), sync.block), sync.block
        )
        name = names.shard(self.name, learner, fragment, 0, life, seq, 0)
        context.store.put(name, data)
        blocks = slices.describe(np.arange(update.size // sync.block))
        manifest = wire.Manifest(
            run=self.name, learner=learner, epoch=0, incarnation=life, seq=seq, fragment=fragment,
            base_version=base.version, base_digest=base.view_digest, layout=context.layout.digest,
            codec=sync.codec, tokens=BATCH * STEPS, steps=STEPS, position=STEPS * seq,
            shards=(
                wire.Shard(
                    name=name, size_bytes=len(data), crc32c=shards.crc32c(data), slices=blocks
                ),
            ),
            local_step=STEPS * seq, loss=min(loss, 1e9), step_time_s=0.001, encode_s=0.0,
            upload_s=0.0, attempt=0, final=False,
        )  # fmt: skip
        await context.bus.publish(names.update(self.name, learner, fragment), wire.encode(manifest))
