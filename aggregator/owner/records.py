"""Builds records: every field of one is named here, from typed parts.

A record has three parts: what the machine decided (`core/decisions.py`), what of it lies in arrays
and objects (`RecordContents`), and who makes it. Whoever publishes one states all three.
"""

from typing import NamedTuple

from diloco.aggregator import instruments
from diloco.aggregator.arrays.fragment import ClosedRound, FragmentArrays
from diloco.aggregator.context import Context, identity, store_version_object
from diloco.aggregator.core import rounds
from diloco.aggregator.core.decisions import Decided
from diloco.aggregator.core.state import State
from diloco.common.process import log, release
from diloco.common.protocol import wire
from diloco.common.storage.tape import record_digest


class RecordContents(NamedTuple):
    """The record's fields on the vectors at its version, and on the objects that hold them.

    Field by field as in `wire.Record`.
    """

    inputs: tuple[wire.Input, ...]
    factors: bytes
    kept: bytes
    radii: bytes
    learning_rate: float
    momentum: float
    delta: wire.ObjectRef | None
    snapshot: wire.ObjectRef
    snapshot_version: int
    deltas: tuple[wire.ObjectRef, ...]
    outer: wire.ObjectRef
    outer_version: int
    outer_seq: int
    view_digest: str
    outer_digest: str
    merged_at_s: float


def contents_of(record: wire.Record) -> RecordContents:
    """The contents that a record states."""
    return RecordContents(**{name: getattr(record, name) for name in RecordContents._fields})


def unchanged(previous: wire.Record, merged_at_s: float) -> RecordContents:
    """Contents of a verdict: the version before it stands, and nothing was merged."""
    return contents_of(previous)._replace(
        inputs=(), factors=b"", kept=b"", radii=b"", delta=None, merged_at_s=merged_at_s
    )


def compose(
    context: Context,
    fragment: int,
    decided: Decided,
    contents: RecordContents,
    *,
    previous: wire.Record | None,
    totals: wire.Totals,
    restored_version: int | None = None,
) -> wire.Record:
    """A record of a fragment, by this process.

    Args:
        context: says who makes it, of which run and epoch.
        fragment: its index.
        decided: the machine's part.
        contents: the arrays' part.
        previous: the fragment's record before it; None for the first of a tape.
        totals: sums of the fragment's records up to this one.
        restored_version: whose contents it repeats, if it goes back.
    """
    return wire.Record(
        **decided._asdict(),
        **contents._asdict(),
        run=context.run,
        epoch=context.epoch,
        fragment=fragment,
        restored_version=restored_version,
        base_digest=previous.view_digest if previous is not None else "",
        layout=context.layout.digest,
        totals=totals,
        aggregator=context.name,
        attempt_id=identity(context),
        previous=record_digest(previous) if previous is not None else "",
        release=release.release(),
        lock=release.lock(),
    )


def cited(record: wire.Record, record_seq: int) -> wire.Record:
    """A record as later ones must cite it: what says "this one" there has a number here."""
    return record.model_copy(update={"outer_seq": record.outer_seq or record_seq})


NOTHING = wire.Totals(**dict.fromkeys(wire.Totals.model_fields, 0))


def sum_up(
    before: wire.Totals, inputs: tuple[wire.Input, ...], rejected: tuple[wire.Rejected, ...]
) -> wire.Totals:
    """The sums with one more record; claims that add up to nonsense stop at the greatest count."""
    return wire.Totals(
        updates_merged=_sum(before.updates_merged, len(inputs)),
        updates_rejected=_sum(before.updates_rejected, len(rejected)),
        tokens_merged=_sum(before.tokens_merged, *(taken.tokens for taken in inputs)),
        tokens_rejected=_sum(before.tokens_rejected, *(taken.tokens for taken in rejected)),
        steps_merged=_sum(before.steps_merged, *(taken.steps for taken in inputs)),
        tokens_credited=_sum(before.tokens_credited, *(taken.tokens_credited for taken in inputs)),
    )


def _sum(*counts: int) -> int:
    return min(sum(counts), wire.GREATEST)


class Version(NamedTuple):
    """A version that is made and not stored, the time of it, and whether its arrays are due."""

    made: ClosedRound
    merged_at_s: float
    with_snapshot: bool


async def make_version(context: Context, arrays: FragmentArrays, state: State) -> Version:
    """Close the round on the arrays.

    Args:
        context: the aggregator's.
        arrays: the fragment's, with the round's sum; changed in place.
        state: the machine's at the close.
    """
    settings = arrays.own_settings
    part = rounds.step_share(state, participation=settings.outer.participation)
    with instruments.timing(context.metrics, context.runtime.clock, "merge"):
        made = await context.runtime.call(arrays.close_round, state.admitted, part)
    due = (state.version + 1) % settings.sync.snapshot_interval_versions == 0
    return Version(made, context.runtime.clock(), due)


async def store_version(
    context: Context,
    arrays: FragmentArrays,
    version: int,
    made_version: Version,
    previous: wire.Record,
    logger: log.Logger,
) -> RecordContents:
    """Store the objects of a round's version, while the next round may merge already.

    Args:
        context: the aggregator's.
        arrays: the fragment's; view and outer state are those of the version.
        version: its number.
        made_version: what was made.
        previous: the newest record.
        logger: the fragment's.
    """
    fragment, made = previous.fragment, made_version.made
    with instruments.timing(context.metrics, context.runtime.clock, "store"):
        delta = await store_version_object(context, fragment, version, "delta", made.delta, logger)
        contents = contents_of(previous)._replace(
            **(made._asdict() | {"delta": delta}),
            deltas=(*previous.deltas, delta),
            merged_at_s=made_version.merged_at_s,
        )
        if not made_version.with_snapshot:
            return contents
        return await with_snapshot(context, fragment, version, arrays, contents, logger)


async def with_snapshot(
    context: Context,
    fragment: int,
    version: int,
    arrays: FragmentArrays,
    contents: RecordContents,
    logger: log.Logger,
) -> RecordContents:
    """The contents once view and outer state of this very version are stored."""
    view, outer = arrays.view_object(), arrays.outer_object()
    return contents._replace(
        snapshot=await store_version_object(context, fragment, version, "view", view, logger),
        snapshot_version=version,
        deltas=(),
        outer=await store_version_object(context, fragment, version, "outer", outer, logger),
        outer_version=version,
        outer_seq=0,
    )
