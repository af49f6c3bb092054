"""The coverage of a verdict: which part of the tape was read, and the result for every version.

A verdict is "verified" only if no part of the run is left out of it. It is "incomplete" if garbage
collection has removed a part, as the tape shows. It is "wrong" if a part differs from its record,
or is missing for another reason. These functions compare what others have read, and read nothing
themselves.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Literal

from diloco.common.process.release import release
from diloco.common.protocol.errors import IntegrityError
from diloco.judge import evidence
from diloco.judge.audit import Breach, audit
from diloco.judge.evidence import Hole
from diloco.judge.objects import Listing
from diloco.replay.decide import decide_newest
from diloco.run.history import Chain, History

Verdict = Literal["verified", "incomplete", "wrong"]
STATUSES: dict[Verdict, int] = {"verified": 0, "wrong": 1, "incomplete": 2}
WITH_IT = "the lost part of the file may have held them"
# Rules that only learners can break: a verdict on the tape does not count them.
OF_LEARNERS = frozenset({"data", "shares"})


@dataclass(frozen=True, kw_only=True)
class Tape:
    """The tape that a verdict is about; sequences are of its stream, times seconds since the epoch.

    Attributes:
        end_seq: sequence of its end message; 0: the run is in progress, or the tape was cut.
        releases: the releases that made its records.
        unreadable: number of records that cannot be read.
        garbage: number of messages that are not of the protocol.
        holes: gaps that garbage collection does not explain.
        breaches: broken rules that are not of learners alone.
        newer: names of objects of versions beyond the tape's end.
        under_way: names of objects of a version that is being made, unless the tape was cut there.
        missing: (name, sequence of its record) of objects that are missing, though garbage
            collection would not have removed them.
        lost: the damage of the file from which the tape was salvaged, or "".
    """

    run: str
    first_seq: int
    last_seq: int
    messages: int
    first_s: float
    last_s: float
    end_seq: int
    releases: tuple[str, ...]
    unreadable: int
    garbage: int
    holes: tuple[Hole, ...]
    breaches: tuple[Breach, ...]
    newer: tuple[str, ...]
    under_way: tuple[str, ...]
    missing: tuple[tuple[str, int], ...]
    lost: str = ""

    @property
    def wrong(self) -> bool:
        """Whether messages or objects are missing or damaged; False for a salvaged copy."""
        gone = self.unreadable or self.holes or self.breaches or self.missing
        return bool(gone) and not self.lost


@dataclass(kw_only=True)
class Versions:
    """Numbers of the chosen versions, by result.

    Attributes:
        again: recomputed, and equal to the record.
        stored: loaded, to recompute later ones: view and outer state have the recorded digests.
        trimmed: removed by garbage collection, as the tape or the age of their records shows.
        missing: their objects are missing for another reason.
        wrong: different from the record.
        unreached: after a version that is wrong or missing, before the next stored state.
        earlier: verified by an earlier call with `--resume`, and not repeated.
    """

    again: int = 0
    stored: int = 0
    trimmed: int = 0
    missing: int = 0
    wrong: int = 0
    unreached: int = 0
    earlier: int = 0


def check_readable(history: History) -> None:
    """Raises an error if a fragment has no readable record.

    Raises:
        IntegrityError: the records were written by another release, or are damaged.
    """
    for fragment in range(len(history.layout.fragments)):
        if history.records.get(fragment):
            continue
        bad = [one for one in history.unreadable if one.fragment == fragment]
        why = (
            f"the first of {len(bad)}, message {bad[0].seq}: {bad[0].why}"
            if bad
            else "none is there"
        )
        raise IntegrityError(
            f"run {history.run!r}: no record of fragment {fragment} can be read by release "
            f"{release()}; {why}",
            hint="replay it with the release that wrote it: docs/operations.md, Upgrading",
        )


def tape_of(
    history: History, listing: Listing, *, window_s: float, now_s: float, lost: str = ""
) -> Tape:
    """Audits a tape, and compares it with the listing of its store.

    Args:
        history: the tape.
        listing: the run's objects, listed before the tape was read.
        window_s: of a bundle without objects, the age in seconds from which garbage collection may
            have removed objects since the bundle was made; else infinite.
        now_s: the time, in seconds since the epoch.
        lost: what is damaged in the file from which the tape was salvaged; "" if it was not.
    """
    times_s, copied = history.times_s, window_s < inf
    first_seq = next(iter(times_s))
    missing = tuple(
        (name, seq)
        for name, seq in evidence.missing_objects(history, listing).items()
        if now_s - history.times_s[seq] <= window_s
    )
    under_way = tuple(evidence.under_way(history, listing.picked))
    breaches = [one for one in audit(history).breaches if one.rule not in OF_LEARNERS]
    unreadable = {f"fragment {bad.fragment}, message {bad.seq}" for bad in history.unreadable}
    return Tape(
        run=history.run,
        first_seq=first_seq,
        last_seq=history.last_seq,
        messages=len(times_s),
        first_s=times_s[first_seq],
        last_s=times_s[history.last_seq],
        end_seq=history.end[0] if history.end else 0,
        releases=tuple(sorted({record.release for record in history.all_records()})),
        unreadable=len(history.unreadable),
        garbage=len(history.garbage),
        holes=tuple(evidence.holes(history)),
        breaches=tuple(
            [found for found in breaches if found.where not in unreadable]
            + [*_newest_decisions(history)]
        ),
        newer=(*evidence.newer_objects(history, listing.picked), *(under_way if copied else ())),
        under_way=() if copied else under_way,
        missing=missing,
        lost=lost,
    )


def _newest_decisions(history: History) -> Iterator[Breach]:
    """Yields a breach for each fragment whose newest record does not follow from the tape.

    A change of any other record is found by the next record, which has its digest.
    """
    for fragment in history.records:
        found = decide_newest(history, fragment)
        if found is not None and found.outcome == "different":
            fields = ", ".join(name for name, _, _ in found.fields)
            what = f"was decided otherwise: {fields} (diloco replay RUN --decide shows it)"
            yield Breach("decision", f"fragment {fragment}, record {found.record_seq}", what)


def before_the_tape(history: History, chosen: Mapping[int, Chain]) -> int:
    """Returns how many versions of the chosen fragments are before the tape's oldest record."""
    count = 0
    for fragment, chain in chosen.items():
        oldest_seq, oldest = history.records[fragment][0]
        if chain and chain[0][0] == oldest_seq and oldest.what != "restored":
            count += oldest.version
    return count


