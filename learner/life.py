"""One life of a learner, as host 0 and as a worker lead it: everything between start and end.

A life is made once, from what was loaded: views first (others' parameters are overwritten by
them), then programs, the inner optimizer, the join, the place in the data. Only then is there a
trainer. `lead.py` and `follow.py` do that as host 0 and as a worker; here is what both need.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from diloco.common import log, names
from diloco.common.bus import Bus
from diloco.common.config import Config
from diloco.common.errors import ConfigError
from diloco.common.health import step_limit_s
from diloco.common.manager import report, tell, tell_stopping
from diloco.common.probes import Probes
from diloco.common.service import Runtime
from diloco.common.store import open_store
from diloco.learner import instruments, tree
from diloco.learner.background import Background
from diloco.learner.boundary import Outbox
from diloco.learner.checkpoint import CheckpointFolder
from diloco.learner.context import Context
from diloco.learner.island import Island
from diloco.learner.recovery import (
    CheckpointId,
    Checkpoints,
    NoCheckpoints,
    Restored,
    Saver,
    open_folder,
    readable_parts,
)
from diloco.learner.replica import Replica
from diloco.learner.task import Params
from diloco.learner.train import Boundaries, InnerStep, Meter, Trainer, compile_programs


class RunEndedError(Exception):
    """There is nothing to train any more: not a failure, and no life begins."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What a host has before its life begins.

    Attributes:
        asked_to_leave: whether somebody wants this process to end.
    """

    config: Config
    island: Island
    runtime: Runtime
    probes: Probes
    background: Background
    asked_to_leave: Callable[[], bool]

    def context(self, bus: Bus, epoch: int) -> Context:
        """What the parts of a life share."""
        config, island = self.config, self.island
        logger = log.get(run=config.run.name, learner=island.learner)
        return Context(
            settings=config.settings(),
            layout=island.layout,
            epoch=epoch,
            bus=bus,
            store=open_store(config.store.url, emulator=config.store.emulator),
            runtime=self.runtime,
            logger=logger if jax.process_count() == 1 else logger.bind(host=jax.process_index()),
            learner=island.learner,
            metrics=self.probes.metrics,
            health=self.probes.health,
        )


@dataclass(frozen=True, kw_only=True)
class Life:
    """One life on one host.

    Attributes:
        trainer: to be run, to its end.
        leave_run: says to the run that this life ends; why it does, for the log.
    """

    host: Host
    context: Context
    trainer: Trainer
    leave_run: Callable[[], str]

    def begin(self) -> None:
        """Say that it trains from now on."""
        manager, trainer = self.host.probes.manager, self.trainer
        health, watchdog_timeout_s = (
            self.context.health,
            self.host.config.learner.watchdog_timeout_s,
        )
        health.limit_s = lambda: step_limit_s(watchdog_timeout_s, trainer.meter.step_time_s)
        health.view = lambda: instruments.view(trainer.meter)
        self.context.logger.info("started", position=trainer.position)
        self.host.probes.start.over()
        self.host.background.spawn(report(health, manager))
        tell(manager, READY="1")

    def leave(self) -> None:
        """End it in order."""
        tell_stopping(self.host.probes.manager)
        why = self.leave_run()
        self.trainer.saver.close()
        self.context.logger.info("left", why=why, local_step=self.trainer.meter.local_step)


def prove_store(host: Host, context: Context) -> None:
    """Store an object before anything is promised: a learner that cannot send would train in vain.

    Raises:
        StoreError: it is not permitted.
    """
    host.probes.health.begin_phase("proving that the store takes objects")
    name = names.proof(names.learner_prefix(context.run, context.learner))
    runtime, store = context.runtime, context.store
    host.background.call(
        runtime.retry(
            "proving the store",
            lambda: runtime.call(store.put, name, name.encode()),
            logger=context.logger,
        )
    )


def read_constants(context: Context, like: Params, name: str | None) -> Params:
    """The run's constants, from the object of that name.

    Raises:
        IntegrityError: it is damaged.
    """
    if name is None:
        return like
    return tree.unpack_constants(context.store.get(name), like, name.rsplit("-", 1)[1])


def compiled(host: Host, replica: Replica, constants: Params) -> InnerStep:
    """The inner step; it and the replica's programs are compiled."""
    island = host.island
    host.probes.health.begin_phase("compiling")
    inner_step = island.inner_step(constants)
    compile_programs(replica, inner_step, island.init_state, next(island.feed(0)))
    return inner_step


def own_folder(host: Host, context: Context) -> CheckpointFolder | None:
    """This host's folder of checkpoints.

    Raises:
        ConfigError: what a learner of several hosts cannot do is asked for.
    """
    section, hosts = host.config.learner, jax.process_count()
    if hosts > 1 and (section.checkpoint_upload or section.warm_start):
        raise ConfigError(
            "a learner of several hosts keeps its checkpoints on the hosts' disks only",
            hint="set learner.checkpoint_upload and learner.warm_start to false for it",
        )
    return open_folder(context, section, jax.process_index(), hosts)


def own_parts(
    host: Host, context: Context, folder: CheckpointFolder | None
) -> dict[CheckpointId, Callable[[], Restored]]:
    """This host's parts of checkpoints, by what they are a part of."""
    island = host.island
    return readable_parts(
        context, host.config.learner, folder, island.state, island.state_shardings
    )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a trainer is made of before its life is on the tape."""

    replica: Replica
    inner_step: InnerStep
    optimizer_state: Any
    meter: Meter


def make_parts(
    host: Host,
    context: Context,
    replica: Replica,
    inner_step: InnerStep,
    found: Restored | None,
) -> Parts:
    """With the inner optimizer's state of a checkpoint, or a fresh one."""
    if found is None:
        found = Restored(host.island.init_state(replica.trained), 0, 0)
    elif jax.process_count() > 1:
        context.logger.info(
            "checkpoint_restored",
            where="folder",
            name=f"host-{jax.process_index()}-of-{jax.process_count()}",
            of=context.learner,
            local_step=found.local_step,
        )
    meter = Meter(
        context.learner,
        context.traffic,
        local_step=found.local_step,
        earlier_tokens=found.tokens,
    )
    return Parts(replica=replica, inner_step=inner_step, optimizer_state=found.state, meter=meter)


def make_saver(
    host: Host, context: Context, folder: CheckpointFolder | None, incarnation: int
) -> Checkpoints:
    """What makes this life's checkpoints."""
    if folder is None:
        return NoCheckpoints()
    return Saver(context, host.config.learner, folder, incarnation, jax.process_count())


def make_trainer(
    host: Host,
    parts: Parts,
    *,
    position: int,
    boundaries: Boundaries,
    outbox: Outbox,
    saver: Checkpoints,
) -> Trainer:
    """The trainer of a life whose data goes on at `position`."""
    island = host.island
    return Trainer(
        replica=parts.replica,
        inner_step=parts.inner_step,
        optimizer_state=parts.optimizer_state,
        batches=island.feed(position),
        position=position,
        tokens_per_step=island.task.tokens_per_batch,
        boundaries=boundaries,
        outbox=outbox,
        meter=parts.meter,
        saver=saver,
        speed=host.config.learner.speed.get(island.learner, 1.0),
    )
