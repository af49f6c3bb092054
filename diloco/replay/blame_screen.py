"""Prints and draws the results of `blame`: tables, a figure and JSON."""

import json as json_module
import sys
import time
from collections.abc import Sequence
from heapq import nlargest
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from diloco.replay.blame import Blame, BlamedRounds, Fate
from diloco.replay.blame_learners import AGAINST, Effect, Effects, LearnerJudgement, judge
from diloco.replay.show import update_name
from diloco.run.cli.screen import LINE_S
from diloco.show.page.html_page import write_figure
from diloco.show.page.svg import CYCLE, Axis, Panel, step_line

WORST = 10
_FATES: dict[Fate, str] = {
    "judged": "judged",
    "early": "before the first complete stored version",
    "damaged": "GONE OR DAMAGED",
    "behind": "after such a round, up to the next stored version",
    "beside": "at which another fragment's view is unknown",
    "unreadable": "whose record cannot be read",
}
_COLOURS = {
    "harmful": "bold red", "useless": "yellow", "uneven": "yellow", "unclear": "dim",
    "helpful": "green",
}  # fmt: skip


def tell(found: Blame, console: Console) -> None:
    """Prints the judgements of the learners, and the updates and tensors that did harm."""
    judgements = judge(found.effects, found.slices, found.began)
    console.print(_learners(judgements), soft_wrap=False)
    worst = nlargest(WORST, found.effects, key=attrgetter("did"))
    console.print(_updates([one for one in worst if one.did > 0] or worst[:1]), soft_wrap=False)
    if found.tensors:
        console.print(_tensors(found), soft_wrap=False)
    for one in judgements:
        if one.conclusion in AGAINST or one.slice:
            console.print(f"[{_COLOURS[one.conclusion]}]{escape(in_words(one))}[/]")
    if not any(one.conclusion in AGAINST for one in judgements):
        console.print(_nobody(found.effects, judgements))
    for line in _coverage(found.rounds):
        console.print(line, markup=False)


