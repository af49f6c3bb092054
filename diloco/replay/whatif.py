"""`diloco replay --set`: merges a run's updates under other settings, and evaluates the model.

With other settings of `outer`, or of the discount of staleness, the rounds are the recorded ones
and the result is exact. Settings that decide which updates a round merges (`quorum`, `bounds`,
`staleness.max_versions`, `outer.participation`) are applied in virtual time (`redecide.py`). In
either case learners do not react: the updates are those that they sent.

In this file the *recorded* model is that of the run, the *changed* model that of the other
settings.
"""

import asyncio
import re
from bisect import bisect_left
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.aggregator.arrays.fragment import FragmentArrays, make_grid
from diloco.aggregator.arrays.outer import make_outer
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core import rounds
from diloco.aggregator.core.decisions import decide_again
from diloco.aggregator.core.events import Commit
from diloco.aggregator.core.updates import Admitted
from diloco.common.process.config import RunSettings, changes, settings_of
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.tape import RunContext
from diloco.judge.objects import list_now
from diloco.judge.remake_and_compare import (
    FragmentRemaker,
    Progress,
    admitted_again,
    copy_arrays,
    is_stored,
    load_arrays,
    merge_round,
)
from diloco.replay.decide import heard, inputs_again, rules_of, whole_from
from diloco.replay.redecide import redecide
from diloco.run.cli.screen import plain_table
from diloco.run.cli.settings import assign, parse_assigned
from diloco.run.history import Chain, History
from diloco.show.page.html_page import write_curves
from diloco.show.page.svg import DASHES, line

SECTIONS = ("outer", "staleness", "quorum", "bounds")
# Prefixes of the settings that change which updates a round merges.
DECIDING = ("quorum.", "bounds.", "staleness.max_versions", "outer.participation")
UNCHANGED = "the run's own settings"
WITHOUT = (
    "the other updates stay as they were sent, from views with the updates left out: leaving out "
    "good ones can make the model explode; --blame measures exactly what each update did"
)


class VersionPlan(NamedTuple):
    """A version of the changed model to make.

    Attributes:
        at_s: when its round closes, in seconds since the epoch.
        admitted: the updates to merge.
        share: the factor of the outer learning rate.
        restored_version: the version to roll back to, without updates; None: no rollback.
    """

    at_s: float
    fragment: int
    admitted: tuple[Admitted, ...]
    share: float
    settings: RunSettings
    restored_version: int | None = None


@dataclass
class MergePlan:
    """The rounds of the changed model, and the recorded ones.

    Attributes:
        changed: sentences on the changes of the specification's settings, and on updates left out.
        settings: the last settings that would be in force.
        chains: by fragment, its records from the version on at which both models begin.
        rounds: rounds of the changed model, in order of time.
        sentences: the limits of the result.
        decided: True if the rounds were decided again.
    """

    changed: list[str]
    settings: RunSettings
    chains: dict[int, Chain]
    rounds: list[VersionPlan]
    sentences: list[str]
    decided: bool


class LossPair(NamedTuple):
    """The held-out loss of the recorded and of the changed model (`loss_if`) at one time.

    `global_step` is that of the recorded run.
    """

    at_s: float
    global_step: int
    loss: float
    loss_if: float


@dataclass
class Result:
    """The losses of both models over time, and by fragment the changed model's last view."""

    points: list[LossPair] = field(default_factory=list)
    views: dict[int, Vector] = field(default_factory=dict)


class Without(NamedTuple):
    """A learner whose updates are left out in the versions `first` to `last` (None: to the end)."""

    learner: str
    first: int = 0
    last: int | None = None

    def leaves_out(self, record: wire.Record, taken: wire.Input) -> bool:
        """True if the input `taken` of the round of `record` is left out."""
        within = self.last is None or record.version <= self.last
        return taken.learner == self.learner and record.version >= self.first and within


def parse_without(text: str) -> Without:
    """Parses `NAME`, `NAME@VERSION` or `NAME@FROM-TO`.

    Raises:
        ConfigError: the text has none of these forms.
    """
    found = re.fullmatch(r"([^@]+)(?:@(\d+)(-)?(\d+)?)?", text)
    if found is None:
        raise ConfigError(f"--without {text}: expected NAME, NAME@VERSION or NAME@FROM-TO")
    name, first, dash, last = found.groups()
    if first is None:
        return Without(name)
    end = int(last) if last else (None if dash else int(first))
    return Without(name, int(first), end)


