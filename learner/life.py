"""One life of a learner, on host 0 and on a worker: everything between start and end.

A life is made once, from loaded objects: views first (other parameters are overwritten by them),
then programs, the join, the data position. `leading_host.py` makes it on host 0,
`following_host.py` on a worker; this module has what both need.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from diloco.common.process import log, metrics
from diloco.common.process.config import Config, RunSettings, fitted
from diloco.common.process.health import (
    PHASE_S,
    report,
    tell,
    tell_stopping,
)
from diloco.common.process.metrics import Metrics
from diloco.common.process.probes import Probes
from diloco.common.process.retry import Runtime
from diloco.common.process.signals import unless_asked
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError, DilocoError, Exit, HostLostError
from diloco.common.protocol.frozen import Frozen, Index
from diloco.common.protocol.layout import Layout, parse_layout
from diloco.common.protocol.wire import LEARNER_STATES
from diloco.common.storage.bus import Bus
from diloco.common.storage.store import ObjectStore, open_store
from diloco.learner.background import Background, Context
from diloco.learner.core import sync
from diloco.learner.hosts.messages import wait_for_hosts
from diloco.learner.member import Member
from diloco.learner.synchronizer import Meter, Synchronizer, mean_and_worst
from diloco.learner.task import Params
from diloco.learner.tensors import tree
from diloco.learner.tensors.checkpoint import CheckpointFolder, copied
from diloco.learner.tensors.mesh import open_groups
from diloco.learner.tensors.placement import placed
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.wire.checkpoint_save_and_restore import (
    PatientFetch,
    Restored,
    Saver,
    open_folder,
)
from diloco.learner.wire.claims import GrantedShares

T = TypeVar("T")
# Seconds between two lines on a terminal.
PROGRESS_S = 5.0


class RunEndedError(DilocoError):
    """The run has ended: no life begins."""

    status = Exit.MISMATCH

    def __init__(self, run: str) -> None:
        super().__init__(
            f"run {run!r} has ended", hint="diloco.load and diloco export read its parameters"
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """The objects that a host has before its life begins.

    Attributes:
        asked_to_leave: returns whether this learner was asked to end.
        gives_up: returns whether such a request ends the start; hosts that have met end later.
        lost_host: is called, on the event loop, when another host is gone; this process may hang
            in a collective then.
        naming_lost: a context in which the error of a broken collective becomes `HostLostError`.
    """

    config: Config
    settings: RunSettings
    member: Member
    runtime: Runtime
    probes: Probes
    background: Background
    asked_to_leave: Callable[[], bool]
    gives_up: Callable[[], bool]
    lost_host: Callable[[BaseException], None]
    naming_lost: Callable[[], AbstractContextManager[None]]

    def starting(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of the start; returns its result.

        Raises:
            AskedToStopError: the start is given up.
        """
        return self.background.call(unless_asked(coroutine, self.gives_up))

    def wait_for(self, what: str, function: Callable[..., T], *args: object) -> T:
        """Calls a blocking function of the start, retrying transient faults; returns its result.

        Raises:
            AskedToStopError: the start is given up.
        """
        runtime, logger = self.runtime, log.get(run=self.settings.run.name)
        return self.starting(
            runtime.retry(
                what,
                lambda: runtime.call(function, *args),
                logger=logger.bind(learner=self.member.learner),
            )
        )

    def open_store(self) -> ObjectStore:
        """Opens the run's store; retries, since its folder may not be mounted yet."""
        section = self.config.store
        return self.wait_for(
            "opening the store", lambda: open_store(section.url, emulator=section.emulator)
        )

    def layout(self, store: ObjectStore, digest: str) -> Layout:
        """Returns the layout of the parameters: by the member's hints, or as the run stores it.

        Raises:
            RunMismatchError: the run has other parameters.
        """
        sync = self.settings.sync
        found = self.member.layout(sync.fragments, sync.block)
        if found is None:
            name = names.layout_object(self.settings.run.name, digest)
            found = parse_layout(self.wait_for("reading the layout", store.get, name), digest)
            self.member.check(found)
        tree.check_wide(found)
        return found

    def context(self, bus: Bus, store: ObjectStore, layout: Layout, epoch: int) -> Context:
        """Makes the context that the parts of a life share."""
        learner = self.member.learner
        logger = log.get(run=self.settings.run.name, learner=learner)
        return Context(
            settings=fitted(self.settings, layout),
            layout=layout,
            epoch=epoch,
            bus=bus,
            store=store,
            runtime=self.runtime,
            logger=logger if jax.process_count() == 1 else logger.bind(host=jax.process_index()),
            learner=learner,
            metrics=self.probes.metrics,
            health=self.probes.health,
        )


