"""The commands over a run's past: `diloco replay`, `diloco tape`, `diloco export`."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from diloco.aggregator.arrays.merge import Vector
from diloco.aggregator.core.decisions import Decision
from diloco.check import remake
from diloco.check.history import Chain, History, messages_of, read_history
from diloco.cli.opening import open_run, placed_bus
from diloco.cli.settings import parse_fragments
from diloco.common import bus_nats, names, wire
from diloco.common.config import load_config
from diloco.common.errors import ConfigError, ObjectMissingError
from diloco.common.tape import Recorded, RunContext
from diloco.common.tape_file import is_tape_file, read_tape_file, tape_file_run, write_tape_file
from diloco.common.views import load_version, load_view
from diloco.model import files as model_file
from diloco.operate.change import find_targets
from diloco.operate.create import make_streams, tape_limits
from diloco.replay import verify, whatif
from diloco.replay.decide import decide
from diloco.replay.verify import Difference, Verified

# Decisions that differ are shown in full up to so many.
SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `diloco replay`, as given."""

    decide: bool = False
    settings: tuple[str, ...] = ()
    fragments: str | None = None
    first: int | None = None
    until: str | None = None
    export: Path | None = None
    resume: Path | None = None
    plot: Path | None = None
    points: int = 8


def run_replay(target: str, options: Options, console: Console | None = None) -> int:
    """Do what the options say; the exit status: 1 if something is not as recorded.

    Raises:
        DilocoError: options that cannot be, or a run that cannot be read.
    """
    _check(options)
    return asyncio.run(_replay(target, options, console or Console()))


def _check(options: Options) -> None:
    """Refuse options that say nothing together.

    Raises:
        ConfigError: they do.
    """
    if options.decide and (options.settings or options.export or options.resume):
        raise ConfigError("--decide goes with --fragments, --from and --until only")
    if options.settings and (options.resume or options.fragments):
        raise ConfigError("--set makes a whole model: it goes without --resume and --fragments")
    if options.export and options.fragments:
        raise ConfigError("--export writes a whole model: it goes without --fragments")
    if options.export:
        model_file.check_target(options.export)


async def _replay(target: str, options: Options, console: Console) -> int:
    async with open_run(target, name="replay", reads=True) as opened:
        context = opened.context
        with console.status("reading the tape ..."):
            until = await _until(context, options)
            history = await read_history(context)
        chosen = verify.chains(history, _fragments(history, options), options.first, until)
        if options.decide:
            return await asyncio.to_thread(_decide, history, chosen, console)
        if options.settings:
            return await _what_if(context, history, chosen, options, console)
        memory = verify.Memory(options.resume, history)
        keep = options.export is not None
        with _progress(console, "verifying") as hear:
            found = await asyncio.to_thread(
                verify.verify, history, chosen, memory, hear, keep_views=keep
            )
        _tell_verified(history, chosen, found, console)
        if options.export is not None and not found.differences:
            await _export_views(context, options.export, found.views, chosen)
            console.print(f"the model of then is in {options.export}")
        return 1 if found.differences or history.unreadable else 0


async def _until(context: RunContext, options: Options) -> dict[int, int]:
    if options.until is None:
        return {}
    targets = await find_targets(context, options.until, option="--until")
    return {fragment: at.record_seq for fragment, at in targets.items()}


def _fragments(history: History, options: Options) -> Sequence[int]:
    known = range(len(history.layout.fragments))
    if options.fragments is None:
        return known
    asked = sorted(parse_fragments(options.fragments))
    if beyond := [fragment for fragment in asked if fragment not in known]:
        raise ConfigError(f"--fragments: run {history.run!r} has no fragment {beyond[0]}")
    return asked


@contextlib.contextmanager
def _progress(console: Console, what: str) -> Iterator[remake.Progress]:
    """A bar, where the output is a terminal; work in a thread ends when its block is left."""
    left = threading.Event()

    def hear(done: int, total: int) -> None:
        if left.is_set():
            raise KeyboardInterrupt
        bar.update(task, completed=done, total=total)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task(what, total=None)
        try:
            yield hear
        finally:
            left.set()


# Verify