def make_plan(
    history: History,
    chosen: Mapping[int, Chain],
    assignments: Sequence[str],
    without: Sequence[Without] = (),
) -> MergePlan:
    """Plans the merges of a run with other settings or without some updates.

    Args:
        history: the tape.
        chosen: by fragment, the records to repeat.
        assignments: changes of settings, each as "section.key=value".
        without: updates to leave out.

    Raises:
        ConfigError: a setting that cannot be replayed, or nothing is left to merge.
    """

    def change(settings: RunSettings) -> RunSettings:
        document = settings.model_dump()
        for assignment in assignments:
            assign(document, assignment)
        return parse_assigned(document)

    changed = changes(history.settings, change(history.settings))
    _check_sections(changed)
    there = list_now(history.store, history.run)
    chains = {fragment: mergeable(chain, there) for fragment, chain in chosen.items()}
    deciding = any(sentence.startswith(DECIDING) for sentence in changed)
    _check_without(chains, without, deciding=deciding)
    rounds = []
    for fragment, chain in chains.items():
        if deciding:
            rounds += _redecided(history, fragment, chain, change)
        else:
            rounds += _recorded(history, fragment, chain, change, without)
    last = max((chain[-1] for chain in chains.values()), key=lambda at: at[0])[1]
    return MergePlan(
        changed=changed + [f"without {_span(one)}" for one in without],
        settings=change(history.settings_at(last.policy.settings_seq)),
        chains=chains,
        rounds=sorted(rounds, key=lambda made: made.at_s),
        sentences=_sentences(chosen, chains, deciding=deciding) + [WITHOUT] * bool(without),
        decided=deciding,
    )


def _check_without(
    chains: Mapping[int, Chain], without: Sequence[Without], *, deciding: bool
) -> None:
    if without and deciding:
        raise ConfigError("--without cannot be combined with settings that decide rounds again")
    inputs = ((r, taken) for chain in chains.values() for _, r in chain[1:] for taken in r.inputs)
    unmet = {*without}
    for record, taken in inputs:
        unmet -= {one for one in unmet if one.leaves_out(record, taken)}
    for one in unmet:
        raise ConfigError(
            f"--without {_span(one)}: no such update was merged",
            hint="diloco status RUN has the names",
        )


def _span(one: Without) -> str:
    last = "" if one.last is None else one.last
    return (
        one.learner if (one.first, one.last) == (0, None) else f"{one.learner}@{one.first}-{last}"
    )


def _check_sections(changed: Sequence[str]) -> None:
    for sentence in changed:
        section = sentence.partition(".")[0]
        if section not in SECTIONS:
            raise ConfigError(
                f"{sentence.partition(':')[0]} cannot be replayed: updates stay as they were sent",
                hint=f"--set takes settings of {', '.join(SECTIONS)}",
            )


def _sentences(
    chosen: Mapping[int, Chain], chains: Mapping[int, Chain], *, deciding: bool
) -> list[str]:
    """Returns sentences on the limits of the result, for its reader."""
    reactions = (
        "learners do not react: their updates are those that they sent, from the recorded views; "
        "in a real run they would have trained from other views"
    )
    found = [reactions]
    if deciding:
        found.append(
            "rounds are decided again in virtual time, by the times of announcements: an estimate; "
            "a change of only outer settings or the discount of staleness gives an exact result"
        )
    late = [fragment for fragment in chains if chains[fragment][0][1].version > 0]
    if late:
        versions = ", ".join(f"{f} at version {chains[f][0][1].version}" for f in late[:8])
        found.append(f"earlier versions stay as recorded: fragments begin {versions}")
    if any(len(chains[fragment]) < len(chosen[fragment]) for fragment in chains):
        found.append("older updates cannot be merged again: garbage collection has taken them")
    if any(record.what == "restore" for chain in chains.values() for _, record in chain):
        found.append("a rollback goes back to the changed run's version at the same time")
    return found


def mergeable(chain: Chain, there: Container[str]) -> Chain:
    """Returns the longest end of a chain that can be merged again.

    It begins with a record whose view and outer state are stored, and lacks no input's objects.

    Args:
        chain: a fragment's records.
        there: the names of the objects in the store.

    Raises:
        ConfigError: the chain has no such end of two records or more.
    """
    begin = None
    for index in range(len(chain) - 1, -1, -1):
        _, record = chain[index]
        if is_stored(record) and record.snapshot.name in there and record.outer.name in there:
            begin = index
        if not all(shard.name in there for taken in record.inputs for shard in taken.shards):
            break
    if begin is None or begin == len(chain) - 1:
        fragment = chain[0][1].fragment if chain else "?"
        raise ConfigError(
            f"fragment {fragment}: no version can be merged again, as the updates are gone",
            hint="garbage collection keeps what gc.replay_window_s says",
        )
    return chain[begin:]


Change = Callable[[RunSettings], RunSettings]


