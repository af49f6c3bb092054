"""Opens a run that an operator names.

The argument RUN of a command is one of these:

- the run's TOML file;
- the folder of a local run;
- the run's name; `use_place` or the environment (DILOCO_BUS_URL, DILOCO_STORE_URL) give its bus and
  store;
- a bundle, for commands that only read. For a bundle without objects, the store is that of the run.

The settings in the run's context are those of its specification, not those of the file. A local run
that has ended has no nats-server any more, so one is started on the run's folder until the command
ends.
"""

import asyncio
import os
import pwd
import socket
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from diloco.aggregator.context import Context
from diloco.common.process import log
from diloco.common.process.config import (
    Config,
    RunSettings,
    load_config,
    parse_settings,
    placed_config,
    store_url,
)
from diloco.common.process.nats_server import (
    NatsServer,
    is_folder_of_server,
    is_free,
    is_served,
    served_at,
)
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusUnavailableError,
    ConfigError,
    ObjectMissingError,
    RunIncompleteError,
    RunMismatchError,
    RunMissingError,
)
from diloco.common.protocol.layout import parse_layout
from diloco.common.storage.bundle import (
    Bundle,
    BundleBus,
    BundleStore,
    is_bundle,
    open_bundle,
    read_header,
)
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import ObjectStore, open_store
from diloco.common.storage.tape import RunContext, load_specification

CONNECT_S = 5.0
# Seconds without an answer after which the server of a local run counts as ended.
LOCAL_CONNECT_S = 2.0
# Keys of the section `learner` that are folders, below the folder of a local run.
FOLDERS = ("checkpoint_dir",)


class RunLocation(NamedTuple):
    """Bus and store of runs given by name; None: from the environment, else the default."""

    bus_url: str | None = None
    store_url: str | None = None


class _Given:
    """Holds the location that the command line gave, for the whole process."""

    place = RunLocation()


def use_place(place: RunLocation) -> None:
    """Sets, for this process, bus and store of runs given by name.

    The store is also that of bundles without objects.
    """
    _Given.place = place


def place() -> RunLocation:
    """Returns the location that `use_place` has set, to pass it on to a child process."""
    return _Given.place


@dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A connected run.

    Attributes:
        config: the configuration of the run's file; for a run given by name or as a bundle, of its
            specification, bus and store.
        specification: the message with which the run was created.
        context: bus, store, layout and settings of the run.
        bundle: the bundle that the run is read from; None: it is read from a bus.
    """

    config: Config
    specification: wire.Specification
    context: RunContext
    bundle: Bundle | None = None

    @property
    def alone(self) -> bool:
        """Whether the run is read from a bundle with objects, to which nothing can be added."""
        return self.bundle is not None and self.bundle.has_objects

    @property
    def copy(self) -> bool:
        """Whether the tape is a bundle without objects, so that run and store may be newer."""
        return self.bundle is not None and not self.bundle.has_objects


def find_config(target: str | Path) -> Path:
    """Returns the path of the TOML file of a run, given that file or a local run's folder.

    Raises:
        ConfigError: there is no such file, or the folder is not a local run's.
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


def run_config(target: str | Path) -> Config:
    """Returns the configuration of RUN, as in its file.

    For a run given by name or as a bundle, only its name, bus and store are known; the other
    settings have their defaults.

    Raises:
        ConfigError: RUN is none of the kinds that this module lists, or its file is invalid.
    """
    path, place = Path(target), _Given.place
    if is_bundle(path):
        header = read_header(path)
        if header["objects"]:
            place = place._replace(store_url=path.absolute().as_uri())
        return _placed(str(header["run"]), place)
    if not path.exists() and names.valid_name(str(target)):
        if (place.store_url or store_url()) is None:
            raise ConfigError(
                f"there is no file or folder {str(target)!r}; for a run's name, say where it is",
                hint="diloco --bus nats://HOST:4222 --store STORE ..., or set DILOCO_BUS_URL and "
                "DILOCO_STORE_URL",
            )
        return _placed(str(target), place)
    file = find_config(target)
    return at_home(load_config(file), path) if path.is_dir() else load_config(file)


def at_home(config: Config, folder: Path) -> Config:
    """Returns a local run's configuration with its paths in `folder`.

    The folder may have been moved or copied since the run was created. The configuration of other
    runs is returned unchanged.
    """
    stored = Path(config.store.url)
    home, here = stored.parent, folder.absolute()
    local = (here / "nats").is_dir() and (here / stored.name).is_dir()
    if not (local and stored.is_absolute()) or home == here:
        return config

    def moved(path: str | None) -> str | None:
        inside = path is not None and Path(path).is_relative_to(home)
        return str(here / Path(path).relative_to(home)) if path and inside else path

    learner = {key: moved(getattr(config.learner, key)) for key in FOLDERS}
    return config.model_copy(
        update={
            "store": config.store.model_copy(update={"url": moved(config.store.url)}),
            "learner": config.learner.model_copy(update=learner),
        }
    )


def placed(run: str, *, stored: bool) -> Config:
    """Returns a configuration with a run's name, and with bus and store of the command line.

    Args:
        run: the run's name.
        stored: whether the command needs the store; if not, the store may be unknown.

    Raises:
        ConfigError: `stored` is set, and no store is given.
    """
    place = _Given.place
    if not stored:
        place = place._replace(store_url=place.store_url or store_url() or "none")
    return _placed(run, place)


