"""The aggregator as a process: connect, check the run, own its fragments until it ends."""

import asyncio
import contextlib

from aggregator.conductor import Conductor
from aggregator.context import Context
from aggregator.driver import FragmentOwner, LivenessWatch
from common import bus_nats, log, names
from common.bus import Bus
from common.config import Config, check_same_run, parse_settings, warnings
from common.errors import IntegrityError
from common.layout import Layout, parse_layout
from common.service import Runtime, cancel, on_signals
from common.store import ObjectStore, open_store
from common.tape import load_specification


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


async def aggregate(context: Context) -> None:
    """Own every fragment of the run until its end is on the tape.

    Raises:
        IntegrityError: a fragment's stored objects do not give the recorded digests; raised
            once nothing else is left to do.
    """
    fragments = range(len(context.layout.fragments))
    owners = [FragmentOwner(context, fragment) for fragment in fragments]
    work = [asyncio.ensure_future(owner.own()) for owner in owners]
    work.append(asyncio.ensure_future(Conductor(context).conduct()))
    watch = asyncio.ensure_future(LivenessWatch(context, owners).watch())
    damaged: list[IntegrityError] = []
    try:
        running = {watch, *work}
        while running > {watch}:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    task.result()
                except IntegrityError as error:
                    # Its fragment stands still until an operator has looked; the others go on.
                    context.logger.exception("fragment_stopped", hint=error.hint)
                    damaged.append(error)
    finally:
        await cancel(watch, *work)
    if damaged:
        raise damaged[0]


def serve(config: Config) -> None:
    """Run an aggregator until the run ends or a signal asks it to stop.

    Raises:
        DilocoError: what stops it for good, with what to do.
    """
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    on_signals(lambda: loop.call_soon_threadsafe(asked.set))
    runtime = Runtime()
    logger = log.get(run=config.run.name, aggregator=config.aggregator.name)
    for sentence in warnings(config.settings()):
        logger.warning("configuration", warning=sentence)
    store = open_store(config.store.url)
    bus = await bus_nats.connect(
        config.bus.url, name=config.aggregator.name, credentials=config.bus.credentials
    )
    try:
        layout, epoch = await load_run(config, bus, store, runtime)
        context = Context(
            name=config.aggregator.name,
            settings=config.settings(),
            layout=layout,
            epoch=epoch,
            bus=bus,
            store=store,
            runtime=runtime,
            logger=logger,
        )
        logger.info("started", fragments=len(layout.fragments))
        work = asyncio.ensure_future(aggregate(context))
        stop = asyncio.ensure_future(asked.wait())
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        logger.info("stopped")
    finally:
        await bus.close()
