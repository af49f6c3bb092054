"""The memory of a fragment's owner on learners: read from records, updated, compared."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diloco.common.protocol import wire
from diloco.common.protocol.reasons import is_offence
from diloco.judge.oracle import numbers
from diloco.judge.oracle.numbers import near

# The number of a learner's newest lives whose marks are kept.
LIVES = 4


class UpdateId(NamedTuple):
    """The identity of one update of a fragment."""

    learner: str
    incarnation: int
    seq: int


class OracleCredit(NamedTuple):
    """The steps, tokens and weight that an update counts for."""

    steps: int
    tokens: int
    weight: float


class MemberRecord(NamedTuple):
    """The state of a learner; the fields are those of `wire.MemberState`."""

    incarnation: int
    live: bool = True
    left: bool = False
    final: bool = False
    step_time_s: float = 0.0
    tokens_per_step: float = 0.0
    weight: float = 0.0
    heard_at_s: float = 0.0
    read_at_s: float = 0.0
    speed: float = 0.0
    unused_s: float = 0.0
    norm: float = 0.0
    missed: int = 0
    offences: int = 0
    not_holding: tuple[int, ...] = ()


@dataclass
class PolicyMemory:
    """The contents of a `wire.PolicyState`, as dictionaries instead of lists.

    Attributes:
        members: by learner.
        marks: (learner, incarnation) -> (number of the newest answered update, its stream
            sequence).
        allowances: by learner: the number of updates it may announce, and the time this holds for.
    """

    members: dict[str, MemberRecord]
    marks: dict[tuple[str, int], tuple[int, int]]
    quarantined: set[str]
    allowances: dict[str, tuple[float, float]]
    seen_seq: int
    floor: int
    settings_seq: int
    closed_at_s: float
    stopping_at_s: float
    quorum_s: float
    sync_s: float
    credits: dict[UpdateId, OracleCredit]

    @classmethod
    def of(cls, policy: wire.PolicyState) -> "PolicyMemory":
        """Returns the memory that a record's `policy` has."""
        return cls(
            members={
                m.learner: MemberRecord(
                    m.incarnation, m.live, m.left, m.final, m.step_time_s, m.tokens_per_step,
                    m.weight, m.heard_at_s, m.read_at_s, m.speed, m.unused_s, m.norm, m.missed,
                    m.offences, m.not_holding,
                )
                for m in policy.members
            },
            marks={(m.learner, m.incarnation): (m.seq, m.stream_seq) for m in policy.marks},
            quarantined=set(policy.quarantined),
            allowances={a.learner: (a.left, a.at_s) for a in policy.allowances},
            seen_seq=policy.seen_seq,
            floor=policy.floor,
            settings_seq=policy.settings_seq,
            closed_at_s=policy.closed_at_s,
            stopping_at_s=policy.stopping_at_s,
            quorum_s=policy.quorum_s,
            sync_s=policy.sync_s,
            credits={
                UpdateId(c.learner, c.incarnation, c.seq): OracleCredit(c.steps, c.tokens, c.weight)
                for c in policy.credits
            },
        )  # fmt: skip

    def copy(self) -> "PolicyMemory":
        """Returns a copy that can be changed independently."""
        return replace(
            self,
            members=dict(self.members),
            marks=dict(self.marks),
            quarantined=set(self.quarantined),
            allowances=dict(self.allowances),
            credits=dict(self.credits),
        )

    def waited_for(self) -> dict[str, MemberRecord]:
        """Returns live learners without quarantine; a run's end and lockstep wait for these."""
        return {
            name: member
            for name, member in self.members.items()
            if member.live and name not in self.quarantined
        }

    def awaited(self) -> dict[str, MemberRecord]:
        """Returns the learners that rounds wait for, with work in one of the last three rounds."""
        return {
            name: member
            for name, member in self.waited_for().items()
            if member.missed < numbers.MISSES
        }

    def took_part(self, norms: Mapping[str, float]) -> None:
        """Notes that a round has made a version.

        Args:
            norms: by learner in the round, its norm per credited step.
        """
        here = self.waited_for()
        for name, member in self.members.items():
            if name in norms:
                self.change(name, norm=norms[name], missed=0)
            elif name in here:
                self.change(name, missed=min(numbers.MISSES, member.missed + 1))

    def step_times(self) -> list[float]:
        """Returns the step times of `waited_for()`, in seconds; 0 for a learner without one."""
        return [member.step_time_s for member in self.waited_for().values()]

    def change(self, learner: str, **fields: Any) -> None:
        """Sets these fields of a learner's `MemberRecord`."""
        self.members[learner] = self.members[learner]._replace(**fields)

    def answered(self, update: UpdateId) -> bool:
        """True if a record has answered an update, or its life is older than those with a mark."""
        if update[:2] in self.marks:
            return self.resolved(update)
        if update in self.credits:
            # Read before, but in no record yet: its answer is still to come.
            return False
        joined = self._joined(update.learner)
        lives = [
            life
            for learner, life in self.marks
            if learner == update.learner and (life > joined) == (update.incarnation > joined)
        ]
        return len(lives) >= LIVES and update.incarnation < min(lives)

    def resolved(self, update: UpdateId) -> bool:
        """True if the mark of an update's life covers the update."""
        mark = self.marks.get(update[:2])
        return mark is not None and update.seq <= mark[0]

    def _joined(self, learner: str) -> int:
        member = self.members.get(learner)
        return member.incarnation if member else 0

    def resolve(self, update: UpdateId, stream_seq: int, reason: str | None) -> None:
        """Notes that a record answers an update: merged (`reason` is None), or rejected."""
        self.marks[update[:2]] = (update.seq, stream_seq)
        # All earlier updates of that life are resolved too, even if the life is soon forgotten.
        for owed in [one for one in self.credits if one[:2] == update[:2]]:
            if owed.seq <= update.seq:
                del self.credits[owed]
        member = self.members.get(update.learner)
        if member is None or (reason is not None and not is_offence(reason)):
            return
        offences = member.offences + (-1 if reason is None else 1)
        self.members[update.learner] = member._replace(offences=max(0, offences))

    def forget_old_lives(self) -> None:
        """Keeps the marks of each learner's `LIVES` newest lives.

        Lives newer than its newest known join are counted separately.
        """
        kept: dict[tuple[str, bool], list[int]] = {}
        for learner, life in self.marks:
            kept.setdefault((learner, life > self._joined(learner)), []).append(life)
        for (learner, _), lives in kept.items():
            for life in sorted(lives)[:-LIVES]:
                del self.marks[learner, life]

    def differences(self, found: "PolicyMemory") -> Iterator[tuple[str, Any, Any]]:
        """Yields (field, expected, found) where `found`, a record's memory, differs from this."""
        for name in ("seen_seq", "floor", "settings_seq", "quarantined", "marks"):
            expected, said = getattr(self, name), getattr(found, name)
            if expected != said:
                yield name, expected, said
        for name in ("closed_at_s", "stopping_at_s", "quorum_s", "sync_s"):
            expected, said = getattr(self, name), getattr(found, name)
            if not near(expected, said):
                yield name, expected, said
        yield from _each("credits", self.credits, found.credits)
        yield from _each("members", self.members, found.members)
        yield from _each("allowances", self.allowances, found.allowances)


def _each(
    name: str, expected: Mapping[Any, tuple[Any, ...]], found: Mapping[Any, tuple[Any, ...]]
) -> Iterator[tuple[str, Any, Any]]:
    for learner in expected.keys() | found.keys():
        wanted, said = expected.get(learner), found.get(learner)
        if wanted is None or said is None or not _same(wanted, said):
            yield f"{name}[{learner}]", wanted, said


def _same(expected: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    return len(expected) == len(found) and all(
        said == wanted if isinstance(wanted, tuple) else near(wanted, said)
        for wanted, said in zip(expected, found, strict=True)
    )
