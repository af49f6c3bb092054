"""One life of a fragment's owner, as the tape shows it: its state between two records.

A life begins from a record (`resumed`) and hears the tape from that record's position on. What else
it is told stands as observations in the records that it makes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.layout import Layout
from diloco.judge.oracle import numbers
from diloco.judge.oracle.memory import OracleCredit, PolicyMemory, UpdateId


@dataclass
class WaitingUpdate:
    """An announced update that no round has merged; `passed`: rounds do not wait for it."""

    manifest: wire.Manifest
    stream_seq: int
    announced_at_s: float
    credit: OracleCredit
    passed: bool = False
    broke: int = 0


class MergedUpdate(NamedTuple):
    """An update in the round's sum, with the numbers that the rules give it."""

    manifest: wire.Manifest
    stream_seq: int
    announced_at_s: float
    norm: float
    credit: OracleCredit
    staleness: int
    discount: float
    clip: float

    @property
    def weight(self) -> float:
        """The update's weight in the merge."""
        return self.credit.weight


class DueRejection(NamedTuple):
    """An update that the next record rejects."""

    manifest: wire.Manifest
    stream_seq: int
    reason: str


class Close(NamedTuple):
    """The record that the rules ask for now."""

    what: Literal["version", "verdict"]
    reason: str
    final: bool
    at_s: float


class RuleBreach(NamedTuple):
    """A rule that something in a record breaks, before it is known which message says so."""

    rule: str
    field: str
    expected: object
    found: object


Phase = Literal["idle", "open", "grace", "cut"]


