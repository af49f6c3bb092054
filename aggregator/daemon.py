"""The aggregator as a process: connect, check the run, own its fragments until it ends.

At its foot: what its metrics and its health say of the fragments that it owns.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from diloco.aggregator.conductor import Conductor
from diloco.aggregator.context import Context
from diloco.aggregator.core.state import State
from diloco.aggregator.leases import Everything, Leases
from diloco.aggregator.owner.liveness import Expiry, LivenessWatch
from diloco.aggregator.owner.owner import FragmentOwner
from diloco.aggregator.owner.tenure import Tenure
from diloco.aggregator.prepare import prepare
from diloco.aggregator.tape_watch import watch_tape
from diloco.aggregator.watches import LOOK_S, CheckpointWatch, ScoreWatch
from diloco.common.process import log, metrics
from diloco.common.process.config import (
    Config,
    check_same_run,
    parse_settings,
    sync_of,
    warnings,
)
from diloco.common.process.health import HealthView, report, tell, tell_stopping
from diloco.common.process.metrics import Metrics
from diloco.common.process.probes import Probes, make_probes, serving
from diloco.common.process.service import (
    AskedToStopError,
    Runtime,
    all_of,
    cancel,
    first_of,
    on_signals,
    unless_asked,
)
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import ConfigError, IntegrityError
from diloco.common.protocol.layout import Layout, parse_layout
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import ObjectStore, open_store
from diloco.common.storage.tape import load_specification

# The longest farewell; systemd ends the unit after 30 s.
LEAVE_S = 25.0


async def load_run(
    config: Config, bus: Bus, store: ObjectStore, runtime: Runtime
) -> tuple[Layout, int]:
    """Check a daemon's configuration against its run; the run's layout and epoch.

    Raises:
        RunMismatchError: no such run, or settings that disagree.
    """
    specification = await load_specification(bus, config.run.name)
    name = names.layout_object(config.run.name, specification.layout)
    layout = parse_layout(await runtime.call(store.get, name), specification.layout)
    theirs = parse_settings(specification.settings)
    check_same_run(config.settings(), theirs, layout.digest, specification.layout)
    return layout, specification.epoch


async def _open_run(config: Config, bus: Bus, runtime: Runtime) -> tuple[ObjectStore, Layout, int]:
    # The bus is asked first: before a run is created there is no folder to open either.
    await load_specification(bus, config.run.name)
    store = open_store(config.store.url, emulator=config.store.emulator)
    return store, *await load_run(config, bus, store, runtime)


class Owners:
    """The fragments that this process owns, a task for each.

    Args:
        context: the aggregator's.
        still_ours: whether a fragment's lease stands, asked of the server.
        done: called once nothing of a fragment is left to do.
        refuse: called once this process has failed at a fragment.
    """

    def __init__(
        self,
        context: Context,
        still_ours: Callable[[int], Awaitable[bool]],
        done: Callable[[int], Awaitable[None]],
        refuse: Callable[[int], None],
    ) -> None:
        self._context = context
        self._refuse = refuse
        self._still_ours = still_ours
        self._done = done
        self._tasks: dict[int, asyncio.Future[None]] = {}
        self._owners: dict[int, FragmentOwner] = {}
        self.damaged: dict[int, IntegrityError] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def show(self) -> None:
        """Tell metrics and health of the owners, whenever these ask."""
        context, fragments = self._context, len(self._context.layout.fragments)
        context.metrics.on_scrape(
            lambda: show_owned(context.metrics, self._tenures(), fragments, len(self.damaged))
        )
        context.health.view = lambda: describe(
            self._tenures(), {f: error.message for f, error in [*self.damaged.items()]}, fragments
        )

    def _tenures(self) -> dict[int, Tenure | None]:
        # Asked from other threads, while owners come and go.
        return {fragment: owner.tenure for fragment, owner in [*self._owners.items()]}

    def all(self) -> Collection[FragmentOwner]:
        """The owners of now, as they come and go."""
        return self._owners.values()

    def take(self, fragment: int) -> None:
        """Begin to own a fragment."""
        self._owners[fragment] = FragmentOwner(self._context, fragment, self._still_ours)
        self._tasks[fragment] = asyncio.ensure_future(self._own(fragment))

    async def drop(self, fragments: Iterable[int]) -> None:
        """Cease to own fragments; what was not committed is forgotten."""
        dropped = [f for f in fragments if f in self._tasks]
        for fragment in dropped:
            del self._owners[fragment]
        await cancel(*(self._tasks.pop(fragment) for fragment in dropped))

    async def drop_all(self) -> None:
        """Cease to own anything."""
        await self.drop([*self._tasks])

    async def failure(self) -> None:
        """Raise what ends the whole aggregator, once an owner has met it."""
        await self._failed

    async def _own(self, fragment: int) -> None:
        try:
            if await self._owners[fragment].own():
                await self._done(fragment)
        except IntegrityError as error:
            # This machine may be the bad one: whoever else is there tries. Other fragments go on.
            self._context.logger.exception("fragment_refused", fragment=fragment, hint=error.hint)
            self.damaged[fragment] = error
            self._refuse(fragment)
        except Exception as error:  # noqa: BLE001 - raised by `failure`
            if not self._failed.done():
                self._failed.set_exception(error)


async def aggregate(context: Context, leases: Leases | None = None) -> None:
    """Own fragments of the run until its end is on the tape and nothing is left to answer.

    Args:
        context: the aggregator's.
        leases: divide the fragments among several; None to own all of them without asking.

    Raises:
        IntegrityError: a fragment's stored objects do not give the recorded digests; raised
            once nothing else is left to do.
    """
    held: Leases | Everything = leases or Everything(context)
    owners = Owners(context, held.still_ours, held.done, held.refuse)
    owners.show()
    liveness = LivenessWatch(context, owners.all())
    try:
        await first_of(
            all_of(held.hold(owners.take, owners.drop), Conductor(context).conduct()),
            liveness.watch(),
            Expiry(context, liveness.hearing).watch(),
            watch_tape(context),
            owners.failure(),
        )
    finally:
        await owners.drop_all()
        await held.release()
    for error in owners.damaged.values():
        raise error


def serve(config: Config, pinned: frozenset[int] | None = None) -> None:
    """Run an aggregator until the run ends or a signal asks it to stop.

    Args:
        config: the whole file.
        pinned: the fragments to keep to; None for a share of all.

    Raises:
        ConfigError: the run has no such fragments.
        DilocoError: what stops it for good, with what to do.
    """
    runtime = Runtime()
    probes = make_probes(runtime.retries, run=config.run.name, aggregator=config.aggregator.name)
    with serving(config.metrics, probes):
        try:
            asyncio.run(_serve(config, pinned, runtime, probes))
        finally:
            log.may_take_longer()


async def _serve(
    config: Config, pinned: frozenset[int] | None, runtime: Runtime, probes: Probes
) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    on_signals(lambda: loop.call_soon_threadsafe(asked.set))
    logger = log.get(run=config.run.name, aggregator=config.aggregator.name)
    for sentence in warnings(config.settings()):
        logger.warning("configuration", warning=sentence)
    begin = _begin(config, pinned, runtime, probes, logger)
    with contextlib.suppress(AskedToStopError):
        context = await unless_asked(begin, asked.is_set)
        try:
            leases = Leases(context, config.aggregator.lease_ttl_s, pinned)
            checkpoint_s = config.aggregator.checkpoint_interval_s
            await _work(context, leases, probes, asked, checkpoint_s)
        finally:
            await context.bus.close()
    logger.info("stopped")


async def _begin(
    config: Config,
    pinned: frozenset[int] | None,
    runtime: Runtime,
    probes: Probes,
    logger: log.Logger,
) -> Context:
    """Connect, read the run, prove the store; waits for whoever does not answer."""
    probes.health.begin_phase("connecting to NATS")
    bus = await jetstream.connect_or_wait(
        config.bus, "aggregator", config.aggregator.name, runtime, logger
    )
    try:
        probes.health.begin_phase("reading the run")
        store, layout, epoch = await runtime.retry(
            "reading the run", lambda: _open_run(config, bus, runtime), logger=logger
        )
        context = Context(
            name=config.aggregator.name,
            gc=config.gc,
            share_expiry_s=config.aggregator.share_expiry_s,
            metrics=probes.metrics,
            health=probes.health,
            settings=config.settings(),
            layout=layout,
            epoch=epoch,
            bus=bus,
            store=store,
            runtime=runtime,
            logger=logger,
        )
        _check_pinned(pinned, len(layout.fragments))
        await _prove_store(context)
        await _compile(context)
    except BaseException:
        await bus.close()
        raise
    logger.info("started", fragments=sorted(pinned) if pinned else len(layout.fragments))
    return context


async def _work(
    context: Context, leases: Leases, probes: Probes, asked: asyncio.Event, checkpoint_s: float
) -> None:
    """Aggregate, and tell systemd, until the run ends or somebody asks for the end."""
    work = asyncio.ensure_future(aggregate(context, leases))
    stop = asyncio.ensure_future(asked.wait())
    probes.start.over()
    reports = asyncio.ensure_future(report(probes.health, probes.manager))
    look_s = min(LOOK_S, checkpoint_s / 4) if checkpoint_s else LOOK_S
    checkpoints = asyncio.ensure_future(CheckpointWatch(context, checkpoint_s).watch(look_s))
    scores = asyncio.ensure_future(ScoreWatch(context).watch())
    tell(probes.manager, READY="1")
    await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
    tell_stopping(probes.manager)
    # All that counts is committed; a thread that hangs in the store would be waited for.
    log.end_within(LEAVE_S)
    await cancel(reports, checkpoints, scores)
    stop.cancel()
    if work.done():
        work.result()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _prove_store(context: Context) -> None:
    """Store an object before it says that it is ready.

    Raises:
        StoreError: it is not permitted.
    """
    context.health.begin_phase("proving that the store takes objects")
    name = names.proof(names.global_prefix(context.run))
    await context.runtime.retry(
        "proving the store",
        lambda: context.runtime.call(context.store.put, name, name.encode()),
        logger=context.logger,
    )


async def _compile(context: Context) -> None:
    """Compile what versions are made with before it says that it is ready, and owns a fragment."""
    context.health.begin_phase("compiling the merge")
    sections = [sync_of(context.settings.sync, fragment) for fragment in context.layout.fragments]
    took_s = 0.0
    for codec, delta_codec in sorted({(each.codec, each.delta_codec) for each in sections}):
        block = context.layout.block
        took_s += await context.runtime.call(prepare, codec, delta_codec, block)
    context.logger.info("compiled", took_s=round(took_s, 3))


def _check_pinned(pinned: frozenset[int] | None, fragments: int) -> None:
    if pinned and max(pinned) >= fragments:
        raise ConfigError(
            f"the run has fragments 0 to {fragments - 1}, and no fragment {max(pinned)}",
            hint="choose other fragments, or omit --fragments for an equal share",
        )


# Of the fragments that are ours; others have those of the rest.
BY_FRAGMENT = (
    metrics.VERSION,
    metrics.CLOCK,
    metrics.COMMITTED_AT,
    metrics.MERGED,
    metrics.REJECTED,
    metrics.DELIVERED,
    metrics.LOST,
    metrics.PENDING,
    metrics.QUEUED,
    metrics.LIVE_LEARNERS,
    metrics.QUARANTINED,
)


def show_owned(
    counted: Metrics, tenures: Mapping[int, Tenure | None], fragments: int, stopped: int
) -> None:
    """Say how the fragments that are ours stand; `fragments` is P, `stopped` how many are damaged.

    A fragment without a tenure is being recovered. Sums are those of the newest record, so that
    they go on where another process left them.
    """
    counted.forget(*BY_FRAGMENT, metrics.PAUSED)
    counted.set(metrics.FRAGMENTS, fragments)
    counted.set(metrics.OWNED, len(tenures))
    counted.set(metrics.REFUSED, stopped)
    for fragment, tenure in sorted(tenures.items()):
        if tenure is not None:
            _show_fragment(counted, fragment, tenure.newest, tenure.state)
            counted.set(metrics.PAUSED, tenure.paused)
            counted.set(metrics.QUEUED, tenure.queued, fragment)


def _show_fragment(counted: Metrics, fragment: int, newest: wire.Record, state: State) -> None:
    live = sum(member.live and not member.left for member in state.members.values())
    for metric, value in (
        (metrics.VERSION, newest.version),
        (metrics.CLOCK, newest.global_step),
        (metrics.COMMITTED_AT, newest.closed_at_s),
        (metrics.MERGED, newest.totals.updates_merged),
        (metrics.REJECTED, newest.totals.updates_rejected),
        (metrics.DELIVERED, newest.totals.tokens_merged),
        (metrics.LOST, newest.totals.tokens_rejected),
        (metrics.PENDING, len(state.pending)),
        (metrics.LIVE_LEARNERS, live),
    ):
        counted.set(metric, value, fragment)
    for learner in sorted(state.quarantined):
        counted.set(metrics.QUARANTINED, 1, fragment, learner)


def describe(
    tenures: Mapping[int, Tenure | None], damaged: Mapping[int, str], fragments: int
) -> HealthView:
    """An aggregator's state, and the fragments that it cannot serve yet, or no more."""
    recovering = [fragment for fragment, tenure in tenures.items() if tenure is None]
    why = [f"refuses fragment {fragment}: {error}" for fragment, error in damaged.items()]
    why += [f"fragment {f} is being recovered" for f in recovering if f not in damaged]
    versions = [tenure.state.version for tenure in tenures.values() if tenure is not None]
    if not tenures:
        return HealthView("stands by", tuple(why))
    span = f" at versions {min(versions)} to {max(versions)}" if versions else ""
    return HealthView(f"owns {len(tenures)} of {fragments} fragments{span}", tuple(why))
