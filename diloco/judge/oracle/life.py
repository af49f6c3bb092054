"""One life of a fragment's owner, as the tape shows it: its state between two records.

A life begins from a record (observation `resumed`) and reads the tape from that record's position
on. All other events are recorded as observations in the records that it makes.
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
    """An announced update that is neither in the round's sum nor rejected.

    Attributes:
        announced_at_s: when the owner read the announcement, in seconds since the epoch.
        passed: True if rounds do not wait for it any longer.
        broke: how often adding it to the sum has failed.
    """

    manifest: wire.Manifest
    stream_seq: int
    announced_at_s: float
    credit: OracleCredit
    passed: bool = False
    broke: int = 0


class MergedUpdate(NamedTuple):
    """An update in the round's sum, its observed norm, and the factors that the rules give it."""

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
    """The record that the rules demand now.

    Attributes:
        reason: why it is made now, such as "complete" or "deadline".
        final: whether the fragment's last version is made then.
        at_s: when the round closes, in seconds since the epoch.
    """

    what: Literal["version", "verdict"]
    reason: str
    final: bool
    at_s: float


class RuleBreach(NamedTuple):
    """A field of a record that breaks a rule; `Violation` adds the record's stream sequence."""

    rule: str
    field: str
    expected: object
    found: object


Phase = Literal["idle", "open", "grace", "cut"]


