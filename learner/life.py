"""One life of a learner: its membership in a run from one join to the end of the process.

A learner that restarts begins a new life under the same name. On each of its hosts a life is a
`Life`, made in this order: views are loaded, programs compiled, the join is published, and the data
position is read. `leading_host.py` makes a `Life` on host 0, `following_host.py` on the other hosts
(the workers); this module has the code that both need.
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
from diloco.common.process.config import Config, LearnerSection, RunSettings, fitted
from diloco.common.process.health import (
    PHASE_S,
    HealthView,
    report,
    tell,
    tell_stopping,
)
from diloco.common.process.metrics import Metrics
from diloco.common.process.probes import Probes
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError, DilocoError, Exit, HostLostError
from diloco.common.protocol.frozen import Frozen, Index
from diloco.common.protocol.layout import Layout, parse_layout
from diloco.common.protocol.wire import LEARNER_STATES, LearnerSlices
from diloco.common.storage.bus import Bus
from diloco.common.storage.store import OUTCOMES, CachedStore, ObjectStore, open_nearby
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
    """The run has ended, so that no learner can join it."""

    status = Exit.MISMATCH

    def __init__(self, run: str) -> None:
        super().__init__(
            f"run {run!r} has ended", hint="diloco.load and diloco export read its parameters"
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """The objects that one host of a learner has before it joins the run.

    Attributes:
        config: the learner's configuration; `settings` are those that all daemons of the run share.
        member: the facts about the training loop, such as its parameters' shapes.
        runtime: clock, retries and threads.
        probes: health, metrics and the connection to systemd.
        background: runs coroutines on the event loop beside training.
        asked_to_leave: returns whether this learner was asked to end.
        gives_up: returns whether such a request aborts the start. After the hosts of a learner are
            connected it aborts nothing: they end together, at a step boundary.
        lost_host: is called on the event loop, with the error, when another host is gone; this
            process may then hang in a collective.
        naming_lost: returns a context manager that turns the error of a broken collective into a
            `HostLostError`.
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
        """Runs a coroutine that is part of the learner's start, and returns its result.

        Raises:
            AskedToStopError: `gives_up` became true meanwhile.
            BaseException: the error that ended a task of the background.
        """
        return self.background.call_unless_failed(coroutine, self.gives_up)

    def wait_for(self, what: str, function: Callable[..., T], *args: object) -> T:
        """Calls a blocking function that is part of the start, and retries transient faults.

        Args:
            what: names the call in the log.
            function: the function to call.
            args: its arguments.

        Returns:
            The function's result.

        Raises:
            AskedToStopError: `gives_up` became true meanwhile.
        """
        runtime, logger = self.runtime, log.get(run=self.settings.run.name)
        return self.starting(
            runtime.retry(
                what,
                lambda: runtime.call(function, *args),
                logger=logger.bind(learner=self.member.learner),
            )
        )

    def alike(self) -> str:
        """Returns as text the settings by which all hosts of a learner must do the same."""
        return (
            f"{self.config.alike(self.member.learner)}, {self.member.tokens_per_step} tokens a step"
            f", modules {' '.join(self.member.holds) or 'all'}"
        )

    def open_store(self) -> ObjectStore:
        """Opens the run's object store; retries, since a store's folder may not be mounted yet."""
        return self.wait_for("opening the store", open_nearby, self.config.store)

    def layout(self, store: ObjectStore, digest: str) -> Layout:
        """Returns the layout: the division of the parameters into fragments and blocks.

        It follows from the member's hint; without a hint it is read from the store.

        Args:
            store: the run's object store.
            digest: the digest of the run's layout.

        Raises:
            RunMismatchError: without a hint: the run has other parameters than the member.
            TaskError: a synchronized leaf is float64, which JAX is not set to use.
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
        """Makes the `Context`: the bus, store, logger and counters that all code of a life shares.

        Args:
            bus: the connection to NATS.
            store: the run's object store.
            layout: the run's layout.
            epoch: the number of the run's tape, 0 for its first.
        """
        learner = self.member.learner
        logger = log.get(run=self.settings.run.name, learner=learner)
        own = self.config.learner.number_of(jax.process_index())
        return Context(
            settings=fitted(self.settings, layout),
            layout=layout,
            epoch=epoch,
            bus=bus,
            store=store,
            runtime=self.runtime,
            logger=logger if jax.process_count() == 1 else logger.bind(host=own),
            learner=learner,
            holds=self.member.holds,
            metrics=self.probes.metrics,
            health=self.probes.health,
        )


@dataclass(frozen=True, kw_only=True)
class Life:
    """One life of a learner, on one of its hosts, that is ready for the first step.

    Attributes:
        host: the objects that the host had before.
        context: the bus, store, logger and counters that all code of this life shares.
        synchronizer: carries out each step boundary.
        params: the parameters with which training begins.
        leave_run: tells the run that this learner ends; returns the reason, for the log.
        give_up: is called if the loop ended before the planned step.
        find: (shapes, shardings) of a state -> the checkpoint to resume from; None: there is none.
        shares: the shares of the data that this learner has claimed.
        last_word: sends the last heartbeat at once.
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
        """Reports to systemd, the health checks and the log that training begins."""
        manager, synchronizer = self.host.probes.manager, self.synchronizer
        health, meter = self.context.health, synchronizer.meter
        watchdog_timeout_s = self.host.config.learner.watchdog_timeout_s
        health.limit_s = partial(meter.turn_limit_s, watchdog_timeout_s)
        health.view = meter.view
        phases = health.phases()
        self.context.logger.info("started", position=synchronizer.position, phases_s=phases)
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

    def leave(self) -> str:
        """Leaves the run, waits for the checkpoint that is being made; logs and returns why."""
        tell_stopping(self.host.probes.manager)
        why = self.leave_run()
        if self.synchronizer.saver is not None:
            self.synchronizer.saver.close()
        local_step = self.synchronizer.meter.local_step
        self.context.logger.info("left", why=why, local_step=local_step)
        # Also for the reports to systemd that may still come; infra/ended.py reads the last status.
        self.context.health.view = lambda: HealthView(f"left: {why}")
        tell(self.host.probes.manager, STATUS=f"left: {why}")
        return why