def _recorded(
    history: History,
    fragment: int,
    chain: Chain,
    change: Change,
    without: Sequence[Without] = (),
) -> list[VersionPlan]:
    """Returns the recorded rounds, with other settings of the outer step or without some inputs."""
    found = []
    for _, record in chain[1:]:
        in_force = history.settings_at(record.policy.settings_seq)
        before, settings = (
            settings_of(each, history.layout, fragment) for each in (in_force, change(in_force))
        )
        if record.what == "restore":
            restored = record.restored_version
            found.append(VersionPlan(record.closed_at_s, fragment, (), 1.0, settings, restored))
        if record.what != "version":
            continue
        admitted = tuple(
            admitted_again(record, taken, settings)
            for taken in record.inputs
            if not any(one.leaves_out(record, taken) for one in without)
        )
        part = record.learning_rate / before.outer.learning_rate
        found.append(VersionPlan(record.closed_at_s, fragment, admitted, part, settings))
    return found


def _decides_as_it_was(
    history: History,
    fragment: int,
    chain: Chain,
    rules_at: Callable[[int], formulas.FragmentRules],
) -> bool:
    """True if the other rules give the same decisions, so that the recorded rounds are exact.

    The decisions are repeated at the recorded times, not at times of virtual time.
    """

    def inputs_of(commit: Commit, record: wire.Record) -> dict[str, object]:
        merged = commit.state.admitted if commit.what == "version" else ()
        return {"inputs": inputs_again(merged, record)}

    decisions = decide_again(
        chain,
        heard(history, fragment),
        rules_at=rules_at,
        whole_from=whole_from(history, fragment),
        further=inputs_of,
    )
    return all(made.outcome == "same" for made in decisions)


def _redecided(history: History, fragment: int, chain: Chain, change: Change) -> list[VersionPlan]:
    """Returns a fragment's rounds, decided again under the changed settings."""

    def rules_at(seq: int) -> formulas.FragmentRules:
        return rules_of(history, change(history.settings_at(seq)), fragment)

    if _decides_as_it_was(history, fragment, chain, rules_at):
        return _recorded(history, fragment, chain, change)
    found = []
    cut = chain[-1] != history.records[fragment][-1]
    for made in redecide(chain, heard(history, fragment), rules_at):
        if cut and made.at_s > chain[-1][1].closed_at_s:
            break  # Beyond --until.
        settings = change(history.settings_at(made.settings_seq))
        settings = settings_of(settings, history.layout, fragment)
        state = made.commit.state
        centered = settings.robust and not history.layout.fragments[fragment].averaged
        part = rounds.step_share(
            state, participation=settings.outer.participation, centered=centered
        )
        admitted = tuple(state.admitted)
        found.append(VersionPlan(made.at_s, fragment, admitted, part, settings))
    for _, record in chain[1:]:
        if record.what == "restore":
            settings = change(history.settings_at(record.policy.settings_seq))
            restored = record.restored_version
            found.append(VersionPlan(record.closed_at_s, fragment, (), 1.0, settings, restored))
    return found


# Merging


class _Models:
    """The arrays of the recorded (`was`) and of the changed model (`would`), advanced in time."""

    def __init__(self, history: History, plan: MergePlan) -> None:
        self._history = history
        self.was: dict[int, FragmentRemaker] = {}
        self.would: dict[int, FragmentArrays] = {}
        # Copies of the versions to which rollbacks go back, by fragment and recorded version.
        self._kept: dict[tuple[int, int | None], FragmentArrays | None] = {
            (fragment, record.restored_version): None
            for fragment, chain in plan.chains.items()
            for _, record in chain
            if record.what == "restore"
        }
        first = {made.fragment: made.settings for made in reversed(plan.rounds)}
        for fragment, chain in plan.chains.items():
            record = chain[0][1]
            settings = first.get(fragment, plan.settings)
            self.would[fragment] = _under(load_arrays(history, record), history, fragment, settings)
            self.was[fragment] = FragmentRemaker(history, fragment, compare=False)
            self.follow(*chain[0])

    def follow(self, seq: int, record: wire.Record) -> None:
        """Advances the recorded model to the next record of its fragment."""
        self.was[record.fragment].take(seq, record)
        if (record.fragment, record.version) in self._kept and record.what != "verdict":
            self._kept[record.fragment, record.version] = copy_arrays(self.would[record.fragment])

    def make(self, made: VersionPlan) -> None:
        """Advances the changed model by the next round of its fragment."""
        arrays = self.would[made.fragment]
        if made.restored_version is not None:
            kept = self._kept[made.fragment, made.restored_version]
            arrays = copy_arrays(kept) if kept is not None else arrays
            self.would[made.fragment] = arrays
        merge_round(self._history.store, arrays, made.settings, made.admitted, made.share)

    def views(self) -> tuple[list[Vector], list[Vector]]:
        """Returns copies of all views: the recorded model's, and the changed model's."""
        return (
            [self.was[fragment].view.copy() for fragment in sorted(self.was)],
            [self.would[fragment].view.copy() for fragment in sorted(self.would)],
        )