@dataclass
class OwnerLife:
    """The state of an aggregator that owns a fragment, as the oracle recomputes it.

    Times are seconds since the epoch by the owner's clock.

    Attributes:
        settings: the settings in force.
        memory: its learners and its moving averages.
        clock: the global step of the newest version.
        final: True once the fragment's last version is made.
        read_seq: the last stream sequence that the owner has read.
        known_seq: the last one that an earlier owner counted in averages and allowances.
        again: by learner, the allowance while this owner reads messages up to `known_seq` again.
        now_s: the time of the last event.
        storing: the kind of the record that is being stored; "" if none is.
        cut: reason and finality of a round that is being cut; None if none is. The owner asks the
            stream's leader for the fragment's last update when it has read the tape up to
            `asked_seq`; it waits for updates up to the answer, `cut_seq`, which came at `cut_at_s`
            (0: not yet).
        waiting: announced updates without a verdict.
        merged: updates in the round's sum.
        refused: updates that the next record rejects.
        due: the record that must be made now.
        breaches: rules that observations broke since the last record.
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
        """Whether the fragment holds averaged state."""
        return self.layout.fragments[self.fragment].averaged

    def breach(self, rule: str, name: str, expected: object, found: object) -> None:
        """Notes that a value `found` in the record breaks a rule, which demands `expected`."""
        self.breaches.append(RuleBreach(rule, name, expected, found))

    # Questions

    def unread(self) -> list[WaitingUpdate]:
        """Returns the updates that the round waits for; of a cut round, those up to the cut."""
        rest = [one for one in self.waiting.values() if not one.passed]
        if self.cut is None or not self.cut_at_s:
            return rest
        return [one for one in rest if one.stream_seq <= self.cut_seq]

    def merged_learners(self) -> set[str]:
        """Returns the learners that have an update in the round's sum."""
        return {one.manifest.learner for one in self.merged}

    def is_under_way(self, update: UpdateId) -> bool:
        """True if an update waits, or the next record answers it."""
        return update in self.waiting or any(update == found for found, *_ in self.resolved())

    def has_unresolved(self, learner: str, incarnation: int) -> bool:
        """True if an update of a learner's life waits, or the next record answers one."""
        under_way = (*self.waiting, *(found for found, *_ in self.resolved()))
        return any(found[:2] == (learner, incarnation) for found in under_way)

    def announcers(self) -> set[str]:
        """Returns the learners that have announced an update for the round."""
        return self.merged_learners() | {one.manifest.learner for one in self.unread()}

    def answered(self) -> set[str]:
        """Returns the learners that announce nothing more before the next record.

        They have an update in the round's sum, or one of their newest life that is rejected.
        """
        members = self.memory.members
        return self.merged_learners() | {
            one.manifest.learner
            for one in self.refused
            if one.manifest.learner in members
            and members[one.manifest.learner].incarnation == one.manifest.incarnation
        }

    def norms(self) -> dict[str, float]:
        """Returns, by live learner without quarantine, its norm per credited step.

        It is that of its update in this round, else of its last merged update; 0 if there is none.
        """
        found = {name: member.norm for name, member in self.memory.waited_for().items()}
        return found | {n: norm for n, norm in self.round_norms().items() if n in found}

    def round_norms(self) -> dict[str, float]:
        """Returns, by learner, the clipped norm per credited step of its merged update."""
        return {one.manifest.learner: one.clip * one.norm / one.credit.steps for one in self.merged}

    def credits(self, *, verdict_only: bool) -> dict[UpdateId, OracleCredit]:
        """Returns the credits of all updates that the next record does not answer.

        `verdict_only`: the next record has verdicts alone, so it answers no merged update.
        """
        found = dict(self.memory.credits) if self.read_seq < self.known_seq else {}
        found |= {update: one.credit for update, one in self.waiting.items()}
        if verdict_only:
            found |= {update_id(one.manifest): one.credit for one in self.merged}
        return found

    def next_clock(self) -> int:
        """Returns the global step of the next version, ignoring the run's end."""
        return numbers.clock_after(self.settings, self.fragment, self.clock)

    def may_follow(self) -> bool:
        """True if the fragment may make another version.

        It may if that version is within the run's steps; or, once the run stops, while the
        fragment's last version is not made.
        """
        if self.final:
            return False
        return bool(self.memory.stopping_at_s) or self.next_clock() <= self.settings.run.steps

    def share(self) -> float:
        """Returns the round's share of the fleet's weight, above 0 and at most 1.

        The fleet's weight is that of the round's updates, and that of the awaited learners without
        one.
        """
        held = sum(one.weight for one in self.merged)
        there = self.merged_learners()
        away = sum(m.weight for name, m in self.memory.awaited().items() if name not in there)
        return held / (held + away) if held else 1.0

    def step_share(self) -> float:
        """Returns the factor of the outer learning rate.

        It is `share` if one learner is merged, or for `outer.participation`; else 1. With centered
        clipping it grows from six learners on, up to eight.
        """
        there = len(self.merged_learners())
        part = self.share() if there == 1 or self.settings.outer.participation else 1.0
        return part * numbers.growth(there) if self.settings.robust and not self.averaged else part

    def position(self, *, verdict_only: bool) -> int:
        """Returns the lowest stream sequence of an update that the next record does not answer.

        Without such an update it is the sequence after the last that was read. `verdict_only`: the
        next record has verdicts alone, so it answers no merged update.
        """
        open_seqs = [one.stream_seq for one in self.waiting.values()]
        open_seqs += [one.stream_seq for one in self.merged] if verdict_only else []
        return min(open_seqs, default=self.read_seq + 1)

    def resolved(self) -> Iterator[tuple[UpdateId, int, str | None]]:
        """Yields (update, stream sequence, reason) of each update that a version's record answers.

        The reason is None for a merged update.
        """
        for one in self.merged:
            yield update_id(one.manifest), one.stream_seq, None
        for other in self.refused:
            yield update_id(other.manifest), other.stream_seq, other.reason

    # Changes

    def discard_sum(self) -> None:
        """Moves the merged updates back to those that wait."""
        for one in self.merged:
            self.waiting[update_id(one.manifest)] = WaitingUpdate(
                one.manifest, one.stream_seq, one.announced_at_s, one.credit
            )
        self.merged = []

    def refuse(self, manifest: wire.Manifest, stream_seq: int, reason: str) -> None:
        """Rejects an update in the next record."""
        self.waiting.pop(update_id(manifest), None)
        self.refused.append(DueRejection(manifest, stream_seq, reason))

    def charge(self, manifest: wire.Manifest, stream_seq: int) -> None:
        """Takes a rejection's price from its sender's allowance, unless an earlier owner did."""
        if stream_seq > self.known_seq:
            left, at_s = self.memory.allowances[manifest.learner]
            self.memory.allowances[manifest.learner] = (left - numbers.REJECTION + 1, at_s)


def update_id(manifest: wire.Manifest) -> UpdateId:
    """Returns the identity of the update that a manifest announces."""
    return UpdateId(manifest.learner, manifest.incarnation, manifest.seq)


def begin(layout: Layout, settings: RunSettings, record: wire.Record, at_s: float) -> OwnerLife:
    """Begins a life from a record; times later than `at_s` (a fast clock's) become `at_s`."""
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
