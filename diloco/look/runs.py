"""`diloco runs`: the runs that a bus has."""

import asyncio
import contextlib
import json as json_module
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from diloco.cli.opening import CONNECT_S, find_config
from diloco.cli.units import human_bytes
from diloco.common import names, wire
from diloco.common.bus import Bus, jetstream
from diloco.common.config import BusSection, load_config, parse_settings
from diloco.common.errors import RunMissingError, WireError
from diloco.common.tape import decode, load_specification, parse_changed


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One run; `versions` of all fragments together, `newest_at_s` seconds since the epoch."""

    run: str
    state: str
    epoch: int
    global_step: int
    steps: int
    versions: int
    fragments: int
    tape_bytes: int
    created_at_s: float
    newest_at_s: float


def list_runs(bus: str | None, *, json: bool) -> None:
    """Print the runs of a bus: of a URL, of a file, or of the default.

    Raises:
        DilocoError: the bus is away, or lists nothing to whoever asks.
    """
    found = asyncio.run(read_runs(_bus_section(bus)))
    if json:
        print(json_module.dumps([asdict(line) for line in found]))  # noqa: T201 - the result
        return
    console = Console()
    if found:
        console.print(_table(found))
    else:
        console.print("there are no runs on this bus")


def _bus_section(bus: str | None) -> BusSection:
    if bus is None:
        return BusSection()
    if "://" in bus and not Path(bus).exists():
        return BusSection(url=bus)
    return load_config(find_config(bus)).bus


async def read_runs(section: BusSection) -> list[RunLine]:
    """Every run of a bus, the one with the newest version first.

    Raises:
        BusUnavailableError: it is away.
        BusError: it does not permit this.
    """
    bus = await jetstream.connect(
        section.url,
        name="operator",
        credentials=section.credentials,
        tls_ca=section.tls_ca,
        connect_timeout_s=CONNECT_S,
    )
    try:
        lines = []
        for stream in await bus.streams():
            run = stream.removeprefix("diloco-")
            if run != stream and names.valid_name(run):
                # What has no specification is none of ours, or is being created.
                with contextlib.suppress(RunMissingError, WireError):
                    lines.append(await _read(bus, run))
    finally:
        await bus.close()
    return sorted(lines, key=lambda line: -line.newest_at_s)


async def _read(bus: Bus, run: str) -> RunLine:
    specification = await load_specification(bus, run)
    settings = parse_settings(specification.settings)
    changed = await bus.last(names.tape_stream(run), names.settings(run))
    settings = settings if changed is None else parse_changed(settings, changed)
    stream, fragments = names.tape_stream(run), settings.sync.fragments
    newest = [await bus.last(stream, names.record(run, index)) for index in range(fragments)]
    records = [
        decode(message.subject, message.payload) for message in newest if message is not None
    ]
    # The body of a large record is in the store, which is not asked here.
    whole = [record for record in records if isinstance(record, wire.Record)]
    filled = await bus.filled(stream)
    return RunLine(
        run=run,
        state=await _state(bus, run, len(records), fragments, paused=settings.run.paused),
        epoch=specification.epoch,
        global_step=max((record.global_step for record in whole), default=0),
        steps=settings.run.steps,
        versions=sum(record.version for record in whole),
        fragments=fragments,
        tape_bytes=filled.size_bytes,
        created_at_s=specification.created_at_s,
        newest_at_s=max((message.time_s for message in newest if message is not None), default=0.0),
    )


async def _state(bus: Bus, run: str, created: int, fragments: int, *, paused: bool) -> str:
    stream = names.tape_stream(run)
    if await bus.last(stream, names.end(run)) is not None:
        return "ended"
    if await bus.last(stream, names.stop(run)) is not None:
        return "stopping"
    if created < fragments:
        return "not wholly created"
    return "paused" if paused else "under way"


def _table(lines: list[RunLine]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("run", "state", "step", "versions", "tape", "newest version"):
        right = title in ("step", "versions", "tape")
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for line in lines:
        newest = datetime.fromtimestamp(line.newest_at_s).astimezone()
        table.add_row(
            line.run,
            line.state if not line.epoch else f"{line.state}, epoch {line.epoch}",
            f"{line.global_step:,} of {line.steps:,}",
            f"{line.versions:,}",
            human_bytes(line.tape_bytes),
            newest.strftime("%Y-%m-%d %H:%M"),
        )
    return table
