"""`diloco tape`: a run's stream as one file, and back on a server."""

import asyncio
from pathlib import Path

from rich.console import Console

from diloco.cli.opening import open_run, placed_bus
from diloco.common import names
from diloco.common.bus import jetstream
from diloco.common.config import load_config
from diloco.common.errors import ConfigError
from diloco.common.tape import (
    is_tape_file,
    messages_of,
    read_tape_file,
    tape_file_run,
    write_tape_file,
)
from diloco.operate.streams import make_streams, tape_limits


def run_tape_export(target: str, path: Path) -> None:
    """Write a run's stream into a file.

    Raises:
        DilocoError: there is no such run, or the file is there.
    """
    console = Console()
    if path.exists():
        raise ConfigError(f"{str(path)!r} exists already", hint="give another name")
    with console.status("reading the tape ..."):
        count = asyncio.run(_tape_export(target, path))
    size = path.stat().st_size
    console.print(f"{count} messages, {size} bytes, are in {path}", soft_wrap=True, highlight=False)


async def _tape_export(target: str, path: Path) -> int:
    async with open_run(target, name="export", reads=True) as opened:
        context = opened.context
        subjects = names.tape_subjects(context.run)
        messages = messages_of(context.bus, context.tape, subjects)
        return await write_tape_file(path, context.run, messages)


def run_tape_import(path: Path, config: Path | None) -> None:
    """Make a stream of an exported file.

    Raises:
        DilocoError: the file is no tape, or the server has the run already.
    """
    if not is_tape_file(path):
        raise ConfigError(f"{str(path)!r} is not a tape file of diloco tape export")
    console = Console()
    run = tape_file_run(path)
    with console.status("writing the tape ..."):
        url, count = asyncio.run(_tape_import(path, run, config))
    console.print(f"run [bold]{run}[/]: {count} messages are on {url}", soft_wrap=True)


async def _tape_import(path: Path, run: str, config: Path | None) -> tuple[str, int]:
    section = placed_bus() if config is None else load_config(config).bus
    bus = await jetstream.connect(
        section.url, name="import", credentials=section.credentials, tls_ca=section.tls_ca
    )
    try:
        stream, subjects = names.tape_stream(run), names.tape_subjects(run)
        # All of it is read once before anything is made of it.
        for _ in read_tape_file(path):
            pass
        count = await bus.restore(stream, subjects, tape_limits(section), read_tape_file(path))
        await make_streams(bus, run, section)
    finally:
        await bus.close()
    return section.url, count
