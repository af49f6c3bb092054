"""`diloco why` and `diloco doctor`: print a run's findings, the worst first.

`diloco.judge.doctor` makes the findings. This module adds the effect of the newest updates on the
held-out loss, as `diloco replay --blame` measures it.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.common.protocol.errors import DilocoError, Exit
from diloco.common.storage.tape import RunContext
from diloco.judge.doctor import Report, examine, picture
from diloco.replay import blame, verify_run
from diloco.replay.blame_learners import AGAINST, Effects, LearnerJudgement, judge
from diloco.replay.blame_screen import in_words, of_slice
from diloco.run.cli.screen import say_json, say_plainly
from diloco.run.cli.subprocess import Isolated
from diloco.run.cli.versions import parse_time
from diloco.run.comparison import LOSS_SPIKE
from diloco.run.health_findings import MISSING_OBJECT
from diloco.run.history import History
from diloco.run.model.load import held_leaves
from diloco.run.state import Finding

# Effects are measured in the BLAMED_ROUNDS newest rounds of all fragments together, or the OF_EACH
# newest of each fragment if these are more. This stops after BLAME_S seconds with the results so
# far; after BUSY_S seconds, if a learner has fewer than FEWEST judged updates before.
BLAMED_ROUNDS, OF_EACH, BLAME_S, BUSY_S = 24, 8, 30.0, 60.0
# Fewer updates of a learner than these show nothing about its data.
FEWEST = 8
# With fewer learners none is blamed: of two that differ, either may be right.
LEAST_LEARNERS = 3

Chosen = Callable[[Finding], bool]


def run_why(
    target: str,
    *,
    everything: bool = False,
    deep: bool = False,
    json: bool = False,
    since: str | None = None,
    learner: str | None = None,
) -> int:
    """Shows findings as they are made; returns the exit status: 1 if one is an error.

    Args:
        target: the argument RUN of the command.
        everything: also show findings of severity "ok".
        deep: also read every object, recompute every version, and check every record.
        json: print all findings as JSON at the end.
        since: a version, time or age, as text: hide findings that are known to have begun earlier.
        learner: hide findings about other learners.

    Raises:
        ConfigError: `target` or `since` cannot be understood.
    """
    chosen = _chosen(since, learner, everything=everything or json)
    console = Console(stderr=json)
    shown = AsItComes(console, chosen, lines=not json)
    with shown.live:
        report = asyncio.run(examine(target, deep=deep, told=shown.told, further=_harm))
    if json:
        say_json(_part(report, chosen).document())
    else:
        shown.end()
        console.print(picture(_part(report, chosen)))
    return Exit.FAILED if report.exists and not report.healthy else Exit.ENDED


class AsItComes:
    """Shows a report while it is made.

    A terminal shows the findings so far, and clears them at the end. Without a terminal, each
    warning or error is printed as one line, and standard error gets the name of each step.

    Args:
        console: the console of the report.
        chosen: returns whether to show a finding.
        lines: False to print no lines without a terminal.
    """

    def __init__(self, console: Console, chosen: Chosen, *, lines: bool) -> None:
        self.live = Live(console=console, transient=True, auto_refresh=False)
        self._console, self._chosen = console, chosen
        self._lines = lines and not console.is_terminal
        # A finding is recognized by its advice, since figures in its sentence change.
        self._said: set[tuple[str, str, str | None]] = set()

    def told(self, report: Report, doing: str) -> None:
        """Shows the report so far, and the name of the step that begins."""
        part = _part(report, self._chosen)
        if self._console.is_terminal:
            so_far = picture(part, ended=False)
            self.live.update(Group(so_far, Text(f"{doing} ...", "dim")), refresh=True)
        for one in part.findings if self._lines else ():
            name = one.about, one.advice or one.sentence, one.runbook
            if one.severity in ("warning", "error") and name not in self._said:
                self._said.add(name)
                say_plainly(f"{one.severity}  {one.about}: {one.sentence}")
        if self._lines:
            Console(stderr=True).print(f"{doing} ...", soft_wrap=True, highlight=False)

    def end(self) -> None:
        """Prints a heading before the whole list, if findings were printed as lines before."""
        if self._said:
            say_plainly("\nall findings, the worst first:")


def _chosen(since: str | None, learner: str | None, *, everything: bool) -> Chosen:
    """Returns the function that decides whether to show a finding."""
    version = int(since) if since is not None and since.isdecimal() else None
    at_s = parse_time(since, time.time(), "--since") if since and version is None else None

    def choose(one: Finding) -> bool:
        if one.severity == "ok" and not everything:
            return False
        if version is not None and one.since is not None and one.since < version:
            return False
        if at_s is not None and one.since_s is not None and one.since_s < at_s:
            return False
        whose = re.fullmatch("learners? (.*)", one.about)
        return learner is None or whose is None or learner in re.split(", | and ", whose[1])

    return choose


def _part(report: Report, chosen: Chosen) -> Report:
    return replace(report, findings=[one for one in report.findings if chosen(one)])


# Effects of the newest updates on the held-out loss


async def _harm(
    context: RunContext, history: History, task: Isolated, found: Sequence[Finding]
) -> list[Finding]:
    """Adds to the findings what their learners' updates did to the held-out loss.

    Returns:
        The findings; further ones on learners that do harm or train on held-out data; and a note if
        some rounds, or all, could not be judged.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    try:
        held = await held_leaves(context, history.specification)
        await asyncio.to_thread(task.call, "hold", context.layout, held)
        judged = await asyncio.to_thread(_blame, context, history, task)
    except (DilocoError, ImportError, OSError) as error:
        why = error.message if isinstance(error, DilocoError) else str(error)
        return [*found, _not_judged(f"what updates did to the held-out loss: {why}")]
    effects = judged.effects
    named = judge(effects, judged.slices, judged.began)
    judgements = {f"learner {one.learner}": one for one in named}
    rounds, later = judged.rounds.fates["judged"], judged.rounds.fates["later"]
    if later:
        all_of_them = f"{rounds} of the {rounds + later} newest rounds, as time ran out"
        why = f"what updates did to the held-out loss: {all_of_them}; `diloco replay RUN --blame`"
        found = [*found, _not_judged(f"{why} judges all, and takes longer")]
    elif not rounds:
        found = [*found, _not_judged("what updates did to the held-out loss: no round is complete")]
    told = [_with_harm(one, judgements.get(one.about)) for one in found]
    accused = {one.about for one in found if one.severity in ("warning", "error")}
    told += [*leaks(effects, judgements)]
    return [*told, *accusations(judgements, accused, rounds)]


