"""Compares a record's fields with those that the rules and the record before it demand.

In these functions `record` is the record to check, `base` the one before it of the same fragment,
and `life` the state of the owner that made `record`, as the oracle recomputed it. They yield a
`RuleBreach` for each field that differs.
"""

from collections.abc import Callable, Iterator, Mapping

from diloco.common.process.config import RunSettings
from diloco.common.protocol import names as object_names
from diloco.common.protocol import wire
from diloco.common.storage.tape import record_digest
from diloco.judge.oracle import numbers
from diloco.judge.oracle.life import Close, OwnerLife, RuleBreach, update_id
from diloco.judge.oracle.memory import PolicyMemory
from diloco.judge.oracle.numbers import near

# Sums and counts are capped at the greatest value that a message can hold.
GREATEST = (1 << 63) - 1


# The contents of a version, which a rollback repeats.
Contents = tuple[str, str, int]
CONTENTS = ("view_digest", "outer_digest", "global_step")
# Fields that a record of verdicts alone repeats of the record before it, beside `outer_seq`.
STANDS = (
    "snapshot", "snapshot_version", "deltas", "outer", "outer_version", "view_digest",
    "outer_digest",
)  # fmt: skip


def contents(record: wire.Record) -> Contents:
    """Returns the digests and the global step of a record's version."""
    return record.view_digest, record.outer_digest, record.global_step


def resolved(record: wire.Record) -> Iterator[wire.Input | wire.Rejected]:
    """Yields the updates that a record answers: merged, then rejected."""
    yield from record.inputs
    yield from record.rejected


def link(base: wire.Record, base_seq: int, record: wire.Record) -> Iterator[RuleBreach]:
    """Checks that versions follow each other and that each record names the one before it."""
    moves = record.what in ("version", "restore")
    yield from _equal(
        "chain",
        ("epoch", base.epoch, record.epoch),
        ("layout", base.layout, record.layout),
        ("version", base.version + moves, record.version),
        ("base_seq", base_seq, record.base_seq),
        ("base_digest", base.view_digest, record.base_digest),
        ("whether it has inputs", record.what == "version", bool(record.inputs)),
        ("whether it restores", record.what == "restore", record.restored_version is not None),
    )
    if (record.release, record.lock) == (base.release, base.lock):
        yield from _equal("chain", ("rules", base.policy.rules, record.policy.rules))
    yield from _equal("chain", ("previous", record_digest(base), record.previous))
    if base.final and (moves or not record.final):
        yield RuleBreach("chain", "what", "nothing after the last version", record.what)
    if record.what == "restored":
        yield RuleBreach("chain", "what", "only the first record of a tape", record.what)
    if record.position < base.position:
        yield RuleBreach("position", "position", f"at least {base.position}", record.position)


def clock(settings: RunSettings | None, base: wire.Record, record: wire.Record
) -> Iterator[RuleBreach]:  # fmt: skip
    """Checks the record's global step.

    Without `settings`, which a trimmed tape may lack, it checks only that the step does not fall.
    """
    expected = base.global_step
    if record.what == "version":
        if settings is None:
            if record.global_step < expected:
                yield RuleBreach("clock", "global_step", f"at least {expected}", record.global_step)
            return
        following = numbers.clock_after(settings, record.fragment, base.global_step)
        expected = min(settings.run.steps, following)
    yield from _equal("clock", ("global_step", expected, record.global_step))


def answers(
    record: wire.Record,
    announced: Callable[[int], tuple[wire.Manifest, float] | None],
    whole_from: int,
) -> Iterator[RuleBreach]:
    """Compares what a record says of the updates it answers with their manifests.

    Args:
        record: a record that is not the first of its fragment.
        announced: returns the manifest at a stream sequence, and when it was stored; None if there
            is no such manifest.
        whole_from: the stream sequence from which on no manifest is missing.
    """
    for taken in resolved(record):
        found = announced(taken.stream_seq)
        if found is None:
            if taken.stream_seq >= whole_from:
                yield RuleBreach("admission", "stream_seq", "an update", taken.stream_seq)
            continue
        sent, stored_at_s = found
        for name in ("learner", "incarnation", "seq", "tokens", "steps"):
            yield from _equal("admission", (name, getattr(sent, name), getattr(taken, name)))
        if not isinstance(taken, wire.Input):
            continue
        for name in ("codec", "shards", "loss", "final"):
            yield from _equal("admission", (name, getattr(sent, name), getattr(taken, name)))
        yield from _equal("admission", ("announced_at_s", stored_at_s, taken.announced_at_s))
        staleness = record.version - 1 - sent.base_version
        yield from _equal("weight", ("staleness", staleness, taken.staleness))
        # The digest of an older view is not checked.
        base_digest = sent.base_digest if staleness else record.base_digest
        known = (record.layout, base_digest)
        yield from _equal("admission", ("base", known, (sent.layout, sent.base_digest)))
        if taken.steps_credited > taken.steps or taken.tokens_credited > taken.tokens:
            credited = (taken.steps_credited, taken.tokens_credited)
            yield RuleBreach("weight", "credited", f"at most {taken.steps, taken.tokens}", credited)