class SoFar:
    """Prints each learner that is judged harmful or useless, once, while rounds are judged.

    Args:
        console: the console to print to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._looked_s = time.monotonic()
        self._told: set[str] = set()

    def __call__(self, found: Blame) -> None:
        """Takes the results so far and prints new judgements, if `LINE_S` seconds have passed."""
        if time.monotonic() - self._looked_s < LINE_S:
            return
        self._looked_s = time.monotonic()
        for one in judge(found.effects, found.slices, found.began):
            if one.conclusion in AGAINST and one.learner not in self._told:
                self._told.add(one.learner)
                rounds = found.rounds.fates["judged"]
                line = f"after {rounds:,} rounds: {in_words(one)}"
                self._console.print(line, soft_wrap=True, markup=False)


def _coverage(rounds: BlamedRounds) -> list[str]:
    """Returns lines on the outcome of the rounds, and on why some were not judged."""
    listed = [
        f"{rounds.fates[fate]:,} {said}" for fate, said in _FATES.items() if rounds.fates[fate]
    ]
    lines = [f"rounds: {', '.join(listed) or 'none'}"]
    lines += [f"not judged: {why}" for why in rounds.why]
    if rounds.left_out:
        lines.append("incomplete: the rounds left out count neither for nor against a learner")
    return lines


def _nobody(effects: Effects, judgements: Sequence[LearnerJudgement]) -> str:
    """Returns the sentence to print if no learner is harmful or useless."""
    if not effects:
        return "no round was judged, so no learner can be judged"
    if effects[-1].loss > effects[0].loss_before and effects.column("alone").mean() > 0:
        return (
            f"no learner stands out, but the held-out loss went from {effects[0].loss_before:.4f} "
            f"to {effects[-1].loss:.4f}, and a round of one update alone makes it worse, "
            "whichever learner sent it: the outer step may be too long (--set "
            "outer.learning_rate=...)"
        )
    if all(one.conclusion == "helpful" for one in judgements):
        return "no learner did harm: each made the held-out loss better, on the whole"
    return "no learner did more harm than chance explains"


def of_slice(one: LearnerJudgement) -> str:
    """Returns the slice that a judgement is about, in words; "" if it is all the held-out data."""
    return f" of the slice {one.slice}" if one.slice else ""


def in_words(one: LearnerJudgement) -> str:
    """Returns the judgement of one learner as a sentence."""
    since = ""
    if one.since is not None:
        at = one.since
        since = (
            f", from version {at.version} of fragment {at.fragment} on (step {at.global_step}, "
            f"update {update_name(at)})"
        )
    loss = f"held-out loss{of_slice(one)}"
    beside = f"each update alone {one.alone:+.5f} on the {loss}, the others' {one.others:+.5f}"
    word = {"useless": "useless, not harmful", "uneven": "uneven, and best on another slice"}
    return f"{one.learner} is {word.get(one.conclusion, one.conclusion)}{since}: {beside}"


def _table(title: str, *columns: str) -> Table:
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        named = column in ("learner", "verdict", "where", "update", "tensor")
        shown.add_column(column, no_wrap=True, justify="left" if named else "right")
    return shown


def _learners(judgements: Sequence[LearnerJudgement]) -> Table:
    rows = _table(
        "What each learner's updates did to the held-out loss (above 0: harm)",
        "learner", "verdict", "updates", "harmed", "sum", "alone", "others alone",
    )  # fmt: skip
    for one in judgements:
        word = f"{one.conclusion} on {one.slice}" if one.slice else one.conclusion
        rows.add_row(
            one.learner, f"[{_COLOURS[one.conclusion]}]{word}[/]", f"{one.updates}", f"{one.worse}",
            f"{one.total:+.4f}", f"{one.alone:+.5f}", f"{one.others:+.5f}",
        )  # fmt: skip
    return rows


def _updates(worst: Sequence[Effect]) -> Table:
    rows = _table(
        "The worst updates", "where", "update", "effect", "alone", "before", "after", "without",
        "norm",
    )  # fmt: skip
    for one in worst:
        rows.add_row(
            f"{one.fragment}@{one.version}", update_name(one), f"{one.did:+.5f}",
            f"{one.alone:+.5f}", f"{one.loss_before:.4f}", f"{one.loss:.4f}",
            f"{one.loss_without:.4f}", f"{one.norm:.3g}",
        )  # fmt: skip
    return rows


def _tensors(found: Blame) -> Table:
    rows = _table("The worst updates by tensor", "where", "update", "tensor", "effect")
    for one in sorted(found.tensors, key=lambda part: (-part.effect.did, -part.did)):
        at = one.effect
        rows.add_row(f"{at.fragment}@{at.version}", update_name(at), one.tensor, f"{one.did:+.5f}")
    return rows


def tell_json(run: str, found: Blame) -> None:
    """Prints all results as one JSON object."""
    judgements = [
        one._asdict() | {"since": None if one.since is None else _plain(one.since)}
        for one in judge(found.effects, found.slices, found.began)
    ]
    tensors = [
        {"update": update_name(one.effect), "fragment": one.effect.fragment,
         "version": one.effect.version, "tensor": one.tensor, "did": one.did}
        for one in found.tensors
    ]  # fmt: skip
    left_out = found.rounds.left_out
    head = json_module.dumps(
        {
            "run": run, "verdict": "incomplete" if left_out else "complete",
            "rounds": {fate: found.rounds.fates[fate] for fate in _FATES},
            "left_out": left_out, "why": found.rounds.why, "learners": judgements,
            "tensors": tensors,
        }
    )  # fmt: skip
    # There may be hundreds of thousands of updates: they are printed one by one.
    sys.stdout.write(head.removesuffix("}") + ', "updates": [')
    for count, one in enumerate(found.effects):
        sys.stdout.write((",\n" if count else "\n") + json_module.dumps(_plain(one)))
    sys.stdout.write("]}\n")
    sys.stdout.flush()


def _plain(one: Effect) -> dict[str, Any]:
    named = one._asdict() | {"update": update_name(one)}
    return {name: value for name, value in named.items() if name not in ("incarnation", "seq")}


def draw(run: str, found: Blame, path: Path) -> None:
    """Writes a page with a curve for each learner: the sum of its effects over global steps.

    Raises:
        ConfigError: the page cannot be written.
    """
    effects = found.effects
    learner, steps, did = (effects.column(name) for name in ("learner", "global_step", "did"))
    marks = [
        step_line(steps[own], np.cumsum(did[own]), CYCLE[rank % len(CYCLE)], name)
        for rank, (place, name) in enumerate(sorted(enumerate(effects.texts), key=itemgetter(1)))
        for own in [learner == place]
    ]
    y = Axis(label="sum of effects on the held-out loss")
    panel = Panel(marks=marks, x=Axis(label="global step"), y=y, width=800, height=400)
    title = f"{run}: what each learner's updates did (upwards: harm)"
    write_figure(title, [panel], path)
