"""Holds what a record says of stored state against the record before it.

Recovery and learners begin from a fragment's newest record: its view, outer state and deltas. No
record behind it carries its digest, and merging again looks at the view alone, so it is these
fields that a false record can have without any digest saying so. Reads nothing.
"""

from collections.abc import Iterator

from diloco.common import names, wire

# Fields by which a record carries on with what was stored before it, and their names for people.
CARRIED = ("snapshot", "snapshot_version", "outer", "outer_version")


def own_state(record: wire.Record) -> Iterator[str]:
    """What a record says wrongly by itself: objects that are not of the versions it says."""
    yield from _named(record, record.snapshot, record.snapshot_version, "view")
    yield from _named(record, record.outer, record.outer_version, "outer")
    if max(record.snapshot_version, record.outer_version) > record.version:
        yield "names stored state of a later version than its own"
    if record.delta is not None and record.what == "version":
        yield from _named(record, record.delta, record.version, "delta")


def own_deltas(record: wire.Record) -> Iterator[str]:
    """Likewise, of its list of deltas; for a chain's oldest record, from which others carry on."""
    for version, ref in enumerate(record.deltas, start=record.snapshot_version + 1):
        yield from _named(record, ref, version, "delta")


def _named(record: wire.Record, ref: wire.ObjectRef, version: int, what: str) -> Iterator[str]:
    if names.parse_version_object(record.run, record.fragment, ref.name) != (version, what):
        yield f"names {ref.name!r} as the {what} of version {version}"


def carried_state(before_seq: int, before: wire.Record, record: wire.Record) -> Iterator[str]:
    """What of a record does not follow from the one before it.

    A version has stored state of its own, or carries on with that before it and one delta more; a
    verdict carries on as it is.

    Args:
        before_seq: sequence of the record before.
        before: the record before.
        record: a version or a verdict.
    """
    if record.what == "verdict":
        if record.delta is not None:
            yield "is a verdict with a delta"
        if record.outer_digest != before.outer_digest:
            yield "is a verdict with another outer state"
    elif record.delta is None:
        yield "is a version without a delta"
    stored = record.snapshot_version == record.version or record.outer_version == record.version
    if stored and record.what == "version":
        whole = record.snapshot_version == record.outer_version
        if not whole or record.outer_seq or record.deltas:
            yield "has stored state of its own that is not whole"
        return
    for field in CARRIED:
        now, then = getattr(record, field), getattr(before, field)
        if now != then:
            yield f"carries on with {field} {_short(now)}, the record before has {_short(then)}"
    deltas = before.deltas if record.delta is None else (*before.deltas, record.delta)
    if record.deltas != deltas:
        yield "its deltas are not those before it and its own"
    if record.outer_seq != (before.outer_seq or before_seq):
        yield (
            f"says that record {record.outer_seq} committed its outer state, that was record "
            f"{before.outer_seq or before_seq}"
        )


def _short(said: object) -> str:
    return repr(said.name) if isinstance(said, wire.ObjectRef) else str(said)
