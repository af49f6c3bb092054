"""The learners that a machine knows, counts over all of them, and liveness from heartbeats.

Each change of a member updates the counts.

A learner is dead if it was silent for long while other learners were heard; if no learner is heard,
the bus is silent, and no learner counts as dead. Only a learner's newest incarnation can be live,
and only by that incarnation's heartbeats: a superseded process may send heartbeats for ever.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from diloco.aggregator.core.immutable_collections import PersistentMap, Ranked, Tally

# Rounds stop waiting for a learner that had no update in this many rounds in a row.
PATIENCE = 3
# The number of incarnations of a learner that are remembered: here, when each was heard; in
# `memory.py`, the mark of each. An update of an older incarnation gets a verdict while the memory
# has a credit for it; if it is announced again later, it is ignored.
LIVES = 4
# The fewest other learners whose values have a median.
LEAST_OTHERS = 2
# A limit for claims, so that sums and products of absurd ones stay finite.
GREATEST = 1e150


class Member(NamedTuple):
    """One learner's state in the machine of a fragment."""

    incarnation: int
    # False once it has left, or has been silent for too long. True from its join on, as it can
    # contribute to the open round.
    live: bool = True
    # It left on purpose; heartbeats still on their way do not revive it.
    left: bool = False
    # Its last update of this fragment is announced, so that the run's last round need not wait.
    final: bool = False
    # Moving averages of what its updates claim; 0 before the first. Only medians over several
    # learners are used.
    step_time_s: float = 0.0
    tokens_per_step: float = 0.0
    # Moving average of the weights that its updates are credited with; 0 before the first.
    weight: float = 0.0
    # When its last update, or its first join, was stored (steps are credited for the time since
    # then), and when the owner read it, by the owner's clock.
    heard_at_s: float = 0.0
    read_at_s: float = 0.0
    # Steps a second that it takes (0: unknown), and the part, in seconds, of the time before
    # its last update that this update's work did not need. The next update may claim that time:
    # after an outage the work comes in two updates, the first of which claims little.
    speed: float = 0.0
    unused_s: float = 0.0
    # Norm per credited step of its last merged update, as merged; 0 before the first.
    norm: float = 0.0
    # Rounds in a row, up to `PATIENCE`, that merged updates, but none of this learner.
    missed: int = 0
    # +1 for each update rejected as an offence, -1 for each merged update, never below 0; a release
    # sets it to 0.
    offences: int = 0
    # Its newest incarnations, at most `LIVES`, that do not hold the fragment's module. Of an older
    # incarnation an update may still be read again.
    not_holding: tuple[int, ...] = ()

    @property
    def holds(self) -> bool:
        """True if its newest incarnation holds the fragment's module."""
        return self.incarnation not in self.not_holding


class _Contribution(NamedTuple):
    """One member's contribution to the counts in `_FleetCounts`; None and False: none."""

    present: bool = False
    awaited: bool = False
    unfinished: bool = False
    step_s: float | None = None
    rate: float | None = None
    tokens_rate: float | None = None
    norm: float | None = None


_ABSENT = _Contribution()


class _Known(NamedTuple):
    """A member, and the member's contribution to the counts in `_FleetCounts`."""

    member: Member
    contribution: _Contribution


class _FleetCounts(NamedTuple):
    """Counts over all members: tallies of names, and ranked values."""

    present: Tally[str] = Tally()
    awaited: Tally[str] = Tally()
    unfinished: Tally[str] = Tally()
    steps_s: Ranked = Ranked()
    rates: Ranked = Ranked()
    tokens_rates: Ranked = Ranked()
    norms: Ranked = Ranked()

    def swap(self, name: str, old: _Contribution, new: _Contribution) -> "_FleetCounts":
        if old == new:
            return self
        return _FleetCounts(
            _changed(self.present, name, old.present, new.present),
            _changed(self.awaited, name, old.awaited, new.awaited),
            _changed(self.unfinished, name, old.unfinished, new.unfinished),
            self.steps_s.swap(old.step_s, new.step_s),
            self.rates.swap(old.rate, new.rate),
            self.tokens_rates.swap(old.tokens_rate, new.tokens_rate),
            self.norms.swap(old.norm, new.norm),
        )


