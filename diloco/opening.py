"""A run as the operator names it: RUN is its TOML file, or the folder of a local run.

Settings are those of the run's specification; in what the file differs from them is for the
command to judge. A local run that has ended has no nats-server any more: one is started on its
folder for as long as the command lasts.
"""

import asyncio
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from common import bus_nats, log, names, wire
from common.bus import Bus
from common.config import Config, load_config, parse_settings
from common.errors import (
    BusUnavailableError,
    ConfigError,
    ObjectMissingError,
    RunMismatchError,
    RunMissingError,
)
from common.layout import parse_layout
from common.nats_server import NatsServer
from common.service import Runtime
from common.store import open_store
from common.tape import RunContext, load_specification

CONNECT_S = 5.0
# How long the server of a local run may take to answer before it counts as ended.
LOCAL_CONNECT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run, connected: the file it was named by, what its tape says it is, and its parts."""

    config: Config
    specification: wire.Specification
    context: RunContext


def find_config(target: str | Path) -> Path:
    """The configuration file of RUN.

    Raises:
        ConfigError: there is nothing of that name, or a folder that holds no local run.
    """
    path = Path(target)
    if path.is_dir():
        path /= "run.toml"
    if path.is_file():
        return path
    raise ConfigError(
        f"{str(target)!r} is neither a configuration file nor the folder of a local run",
        hint="give the TOML file the run was created with, or a folder such as runs/<name>",
    )


@asynccontextmanager
async def open_run(target: str | Path, *, name: str = "operator") -> AsyncIterator[OpenRun]:
    """Connect to a run for as long as the block lasts.

    Args:
        target: RUN, as the module says.
        name: who asks, as the server's monitoring shows it.

    Raises:
        ConfigError: no such file or folder, or the file cannot be understood.
        RunMissingError: the bus has no such run.
        RunMismatchError: the store has not.
        BusUnavailableError, StoreUnavailableError: bus or store are away.
    """
    config = load_config(find_config(target))
    async with AsyncExitStack() as stack:
        bus, specification = await _find(stack, Path(target), config, name)
        store = open_store(config.store.url, emulator=config.store.emulator)
        runtime = Runtime()
        layout = names.layout_object(config.run.name, specification.layout)
        try:
            data = await runtime.call(store.get, layout)
        except ObjectMissingError as error:
            raise RunMismatchError(
                f"the store {config.store.url!r} does not hold run {config.run.name!r}: "
                f"{error.message}",
                hint="check store.url: it must be the store that the run was created in",
            ) from error
        context = RunContext(
            settings=parse_settings(specification.settings),
            layout=parse_layout(data, specification.layout),
            epoch=specification.epoch,
            bus=bus,
            store=store,
            runtime=runtime,
            logger=log.get(run=config.run.name),
        )
        yield OpenRun(config=config, specification=specification, context=context)


async def _find(
    stack: AsyncExitStack, target: Path, config: Config, name: str
) -> tuple[Bus, wire.Specification]:
    """A connection to the server that has the run; one of our own if it is an ended local run."""
    ended = target / "nats"
    try:
        within_s = LOCAL_CONNECT_S if ended.is_dir() else CONNECT_S
        return await _connect(stack, config, config.bus.url, name, within_s)
    except BusUnavailableError:
        if not ended.is_dir():
            raise
        port = urllib.parse.urlsplit(config.bus.url).port
    except RunMissingError:
        if not ended.is_dir():
            raise
        port = None  # Somebody else's server has come by the old port.
    # Threads of the loop's pool last as long as the loop, and so does a server started by one.
    server = NatsServer(ended, port=port)
    stack.push_async_callback(asyncio.to_thread, server.stop)
    await asyncio.to_thread(server.start)
    return await _connect(stack, config, server.url, name, CONNECT_S)


async def _connect(
    stack: AsyncExitStack, config: Config, url: str, name: str, within_s: float
) -> tuple[Bus, wire.Specification]:
    bus = await bus_nats.connect(
        url,
        name=name,
        credentials=config.bus.credentials,
        tls_ca=config.bus.tls_ca,
        connect_timeout_s=within_s,
    )
    try:
        specification = await load_specification(bus, config.run.name)
    except BaseException:
        await bus.close()
        raise
    stack.push_async_callback(bus.close)
    return bus, specification
