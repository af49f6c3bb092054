"""`diloco replay`: chooses and runs the mode: verify, decide, score, blame or what-if."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.tape import RunContext, first_message
from diloco.judge.objects import fragment_of, list_now, read_listing
from diloco.replay import (
    blame,
    blame_screen,
    decide_screen,
    score_and_bisect,
    verify_run,
    verify_screen,
    whatif,
)
from diloco.replay.coverage import (
    STATUSES,
    Tape,
    before_the_tape,
    check_readable,
    tape_of,
    verdict,
)
from diloco.replay.options import Options
from diloco.replay.verify_run import Lost
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import progress
from diloco.run.cli.settings import parse_fragments
from diloco.run.cli.versions import find_targets
from diloco.run.history import Chain, History, read_history
from diloco.run.model import files as model_file
from diloco.show.page.html_page import check_name


def run_replay(target: str, options: Options, console: Console | None = None) -> int:
    """Runs the mode that the options ask for, and prints its result.

    Returns:
        The exit status: 0 if everything is as recorded, 1 if a part differs, 2 if a part could not
        be checked.

    Raises:
        DilocoError: invalid options, or a run that cannot be read.
    """
    _check(options)
    check_name(options.plot)
    console = console or Console(soft_wrap=True, highlight=False)
    return asyncio.run(_replay(target, options, console))


def _check(options: Options) -> None:
    """Refuses options that exclude each other.

    Raises:
        ConfigError: options exclude each other; the message names them.
    """
    if options.decide and (options.settings or options.export or options.resume):
        raise ConfigError("--decide can be combined with --fragments, --from and --until only")
    if (options.settings or options.without) and (options.resume or options.fragments):
        raise ConfigError("--set needs all fragments and excludes --resume and --fragments")
    modes = (options.decide, bool(options.settings or options.without), options.blame,
             options.score or options.bisect)  # fmt: skip
    if sum(modes) > 1:
        raise ConfigError("--decide, --set, --blame and --score exclude each other")
    if (options.blame or options.score or options.bisect) and options.fragments:
        raise ConfigError("--blame, --score and --bisect score the whole model: omit --fragments")
    if options.export and options.fragments:
        raise ConfigError("--export needs all fragments and excludes --fragments")
    if options.export:
        model_file.check_target(options.export)


async def _replay(target: str, options: Options, console: Console) -> int:
    async with open_run(target, name="replay", reads=True) as opened:
        context = opened.context
        with console.status("reading the tape ..."):
            until = await _until(context, options)
            # The store is listed before the tape is read: a listed object that the tape does not
            # name is then newer than the tape.
            listing = await read_listing(context)
            history = await read_history(context)
        check_readable(history)
        chosen = verify_run.chains(history, _fragments(history, options), options.first, until)
        if options.decide:
            told = partial(decide_screen.tell, as_json=options.json)
            return await asyncio.to_thread(told, history, chosen, console)
        if options.settings or options.without:
            return await _what_if(context, history, chosen, options, console)
        if options.score or options.bisect or options.blame:
            # These modes need only the records of the tape.
            history.let_go_of_messages()
            del listing
        if options.score or options.bisect:
            return await score_and_bisect.run_score(context, history, chosen, options, console)
        if options.blame:
            return await _blame(context, history, chosen, options, console)
        window_s = opened.config.gc.replay_window_s if opened.copy else math.inf
        lost = opened.bundle.header.get("lost", "") if opened.bundle is not None else ""
        now_s = context.runtime.clock()
        tape = tape_of(history, listing, window_s=window_s, now_s=now_s, lost=lost)
        tape = replace(tape, missing=await _still_missing(context, tape.missing))
        # Merging needs memory itself, and only the records of the tape.
        history.let_go_of_messages()
        del listing
        return await _verify(context, history, chosen, tape, window_s, options, console)


async def _verify(
    context: RunContext,
    history: History,
    chosen: Mapping[int, Chain],
    tape: Tape,
    window_s: float,
    options: Options,
    console: Console,
) -> int:
    memory = verify_run.VerifyProgress(options.resume, history)
    keep = options.export is not None
    with progress("verifying") as hear:
        found = await asyncio.to_thread(
            verify_run.verify, history, chosen, memory, hear, keep_views=keep
        )
    found.versions.trimmed += before_the_tape(history, chosen) if options.first is None else 0
    for lost in found.lost:
        if await _is_collected(context, history, lost, window_s):
            found.versions.trimmed += 1
        else:
            found.versions.missing += 1
    if options.json:
        verify_screen.tell_json(tape, found)
    else:
        verify_screen.show_unreadable(history.unreadable, console)
        verify_screen.tell(tape, found, len(chosen), console)
    if options.export is not None and not found.differences:
        await _export_views(context, options.export, found.views, chosen)
        console.print(f"the model at that point is in {options.export}")
    return STATUSES[verdict(tape, found.versions)]


async def _is_collected(context: RunContext, history: History, lost: Lost, window_s: float) -> bool:
    """True if garbage collection may have removed the objects of a version that is lost.

    Either the tape has been trimmed past its record by now, or the record is older than `window_s`.
    """
    oldest = await first_message(context, names.record(context.run, lost.fragment))
    if lost.record_seq <= max(history.records[lost.fragment][0][0], oldest.seq):
        return True
    return context.runtime.clock() - history.times_s[lost.record_seq] > window_s


async def _still_missing(
    context: RunContext, missing: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    """Returns those (object, sequence) that are still missing, and not collected by now."""
    if not missing:
        return ()
    oldest: dict[int | None, int] = {}
    for fragment in range(len(context.layout.fragments)):
        oldest[fragment] = (await first_message(context, names.record(context.run, fragment))).seq
    found = await context.runtime.call(list_now, context.store, context.run)
    return tuple(
        (name, seq)
        for name, seq in missing
        if name not in found and seq > oldest.get(fragment_of(context.run, name), 0)
    )


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


# The model


async def _export_views(
    context: RunContext, folder: Path, views: dict[int, Vector], chosen: Mapping[int, Chain]
) -> None:
    if missing := [fragment for fragment in chosen if fragment not in views]:
        raise ConfigError(
            f"fragment {missing[0]} could not be recomputed up to that version",
            hint="its inputs were garbage-collected; diloco export reads stored views",
        )
    records = {fragment: chain[-1][1] for fragment, chain in chosen.items()}
    await model_file.write_model(folder, "safetensors", context, views, records)


# Blame


async def _blame(
    context: RunContext,
    history: History,
    chosen: dict[int, Chain],
    options: Options,
    console: Console,
) -> int:
    # Without scoring, neither the task nor its libraries are loaded.
    from diloco.run.model.view import held_out_scorer

    evaluate = await held_out_scorer(context, history.specification)
    with progress("merging without each update") as hear:
        # On a terminal the bar shows the progress, and other lines would break it.
        shown = None if options.json or console.is_terminal else blame_screen.SoFar(console)
        work = partial(blame.blame, progress=hear, told=shown)
        found = await asyncio.to_thread(work, context, history, chosen, evaluate)
    found.rounds.count("unreadable", rounds=len(history.unreadable))
    if options.first is None:
        found.rounds.count("early", rounds=before_the_tape(history, chosen))
    if options.json:
        blame_screen.tell_json(history.run, found)
    else:
        blame_screen.tell(found, console)
        if options.plot is not None:
            await asyncio.to_thread(blame_screen.draw, history.run, found, options.plot)
            console.print(f"the figure is {options.plot}")
    return STATUSES["incomplete" if found.rounds.left_out else "verified"]


# What if


async def _what_if(
    context: RunContext,
    history: History,
    chosen: dict[int, Chain],
    options: Options,
    console: Console,
) -> int:
    without = [whatif.parse_without(text) for text in options.without]
    plan = await asyncio.to_thread(whatif.make_plan, history, chosen, options.settings, without)
    for sentence in plan.sentences:
        console.print(f"[yellow]note:[/] {sentence}")
    with progress("merging with other settings") as hear:
        result = await whatif.play(context, history, plan, options.points, hear)
    console.print(whatif.table(plan, result), soft_wrap=False)
    path = options.plot or Path(f"what-if-{history.run}.html")
    await asyncio.to_thread(whatif.draw, plan, result, path)
    console.print(f"the figure is {path}")
    if options.export is not None:
        records = {fragment: chain[-1][1] for fragment, chain in chosen.items()}
        await model_file.write_model(
            options.export, "safetensors", context, result.views, records, settings=plan.settings
        )
        console.print(f"the model that would have been is in {options.export}")
    return 0
