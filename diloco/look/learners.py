"""`diloco learners`: who takes part in a run, what became of what they sent, who is shut out."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from rich.table import Table
from rich.text import Text

from diloco.aggregator.quarantine import quarantine
from diloco.check.history import History, read_history
from diloco.cli.opening import open_run, operator_context
from diloco.cli.units import age
from diloco.common.errors import ConfigError, RunMismatchError

REASONS = 3
STYLES = {"live": "green", "quarantined": "bold red", "silent": "yellow", "left": "dim"}


@dataclass
class Learner:
    """One learner, from what the tape still has.

    Attributes:
        state: "live", "silent" (its fragments' owners wait for it no more), "left", or
            "quarantined"; `why` says what for.
        incarnation: its newest life, of `lives` that the tape knows.
        offences: the most that any fragment counts; see `bounds.quarantine_offences`.
        tokens: of what was merged, on the mean over the fragments.
        reasons: how many updates were rejected, by reason.
        heard_at_s: when its last join or update was stored, in seconds since the epoch.
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
    heard_at_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


async def look(target: str) -> list[Learner]:
    """Everybody who has joined a run, by name.

    Raises:
        ConfigError, BusError, StoreError: RUN cannot be opened or read.
    """
    async with open_run(target) as opened:
        return survey(await read_history(opened.context))


def survey(history: History) -> list[Learner]:
    """Everybody who has joined, by name."""
    found: dict[str, Learner] = {}
    for seq, join in history.joins:
        one = found.setdefault(join.learner, Learner(join.learner))
        one.lives, one.host, one.incarnation = one.lives + 1, join.host, seq
    for record in history.all_records():
        for taken in record.inputs:
            one = found.setdefault(taken.learner, Learner(taken.learner))
            one.merged += 1
            one.tokens += taken.tokens
        for refused in record.rejected:
            one = found.setdefault(refused.learner, Learner(refused.learner))
            one.rejected += 1
            one.reasons[refused.reason] += 1
    for one in found.values():
        one.tokens //= max(1, len(history.layout.fragments))
    _remember(history, found)
    for _, word in history.quarantines:
        if word.learner in found:
            said = ("quarantined", word.reason) if word.active else ("live", "")
            found[word.learner].state, found[word.learner].why = said
    for one in found.values():
        if one.state == "live":
            one.state = _state(history, one)
    return [found[name] for name in sorted(found)]


def _remember(history: History, found: dict[str, Learner]) -> None:
    """What the machines know of the members after their newest records."""
    for chain in history.records.values():
        memory = chain[-1][1].policy
        for member in memory.members:
            one = found.setdefault(member.learner, Learner(member.learner))
            one.incarnation = max(one.incarnation, member.incarnation)
            one.offences = max(one.offences, member.offences)
            one.step_time_s = max(one.step_time_s, member.step_time_s)
            one.heard_at_s = max(one.heard_at_s, member.heard_at_s)
        for name in memory.quarantined:
            # The word itself may be trimmed from the tape by now; a later one overrules this.
            found.setdefault(name, Learner(name)).state = "quarantined"


def _state(history: History, one: Learner) -> str:
    """What a learner is that is not shut out."""
    newest = [chain[-1][1].policy.members for chain in history.records.values()]
    known = [member for members in newest for member in members if member.learner == one.name]
    if any(leave.incarnation == one.incarnation for _, leave in history.full_leaves(one.name)):
        return "left"
    current = [member for member in known if member.incarnation == one.incarnation]
    if current and all(member.left for member in current):
        return "left"
    return "silent" if current and not any(member.live for member in current) else "live"


async def judge(target: str, name: str, *, active: bool, reason: str) -> None:
    """Shut a learner out, or let it in again.

    Raises:
        RunMismatchError: no learner of that name has joined the run.
        ConfigError, BusError: RUN cannot be opened, or takes no words.
    """
    async with open_run(target) as opened:
        known = [one.name for one in survey(await read_history(opened.context))]
        if name not in known:
            raise RunMismatchError(
                f"no learner {name!r} has joined run {opened.context.run!r}",
                hint=f"it knows {', '.join(known) or 'nobody'}",
            )
        await quarantine(operator_context(opened), name, active=active, reason=reason)


def chosen(shut_out: str | None, release: str | None) -> tuple[str, bool] | None:
    """(learner, active) that the options ask for, or None to look only.

    Raises:
        ConfigError: both at once.
    """
    if shut_out is not None and release is not None:
        raise ConfigError(
            "--quarantine and --release cannot be given together", hint="use the command twice"
        )
    if shut_out is not None:
        return shut_out, True
    return None if release is None else (release, False)


def as_json(learners: Iterable[Learner]) -> list[dict[str, object]]:
    """For scripts: each learner's fields."""
    return [asdict(one) | {"reasons": dict(one.reasons)} for one in learners]


def table(learners: Iterable[Learner]) -> Table:
    """For people; what has no place in 80 columns is in the JSON."""
    shown = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    left = ("learner", "state", "rejected for")
    for title in ("learner", "state", "heard", "lives", "merged", "rej.", "offences", "tokens"):
        shown.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    shown.add_column("rejected for")
    for one in learners:
        reasons = one.reasons.most_common(REASONS)
        shown.add_row(
            one.name,
            Text(one.state, style=STYLES.get(one.state, "")),
            age(max(0.0, time.time() - one.heard_at_s)) if one.heard_at_s else "never",
            f"{one.lives}",
            f"{one.merged:,}",
            f"{one.rejected:,}",
            f"{one.offences:,}",
            f"{one.tokens:,}",
            ", ".join(f"{reason} x {count}" for reason, count in reasons),
        )
    return shown