class Members(Mapping[str, Member]):
    """The learners that the machine of a fragment knows, by name, in the order of first joins.

    A learner that is live and not quarantined is *present*.

    Args:
        members: the members, by learner's name.
        shut_out: the quarantined learners, whether members or not.
        norms: norm per credited step of each learner's newest update merged in the open round; it
            replaces `Member.norm`, which is from earlier rounds, in medians.
    """

    __slots__ = ("_counts", "_members", "_norms", "_shut_out")

    def __init__(
        self,
        members: Mapping[str, Member] = MappingProxyType({}),
        shut_out: frozenset[str] = frozenset(),
        norms: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._shut_out = shut_out
        self._norms = PersistentMap(norms)
        known = {
            name: _Known(one, self._contribution_of(name, one)) for name, one in members.items()
        }
        self._members = PersistentMap(known)
        present = {
            name: one.contribution for name, one in known.items() if one.contribution.present
        }
        contributions = present.values()
        self._counts = _FleetCounts(
            Tally(present),
            Tally(name for name, contribution in present.items() if contribution.awaited),
            Tally(name for name, contribution in present.items() if contribution.unfinished),
            Ranked(
                contribution.step_s
                for contribution in contributions
                if contribution.step_s is not None
            ),
            Ranked(
                contribution.rate for contribution in contributions if contribution.rate is not None
            ),
            Ranked(
                contribution.tokens_rate
                for contribution in contributions
                if contribution.tokens_rate is not None
            ),
            Ranked(
                contribution.norm for contribution in contributions if contribution.norm is not None
            ),
        )

    def put(self, name: str, member: Member) -> "Members":
        """Returns the members with a learner's state replaced."""
        known = _Known(member, self._contribution_of(name, member))
        counts = self._counts.swap(name, self._own(name), known.contribution)
        return self._made(self._members.put(name, known), self._norms, counts)

    def merged(self, name: str, norm: float) -> "Members":
        """Returns the members after the open round has merged an update with this norm per step."""
        norms, known = self._norms.put(name, norm), self._members.find(name)
        if known is None or not known.contribution.present:
            return self._made(self._members, norms, self._counts)
        after = known._replace(contribution=known.contribution._replace(norm=_known(norm)))
        counts = self._counts.swap(name, known.contribution, after.contribution)
        return self._made(self._members.put(name, after), norms, counts)

    def but(
        self,
        members: Mapping[str, Member] | None = None,
        shut_out: frozenset[str] | None = None,
        norms: Mapping[str, float] | None = None,
    ) -> "Members":
        """Returns the members with some arguments replaced, in time proportional to the fleet."""
        return Members(
            self if members is None else members,
            self._shut_out if shut_out is None else shut_out,
            self._norms if norms is None else norms,
        )

    @property
    def present(self) -> Tally[str]:
        """The learners that are live and not quarantined, each counted once."""
        return self._counts.present

    @property
    def awaited(self) -> Tally[str]:
        """The learners that a round waits for: present, with an update in recent rounds.

        Heartbeats alone do not count: a learner that sends nothing else would delay every round.
        """
        return self._counts.awaited

    @property
    def unfinished(self) -> Tally[str]:
        """The present learners that have not announced their last update."""
        return self._counts.unfinished

    def usual_step_s(self) -> float:
        """Returns the lower median of the step times of present learners; 0 if none is known."""
        # A step time is a claim: if the slowest counted, one learner could stop the run. The lower
        # of two middle values, so the faster one's in a fleet of two.
        return self._counts.steps_s.lower_median() or 0.0

    def fastest_step_s(self) -> float:
        """Returns the least step time that present learners report, at least half the usual one.

        Returns 0 if no learner reports one.
        """
        # With the median, faster learners would wait for a round with each update. With the least
        # claim alone, a claim near 0 would remove all pace, and rounds of one learner would race;
        # with the bound one learner can at most halve the interval.
        return max(self._counts.steps_s.least() or 0.0, self.usual_step_s() / 2)

    def others_rate(self, name: str) -> float | None:
        """Returns the upper median of the steps per second of present learners other than `name`.

        A learner's rate is the claimed average or the measured one, whichever is higher. None if
        fewer than `LEAST_OTHERS` other learners have a rate.
        """
        return self._counts.rates.upper_median(self._own(name).rate, LEAST_OTHERS)

    def others_tokens_rate(self, name: str) -> float | None:
        """Returns, as `others_rate`, the upper median of steps per second x (tokens per step)^2."""
        return self._counts.tokens_rates.upper_median(self._own(name).tokens_rate, LEAST_OTHERS)

    def others_norm(self, name: str) -> float | None:
        """Returns, as `others_rate`, the upper median of `Member.norm`, or of newer norms."""
        return self._counts.norms.upper_median(self._own(name).norm, LEAST_OTHERS)

    def unordered(self) -> Iterator[Member]:
        """Yields the members' states in any order, which is faster."""
        return (known.member for known in self._members.unordered())

    def __getitem__(self, name: str) -> Member:
        """Returns the state of a learner."""
        return self._members[name].member

    def __contains__(self, name: object) -> bool:
        """True if a learner of this name is known."""
        return name in self._members

    def __len__(self) -> int:
        """Returns the number of known learners."""
        return len(self._members)

    def __iter__(self) -> Iterator[str]:
        """Yields the learners' names, in the order of first joins."""
        return iter(self._members)

    def _own(self, name: str) -> _Contribution:
        known = self._members.find(name)
        return _ABSENT if known is None else known.contribution

    def _contribution_of(self, name: str, member: Member) -> _Contribution:
        if not member.live or name in self._shut_out:
            return _ABSENT
        rate = min(1 / member.step_time_s, GREATEST) if member.step_time_s > 1 / GREATEST else 0.0
        # The measured speed fades slowly, so that a machine that is busy for a while does not lower
        # the fleet's median.
        rate = max(rate, member.speed)
        tokens_rate = rate * min(member.tokens_per_step, GREATEST) ** 2
        norm = self._norms.find(name)
        return _Contribution(
            present=True,
            awaited=member.missed < PATIENCE,
            unfinished=not member.final,
            step_s=_known(member.step_time_s),
            rate=_known(rate),
            tokens_rate=_known(tokens_rate),
            norm=_known(member.norm if norm is None else norm),
        )

    def _made(
        self,
        members: PersistentMap[str, _Known],
        norms: PersistentMap[str, float],
        counts: _FleetCounts,
    ) -> "Members":
        made = object.__new__(Members)
        made._members, made._norms, made._counts = members, norms, counts
        made._shut_out = self._shut_out
        return made


def _known(value: float) -> float | None:
    """Returns the value; None if it is 0, which stands for unknown."""
    return value if value > 0 else None


def _changed(names: Tally[str], name: str, before: bool, after: bool) -> Tally[str]:
    return names if before == after else names.more(name, 1 if after else -1)


class LastHeard:
    """When an aggregator received signs of life from each learner, for all fragments.

    Heartbeats, joins and updates are signs of life. Times are in seconds by the aggregator's clock.

    Args:
        now_s: when the aggregator begins to listen.
    """

    def __init__(self, now_s: float) -> None:
        self._newest_s = now_s
        # Silence counts from this time at the earliest.
        self._since_s = now_s
        self._heard_at_s: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._signs: dict[tuple[int, str], tuple[int, float]] = {}

    def beat(self, learner: str, incarnation: int, now_s: float, timeout_s: float) -> None:
        """Notes a heartbeat; `timeout_s` is the longest silence of a live learner."""
        if now_s - self._newest_s > timeout_s:
            # After a silence of all learners, each has `timeout_s` again to be heard.
            self._since_s = now_s
        self._newest_s = now_s
        self._hear(learner, incarnation, now_s)

    @property
    def newest_s(self) -> float:
        """The time of the newest heartbeat of any learner, or when listening began."""
        return self._newest_s

    def silent_s(self, learner: str, incarnation: int) -> float:
        """Returns the seconds from an incarnation's last sign of life to the newest heartbeat.

        The newest heartbeat is that of any learner. Signs of life of the learner's later
        incarnations count too.
        """
        lives = self._heard_at_s[learner]
        heard = [at_s for life, at_s in lives.items() if life >= incarnation]
        return self._newest_s - max([self._since_s, *heard])

    def is_live(
        self, fragment: int, learner: str, member: Member, now_s: float, timeout_s: float
    ) -> bool:
        """True if a member of a fragment's machine counts as live.

        It does if the seconds from its last sign of life to any learner's last heartbeat are less
        than `timeout_s`. A new incarnation or update in `member` is a sign of life at `now_s`.
        """
        # Joins and updates are signs of life too, at the time when we see them, as the server's
        # clock may differ from ours by hours. A learner that was never heard counts from its join,
        # or from when we began to listen.
        key, sign = (fragment, learner), (member.incarnation, member.heard_at_s)
        if self._signs.get(key) != sign:
            self._signs[key] = sign
            self._hear(learner, member.incarnation, now_s)
        heard_at_s = self._heard_at_s[learner].get(member.incarnation, self._since_s)
        return self._newest_s - max(heard_at_s, self._since_s) < timeout_s

    def _hear(self, learner: str, incarnation: int, now_s: float) -> None:
        lives = self._heard_at_s[learner]
        # The newest last, so that the one silent for longest is forgotten. Incarnations that a
        # learner invents displace only its own.
        lives.pop(incarnation, None)
        lives[incarnation] = now_s
        if len(lives) > LIVES:
            del lives[next(iter(lives))]
