"""Implements `diloco run show`, `set`, `pause`, `end`, `rollback`, `checkpoint` and `resume`.

`target` is the argument RUN of a command: a TOML file, a local run's folder, or a run's name.
"""

import dataclasses
import json as jsonlib
import sys
from collections.abc import Sequence

import tomli_w

from diloco.aggregator import checkpoint, rollback
from diloco.aggregator import settings as run_settings
from diloco.aggregator.context import Context
from diloco.aggregator.owner.quarantine_messages import quarantine as tell_quarantine
from diloco.common.process import log
from diloco.common.process.config import (
    Config,
    RunSettings,
    changes,
    check_same_run,
    fitted,
    load_config,
    parse_settings,
    warnings,
)
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import RunMismatchError
from diloco.common.protocol.layout import parse_layout
from diloco.common.storage import checkpoint_files
from diloco.common.storage.bus import jetstream
from diloco.common.storage.store import ObjectStore, open_store
from diloco.common.storage.tape import Recorded, effective_settings, last_record
from diloco.operate.make_streams import make_streams
from diloco.run.cli.opening import find_config, open_run, operator_context, who
from diloco.run.cli.settings import assign, parse_assigned
from diloco.run.cli.versions import find_targets
from diloco.run.watch import Watch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preview:
    """The effect of a change of settings, as sentences; all are empty if nothing would change.

    Attributes:
        changed: one for each key that changes.
        rates: on the inner learning rate at the run's end, if the run's length changes.
        warned: warnings about the new settings.
    """

    changed: list[str]
    rates: list[str]
    warned: list[str]


async def preview(target: str, assignments: Sequence[str]) -> Preview:
    """Returns the effect that `change` would have.

    Raises:
        ConfigError: no setting of that name, no such value, or a fixed setting.
        RunMismatchError: no such run, or it has stopped.
    """
    async with open_run(target, reads=True) as opened:
        context = opened.context
        before, _ = await effective_settings(context)
        after = _assigned(before, assignments)
        await run_settings.check_change(context, before, after)
        changed = changes(before, after)
        rates: list[str] = []
        if before.run.steps != after.run.steps:
            rates = _rates(context.settings, before.run.steps, after.run.steps)
        return Preview(changed=changed, rates=rates, warned=warnings(after) if changed else [])


def _assigned(before: RunSettings, assignments: Sequence[str]) -> RunSettings:
    document = before.model_dump()
    for assignment in assignments:
        assign(document, assignment)
    return parse_assigned(document)


def _rates(created: RunSettings, old: int, new: int) -> list[str]:
    """Returns sentences on the final inner learning rate, before and after the change."""
    horizon = created.run.steps
    stays = f"the schedule's horizon stays {horizon:,} steps"
    if not created.task.build:
        return [f"{stays}, if the learners' own loops ask the run's file for it"]
    from diloco.learner.load_and_check_task import model_of

    schedule = model_of(created).schedule
    if schedule is None:
        return [f"{stays}; the optimizer's own schedule is not asked for its rates"]
    (before, after) = (f"{float(schedule(step)):.4g}" for step in (old, new))
    rates = f"{before} at step {old:,} before, {after} at step {new:,} now"
    return [f"inner learning rate at the end: {rates}", stays]