def _tell_verified(
    history: History, chosen: Mapping[int, Chain], found: Verified, console: Console
) -> None:
    for seq, fragment, why in history.unreadable:
        if fragment in chosen:
            console.print(f"[bold red]unreadable[/]: record {seq} of fragment {fragment}: {why}")
    for difference in found.differences:
        show_difference(difference, console)
    skipped = ""
    if found.skipped:
        skipped = f", {found.skipped} more cannot be: garbage collection has taken their inputs"
    verdict = "[bold red]differences[/]" if found.differences else "[green]bit for bit[/]"
    console.print(
        f"run [bold]{history.run}[/]: {found.versions} versions of {len(chosen)} fragments merged "
        f"again from {found.records} records{skipped}: {verdict}",
        soft_wrap=True,
    )


def show_difference(difference: Difference, console: Console) -> None:
    """Everything that is needed to look into it."""
    record = difference.record
    console.print(
        f"[bold red]fragment {difference.fragment}, version {record.version}[/] (record "
        f"{difference.record_seq}, made by {record.aggregator}, built on record {record.base_seq})",
        soft_wrap=True,
    )
    console.print(f"  {escape(difference.what)}", soft_wrap=True, highlight=False)
    facts = {
        "view": record.view_digest,
        "outer state": record.outer_digest,
        "view before": record.base_digest,
        "step": f"learning rate {record.learning_rate:g}, momentum {record.momentum:g}, settings "
        f"{record.policy.settings_seq or 'of the specification'}",
        "delta": record.delta.name if record.delta else "-",
        "snapshot": f"version {record.snapshot_version}: {record.snapshot.name}",
        "outer": f"version {record.outer_version}: {record.outer.name}",
    }
    for name, value in facts.items():
        console.print(f"  {name:<12} {escape(str(value))}", soft_wrap=True, highlight=False)
    for taken in record.inputs:
        console.print(
            f"  input        {taken.learner}, life {taken.incarnation}, update {taken.seq}, at "
            f"{taken.stream_seq} on the tape: weight {taken.weight:g}, staleness "
            f"{taken.staleness}, discount {taken.discount:g}, clip {taken.clip:g}",
            soft_wrap=True,
            highlight=False,
        )
        for shard in taken.shards:
            console.print(
                f"               {escape(shard.name)} ({shard.size_bytes} bytes, crc32c "
                f"{shard.crc32c:08x})",
                soft_wrap=True,
                highlight=False,
            )
    console.print("  hint: runbooks/digest-mismatch.md")


async def _export_views(
    context: RunContext, folder: Path, views: dict[int, Vector], chosen: Mapping[int, Chain]
) -> None:
    if missing := [fragment for fragment in chosen if fragment not in views]:
        raise ConfigError(
            f"fragment {missing[0]} could not be made again up to there",
            hint="what it needs was collected as garbage; diloco export reads stored views",
        )
    records = {fragment: chain[-1][1] for fragment, chain in chosen.items()}
    await model_file.write_model(folder, "safetensors", context, views, records)


# Decide


def _decide(history: History, chosen: Mapping[int, Chain], console: Console) -> int:
    outcomes: dict[str, int] = {"same": 0, "different": 0, "unknown": 0}
    reasons: dict[str, int] = {}
    for fragment, chain in chosen.items():
        for decision in decide(history, fragment, chain):
            outcomes[decision.outcome] += 1
            if decision.outcome == "unknown":
                reasons[decision.why] = reasons.get(decision.why, 0) + 1
            if decision.outcome == "different" and outcomes["different"] <= SHOWN:
                show_decision(decision, console)
    for why, count in reasons.items():
        console.print(f"[yellow]{count} not decided again[/]: {why}", soft_wrap=True)
    if outcomes["different"] > SHOWN:
        console.print(f"... and {outcomes['different'] - SHOWN} more that differ")
    for seq, fragment, why in history.unreadable:
        console.print(f"[bold red]unreadable[/]: record {seq} of fragment {fragment}: {why}")
    console.print(
        f"run [bold]{history.run}[/]: {outcomes['same']} decisions are as recorded, "
        f"{outcomes['different']} differ, {outcomes['unknown']} could not be decided again",
        soft_wrap=True,
    )
    return 1 if outcomes["different"] or history.unreadable else 0