@dataclass
class OwnerLife:
    """The owner's knowledge, and the round that it has in hand.

    Attributes:
        settings: in force.
        memory: of learners and averages.
        known_seq: up to there an earlier life has counted averages and allowances.
        again: allowances for what that life had met, from when this one meets it.
        now_s: the last time that it was told.
        storing: a record under way, "" for none: no other begins before it stands.
        cut: reason and finality of a cut round; `cut_seq` once the leader has answered, who was
            asked when the tape had been read up to `asked_seq`.
        due: the record that must be made now.
    """

    layout: Layout
    epoch: int
    fragment: int
    settings: RunSettings
    memory: PolicyMemory
    version: int
    view_digest: str
    clock: int
    final: bool
    read_seq: int
    known_seq: int
    began_at_s: float
    now_s: float
    phase: Phase = "idle"
    opened_at_s: float = 0.0
    quorum_at_s: float = 0.0
    storing: Literal["", "version", "verdict"] = ""
    cut: tuple[str, bool] | None = None
    cut_seq: int = 0
    cut_at_s: float = 0.0
    asked_seq: int = 0
    waiting: dict[UpdateId, WaitingUpdate] = field(default_factory=dict)
    merged: list[MergedUpdate] = field(default_factory=list)
    refused: list[DueRejection] = field(default_factory=list)
    due: Close | None = None
    breaches: list[RuleBreach] = field(default_factory=list)
    again: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def averaged(self) -> bool:
        """Whether the fragment holds state."""
        return self.layout.fragments[self.fragment].averaged

    def breach(self, rule: str, name: str, expected: object, found: object) -> None:
        """Note that a value of the record, `found`, breaks a rule, which demands `expected`."""
        self.breaches.append(RuleBreach(rule, name, expected, found))

    # Questions

    def unread(self) -> list[WaitingUpdate]:
        """The updates that the round waits for; of a cut round, those announced by then."""
        rest = [one for one in self.waiting.values() if not one.passed]
        if self.cut is None or not self.cut_at_s:
            return rest
        return [one for one in rest if one.stream_seq <= self.cut_seq]

    def merged_learners(self) -> set[str]:
        """The learners whose work is in the sum."""
        return {one.manifest.learner for one in self.merged}

    def is_under_way(self, update: UpdateId) -> bool:
        """Whether an update waits, or is in the next record."""
        return update in self.waiting or any(update == found for found, *_ in self.resolved())

    def has_unresolved(self, learner: str, incarnation: int) -> bool:
        """Whether an update of a life waits, or is in the next record."""
        under_way = (*self.waiting, *(found for found, *_ in self.resolved()))
        return any(found[:2] == (learner, incarnation) for found in under_way)

    def announcers(self) -> set[str]:
        """The learners that have announced for the round."""
        return self.merged_learners() | {one.manifest.learner for one in self.unread()}

    def answered(self) -> set[str]:
        """The learners that send nothing more before the record."""
        members = self.memory.members
        return self.merged_learners() | {
            one.manifest.learner
            for one in self.refused
            if one.manifest.learner in members
            and members[one.manifest.learner].incarnation == one.manifest.incarnation
        }

    def norms(self) -> dict[str, float]:
        """The newest merged norm per credited step of each present learner, with the round's."""
        found = {name: member.norm for name, member in self.memory.waited_for().items()}
        return found | {n: norm for n, norm in self.round_norms().items() if n in found}

    def round_norms(self) -> dict[str, float]:
        """The round's norms per credited step, by learner."""
        return {one.manifest.learner: one.clip * one.norm / one.credit.steps for one in self.merged}

    def credits(self, *, without_sum: bool) -> dict[UpdateId, OracleCredit]:
        """The credits of all updates that the next record leaves unresolved."""
        found = dict(self.memory.credits) if self.read_seq < self.known_seq else {}
        found |= {update: one.credit for update, one in self.waiting.items()}
        if without_sum:
            found |= {update_id(one.manifest): one.credit for one in self.merged}
        return found

    def next_clock(self) -> int:
        """The run's clock at the next version, if the run were long enough."""
        return numbers.clock_after(self.settings, self.fragment, self.clock)

    def may_follow(self) -> bool:
        """Whether another round belongs to the run."""
        if self.final:
            return False
        return bool(self.memory.stopping_at_s) or self.next_clock() <= self.settings.run.steps

    def share(self) -> float:
        """Part of the live fleet's weight that the round holds."""
        held = sum(one.weight for one in self.merged)
        there = self.merged_learners()
        away = sum(m.weight for name, m in self.memory.awaited().items() if name not in there)
        return held / (held + away) if held else 1.0

    def step_share(self) -> float:
        """The outer step's factor: `share` of one learner alone or by `participation`, else 1."""
        alone = len(self.merged_learners()) == 1
        return self.share() if alone or self.settings.outer.participation else 1.0

    def position(self, *, without_sum: bool) -> int:
        """Lowest sequence that the next record leaves unresolved."""
        open_seqs = [one.stream_seq for one in self.waiting.values()]
        open_seqs += [one.stream_seq for one in self.merged] if without_sum else []
        return min(open_seqs, default=self.read_seq + 1)

    def resolved(self) -> Iterator[tuple[UpdateId, int, str | None]]:
        """Every update that the record of a version answers; no reason where it is merged."""
        for one in self.merged:
            yield update_id(one.manifest), one.stream_seq, None
        for other in self.refused:
            yield update_id(other.manifest), other.stream_seq, other.reason

    # Changes

    def discard_sum(self) -> None:
        """Let the merged updates wait again, as if they had not been read."""
        for one in self.merged:
            self.waiting[update_id(one.manifest)] = WaitingUpdate(
                one.manifest, one.stream_seq, one.announced_at_s, one.credit
            )
        self.merged = []

    def refuse(self, manifest: wire.Manifest, stream_seq: int, reason: str) -> None:
        """Reject an update in the next record."""
        self.waiting.pop(update_id(manifest), None)
        self.refused.append(DueRejection(manifest, stream_seq, reason))

    def charge(self, manifest: wire.Manifest, stream_seq: int) -> None:
        """Take a rejection's cost from its sender's allowance, unless an earlier life took it."""
        if stream_seq > self.known_seq:
            left, at_s = self.memory.allowances[manifest.learner]
            self.memory.allowances[manifest.learner] = (left - numbers.REJECTION + 1, at_s)


def update_id(manifest: wire.Manifest) -> UpdateId:
    """The update that a manifest announces."""
    return UpdateId(manifest.learner, manifest.incarnation, manifest.seq)


def begin(layout: Layout, settings: RunSettings, record: wire.Record, at_s: float) -> OwnerLife:
    """The life that begins from a record; times of a maker whose clock was ahead are now."""
    memory = PolicyMemory.of(record.policy)
    memory.closed_at_s = min(memory.closed_at_s, at_s)
    memory.stopping_at_s = min(memory.stopping_at_s, at_s)
    return OwnerLife(
        layout=layout,
        epoch=record.epoch,
        fragment=record.fragment,
        settings=settings,
        memory=memory,
        version=record.version,
        view_digest=record.view_digest,
        clock=record.global_step,
        final=record.final,
        read_seq=record.position - 1,
        known_seq=record.policy.seen_seq,
        began_at_s=at_s,
        now_s=at_s,
    )