def _under(
    arrays: FragmentArrays, history: History, fragment: int, settings: RunSettings
) -> FragmentArrays:
    """Returns arrays for other settings; with another outer optimizer its state is new."""
    grid = make_grid(settings, history.layout, fragment)
    state = arrays.state
    was, own = (
        settings_of(each, history.layout, fragment) for each in (history.settings, settings)
    )
    if own.outer.optimizer != was.outer.optimizer:
        state = make_outer(own.outer.optimizer).init(grid.size)
    return replace(arrays, settings=settings, grid=grid, state=state)


async def play(
    context: RunContext, history: History, plan: MergePlan, points: int, progress: Progress
) -> Result:
    """Merges both models; evaluates both at the beginning and at `points` later times.

    Raises:
        DilocoError: an update or a view cannot be read.
    """
    from diloco.learner.load_and_check_task import model_of
    from diloco.learner.task import held_out_loss
    from diloco.run.model.view import GlobalModel

    task = await asyncio.to_thread(model_of, history.settings)
    model = await GlobalModel.of_run(context, task)
    models = await asyncio.to_thread(_Models, history, plan)
    line: list[tuple[float, int, Any]] = [(made.at_s, 0, made) for made in plan.rounds]
    line += [(at[1].closed_at_s, at[0], at) for chain in plan.chains.values() for at in chain[1:]]
    line.sort(key=lambda item: item[:2])
    marks = _marks([item[0] for item in line], points)
    begins = [chain[0][1] for chain in plan.chains.values()]
    step = max(record.global_step for record in begins)
    views, _ = models.views()
    loss = await asyncio.to_thread(held_out_loss, task, model.params(views))
    at_s = max(record.closed_at_s for record in begins)
    result = Result([LossPair(at_s, step, loss, loss)])
    for index, (at_s, _, item) in enumerate(line):
        if isinstance(item, VersionPlan):
            await asyncio.to_thread(models.make, item)
        else:
            await asyncio.to_thread(models.follow, *item)
            step = max(step, item[1].global_step)
        progress(index + 1, len(line))
        if index in marks:
            losses = [
                (await asyncio.to_thread(held_out_loss, task, model.params(views)))
                for views in models.views()
            ]
            result.points.append(LossPair(at_s, step, losses[0], losses[1]))
    result.views = {fragment: arrays.view for fragment, arrays in models.would.items()}
    return result


def _marks(times_s: Sequence[float], points: int) -> set[int]:
    """Returns the indices in `times_s` after which both models are evaluated, evenly spread.

    Of equal times the last index is used. A recorded round and its counterpart may close at the
    same time, and between them one model is a round ahead of the other.
    """
    last = len(times_s) - 1
    ends = [i for i in range(len(times_s)) if i == last or times_s[i] < times_s[i + 1]]
    wanted = [last * (number + 1) // points for number in range(points)]
    return {ends[bisect_left(ends, index)] for index in wanted}


def table(plan: MergePlan, result: Result) -> Table:
    """Returns a table of the losses of both models, and of their differences."""
    title = "; ".join(plan.changed) or UNCHANGED
    rows = plain_table("time (UTC)", "step", "as it was", "what if", "difference", title=title)
    for point in result.points:
        at = datetime.fromtimestamp(point.at_s, UTC)
        rows.add_row(
            f"{at:%Y-%m-%d %H:%M:%S}",
            str(point.global_step),
            f"{point.loss:.4f}",
            f"{point.loss_if:.4f}",
            f"{point.loss_if - point.loss:+.4f}",
        )
    was = [r for chain in plan.chains.values() for _, r in chain[1:] if r.what == "version"]
    would = [made for made in plan.rounds if made.admitted]
    rows.caption = (
        f"held-out loss; versions {len(was)} and {len(would)}, updates merged "
        f"{sum(len(r.inputs) for r in was)} and {sum(len(made.admitted) for made in would)}, "
        f"staleness {_staleness([i.staleness for r in was for i in r.inputs]):.2f} and "
        f"{_staleness([a.staleness for made in would for a in made.admitted]):.2f}"
    )
    return rows


def _staleness(found: Sequence[int]) -> float:
    return sum(found) / len(found) if found else 0.0


def draw(plan: MergePlan, result: Result, path: Path) -> None:
    """Writes a page with both models' held-out loss over the global step.

    Raises:
        ConfigError: the page cannot be written.
    """
    rows = [(point.global_step, point.loss, point.loss_if) for point in result.points]
    steps, loss, loss_if = np.asarray(rows, np.float64).reshape(-1, 3).T
    marks = [
        line(steps, loss, "blue", "as it was"),
        line(steps, loss_if, "red", "what if", DASHES[1]),
    ]
    write_curves("; ".join(plan.changed) or UNCHANGED, marks, "held-out loss", path)
