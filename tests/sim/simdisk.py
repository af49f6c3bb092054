"""A learner's disk in the simulation: real files, which outlive the learner's processes.

A learner that restarts must continue from its newest complete checkpoint. A power failure may cut
the newest file short.
"""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp
import numpy as np
from simactor import Actor
from simchain import Violation

from diloco.common.process.config import LearnerSection
from diloco.learner.background import Context
from diloco.learner.core.carry import Carried
from diloco.learner.core.events import Start, SyncRules
from diloco.learner.synchronizer import Synchronizer
from diloco.learner.tensors import checkpoint as checkpoints
from diloco.learner.tensors.checkpoint import Facts, HostCheckpoint, PartFolder
from diloco.learner.wire.checkpoint_save_and_restore import (
    Coverage,
    Restored,
    TrainingProgress,
    UnsentWork,
    restore,
)
from diloco.learner.wire.incarnation import Membership
from diloco.learner.wire.resume_position import ResumePosition

KEEP = 12
EVERY_STEPS = 3
LIKE = {"moment": jnp.zeros(4)}
# In memory where there is such a folder: a file's fsync would take real time, thousands of times.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


# Snapshots that are kept, and the longest time in seconds that one takes.
SNAPSHOTS, SNAPSHOT_S = 2, 3.0


class Snapshots:
    """The snapshots of one learner's unsent work, which outlive its processes."""

    def __init__(self) -> None:
        self.kept: list[tuple[Facts, Any]] = []

    def going_on(
        self,
        place: ResumePosition,
        life: Membership,
        rules: SyncRules,
        starts: Sequence[Start | None],
    ) -> tuple[Facts, Any, tuple[Carried, ...]] | None:
        """Returns the newest snapshot that fits the tape, and how its work is taken over."""
        for facts, values in reversed(self.kept):
            found = place.fits(facts, life, rules, starts)
            if found is not None:
                return facts, values, found
        return None


class SimSaver:
    """Makes the snapshots of one life, with the methods of `Saver`; each takes a while."""

    def __init__(
        self, actor: Actor, context: Context, incarnation: int, snapshots: Snapshots
    ) -> None:
        self._actor = actor
        self._context = context
        self._incarnation = incarnation
        self._snapshots = snapshots
        self._coverage = Coverage(context)
        self._busy = False
        self.cover, self.release = self._coverage.cover, self._coverage.release

    def idle(self) -> bool:
        return not self._busy

    def save(self, _state: Any, progress: TrainingProgress, unsent: UnsentWork) -> None:
        context = self._context
        facts = Facts(
            run=context.run, learner=context.learner, layout=context.layout.digest,
            epoch=context.epoch, incarnation=self._incarnation, leaves=(), unsent=unsent.stated,
            loss=unsent.loss(), **progress._asdict(),
        )  # fmt: skip
        self._busy = True
        self._actor.spawn(self._write(facts, unsent.values))

    async def _write(self, facts: Facts, values: Any) -> None:
        await asyncio.sleep(self._actor.rng.uniform(0, SNAPSHOT_S))
        self._actor.check()
        self._busy = False
        self._actor.effect("save", f"{facts.local_step}", lambda: self._keep(facts, values))
        self._actor.world.injected["snapshots"] += 1
        # Here a step is counted before its boundary.
        self._coverage.stored(facts.local_step + 1)

    def _keep(self, facts: Facts, values: Any) -> None:
        self._snapshots.kept = [*self._snapshots.kept, (facts, values)][-SNAPSHOTS:]


class Disk:
    """The checkpoints of one learner.

    Args:
        rng: draws whether and where a power failure cuts the newest file.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._folder = TemporaryDirectory(prefix="sim-", dir=MEMORY)
        self._path = Path(self._folder.name)
        self._parts = PartFolder(self._path, KEEP)
        # Local steps of the complete checkpoints, oldest first.
        self._whole: list[int] = []
        # Whether this life has written any.
        self._written = False

    def close(self) -> None:
        """Delete the disk's files."""
        self._folder.cleanup()

    def save(
        self, actor: Actor, context: Context, synchronizer: Synchronizer, incarnation: int
    ) -> None:
        """Write a checkpoint every `EVERY_STEPS` local steps."""
        step = synchronizer.meter.local_step
        if step % EVERY_STEPS:
            return
        arrays = {key: np.full(4, step, np.float32) for key in checkpoints.on_host(LIKE)}
        progress = TrainingProgress(step, synchronizer.meter.tokens, synchronizer.position, 0)
        facts = Facts(
            run=context.run,
            learner=context.learner,
            layout=context.layout.digest,
            epoch=context.epoch,
            incarnation=incarnation,
            leaves=checkpoints.describe(LIKE, arrays),
            **progress._asdict(),
        )
        actor.effect("save", str(step), lambda: self._write(HostCheckpoint(facts, arrays)))
        actor.world.injected["checkpoints"] += 1

    def _write(self, checkpoint: HostCheckpoint) -> None:
        self._parts.write(checkpoint)
        self._written = True
        self._whole = [*self._whole, checkpoint.facts.local_step][-KEEP:]

    def lose_power(self) -> bool:
        """Cut this life's newest checkpoint short, half of the time; returns whether it was cut."""
        written, self._written = self._written, False
        if not written or self._rng.random() < 0.5:
            return False
        newest = max(self._path.glob("*.safetensors"), key=lambda path: int(path.stem))
        data = newest.read_bytes()
        newest.chmod(0o600)
        newest.write_bytes(data[: self._rng.randrange(len(data))])
        self._whole.pop()
        return True

    def restore(self, actor: Actor, context: Context) -> Restored | None:
        """Returns the state with which a new life begins; checks that it is the newest complete one."""
        section = LearnerSection(checkpoint_dir=str(self._path))
        found = restore(context, section, self._parts, LIKE, lambda _what, function: function())
        expected = self._whole[-1] if self._whole else None
        step = found.local_step if found else None
        content = int(found.state["moment"][0]) if found else None
        if not step == content == expected:
            what = f"restores {step} ({content}), its newest is {expected}"
            actor.world.fail(Violation("checkpoint", context.learner, what))
        return found
