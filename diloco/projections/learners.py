"""Everybody who has joined a run, as its tape has it."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median

from diloco.common import wire
from diloco.common.tape import Entry, Item, RunContext, read_tape
from diloco.projections.trend import Point, Trend, points_of

# Of a learner's updates, so many are looked back on.
RECENT = 16
# Newest rounds of several that are kept, for who looks into their shards.
ROUNDS = 8


@dataclass
class Learner:
    """One learner, from what the tape still has.

    Attributes:
        state: "live", "silent" (its fragments' owners wait for it no more), "left", "joined" (no
            record knows of its newest life yet), or "quarantined"; `why` says what for.
        incarnation: its newest life, of `lives` that the tape knows.
        offences: the most that any fragment counts; see `bounds.quarantine_offences`.
        tokens: of what was merged, on the mean over the fragments.
        reasons: how many updates were rejected, by reason.
        less: how many of those merged count for less than they claim, by what: "steps" that there
            was no time for, "weight" far above the others', "norm" far above the others'.
        loss: median of its last updates that were merged; `norms`: of their norms, each relative to
            the median of its round; None before any was.
        heard_at_s: when its last join or update was stored, in seconds since the epoch.
        trend: its merged updates, spread over the run.
        cosine: of its newest updates to the others' in their rounds, where their shards were read.
    """

    name: str
    state: str = "live"
    why: str = ""
    host: str = ""
    incarnation: int = 0
    lives: int = 0
    merged: int = 0
    rejected: int = 0
    offences: int = 0
    tokens: int = 0
    step_time_s: float = 0.0
    loss: float | None = None
    norms: float | None = None
    heard_at_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    less: Counter[str] = field(default_factory=Counter)
    trend: list[Point] = field(default_factory=list)
    cosine: float | None = None


class Roster:
    """The learners of a run, message by message; holds no more than there are learners.

    Args:
        fragments: P, of the run.
    """

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._known: dict[str, Learner] = {}
        self._left: set[tuple[str, int]] = set()
        self._words: dict[str, wire.Quarantine] = {}
        self._newest: dict[int, wire.PolicyState] = {}
        self._recent: dict[str, deque[Point]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._trends: dict[str, Trend] = defaultdict(Trend)
        self.rounds: deque[wire.Record] = deque(maxlen=ROUNDS)

    def take(self, item: Item) -> None:
        """Note what comes next on the tape."""
        match item:
            case Entry(body=wire.Join() as join):
                one = self._learner(join.learner)
                one.lives, one.host, one.incarnation = one.lives + 1, join.host, item.seq
            case Entry(body=wire.Leave() as leave) if not leave.fragments:
                self._left.add((leave.learner, leave.incarnation))
            case Entry(body=wire.Quarantine() as word):
                self._words[word.learner] = word
            case Entry(body=wire.Record() as record):
                self._note(record)

    def learners(self) -> list[Learner]:
        """Everybody so far, by name."""
        found = {name: replace(one) for name, one in self._known.items()}
        for one in found.values():
            one.tokens //= max(1, self._fragments)
            if recent := self._recent.get(one.name):
                one.loss = median(point.loss for point in recent)
                one.norms = median(point.norm for point in recent)
                one.trend = [*self._trends[one.name].points]
        self._remember(found)
        for name, word in self._words.items():
            if name in found:
                said = ("quarantined", word.reason) if word.active else ("live", "")
                found[name].state, found[name].why = said
        for one in found.values():
            if one.state == "live":
                one.state = self._state(one)
        return [found[name] for name in sorted(found)]

    def _learner(self, name: str) -> Learner:
        return self._known.setdefault(name, Learner(name))

    def _note(self, record: wire.Record) -> None:
        if len(record.inputs) > 2:
            self.rounds.append(record)
        for name, point in points_of(record):
            self._recent[name].append(point)
            self._trends[name].add(point)
        for taken in record.inputs:
            one = self._learner(taken.learner)
            one.merged += 1
            one.tokens += taken.tokens
            one.less.update(taken.less_for)
        for refused in record.rejected:
            one = self._learner(refused.learner)
            one.rejected += 1
            one.reasons[refused.reason] += 1
        self._newest[record.fragment] = record.policy

    def _remember(self, found: dict[str, Learner]) -> None:
        """What the machines know of the members after their newest records."""
        for memory in self._newest.values():
            for member in memory.members:
                one = found.setdefault(member.learner, Learner(member.learner))
                one.incarnation = max(one.incarnation, member.incarnation)
                one.offences = max(one.offences, member.offences)
                one.step_time_s = max(one.step_time_s, member.step_time_s)
                one.heard_at_s = max(one.heard_at_s, member.heard_at_s)
            for name in memory.quarantined:
                # The word itself may be trimmed from the tape by now; a later one overrules this.
                found.setdefault(name, Learner(name)).state = "quarantined"

    def _members(self, one: Learner) -> Iterator[wire.MemberState]:
        """What each fragment's machine knows of a learner's newest life."""
        for memory in self._newest.values():
            for member in memory.members:
                if (member.learner, member.incarnation) == (one.name, one.incarnation):
                    yield member

    def _state(self, one: Learner) -> str:
        """What a learner is that is not shut out."""
        if (one.name, one.incarnation) in self._left:
            return "left"
        current = [*self._members(one)]
        if current and all(member.left for member in current):
            return "left"
        if not current:
            return "joined"
        return "live" if any(member.live for member in current) else "silent"


async def read_roster(context: RunContext) -> Roster:
    """All that the tape says of a run's learners up to now.

    Raises:
        BusError, StoreUnavailableError: bus or store are away.
    """
    roster = Roster(len(context.layout.fragments))
    async for item in read_tape(context):
        roster.take(item)
    return roster


async def read_learners(context: RunContext) -> list[Learner]:
    """Everybody who has joined a run up to now, by name; errors as `read_roster`."""
    return (await read_roster(context)).learners()
