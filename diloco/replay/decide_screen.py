"""Prints the result of `diloco replay --decide`: how many decisions are the same, which differ."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from diloco.aggregator.core.decisions import Decision
from diloco.common.protocol import wire
from diloco.replay import verify_screen
from diloco.replay.coverage import STATUSES, Verdict
from diloco.replay.decide import decide
from diloco.run.cli.screen import plain_table, say_json
from diloco.run.history import Chain, History

# The most differing decisions that are shown in full.
SHOWN = 5


@dataclass
class DecisionCounts:
    """Counts of decisions that were repeated.

    Attributes:
        outcomes: by outcome: "same", "different" or "unknown" (not repeated).
        reasons: of the unknown ones, by reason.
        different: the first `SHOWN` that differ.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    different: list[Decision] = field(default_factory=list)

    def take(self, decision: Decision) -> None:
        """Counts the next decision."""
        self.outcomes[decision.outcome] += 1
        if decision.outcome == "unknown":
            self.reasons[decision.why] += 1
        if decision.outcome == "different" and len(self.different) < SHOWN:
            self.different.append(decision)


def tell(history: History, chosen: Mapping[int, Chain], console: Console, *, as_json: bool) -> int:
    """Decides the chosen records again and prints the comparison; returns the exit status."""
    found = DecisionCounts()
    for fragment, chain in chosen.items():
        for decision in decide(history, fragment, chain):
            found.take(decision)
    said: Verdict = "incomplete" if found.outcomes["unknown"] else "verified"
    if found.outcomes["different"] or history.unreadable:
        said = "wrong"
    if as_json:
        _tell_json(history, found, said)
    else:
        _tell(history, found, console)
    return STATUSES[said]


def _tell(history: History, found: DecisionCounts, console: Console) -> None:
    for decision in found.different:
        show_decision(decision, console)
    for why, count in found.reasons.items():
        console.print(f"[yellow]{count} not decided again[/]: {why}")
    if (more := found.outcomes["different"] - SHOWN) > 0:
        console.print(f"... and {more} more that differ")
    verify_screen.show_unreadable(history.unreadable, console)
    console.print(
        f"run [bold]{history.run}[/]: {found.outcomes['same']} decisions are as recorded, "
        f"{found.outcomes['different']} differ, {found.outcomes['unknown']} could not be decided "
        "again",
    )


def _tell_json(history: History, found: DecisionCounts, said: Verdict) -> None:
    document = {
        "run": history.run,
        "verdict": said,
        "status": STATUSES[said],
        "same": found.outcomes["same"],
        "different": found.outcomes["different"],
        "unknown": found.outcomes["unknown"],
        "unknown_for": dict(found.reasons),
        "unreadable": len(history.unreadable),
        "first_different": [
            {
                "record_seq": one.record_seq,
                "fragment": one.record.fragment,
                "version": one.record.version,
                "fields": [
                    {"field": part, "recorded": recorded, "decided": decided}
                    for name, was, is_now in one.fields
                    for part, recorded, decided in _parts(name, was, is_now)
                ],
            }
            for one in found.different
        ],
    }
    say_json(document)


def show_decision(decision: Decision, console: Console) -> None:
    """Prints a decision that differs: each field, as recorded and as decided now."""
    record = decision.record
    console.print(
        f"[bold red]fragment {record.fragment}, {record.what} {record.version}[/] (record "
        f"{decision.record_seq}, made by {record.aggregator}, closed for {record.reason})",
    )
    both = ("recorded", "decided again")
    table = plain_table("field", *both, words=both, wraps=True)
    for name, said, found in decision.fields:
        for part, one, other in _parts(name, said, found):
            table.add_row(part, escape(one), escape(other))
    console.print(table, soft_wrap=False)


def _parts(name: str, said: Any, found: Any) -> Iterator[tuple[str, str, str]]:
    """Yields (name, recorded, decided again) as text, for the smallest parts that differ."""
    if isinstance(said, wire.NestedRecord) and type(said) is type(found):
        for key in type(said).model_fields:
            yield from _parts(f"{name}.{key}", getattr(said, key), getattr(found, key))
    elif isinstance(said, tuple) and isinstance(found, tuple) and len(said) == len(found):
        for index, (one, other) in enumerate(zip(said, found, strict=True)):
            yield from _parts(f"{name}[{index}]", one, other)
    elif isinstance(said, tuple) and isinstance(found, tuple):
        yield name, f"{len(said)}: {_short(said)}", f"{len(found)}: {_short(found)}"
    elif said != found:
        yield name, _short(said), _short(found)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."
