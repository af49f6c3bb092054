"""`diloco run gc`: collects the garbage of a whole run, whether its aggregators run or not.

This command does not have an aggregator's state, which tells the pending updates. So every manifest
from a fragment's position on counts as pending. It also collects what aggregators do not track:
shards of unknown learners.
"""

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rich.table import Table

from diloco.aggregator.core import garbage
from diloco.aggregator.core.garbage import Announcers, GarbageObject, Ledger, Trim
from diloco.aggregator.core.updates import UpdateId
from diloco.aggregator.owner.garbage_collector import (
    check_epoch,
    check_tape_is_newest,
    delete,
    read_on,
    read_retained,
    trim_tape,
)
from diloco.common.process import log
from diloco.common.process.config import GcSection, service_manager
from diloco.common.process.health import Health, HealthView, Starting, tell
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import Exit
from diloco.common.storage.store import ObjectInfo
from diloco.common.storage.tape import Entry, Extent, RunContext, has_ended, read_tape
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import plain_table

if TYPE_CHECKING:
    from diloco.operate.command import TimerOptions

KINDS = ("shard", "delta", "view", "outer", "record", "checkpoint")


@dataclass
class GarbageFound:
    """The garbage of a run.

    Attributes:
        trims: by subject, the sequence below which messages are to be removed.
        objects: the objects to delete.
        messages: the number of messages that `trims` remove from the tape.
    """

    trims: list[Trim] = field(default_factory=list)
    objects: list[GarbageObject] = field(default_factory=list)
    messages: int = 0


class StoreListing(NamedTuple):
    """The store's contents.

    Attributes:
        objects: names and sizes, by fragment.
        learners: the learners that have shards.
    """

    objects: dict[int, list[ObjectInfo]]
    learners: set[str]


class TapeFacts(NamedTuple):
    """The tape's contents, as far as collecting garbage needs them.

    Attributes:
        sequences: stream sequences of all messages, by subject.
        lives: by learner that has joined, its newest incarnation.
        manifests: by fragment, the (stream sequence, update) of its manifests.
        extent: first and last stream sequence of the tape.
    """

    sequences: dict[str, list[int]]
    lives: dict[str, int]
    manifests: dict[int, list[tuple[int, UpdateId]]]
    extent: Extent


async def collect(target: str, *, dry_run: bool) -> GarbageFound:
    """Finds a run's garbage, and removes it unless `dry_run`.

    Raises:
        RunMismatchError: the run was resumed on a newer tape.
        IntegrityError: the tape ends before its objects.
        DilocoError: bus or store are unreachable, or do not permit it.
    """
    async with open_run(target) as run:
        found = await find(run.context, run.config.gc)
        if not dry_run:
            await trim_tape(run.context, found.trims)
            await delete(run.context, [item.name for item in found.objects])
    return found


async def find(context: RunContext, section: GcSection) -> GarbageFound:
    """Returns a run's garbage, and removes nothing.

    It reads store and tape in the order of `aggregator/owner/garbage_collector.py`.

    Raises:
        DilocoError: as `collect`.
    """
    stored = await context.runtime.call(_listing, context)
    heard = await _hear(context)
    lives = _lives(heard, stored.learners)
    fragments = range(len(context.layout.fragments))
    ledgers = [Ledger(context.run, fragment, context.epoch) for fragment in fragments]
    for ledger in ledgers:
        await read_on(context, ledger)
        check_tape_is_newest(ledger, stored.objects[ledger.fragment])
    retained = await read_retained(context, section.keep_checkpoints, context.logger)
    found, answered = GarbageFound(), []
    marked: list[tuple[str, int]] = []
    for fragment, ledger in enumerate(ledgers):
        pending = {up for seq, up in heard.manifests[fragment] if seq >= ledger.position}
        plan = garbage.plan(
            ledger,
            stored.objects[fragment],
            fleet=Announcers(lives, pending),
            pinned=retained.of(fragment),
            replay_window_s=section.replay_window_s,
        )
        answered.append(plan.answered_seq if plan else 0)
        marked += ledger.marks
        if plan is not None:
            found.objects += plan.objects
            found.trims += plan.trims
    await check_epoch(context)
    found.trims += garbage.plan_run(context.run, answered, lives, marked)
    found.objects += [GarbageObject("checkpoint", *info) for info in retained.stale]
    found.messages = sum(_count(heard.sequences[trim.subject], trim) for trim in found.trims)
    return found


