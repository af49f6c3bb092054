"""Holds a listing of a run's store against its records: is what they name there, and as long?

It knows what recovery and learners that join need, and what garbage collection may have taken; it
reads no object. `remake.py` goes on with their contents.
"""

from collections.abc import Callable, Iterator, Mapping

from diloco.check.audit import Breach, Objects
from diloco.check.evidence import missing_objects, newer_objects
from diloco.check.listing import Listing, list_now, may_be_newer
from diloco.common import names, wire
from diloco.projections.history import History


def needed_now(history: History) -> Iterator[tuple[int, wire.ObjectRef | wire.Shard]]:
    """(record's sequence, object) of all that recovery and joining learners need."""
    for chain in history.records.values():
        newest_seq, newest = chain[-1]
        yield from ((newest_seq, ref) for ref in (newest.snapshot, newest.outer, *newest.deltas))
        covered = newest.outer_seq or newest_seq
        for seq, record in reversed(chain):
            if seq <= covered:
                break
            for taken in record.inputs:
                yield from ((seq, shard) for shard in taken.shards)


def named(record: wire.Record) -> Iterator[wire.ObjectRef | wire.Shard]:
    """Every object that a record names."""
    yield from (record.snapshot, record.outer, *record.deltas)
    if record.delta is not None:
        yield record.delta
    for taken in record.inputs:
        yield from taken.shards


def all_named(history: History) -> Iterator[wire.ObjectRef | wire.Shard]:
    """Every object that a record names, without those that the record before names as well."""
    for chain in history.records.values():
        before: set[str] = set()
        for _, record in chain:
            own = {ref.name: ref for ref in named(record)}
            yield from (ref for name, ref in own.items() if name not in before)
            before = {*own}


def check_objects(
    history: History, *, everything: bool = False, before: Listing | None = None
) -> Objects:
    """Compare a listing of the store with the tape.

    Args:
        history: the tape.
        before: objects that were there before the tape was read, where it goes on: those that it
            does not know of are newer, and what was stored since is nobody's orphan. None: those of
            now.
        everything: want all that the tape names, as where nothing is ever collected.

    Raises:
        StoreError: the store cannot be listed.
    """
    found, run = Objects(), history.run
    wanted = {ref.name: (seq, ref) for seq, ref in needed_now(history)}
    found.needed = len(wanted)
    found.needed_bytes = sum(ref.size_bytes for _, ref in wanted.values())
    known = Listing((ref.name, ref.size_bytes) for ref in all_named(history))
    there = list_now(history.store, run, _unknown(history, known))
    if amiss := known.beside(there):
        _check_named(found, history, amiss, there, wanted, everything=everything)
    newer = {*newer_objects(history, (there if before is None else before).picked)}
    sizes = {name: there.size(name) for name in sorted(newer)}
    found.newer = {name: size for name, size in sizes.items() if size is not None}
    prefixes = tuple(names.fragment_prefix(run, f) for f in range(len(history.layout.fragments)))
    kept = tuple(_pinned(history))
    others = Listing((name, 0) for name in _other_names(history)) if there.picked else Listing()
    found.orphans = {
        name: there.size(name) or 0
        for name in there.picked
        if (name.startswith(prefixes) or "/update/" in name)
        and not (name in known or name in others or name in newer)
        and not name.startswith(kept)
        and (before is None or name in before)
    }
    return found


def _unknown(history: History, known: Listing) -> Callable[[str], bool]:
    """Whether no record names an object, or it may be newer than the tape."""
    newest = {
        fragment: chain[-1][1].version if chain else -1
        for fragment in range(len(history.layout.fragments))
        for chain in [history.records[fragment]]
    }
    newer = may_be_newer(history.run, newest, history.last_seq)
    return lambda name: name not in known or newer(name)


def _check_named(
    found: Objects,
    history: History,
    amiss: Listing,
    there: Listing,
    wanted: Mapping[str, tuple[int, wire.ObjectRef | wire.Shard]],
    *,
    everything: bool,
) -> None:
    """Objects that are gone though they are needed, or have another size."""
    standing = missing_objects(history, there)
    for name, ref in {r.name: r for r in all_named(history) if r.name in amiss}.items():
        seq = wanted[name][0] if name in wanted else 0
        where = f"record {seq}" if seq else "an older record"
        size = there.size(name)
        if size is not None:
            what = f"{name!r} has {size} bytes, not {ref.size_bytes}"
            found.breaches.append(Breach("objects", where, what))
            continue
        found.collected += 1
        if seq or everything:
            found.breaches.append(Breach("objects", where, f"no object {name!r}"))
        elif name in standing:
            where = f"record {standing[name]}"
            what = f"no object {name!r}, and no collection takes it while that record stands"
            found.breaches.append(Breach("objects", where, what))


def _other_names(history: History) -> Iterator[str]:
    """Objects that the tape names outside of records' own fields."""
    for _, manifest in history.manifests:
        yield from (shard.name for shard in manifest.shards)
    yield from history.bodies


def _pinned(history: History) -> set[str]:
    """How the names of all that checkpoints keep begin."""
    return {
        names.version_object(history.run, fragment, version, "", "").removesuffix("--")
        for _, checkpoint in history.checkpoints
        for fragment, version in enumerate(checkpoint.versions)
    }