@dataclass(frozen=True, kw_only=True)
class Life:
    """One life on one host.

    Attributes:
        params: the parameters with which the life begins.
        leave_run: tells the run that this life ends; returns why, for the log.
        give_up: is called if the loop ended before the planned step.
        find: returns a checkpoint of a state with these shapes and shardings, or None.
        shares: the learner's shares of the data, if its epochs are divided.
        last_word: sends the life's last heartbeat at once.
    """

    host: Host
    context: Context
    synchronizer: Synchronizer
    params: Params
    leave_run: Callable[[], str]
    give_up: Callable[[], None]
    find: Callable[[Any, Any], Restored | None]
    shares: GrantedShares
    last_word: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Tells the run's daemons that this learner trains from now on."""
        manager, synchronizer = self.host.probes.manager, self.synchronizer
        health, meter = self.context.health, synchronizer.meter
        watchdog_timeout_s = self.host.config.learner.watchdog_timeout_s
        health.limit_s = partial(meter.turn_limit_s, watchdog_timeout_s)
        health.view = meter.view
        self.context.logger.info("started", position=synchronizer.position)
        self.host.probes.start.over()
        self.host.background.spawn(report(health, manager))
        if log.on_terminal():
            self.host.background.spawn(self._progress(meter))
        tell(manager, READY="1")

    async def _progress(self, meter: Meter) -> None:
        """Reports training to a terminal, whenever there is something new; never returns."""
        known = -1
        while True:
            await asyncio.sleep(PROGRESS_S)
            if meter.local_step == known:
                continue
            known = meter.local_step
            self.context.logger.info(
                "progress",
                state=meter.state,
                local_step=known,
                global_step=meter.global_step,
                loss=meter.loss,
                tokens_per_s=meter.tokens_per_s,
                version=meter.version,
            )

    def leave(self) -> None:
        """Ends the life in order: leaves the run, finishes the checkpoint, logs why."""
        tell_stopping(self.host.probes.manager)
        why = self.leave_run()
        if self.synchronizer.saver is not None:
            self.synchronizer.saver.close()
        local_step = self.synchronizer.meter.local_step
        self.context.logger.info("left", why=why, local_step=local_step)


def ended_early() -> None:
    """Raises the error of a host whose loop ended early: the other hosts cannot take a step.

    Raises:
        HostLostError: always.
    """
    raise HostLostError(
        "the training loop of this host ended before `done`, and the learner's other hosts cannot"
        " take a step without it",
        hint="let all hosts' data be endless; to end early, call `leave()` and step until `done`",
    )


def prove_store(host: Host, context: Context) -> None:
    """Stores an object before joining, since a learner that cannot send would train in vain.

    Raises:
        StoreError: the store does not permit it.
    """
    host.probes.health.begin_phase("proving that the store takes objects")
    name = names.proof(names.learner_prefix(context.run, context.learner))
    host.wait_for("proving the store", context.store.put, name, name.encode())


def read_frozen(host: Host, context: Context, name: str | None) -> Params:
    """Returns the leaves that are not synchronized, sharded as the loop's; a host reads its part.

    Args:
        host: this host.
        context: the life's context.
        name: name of the run's index of these leaves.

    Raises:
        IntegrityError: a leaf is damaged, or a leaf loaded by this learner differs from the run's.
    """
    like = host.member.frozen_shapes(context.layout)
    if name is None:
        return like

    def get(name: str) -> bytes:
        return host.wait_for("reading held leaves", context.store.get, name)

    held = Frozen(context.run, get, name)
    loaded = host.member.load_frozen() if host.member.load_frozen is not None else {}
    for leaf in loaded:
        held.check(leaf, loaded[leaf])
    lies = host.member.shardings
    found = {
        leaf: placed(lies[leaf], shape, partial(_slice, held, loaded, leaf))
        for leaf, shape in tree.by_name(like).items()
    }
    return tree.from_names(like, found)


def _slice(held: Frozen, loaded: Mapping[str, Any], name: str, index: Index) -> np.ndarray:
    if name in loaded:
        # Of a leaf that is loaded lazily, only this part is read.
        return np.asarray(loaded[name][index])
    return held.read(name, index)