def _listing(context: RunContext) -> StoreListing:
    """Lists the objects of all fragments; blocks."""
    stored = StoreListing(defaultdict(list), set())
    for info in context.store.list(names.learners_prefix(context.run)):
        shard = names.parse_shard(context.run, info.name)
        if shard is not None:
            stored.objects[shard.fragment].append(info)
            stored.learners.add(shard.learner)
    for fragment in range(len(context.layout.fragments)):
        prefix = names.fragment_prefix(context.run, fragment)
        stored.objects[fragment] += context.store.list(prefix)
    return stored


async def _hear(context: RunContext) -> TapeFacts:
    """Reads the whole tape and keeps only the facts of `TapeFacts`."""
    heard = TapeFacts(defaultdict(list), {}, defaultdict(list), Extent())
    async for item in read_tape(context):
        heard.extent.take(item)
        heard.sequences[item.subject].append(item.seq)
        match item:  # The aggregators have warned of garbage already.
            case Entry(body=wire.Join() as join):
                heard.lives[join.learner] = item.seq
            case Entry(body=wire.Manifest() as sent):
                update = UpdateId(sent.learner, sent.incarnation, sent.seq)
                heard.manifests[sent.fragment].append((item.seq, update))
    return heard


def _lives(heard: TapeFacts, learners: set[str]) -> dict[str, int]:
    """Returns the newest incarnation of every learner that has a message or a shard.

    A learner without a join on this tape cannot announce a shard that it stored before the tape was
    read. So its incarnation counts as the sequence after the tape's last: all its shards are
    garbage.
    """
    subjects = [names.parse_subject(subject) for subject in heard.sequences]
    speaking = {
        subject.learner
        for subject in subjects
        if subject is not None and subject.learner and subject.kind != "quarantine"
    }
    return dict.fromkeys(learners | speaking, heard.extent.last_seq + 1) | heard.lives


def _count(sequences: Sequence[int], trim: Trim) -> int:
    """Returns the number of messages that a trim removes; `sequences` are those of its subject."""
    return sum(seq < min(trim.below_seq, sequences[-1]) for seq in sequences)


def table(found: GarbageFound, *, dry_run: bool) -> Table:
    """Returns a table of the garbage found: number and bytes by kind."""
    title = "would be removed" if dry_run else "removed"
    shown = plain_table("kind", "count", "bytes", title=title)
    counts, sizes = Counter[str](), Counter[str]()
    for item in found.objects:
        counts[item.kind] += 1
        sizes[item.kind] += item.size_bytes
    for kind in KINDS:
        shown.add_row(kind, f"{counts[kind]:,}", f"{sizes[kind]:,}")
    shown.add_row("message", f"{found.messages:,}", "")
    shown.add_row("objects", f"{counts.total():,}", f"{sizes.total():,}")
    return shown


T = TypeVar("T")


async def timed(target: str, work: Callable[[], Awaitable[T]], options: "TimerOptions") -> T:
    """Runs `work`; tries again for `options.wait_s` seconds while NATS or the store is unreachable.

    It reports to systemd while it waits, and returns the result of `work`.

    Raises:
        DilocoError: raised by `work`, or the last transient fault when the time was over.
    """
    runtime, manager = Runtime(), service_manager()
    told = Starting(
        Health(view=lambda: HealthView("working"), waiting=runtime.retries.now), manager
    )
    told.begin()
    try:
        result = await runtime.retry(
            target, work, logger=log.get(run=target), deadline_s=options.wait_s
        )
    finally:
        told.over()
    tell(manager, STATUS="done")
    return result


async def status(target: str, options: "TimerOptions") -> int:
    """Returns the exit status of a command that a timer runs.

    It is `Exit.OVER` if the run has ended and `options.until_end` asks for that; else `Exit.ENDED`.
    """
    if not options.until_end:
        return Exit.ENDED
    async with open_run(target, reads=True) as opened:
        ended = await has_ended(opened.context.bus, opened.context.run)
    return Exit.OVER if ended else Exit.ENDED