def ended_early() -> None:
    """Raises an error, since this host's loop ended early and the other hosts cannot step alone.

    Raises:
        HostLostError: always.
    """
    raise HostLostError(
        "the training loop of this host ended before `done`, and the learner's other hosts cannot"
        " take a step without it",
        hint="let all hosts' data be endless; to end early, call `leave()` and step until `done`",
    )


def prove_store(host: Host, context: Context) -> None:
    """Stores a small object before joining, to prove that this learner can upload updates.

    Raises:
        StoreError: the store does not permit it.
    """
    host.probes.health.begin_phase("proving that the store takes objects")
    name = names.proof(names.learner_prefix(context.run, context.learner))
    host.wait_for("proving the store", context.store.put, name, name.encode())


def read_frozen(host: Host, context: Context, name: str | None) -> Params:
    """Returns the leaves that are not synchronized, with the shardings of the loop's parameters.

    Each host reads only the slices that its devices need.

    Args:
        host: this host.
        context: the life's context.
        name: name of the object that lists these leaves; None: all leaves are synchronized.

    Returns:
        A tree like the loop's parameters, with None in place of synchronized leaves.

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
    """Compiles the training step and the synchronization before this learner joins the run.

    Args:
        host: this host.
        replica: the learner's tensors; the programs are tried on copies.
        held: the leaves that are not synchronized.
    """
    if jax.process_count() > 1:
        host.probes.health.begin_phase("waiting for the learner's other hosts")
        open_groups(host.member.shardings.values(), partial(wait_for_hosts, PHASE_S))
    host.probes.health.begin_phase("compiling")
    with host.member.compiling():
        replica.warm_up()
        if host.config.learner.snapshot_steps:
            jax.block_until_ready(replica.unsent())
        if host.member.warm_up is not None:
            host.member.warm_up(lambda: tree.join(copied(replica.trained), copied(held)))


def own_folder(host: Host, context: Context) -> CheckpointFolder | None:
    """Returns this host's folder of checkpoints; None if the learner keeps none.

    Raises:
        ConfigError: a learner of several hosts has `warm_start`.
    """
    section, hosts = host.config.learner, jax.process_count()
    if (hosts > 1 or section.formation) and section.warm_start:
        raise ConfigError(
            "a learner of several hosts resumes from its own checkpoints alone",
            hint="set learner.warm_start to false for it",
        )
    return open_folder(context, section, own_part(section))


def own_part(section: LearnerSection) -> str:
    """Returns the name of this host's part of each checkpoint; "" for a learner of one host.

    With several slices, hosts at the same place of their slices have the same part.
    """
    hosts = section.slice_hosts if section.formation else jax.process_count()
    if hosts == 1 and not section.formation:
        return ""
    return names.checkpoint_part(jax.process_index() % hosts, hosts)


def patient_fetch(host: Host, context: Context) -> PatientFetch:
    """Returns a blocking function for reads of the store, which retries transient faults.

    It maps (name for the log, a function that reads) to the result of that function.
    """

    def fetch(what: str, function: Callable[[], Any]) -> Any:
        runtime = context.runtime
        return host.background.call_unless_failed(
            runtime.retry(what, lambda: runtime.call(function), logger=context.logger)
        )

    return fetch


def log_restored(context: Context, found: Restored, where: str, part: str) -> None:
    """Logs from which part of a checkpoint this host resumes, in a learner of several hosts."""
    context.logger.info(
        "checkpoint_restored",
        where=where,
        name=part.rstrip("/"),
        of=context.learner,
        local_step=found.local_step,
    )


def make_saver(
    host: Host, context: Context, folder: CheckpointFolder | None, incarnation: int, **hosts: Any
) -> Saver | None:
    """Returns the writer of this life's checkpoints; None if `folder` is None.

    `hosts`: `made` or `others_made` of `Saver`.
    """
    if folder is None:
        return None
    section = host.config.learner
    if section.formation and jax.process_index() >= section.slice_hosts:
        # The first slice uploads the same parts.
        section = section.model_copy(update={"checkpoint_upload": False})
    return Saver(context, section, folder, incarnation, own_part(section), **hosts)


def make_replica(host: Host, context: Context, views: Any) -> Replica:
    """Returns the learner's tensors, with the values of `views`.

    Args:
        host: this host.
        context: the life's context.
        views: the newest view of each held fragment, in their order: float32 [fragment's size].
    """
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


def show_cache(counted: Metrics, store: ObjectStore) -> None:
    """Sets the metric of the reads through a cache, if this learner reads through one."""
    if isinstance(store, CachedStore):
        for outcome in OUTCOMES:
            counted.set(metrics.CACHE_READS, store.reads[outcome], outcome)


def show_slices(counted: Metrics, slices: LearnerSlices | None) -> None:
    """Sets the metric of the slices that train, if the learner has several."""
    if slices is not None:
        counted.set(metrics.SLICES, slices.present, "present")
        counted.set(metrics.SLICES, slices.given, "given")


def show_series(counted: Metrics, learner: Synchronizer, state: sync.State) -> None:
    """Sets the Prometheus metrics in `counted` from a learner's counters and its core's state."""
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
        if fragment.held:
            counted.set(metrics.ADOPTED, fragment.version, index)
            counted.set(metrics.UNSENT, unsent.get(index, 0), index)
