"""The checker of one fragment's updates and records.

The checker follows the fragment by the tape's messages alone, and raises the first broken rule as a
`Violation`.
"""

import bisect
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from simtensors import Covers

from diloco.common.protocol import wire
from diloco.common.storage.tape import by_learner


class Violation(Exception):  # noqa: N818 - no error of ours, but of what is tested
    """A rule that must hold is broken.

    Args:
        rule: name of the checker.
        about: the fragment, learner or object concerned, as in traces.
        what: what was found.
    """

    def __init__(self, rule: str, about: str, what: str) -> None:
        super().__init__(rule, about, what)
        self.rule = rule
        self.about = about
        self.what = what

    def __str__(self) -> str:
        return f"{self.rule}: {self.about}: {self.what}"


def hold(condition: bool, rule: str, about: object, what: str) -> None:
    """Raise a `Violation` unless the condition is true."""
    if not condition:
        raise Violation(rule, str(about), what)


class UpdateId(NamedTuple):
    learner: str
    incarnation: int
    seq: int


def update_id(taken: wire.Input | wire.Rejected | wire.Manifest) -> UpdateId:
    """Returns the id of the update of a manifest or of a record's entry."""
    return UpdateId(taken.learner, taken.incarnation, taken.seq)


class Sent(NamedTuple):
    """An update whose manifest is on the tape.

    Attributes:
        manifest: the manifest; None once a record has a verdict on the update.
        covers: the steps that the update covers.
    """

    manifest: wire.Manifest | None
    covers: Covers