async def change(target: str, assignments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Changes settings of a run; returns the changes, and warnings about the new settings.

    Each assignment is "section.key=value".

    Raises:
        ConfigError: no setting of that name, no such value, or a fixed setting.
        RunMismatchError: no such run, or it has stopped.
    """
    async with open_run(target) as opened:
        context = operator_context(opened)
        before, seq = await effective_settings(context)
        after = _assigned(before, assignments)
        changed = await run_settings.change_settings(context, after, based_on=seq)
        return changed, warnings(after)


async def quarantine(target: str, name: str, *, active: bool, reason: str) -> None:
    """Quarantines a learner if `active`, else releases it.

    Raises:
        RunMismatchError: no learner of that name has joined the run.
        ConfigError, BusError: RUN cannot be opened, or its bus refuses the message.
    """
    async with open_run(target) as opened:
        run = await Watch(opened.context).begin(1)
        known = [one.name for one in run.learners]
        if name not in known:
            raise RunMismatchError(
                f"no learner {name!r} has joined run {opened.context.run!r}",
                hint=f"it knows {', '.join(known) or 'nobody'}",
            )
        await tell_quarantine(operator_context(opened), name, active=active, reason=reason)


async def end(target: str) -> int:
    """Ends a run early: publishes its stop; returns the global step at which it stops.

    Raises:
        RunMismatchError: no such run, or it has stopped.
    """
    async with open_run(target) as opened:
        return await run_settings.end_run(operator_context(opened), "operator")


# Rollback


@dataclasses.dataclass(frozen=True)
class RollbackMove:
    """The rollback of one fragment.

    Attributes:
        newest: its newest version.
        target: the earlier version whose contents its next version gets.
    """

    fragment: int
    newest: int
    target: Recorded


async def plan_rollback(target: str, to: str) -> list[RollbackMove]:
    """Returns what a rollback would do to each fragment; changes nothing.

    Args:
        target: RUN.
        to: one version for all fragments, versions for each joined by commas, the name of a
            checkpoint, a time in ISO 8601, or an age (90m, 2h, 1d).

    Raises:
        ConfigError: `to` is invalid, or earlier than the tape.
    """
    async with open_run(target) as opened:
        context = operator_context(opened)
        targets = await find_targets(context, to)
        newest = {f: (await last_record(context, f))[0].version for f in targets}
        return [RollbackMove(f, newest[f], at) for f, at in targets.items()]


async def roll_back(target: str, moves: Sequence[RollbackMove]) -> list[wire.Record]:
    """Rolls a run's fragments back, as planned; returns each fragment's new record.

    Raises:
        RunMismatchError: the run has stopped.
        ConfigError: objects of an earlier version are gone.
    """
    async with open_run(target) as opened:
        targets = {move.fragment: move.target for move in moves}
        made = await rollback.roll_back(operator_context(opened), targets)
        return list(made.values())


# Checkpoint and resume


async def make_checkpoint(target: str) -> checkpoint.Marked:
    """Makes a checkpoint of a run; returns its name and versions.

    Raises:
        RunMismatchError: no such run.
    """
    async with open_run(target) as opened:
        return await checkpoint.mark(operator_context(opened))


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The checkpoint from which a run was resumed, its new tape's epoch, and its versions."""

    checkpoint: str
    epoch: int
    versions: tuple[int, ...]


async def resume(target: str, name: str | None) -> Resumed:
    """Begins a new tape for a run from a checkpoint in its store.

    Args:
        target: RUN.
        name: the checkpoint; None: the newest, or that with which an interrupted call has begun.

    Raises:
        ConfigError: there is no such checkpoint.
        RunMismatchError: the file disagrees with the run, or the bus has its tape already.
    """
    config = load_config(find_config(target))
    store, run = open_store(config.store.url, emulator=config.store.emulator), config.run.name
    named = [name] if name else checkpoint_files.checkpoints(store, run)
    return await checkpoint.from_newest(named, lambda name: _resume_from(config, store, name))


async def _resume_from(config: Config, store: ObjectStore, name: str | None) -> Resumed:
    run = config.run.name
    file = checkpoint_files.load_file(store, run, name)
    layout_digest = file.specification.layout
    layout = parse_layout(store.get(names.layout_object(run, layout_digest)), layout_digest)
    settings = parse_settings(file.specification.settings)
    check_same_run(fitted(config.settings(), layout), settings, layout_digest, layout_digest)
    bus = await jetstream.connect(
        config.bus.url, name="resume", credentials=config.bus.credentials, tls_ca=config.bus.tls_ca
    )
    try:
        epoch = await checkpoint.next_epoch(bus, store, file)
        await make_streams(bus, run, config.bus, epoch)
        context = Context(
            settings=settings,
            layout=layout,
            epoch=epoch,
            bus=bus,
            store=store,
            runtime=Runtime(),
            logger=log.get(run=run),
            name=who(),
        )
        # First: a tape that has begun with a checkpoint begins with no other one.
        await checkpoint.check_begun(context, file)
        await checkpoint.check_objects(context, file.records)
        specification = await checkpoint.begin_epoch(context, file)
        context = dataclasses.replace(context, epoch=specification.epoch)
        await checkpoint.begin_fragments(context, file.records)
    finally:
        await bus.close()
    versions = tuple(record.version for record in file.records)
    return Resumed(file.name, context.epoch, versions)


async def show(target: str, *, created: bool, json: bool) -> None:
    """Prints a run's settings, as TOML or JSON.

    Args:
        target: RUN.
        created: print those that the run was created with; else those in force.
        json: print JSON.

    Raises:
        DilocoError: there is no such run.
    """
    async with open_run(target, reads=True) as opened:
        settings = opened.context.settings
        if not created:
            settings, _ = await effective_settings(opened.context)
    document = settings.model_dump(mode="json")
    text = jsonlib.dumps(document, indent=2) + "\n" if json else tomli_w.dumps(document)
    sys.stdout.write(text)