def verdict(tape: Tape, versions: Versions) -> Verdict:
    """Returns the verdict on a tape and its versions."""
    if tape.wrong or versions.wrong or (versions.missing and not tape.lost):
        return "wrong"
    if tape.newer or tape.lost or versions.trimmed or versions.unreached:
        return "incomplete"
    return "verified"


def document(tape: Tape, versions: Versions, **more: Any) -> dict[str, Any]:
    """Returns the verdict and its coverage for JSON; `more` are further fields."""
    said = verdict(tape, versions)
    return {
        "verdict": said,
        "status": STATUSES[said],
        "tape": asdict(tape) | {"holes": [hole._asdict() for hole in tape.holes]},
        "versions": asdict(versions),
        "read_by": release(),
        **more,
    }


def sentences(tape: Tape, versions: Versions) -> list[str]:
    """Returns the coverage, and what is wrong with the tape, as lines of text."""
    end = f"end message at {tape.end_seq}" if tape.end_seq else "no end message"
    unread = f"{tape.unreadable} unreadable, {tape.garbage} not of the protocol"
    found = [
        f"tape: {tape.messages:,} messages, {tape.first_seq} to {tape.last_seq}, {end}; {unread}"
    ]
    counts = {
        "made again": versions.again,
        "begun with as stored": versions.stored,
        "verified by an earlier call": versions.earlier,
        "before what garbage collection has left": versions.trimmed,
        "gone with a part of the file" if tape.lost else "MISSING": versions.missing,
        "WRONG": versions.wrong,
        "behind one that is wrong, gone or unreadable, up to the next stored state": (
            versions.unreached
        ),
    }
    listed = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    found.append(f"versions: {listed or 'none'}")
    return [*found, *_damage(tape)]


def _damage(tape: Tape) -> Iterable[str]:
    if tape.lost:
        yield f"this is what was left of a damaged file: {tape.lost}"
    for hole in tape.holes:
        why = WITH_IT if tape.lost else "garbage collection takes none from there"
        yield f"{hole.messages:,} messages are gone, {hole.first_seq} to {hole.last_seq}: {why}"
    for breach in tape.breaches[:5]:
        yield f"{breach.where}: {breach.what}"
    if len(tape.breaches) > 5:
        yield f"... and {len(tape.breaches) - 5:,} more records that do not fit"
    if tape.missing:
        (name, seq), why = tape.missing[0], "no collection takes them while their records stand"
        yield (
            f"{len(tape.missing):,} objects are missing, and {WITH_IT if tape.lost else why}; the "
            f"first: {name} of record {seq}"
        )
    if tape.newer:
        yield (
            f"the tape ends before its objects: the store has {len(tape.newer):,} of what came "
            f"later, such as {tape.newer[0]}"
        )
    if tape.under_way:
        yield (
            f"a version was being made when the tape ended, or the tape was cut there: the store "
            f"has {tape.under_way[0]}"
        )