def _blame(context: RunContext, history: History, task: Isolated) -> blame.Blame:
    """Measures the effects of the newest rounds' updates, in about `BUSY_S` seconds at most."""
    began_s = time.monotonic()

    def evaluate(views: Sequence[Vector]) -> blame.Losses:
        for view in views:
            task.call("see", view)
        losses: blame.Losses = task.call("losses", within_s=BLAME_S)
        return losses

    fragments = sorted(history.records)
    first = max(0, min(history.versions()) - max(OF_EACH, BLAMED_ROUNDS // len(fragments)))
    chains = verify_run.chains(history, fragments, first, {})

    def enough(found: blame.Blame) -> bool:
        took_s = time.monotonic() - began_s
        updates = Counter(effect.learner for effect in found.effects).values()
        few = min(updates, default=0) < FEWEST
        return took_s > (BUSY_S if few else BLAME_S)

    return blame.blame(context, history, chains, evaluate, enough=enough)


def _not_judged(what: str) -> Finding:
    return Finding(severity="note", about="not judged", sentence=what)


def _with_harm(one: Finding, judgement: LearnerJudgement | None) -> Finding:
    # A finding on a deleted object has nothing to do with harm.
    told = one.severity in ("warning", "error") and one.runbook != MISSING_OBJECT
    if judgement is None or not told:
        return one
    harm = (
        f"its newest {judgement.updates} updates{of_slice(judgement)}: "
        f"{judgement.total:+.4f} in all; {judgement.alone:+.5f} each alone, "
        f"the others' {judgement.others:+.5f}"
    )
    return replace(one, harm=harm)


def accusations(
    judgements: Mapping[str, LearnerJudgement], accused: Collection[str], rounds: int
) -> Iterator[Finding]:
    """Yields a finding on each harmful, useless or uneven learner.

    With fewer than `LEAST_LEARNERS` learners, one note replaces the findings on harmful and useless
    ones.

    Args:
        judgements: the judgement of each learner, by the subject of its finding: "learner a".
        accused: subjects with warnings or errors already: they get no warning here.
        rounds: the number of rounds that were judged.
    """
    against = [
        one
        for about, one in judgements.items()
        if one.conclusion in AGAINST and about not in accused
    ]
    yield from (
        Finding(severity="note", about=about, sentence=in_words(one))
        for about, one in judgements.items()
        if one.conclusion == "uneven"
    )
    if len(judgements) >= LEAST_LEARNERS:
        yield from (_accusation(one, rounds) for one in against)
    elif against:
        yield _not_judged(
            "which learner did harm to the held-out loss: that takes three learners; `diloco "
            "replay RUN --blame` shows what each update did"
        )


def _accusation(one: LearnerJudgement, rounds: int) -> Finding:
    return Finding(
        severity="warning",
        about=f"learner {one.learner}",
        sentence=in_words(one),
        advice=f"`diloco replay RUN --blame` judges every round; `diloco run quarantine RUN "
        f"{one.learner}` rejects its updates",
        runbook=LOSS_SPIKE,
        evidence=f"{one.updates} updates of {rounds} rounds merged without each of them",
        since=one.since.version if one.since else None,
        since_s=one.since.at_s if one.since else None,
    )


def leaks(effects: Effects, judgements: dict[str, LearnerJudgement]) -> Iterator[Finding]:
    """Yields a finding on each learner that seems to train on the held-out data.

    Such a learner's updates alone improve the held-out loss, and the others' do not; and the
    held-out loss is near this learner's training loss, and far from the others' training losses.
    """
    held_out = effects[-1].loss if effects else 0.0
    names = effects.texts
    for about, one in judgements.items():
        own = [effect for effect in effects if effect.learner == one.learner]
        others = [effect for effect in effects if effect.learner != one.learner]
        if len(own) < FEWEST or len(names) < LEAST_LEARNERS or one.alone >= 0 or one.others < 0:
            continue
        # A harmful learner spoils the others' mean, and would make an honest one look like a leak.
        if min(other.alone for other in judgements.values() if other != one) <= one.alone / 2:
            continue
        loss = fmean(effect.training_loss for effect in own)
        # The median, since a learner that diverges has no usual loss.
        usual = median(effect.training_loss for effect in others)
        always = sum(effect.alone < 0 for effect in own) > 0.9 * len(own)
        if always and abs(held_out - loss) < abs(held_out - usual) and loss < usual:
            yield Finding(
                severity="warning",
                about=about,
                sentence=f"it trains on the held-out data: the held-out loss {held_out:.4g} is "
                f"near its training loss {loss:.4g}, and that of the others is {usual:.4g}; scores "
                "mean nothing any more",
                advice="remove the held-out data from the learner's data, and score on other data",
                runbook=LOSS_SPIKE,
                evidence=f"each update alone {one.alone:+.5f} on the held-out loss, the others' "
                f"{one.others:+.5f}",
            )