def names(record: wire.Record) -> Iterator[RuleBreach]:
    """Checks that the objects' names have the versions that the record states for these objects."""
    told = [
        ("view", record.snapshot_version, record.snapshot),
        ("outer", record.outer_version, record.outer),
        *(("delta", v, ref) for v, ref in enumerate(record.deltas, record.snapshot_version + 1)),
    ]
    if record.delta is not None and record.what == "version":
        told.append(("delta", record.version, record.delta))
    for what, version, ref in told:
        found = object_names.parse_version_object(record.run, record.fragment, ref.name)
        if found != (version, what) or version > record.version:
            yield RuleBreach("objects", what, f"of version {version}", ref.name)


def sums(base: wire.Record, record: wire.Record) -> Iterator[RuleBreach]:
    """Checks the totals: those of `base`, and the updates that the record answers."""
    before, now = base.totals, record.totals
    taken, not_taken = record.inputs, record.rejected
    expected = {
        "updates_merged": before.updates_merged + len(taken),
        "updates_rejected": before.updates_rejected + len(not_taken),
        "tokens_merged": before.tokens_merged + sum(one.tokens for one in taken),
        "tokens_rejected": before.tokens_rejected + sum(one.tokens for one in not_taken),
        "steps_merged": before.steps_merged + sum(one.steps for one in taken),
        "tokens_credited": before.tokens_credited + sum(one.tokens_credited for one in taken),
    }
    yield from _equal(
        "totals",
        *((name, min(sum_, GREATEST), getattr(now, name)) for name, sum_ in expected.items()),
    )


def decision(life: OwnerLife, close: Close, record: wire.Record) -> Iterator[RuleBreach]:
    """Compares a record's decisions with those that the rules demand.

    Args:
        life: the owner's state just before the record.
        close: the record that the rules demand.
        record: the record.
    """
    made = close.what == "version"
    yield from _equal(
        "round",
        ("what", close.what, record.what),
        ("reason", close.reason, record.reason),
        ("final", close.final, record.final),
    )
    for name, expected, found in (
        ("opened_at_s", life.opened_at_s, record.opened_at_s),
        ("quorum_at_s", life.quorum_at_s, record.quorum_at_s),
        ("closed_at_s", close.at_s, record.closed_at_s),
    ):
        if not near(expected, found):
            yield RuleBreach("round", name, expected, found)
    position = life.position(verdict_only=not made)
    yield from _equal("position", ("position", position, record.position))
    yield from _inputs(life if made else None, record)
    yield from _rejected(life, record)
    if made:
        yield from _step_size(life, record)


def remembered(life: OwnerLife, record: wire.Record) -> Iterator[RuleBreach]:
    """Checks `record.policy`, the owner's memory; `life` is the owner's state after the record."""
    expected = life.memory.copy()
    expected.seen_seq = max(life.read_seq, life.known_seq)
    expected.credits = life.credits(verdict_only=record.what == "verdict")
    for name, wanted, found in expected.differences(PolicyMemory.of(record.policy)):
        yield RuleBreach("memory", name, wanted, found)


def _inputs(life: OwnerLife | None, record: wire.Record) -> Iterator[RuleBreach]:
    """Compares a record's inputs, their order and weights; if `life` is None, it must have none."""
    merged = life.merged if life is not None else []
    expected = [(*update_id(one.manifest), one.stream_seq) for one in merged]
    found = [(i.learner, i.incarnation, i.seq, i.stream_seq) for i in record.inputs]
    if expected != found:
        yield RuleBreach("admission", "inputs", expected, found)
        return
    for one, taken in zip(merged, record.inputs, strict=True):
        yield from _equal(
            "weight",
            ("steps_credited", one.credit.steps, taken.steps_credited),
            ("tokens_credited", one.credit.tokens, taken.tokens_credited),
        )
        for name in ("weight", "staleness", "discount", "clip", "norm"):
            if not near(getattr(one, name), getattr(taken, name)):
                yield RuleBreach("weight", name, getattr(one, name), getattr(taken, name))