def compile_programs(host: Host, replica: Replica, held: Params) -> None:
    """Compiles step and synchronization on copies, before this learner joins the run."""
    if jax.process_count() > 1:
        host.probes.health.begin_phase("waiting for the learner's other hosts")
        open_groups(host.member.shardings.values(), partial(wait_for_hosts, PHASE_S))
    host.probes.health.begin_phase("compiling")
    with host.member.compiling():
        replica.warm_up()
        if host.member.warm_up is not None:
            host.member.warm_up(lambda: tree.join(copied(replica.trained), copied(held)))


def own_folder(host: Host, context: Context) -> CheckpointFolder | None:
    """Returns this host's folder of checkpoints.

    Raises:
        ConfigError: a learner of several hosts has `warm_start`.
    """
    section, hosts = host.config.learner, jax.process_count()
    if hosts > 1 and section.warm_start:
        raise ConfigError(
            "a learner of several hosts resumes from its own checkpoints alone",
            hint="set learner.warm_start to false for it",
        )
    return open_folder(context, section, jax.process_index(), hosts)


def own_part() -> str:
    """Returns the name of this host's part of a checkpoint; "" for a learner of a single host."""
    return names.checkpoint_part(jax.process_index(), jax.process_count())


def patient_fetch(host: Host, context: Context) -> PatientFetch:
    """Returns a blocking function that reads the store and retries transient faults."""

    def fetch(what: str, function: Callable[[], Any]) -> Any:
        runtime = context.runtime
        return host.background.call(
            runtime.retry(what, lambda: runtime.call(function), logger=context.logger)
        )

    return fetch


def log_restored(context: Context, found: Restored, where: str) -> None:
    """Logs the part of a checkpoint from which a host of several resumes."""
    context.logger.info(
        "checkpoint_restored",
        where=where,
        name=own_part().rstrip("/"),
        of=context.learner,
        local_step=found.local_step,
    )


def make_saver(
    host: Host, context: Context, folder: CheckpointFolder | None, incarnation: int
) -> Saver | None:
    """Makes the writer of this life's checkpoints, if the learner keeps any."""
    if folder is None:
        return None
    return Saver(context, host.config.learner, folder, incarnation, own_part())


def make_replica(host: Host, context: Context, views: Any) -> Replica:
    """Returns the learner's tensors, made from the newest views of all fragments, float32 [N]."""
    member = host.member
    return Replica(
        context.settings.sync,
        context.layout,
        member.synced(context.layout),
        views,
        shardings=member.shardings_of(context.layout),
        anchor=member.anchor,
    )


# --- A learner's metrics, as `common/process/metrics.py` defines them


def show_series(counted: Metrics, learner: Synchronizer, state: sync.State) -> None:
    """Sets a learner's metrics; `state` is its core's state."""
    meter, traffic = learner.meter, learner.meter.traffic
    each = learner.tokens_per_step
    delay, adoption = mean_and_worst(meter.delays), mean_and_worst(meter.adoptions)
    for metric, value in (
        (metrics.TOKENS, meter.tokens),
        (metrics.STEPS, meter.tokens / each),
        (metrics.DATA_TOKENS, learner.position * each),
        (metrics.GLOBAL_STEP, meter.global_step),
        (metrics.STEP_TIME, meter.step_time_s),
        (metrics.DELAY, delay[0]),
        (metrics.DELAY_STEPS, delay[2]),
        (metrics.STALL, meter.stall_s),
        (metrics.DATA_WAIT, meter.data_s),
        (metrics.RUN_TIME, meter.run_s),
        (metrics.UP, traffic.bytes_up),
        (metrics.DOWN, traffic.bytes_down),
        (metrics.SENT, traffic.updates_sent),
    ):
        counted.set(metric, value)
    for at, of in enumerate(("mean", "worst")):
        counted.set(metrics.ADOPTION, adoption[at], of)
        counted.set(metrics.ADOPTION_STEPS, adoption[2 + at], of)
    if meter.loss is not None:
        counted.set(metrics.LOSS, meter.loss)
    for name, value in meter.metrics.items():
        counted.set(metrics.METRIC, value, name)
    for name in LEARNER_STATES:
        counted.set(metrics.STATE, name == meter.state, name)
    unsent = sync.unsent(state)
    for index, fragment in enumerate(state.fragments):
        counted.set(metrics.ADOPTED, fragment.version, index)
        counted.set(metrics.UNSENT, unsent.get(index, 0), index)