def _placed(run: str, place: RunLocation) -> Config:
    """Returns a configuration with a run's name, bus and store, and defaults for all else."""
    document: dict[str, dict[str, Any]] = {"run": {"name": run, "steps": 1}}
    if place.bus_url is not None:
        document["bus"] = {"url": place.bus_url}
    if place.store_url is not None:
        document["store"] = {"url": place.store_url}
    try:
        return placed_config(document)
    except ConfigError as error:
        raise ConfigError(
            f"the store of run {run!r} is not known: {error.message}",
            hint="diloco --store STORE ..., or set DILOCO_STORE_URL",
        ) from error


@asynccontextmanager
async def open_run(
    target: str | Path,
    *,
    name: str = "operator",
    reads: bool = False,
    salvage: bool = False,
    credentials: str | None = None,
) -> AsyncIterator[OpenRun]:
    """Connects to a run for as long as the block lasts.

    Args:
        target: RUN, as the module defines it.
        name: the connection's name in the NATS server's monitoring.
        reads: whether the caller only reads; otherwise a bundle is refused.
        salvage: whether to use the intact parts of a damaged bundle.
        credentials: a file of NATS credentials, instead of the one that the configuration names.

    Raises:
        ConfigError: no such file or folder, or the file is invalid.
        RunMissingError: the bus has no such run.
        IntegrityError: the bundle is damaged, without `salvage`.
        RunIncompleteError: the run is being created.
        RunMismatchError: the store has no such run.
        BusUnavailableError, StoreUnavailableError: bus or store are unreachable.
    """
    path = Path(target)
    config = run_config(target)
    if credentials is not None:
        bus_section = config.bus.model_copy(update={"credentials": credentials})
        config = config.model_copy(update={"bus": bus_section})
    async with AsyncExitStack() as stack:
        bundle = None
        if is_bundle(path):
            bundle = _open_file(stack, path, reads=reads, salvage=salvage)
            bus: Bus = BundleBus(bundle)
            specification = await load_specification(bus, config.run.name)
        else:
            bus, specification = await _find(stack, path, config, name)
        if bundle is not None and bundle.has_objects:
            store: ObjectStore = BundleStore(bundle)
            # Ages in a bundle are as of its making.
            made_s = float(bundle.header["made_s"])
            runtime = Runtime(clock=lambda: made_s)
        else:
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
        settings = parse_settings(specification.settings)
        if not path.exists() or bundle is not None:
            known = {section: getattr(settings, section) for section in RunSettings.model_fields}
            config = config.model_copy(update=known)
        context = RunContext(
            settings=settings,
            layout=parse_layout(data, specification.layout),
            epoch=specification.epoch,
            bus=bus,
            store=store,
            runtime=runtime,
            logger=log.get(run=config.run.name),
        )
        yield OpenRun(config=config, specification=specification, context=context, bundle=bundle)


def operator_context(opened: OpenRun) -> Context:
    """Returns the context that functions of the aggregator take, with the operator as its name."""
    parts = {field.name: getattr(opened.context, field.name) for field in fields(RunContext)}
    return Context(**parts, name=who())


def who() -> str:
    """Returns the name under which the tape records this user's acts: "operator USER@HOST"."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    return f"operator {user}@{socket.gethostname()}"


def _open_file(stack: AsyncExitStack, path: Path, *, reads: bool, salvage: bool) -> Bundle:
    """Opens a bundle until the stack is closed.

    Raises:
        ConfigError: `reads` is False.
        IntegrityError: the bundle is damaged.
    """
    if not reads:
        raise ConfigError(
            f"{str(path)!r} is a bundle; this command needs the run on a server",
            hint="restore the run to a server first: diloco restore FILE",
        )
    bundle = open_bundle(path, salvage=salvage)
    stack.callback(bundle.close)
    return bundle


async def _find(
    stack: AsyncExitStack, target: Path, config: Config, name: str
) -> tuple[Bus, wire.Specification]:
    """Connects to the NATS server that has the run; starts one for an ended local run."""
    ended = target / "nats"
    if not is_folder_of_server(ended):
        return await _connect(stack, config, config.bus.url, name, CONNECT_S)
    port = urllib.parse.urlsplit(config.bus.url).port
    # Another server may answer at that address: that of the folder from which this one was copied,
    # or one that uses the port since.
    if is_served(ended):
        try:
            return await _connect(stack, config, config.bus.url, name, LOCAL_CONNECT_S)
        except (BusUnavailableError, RunMissingError) as error:
            at = served_at(ended)
            if at == "" or (at == config.bus.url and isinstance(error, RunMissingError)):
                raise RunIncompleteError(
                    f"run {config.run.name!r} begins: its server has started, and the run is being "
                    "created",
                    hint=f"try again in a few seconds; its logs are in {target / 'logs'}",
                ) from error
            if at == config.bus.url:
                raise
            port = None
    # Threads of the loop's pool last as long as the loop, and so does a server started by one.
    server = NatsServer(ended, port=port if port and is_free(port) else None)
    # At the interpreter's end the pool no longer exists.
    stack.callback(server.stop)
    await asyncio.to_thread(server.start)
    return await _connect(stack, config, server.url, name, CONNECT_S)


async def _connect(
    stack: AsyncExitStack, config: Config, url: str, name: str, within_s: float
) -> tuple[Bus, wire.Specification]:
    bus = await jetstream.connect(
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