def _rejected(life: OwnerLife, record: wire.Record) -> Iterator[RuleBreach]:
    expected = [
        (*update_id(one.manifest), one.stream_seq, one.manifest.tokens, one.manifest.steps,
         str(one.reason))
        for one in life.refused
    ]  # fmt: skip
    found = [
        (r.learner, r.incarnation, r.seq, r.stream_seq, r.tokens, r.steps, r.reason)
        for r in record.rejected
    ]
    if expected != found:
        yield RuleBreach("admission", "rejected", expected, found)


def _step_size(life: OwnerLife, record: wire.Record) -> Iterator[RuleBreach]:
    """Checks the record's learning rate and momentum, which depend on `life.step_share()`."""
    outer = life.settings.outer
    share = life.step_share()
    rate = outer.learning_rate * share
    momentum = outer.momentum ** min(share, 1.0)
    if not near(rate, record.learning_rate):
        yield RuleBreach("settings", "learning_rate", rate, record.learning_rate)
    if not near(momentum, record.momentum):
        yield RuleBreach("settings", "momentum", momentum, record.momentum)


def objects(
    settings: RunSettings | None, base: wire.Record, base_seq: int, record: wire.Record
) -> Iterator[RuleBreach]:
    """Checks which view, deltas and outer state the record names: its own, or those of `base`.

    `settings` has the interval of snapshots. If it is None, as the tape no longer has them, the
    record's own fields decide which of the two it must name.
    """
    outer_seq = base.outer_seq or base_seq
    if record.what == "verdict":
        stands, found = ([getattr(each, name) for name in STANDS] for each in (base, record))
        expected, said = (*stands, outer_seq, None), (*found, record.outer_seq, record.delta)
        yield from _equal("objects", ("contents of the version before", expected, said))
        return
    if record.delta is None:
        yield RuleBreach("objects", "delta", "of every version", None)
    whole = record.version in (record.snapshot_version, record.outer_version)
    if settings is not None:
        whole = record.version % settings.sync.snapshot_interval_versions == 0
    if whole:
        yield from _whole(record)
        return
    yield from _equal(
        "objects",
        ("snapshot", base.snapshot, record.snapshot),
        ("snapshot_version", base.snapshot_version, record.snapshot_version),
        ("deltas", (*base.deltas, record.delta), record.deltas),
        ("outer", base.outer, record.outer),
        ("outer_version", base.outer_version, record.outer_version),
        ("outer_seq", outer_seq, record.outer_seq),
    )


def _whole(record: wire.Record) -> Iterator[RuleBreach]:
    """Checks that a record names a view and an outer state of its own version."""
    yield from _equal(
        "objects",
        ("snapshot_version", record.version, record.snapshot_version),
        ("outer_version", record.version, record.outer_version),
        ("deltas", (), record.deltas),
        ("outer_seq", 0, record.outer_seq),
    )


def restore(
    base: wire.Record, versions: Mapping[int, Contents], record: wire.Record
) -> Iterator[RuleBreach]:
    """Checks a rollback: it repeats an earlier version, and its policy changes only the floor.

    `versions` has the contents of the fragment's versions that are known.
    """
    expected = PolicyMemory.of(base.policy)
    expected.floor = record.version
    for name, wanted, found in expected.differences(PolicyMemory.of(record.policy)):
        yield RuleBreach("restore", f"policy.{name}", wanted, found)
    yield from _equal(
        "restore",
        ("rejected", (), record.rejected),
        ("position", base.position, record.position),
        ("totals", base.totals, record.totals),
    )
    yield from _whole(record)
    earlier = record.restored_version or 0
    if earlier >= record.version:
        yield RuleBreach("restore", "restored_version", "an earlier version", earlier)
    source = versions.get(earlier)
    if source is not None:
        yield from _equal("restore", *zip(CONTENTS, source, contents(record), strict=True))


def _equal(rule: str, *fields: tuple[str, object, object]) -> Iterator[RuleBreach]:
    for name, expected, found in fields:
        if expected != found:
            yield RuleBreach(rule, name, expected, found)