def show_decision(decision: Decision, console: Console) -> None:
    """A decision that came out in another way: each field, as recorded and as decided now."""
    record = decision.record
    console.print(
        f"[bold red]fragment {record.fragment}, {record.what} {record.version}[/] (record "
        f"{decision.record_seq}, made by {record.aggregator}, closed for {record.reason})",
        soft_wrap=True,
    )
    table = Table("field", "recorded", "decided again", show_edge=False)
    for name, said, found in decision.fields:
        for part, one, other in _parts(name, said, found):
            table.add_row(part, escape(one), escape(other))
    console.print(table)


def _parts(name: str, said: Any, found: Any) -> Iterator[tuple[str, str, str]]:
    """The smallest parts of a field that differ."""
    if isinstance(said, wire.Part) and type(said) is type(found):
        for key in type(said).model_fields:
            yield from _parts(f"{name}.{key}", getattr(said, key), getattr(found, key))
    elif isinstance(said, tuple) and isinstance(found, tuple) and len(said) == len(found):
        for index, (one, other) in enumerate(zip(said, found, strict=True)):
            yield from _parts(f"{name}[{index}]", one, other)
    elif isinstance(said, tuple) and isinstance(found, tuple):
        yield name, f"{len(said)}: {_short(said)}", f"{len(found)}: {_short(found)}"
    elif said != found:
        yield name, _short(said), _short(found)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


# What if


async def _what_if(
    context: RunContext,
    history: History,
    chosen: dict[int, Chain],
    options: Options,
    console: Console,
) -> int:
    plan = await asyncio.to_thread(whatif.make_plan, history, chosen, options.settings)
    for sentence in plan.sentences:
        console.print(f"[yellow]note:[/] {sentence}", soft_wrap=True)
    with _progress(console, "merging with other settings") as hear:
        result = await whatif.play(context, history, plan, options.points, hear)
    console.print(whatif.table(plan, result))
    path = options.plot or Path(f"what-if-{history.run}.png")
    await asyncio.to_thread(whatif.draw, plan, result, path)
    console.print(f"the picture is {path}", soft_wrap=True)
    if options.export is not None:
        records = {fragment: chain[-1][1] for fragment, chain in chosen.items()}
        await model_file.write_model(
            options.export, "safetensors", context, result.views, records, settings=plan.settings
        )
        console.print(f"the model that would have been is in {options.export}", soft_wrap=True)
    return 0


# Export


def run_export(target: str, folder: Path, form: str, version: str | None) -> None:
    """Write a run's global model, as it is or as it was.

    Raises:
        DilocoError: it cannot be written, or is not there any more.
    """
    model_file.check_target(folder, form)
    console = Console()
    with console.status("reading the model ..."):
        records = asyncio.run(_export(target, folder, form, version))
    versions = ",".join(str(records[fragment].version) for fragment in sorted(records))
    console.print(f"versions {versions} are in {folder}", soft_wrap=True, highlight=False)


async def _export(
    target: str, folder: Path, form: str, version: str | None
) -> dict[int, wire.Record]:
    async with open_run(target, name="export", reads=True) as opened:
        context = opened.context
        views: dict[int, Vector] = {}
        records: dict[int, wire.Record] = {}
        at: dict[int, Recorded] = {}
        if version is not None:
            at = await find_targets(context, version, option="--version")
        for fragment in range(len(context.layout.fragments)):
            if fragment in at:
                records[fragment] = at[fragment].record
                views[fragment] = await _view_of(context, at[fragment].record)
            else:
                loaded = await load_view(context, fragment)
                records[fragment], views[fragment] = loaded.record, loaded.view
        await model_file.write_model(folder, form, context, views, records)
        return records


async def _view_of(context: RunContext, record: wire.Record) -> Vector:
    try:
        return await load_version(context, record)
    except ObjectMissingError as error:
        raise ConfigError(
            f"version {record.version} of fragment {record.fragment} is not there any more: "
            f"{error.message}",
            hint="garbage collection keeps what gc.replay_s says; choose a later version",
        ) from error


# The tape


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
        raise ConfigError(f"{str(path)!r} is no file of diloco tape export")
    console = Console()
    run = tape_file_run(path)
    with console.status("writing the tape ..."):
        url, count = asyncio.run(_tape_import(path, run, config))
    console.print(f"run [bold]{run}[/]: {count} messages are on {url}", soft_wrap=True)


async def _tape_import(path: Path, run: str, config: Path | None) -> tuple[str, int]:
    section = placed_bus() if config is None else load_config(config).bus
    bus = await bus_nats.connect(
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