@dataclass
class Chain:
    """Checks one fragment on one tape.

    `unresolved`: the updates without a verdict and their stream sequences, oldest first. `merged`:
    for each learner the merged steps as intervals: the sorted starts, and the stop of each start.
    """

    fragment: int
    epoch: int = 0
    record: wire.Record | None = None
    record_seq: int = 0
    sent: dict[UpdateId, Sent] = field(default_factory=dict)
    unresolved: dict[UpdateId, int] = field(default_factory=dict)
    fates: Counter[str] = field(default_factory=Counter)
    merged: dict[int, tuple[list[int], list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], []))
    )
    # Where the next update of each life begins; where each learner's last update ended.
    next_start: dict[tuple[str, int], int] = field(default_factory=dict)
    until: dict[str, int] = field(default_factory=dict)
    digests: dict[int, tuple[str, str]] = field(default_factory=dict)
    restores: int = 0
    # The record that the epoch's first record must repeat, and that record's totals.
    begins_with: wire.Record | None = None
    before: tuple[int, ...] = (0, 0, 0, 0, 0)

    @classmethod
    def goes_on(cls, epoch: int, file: wire.CheckpointFile, record: wire.Record) -> "Chain":
        """Returns the chain of a new tape that begins with a checkpoint's record."""
        return cls(
            record.fragment,
            epoch,
            until={**file.specification.positions, **by_learner(file.data_positions)},
            begins_with=record,
            before=sums(record.totals),
        )

    @property
    def about(self) -> str:
        return f"fragment {self.fragment}"

    # Updates

    def send(self, manifest: wire.Manifest, covers: Covers, seq: int) -> None:
        """Note the first announcement of an honest update."""
        update = update_id(manifest)
        self.sent[update] = Sent(manifest, covers)
        self.unresolved[update] = seq
        self.fates["sent"] += 1
        self.fates["tokens_sent"] += manifest.tokens

    def check_data(self, update: UpdateId, covers: Covers) -> None:
        """Checks that each step is sent once: an update begins where the one before ended."""
        life = (update.learner, update.incarnation)
        expected = self.next_start.get(life)
        least = self.until.get(update.learner, 0)
        if self.restores:
            expected = None  # At a rollback learners drop the steps that they have not sent.
        if covers.start != expected if expected is not None else covers.start < least:
            raise Violation("data", str(update), f"{covers} is to follow {expected or least}")
        self.next_start[life] = self.until[update.learner] = covers.stop

    def resolve(
        self, record: wire.Record, taken: wire.Input | wire.Rejected, *, lies: bool
    ) -> None:
        """Checks that one record answers each update; a liar's update counts as sent only then."""
        update = update_id(taken)
        fate = "merged" if isinstance(taken, wire.Input) else "rejected"
        sent = self.sent.get(update)
        if sent is None:
            raise Violation("resolved", str(update), f"{fate}, and was never sent")
        if lies and sent.manifest is not None:
            self.fates["sent"] += 1
            self.fates["tokens_sent"] += sent.manifest.tokens
        elif self.unresolved.pop(update, None) is None or sent.manifest is None:
            what = f"{fate} by version {record.version}, and was resolved before"
            raise Violation("resolved", str(update), what)
        self.sent[update] = sent._replace(manifest=None)
        if (taken.tokens, taken.steps) != (sent.manifest.tokens, sent.manifest.steps):
            raise Violation("resolved", str(update), "with other tokens or steps than it has")
        self.fates[fate] += 1
        self.fates[f"tokens_{fate}"] += taken.tokens
        if isinstance(taken, wire.Input):
            self.fates["steps"] += taken.steps
            hold(taken.shards == sent.manifest.shards, "resolved", update, "has other shards")
            self._merge(update, sent.covers)

    def _merge(self, update: UpdateId, covers: Covers) -> None:
        """Checks that no step is merged twice."""
        starts, stops = self.merged[covers.learner]
        at = bisect.bisect_left(starts, covers.start)
        if (at > 0 and stops[at - 1] > covers.start) or (
            at < len(starts) and covers.stop > starts[at]
        ):
            raise Violation("data", str(update), f"{covers} was merged before")
        if at > 0 and stops[at - 1] == covers.start:
            stops[at - 1] = covers.stop
        else:
            starts.insert(at, covers.start)
            stops.insert(at, covers.stop)

    # Records

    def check_link(self, record: wire.Record) -> None:
        """Checks that a record follows the one before, and that versions have no gap or fork."""
        about, before = self.about, self.record
        hold(record.epoch == self.epoch, "chain", about, f"is of epoch {record.epoch}")
        if before is None:
            origin = self.begins_with
            version, digest = (origin.version, origin.view_digest) if origin else (0, None)
            first = (record.version, record.base_seq, record.base_digest) == (version, 0, "")
            same = digest in (None, record.view_digest)
            hold(first and same, "chain", about, f"begins with {record.version}")
            return
        moves = record.what in ("version", "restore")
        hold(record.version == before.version + moves, "chain", about,
             f"{record.what} {record.version} after {before.version}")  # fmt: skip
        hold(record.base_seq == self.record_seq, "chain", about,
             f"built on {record.base_seq}, not {self.record_seq}")  # fmt: skip
        hold(record.base_digest == before.view_digest, "chain", about,
             f"version {record.version} is built on another view")  # fmt: skip
        hold(not (before.final and record.what == "version"), "chain", about,
             f"version {record.version} after the last")  # fmt: skip
        forward = record.global_step >= before.global_step or record.what == "restore"
        hold(forward, "chain", about, f"the clock goes back to {record.global_step}")
        self.restores += record.what == "restore"

    def follow(self, record: wire.Record, seq: int) -> None:
        """Takes a record as the newest, after all updates that it answers were resolved."""
        self._check_position(record)
        self._check_totals(record)
        self._check_digests(record)
        self.record, self.record_seq = record, seq

    def _check_position(self, record: wire.Record) -> None:
        """Checks that the record's position passes no unresolved update, and never goes back."""
        if self.record is not None:
            hold(record.position >= self.record.position, "position", self.about,
                 f"{record.position} after {self.record.position}")  # fmt: skip
        for update, first_seq in self.unresolved.items():
            hold(first_seq >= record.position, "position", update,
                 f"at {first_seq}, unresolved and behind {record.position}")  # fmt: skip
            break  # They are in order.

    def _check_totals(self, record: wire.Record) -> None:
        """Checks that tokens sent are those merged, rejected or in flight, and the record's totals."""
        fates = self.fates
        unresolved = (self.sent[update].manifest for update in self.unresolved)
        flying = sum(manifest.tokens for manifest in unresolved if manifest is not None)
        balance = fates["tokens_merged"] + fates["tokens_rejected"] + flying
        hold(fates["tokens_sent"] == balance, "tokens", self.about, f"{dict(fates)}, {flying}")
        found = sums(record.totals)
        counters = ("merged", "rejected", "tokens_merged", "tokens_rejected", "steps")
        counted = tuple(
            min(before + fates[name], wire.GREATEST)
            for before, name in zip(self.before, counters, strict=True)
        )
        hold(found == counted, "totals", self.about, f"{found}, counted are {counted}")

    def _check_digests(self, record: wire.Record) -> None:
        """Checks that a rollback's digests are the restored version's; the oracle checks all others."""
        recorded = (record.view_digest, record.outer_digest)
        if record.what != "verdict":
            self.digests[record.version] = recorded
        if record.restored_version is not None and record.what == "restore":
            same = self.digests[record.restored_version] == recorded
            hold(same, "digests", self.about, f"is not version {record.restored_version}")


def check_covers(manifest: wire.Manifest, covers: Covers, tokens: int) -> None:
    """Checks that an update covers the steps that its manifest claims, which had so many tokens."""
    right = (
        f"learner-{covers.learner}" == manifest.learner
        and covers.stop - covers.start == manifest.steps
        and manifest.tokens == tokens
        and manifest.position >= covers.stop
    )
    if not right:
        raise Violation("data", str(update_id(manifest)), f"{covers}, but {manifest}")


def sums(totals: wire.Totals) -> tuple[int, ...]:
    """Returns a record's totals, in the order of `Chain.before`."""
    return (
        totals.updates_merged,
        totals.updates_rejected,
        totals.tokens_merged,
        totals.tokens_rejected,
        totals.steps_merged,
    )
