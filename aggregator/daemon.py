"""The aggregator process: connects, checks the run, owns its fragments until the run ends."""

import asyncio
import contextlib

from diloco.aggregator.checkpoint_and_score_watch import LOOK_S, CheckpointWatch, ScoreWatch
from diloco.aggregator.compile_kernels import prepare
from diloco.aggregator.context import Context, put_proof
from diloco.aggregator.leases import Leases, NoLeases
from diloco.aggregator.owner.liveness import Expiry, LivenessWatch
from diloco.aggregator.owner.owner import Owners
from diloco.aggregator.stop_and_end import Conductor
from diloco.aggregator.tape_watch import watch_tape
from diloco.common.process import log
from diloco.common.process.config import (
    Config,
    check_same_run,
    fitted,
    parse_settings,
    sync_of,
    warnings,
)
from diloco.common.process.health import report, tell, tell_stopping
from diloco.common.process.probes import Probes, make_probes, serving
from diloco.common.process.retry import Runtime
from diloco.common.process.signals import AskedToStopError, on_signals, unless_asked
from diloco.common.process.tasks import all_of, cancel, first_of
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.layout import Layout, parse_layout
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import ObjectStore, open_store
from diloco.common.storage.tape import await_specification, load_specification

# The longest shutdown in seconds; systemd ends the unit after 30 s.
LEAVE_S = 25.0


async def load_run(
    config: Config, bus: Bus, store: ObjectStore, runtime: Runtime
) -> tuple[Layout, int]:
    """Checks a daemon's configuration against its run; returns (layout of the run, epoch).

    Raises:
        RunMismatchError: there is no such run, or its settings differ from the configuration.
    """
    specification = await load_specification(bus, config.run.name)
    name = names.layout_object(config.run.name, specification.layout)
    layout = parse_layout(await runtime.call(store.get, name), specification.layout)
    theirs = parse_settings(specification.settings)
    check_same_run(fitted(config.settings(), layout), theirs, layout.digest, specification.layout)
    return layout, specification.epoch


async def _open_run(config: Config, bus: Bus, runtime: Runtime) -> tuple[ObjectStore, Layout, int]:
    # The bus first, as there is no store's folder either before the run is created.
    await await_specification(bus, config.run.name, config.bus.wait_for_run_s)
    store = open_store(config.store.url, emulator=config.store.emulator)
    return store, *await load_run(config, bus, store, runtime)


async def aggregate(context: Context, leases: Leases | None = None) -> None:
    """Owns fragments until the run's `end` is on the tape and every update has a verdict.

    Args:
        context: the aggregator's context.
        leases: the leases that divide the fragments among aggregators; None to own all fragments
            without leases.

    Raises:
        IntegrityError: a fragment's stored objects do not give the recorded digests; raised
            once nothing else is left to do.
    """
    held: Leases | NoLeases = leases or NoLeases(context)
    owners = Owners(context, held)
    owners.show()
    liveness = LivenessWatch(context, owners.all())

    async def conduct() -> None:
        await Conductor(context).conduct()
        held.run_ended()

    try:
        await first_of(
            all_of(held.hold(owners.take, owners.drop), conduct()),
            liveness.watch(),
            Expiry(context, liveness.last_heard).watch(),
            watch_tape(context),
            owners.failure(),
        )
    finally:
        await owners.drop_all()
        await held.release()
    for error in owners.damaged.values():
        raise error


def serve(config: Config, pinned: frozenset[int] | None = None) -> None:
    """Runs an aggregator until the run ends or a signal asks it to stop.

    Args:
        config: the configuration.
        pinned: the fragments that this aggregator may own; None for an equal share of all.

    Raises:
        ConfigError: the run has no such fragments.
        DilocoError: a permanent error; its hint says what to do.
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
    """Connects, loads the run, checks the store; waits while bus or store are unreachable."""
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
            settings=fitted(config.settings(), layout),
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
    """Aggregates, and reports to systemd, until the run ends or the daemon is asked to stop."""
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
    # The state is on the tape; this only prevents waiting for a thread that hangs in the store.
    log.end_within(LEAVE_S)
    await cancel(reports, checkpoints, scores)
    stop.cancel()
    if work.done():
        work.result()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _prove_store(context: Context) -> None:
    """Stores an object before the daemon is ready, to prove that the daemon may store objects.

    Raises:
        StoreError: the daemon's credentials do not permit it.
    """
    context.health.begin_phase("proving that the store takes objects")
    await context.runtime.retry(
        "proving the store", lambda: put_proof(context), logger=context.logger
    )


async def _compile(context: Context) -> None:
    """Compiles the run's kernels before the daemon is ready and owns a fragment."""
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
