"""`diloco why` and `diloco doctor`: what is amiss with a run, the worst first, from one list.

`diloco.judge.doctor` makes the list, of which status, page, report and watch show the part that is
of a moment. Here come what the newest updates did to the held-out loss, and how the list is shown.
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
from diloco.replay.blame_learners import AGAINST, Effects, Sentence, judge
from diloco.replay.blame_screen import in_words, of_slice
from diloco.run.cli.screen import say_json, say_plainly
from diloco.run.cli.subprocess import Isolated
from diloco.run.cli.versions import parse_time
from diloco.run.comparison import LOSS_SPIKE
from diloco.run.findings import MISSING_OBJECT
from diloco.run.history import History
from diloco.run.model.load import held_leaves
from diloco.run.state import Finding

# Rounds of all fragments together that are merged without each of their updates, or so many of each
# if that is more, and how long that may take: what is known by then is told. The longer time is for
# a machine that is busy.
BLAMED_ROUNDS, OF_EACH, BLAME_S, BUSY_S = 24, 8, 30.0, 60.0
# Updates of a learner, of fewer nothing is said of what it trains on.
FEWEST = 8
# Of fewer learners blame accuses none: of two that pull apart either may be right.
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
    """Show what is found as it comes; returns the exit status: 1 if something is an error.

    Args:
        target: RUN.
        everything: also what is well.
        deep: also read every object, make every version again, and judge every record.
        json: print the list for scripts, once it is whole.
        since: only what began at this version or time or later, or nobody knows when.
        learner: only what is about this learner, or about none.

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

    On a terminal the list so far, which goes away; elsewhere each alert once, on a line of its own,
    and on standard error what is done.

    Args:
        console: where the report goes.
        chosen: the findings that are asked for.
        lines: whether anything is shown without a terminal.
    """

    def __init__(self, console: Console, chosen: Chosen, *, lines: bool) -> None:
        self.live = Live(console=console, transient=True, auto_refresh=False)
        self._console, self._chosen = console, chosen
        self._lines = lines and not console.is_terminal
        # Figures change from look to look, and what to do about them does not.
        self._said: set[tuple[str, str, str | None]] = set()

    def told(self, report: Report, doing: str) -> None:
        """Hears the report so far, and what is done next."""
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
        """Print a heading before the whole list, which repeats the findings shown so far."""
        if self._said:
            say_plainly("\nall of it, the worst first:")


def _chosen(since: str | None, learner: str | None, *, everything: bool) -> Chosen:
    """Whether a finding is asked for."""
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


# What the newest updates did to the held-out loss


async def _harm(
    context: RunContext, history: History, task: Isolated, found: Sequence[Finding]
) -> list[Finding]:
    """The findings with what their learners' updates did, those on further learners, and why not.

    Raises:
        StoreUnavailableError: the store is away.
    """
    try:
        held = await held_leaves(context, history.specification)
        await asyncio.to_thread(task.call, "hold", context.layout, held)
        judged = await asyncio.to_thread(_blame, context, history, task)
    except (DilocoError, ImportError, OSError) as error:
        why = error.message if isinstance(error, DilocoError) else str(error)
        return [*found, _not_judged(f"what updates did to the held-out loss: {why}")]
    effects = judged.effects
    sentences = {f"learner {one.learner}": one for one in judge(effects, judged.slices)}
    rounds, later = judged.rounds.fates["judged"], judged.rounds.fates["later"]
    if later:
        all_of_them = f"{rounds} of the {rounds + later} newest rounds, for want of time"
        why = f"what updates did to the held-out loss: {all_of_them}; `diloco replay RUN --blame`"
        found = [*found, _not_judged(f"{why} takes its time for all")]
    elif not rounds:
        found = [*found, _not_judged("what updates did to the held-out loss: no round is whole")]
    told = [_with_harm(one, sentences.get(one.about)) for one in found]
    accused = {one.about for one in found if one.severity in ("warning", "error")}
    told += [*leaks(effects, sentences)]
    return [*told, *accusations(sentences, accused, rounds)]


def _blame(context: RunContext, history: History, task: Isolated) -> blame.Blame:
    """The newest rounds, each without each of its updates, until the time is over."""
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


def _with_harm(one: Finding, sentence: Sentence | None) -> Finding:
    # A file that somebody deleted says nothing of what it held.
    told = one.severity in ("warning", "error") and one.runbook != MISSING_OBJECT
    if sentence is None or not told:
        return one
    harm = (
        f"its newest {sentence.updates} updates{of_slice(sentence)}: {sentence.total:+.4f} in all; "
        f"{sentence.alone:+.5f} each alone, the others' {sentence.others:+.5f}"
    )
    return replace(one, harm=harm)


def accusations(
    sentences: Mapping[str, Sentence], accused: Collection[str], rounds: int
) -> Iterator[Finding]:
    """Findings on learners that no other finding is about; none of fewer than three learners.

    Args:
        sentences: of all learners, by what a finding on them is about.
        accused: the subjects of other findings.
        rounds: that were judged.
    """
    against = [
        one for about, one in sentences.items() if one.word in AGAINST and about not in accused
    ]
    yield from (
        Finding(severity="note", about=about, sentence=in_words(one))
        for about, one in sentences.items()
        if one.word == "uneven"
    )
    if len(sentences) >= LEAST_LEARNERS:
        yield from (_accusation(one, rounds) for one in against)
    elif against:
        yield _not_judged(
            "who did harm to the held-out loss, for which it takes three learners; `diloco replay "
            "RUN --blame` shows what each update did"
        )


def _accusation(one: Sentence, rounds: int) -> Finding:
    return Finding(
        severity="warning",
        about=f"learner {one.learner}",
        sentence=in_words(one),
        advice=f"`diloco replay RUN --blame` judges every round; `diloco run quarantine RUN "
        f"{one.learner}` lets none of it in",
        runbook=LOSS_SPIKE,
        evidence=f"{one.updates} updates of {rounds} rounds merged without each of them",
        since=one.since.version if one.since else None,
        since_s=one.since.at_s if one.since else None,
    )


def leaks(effects: Effects, sentences: dict[str, Sentence]) -> Iterator[Finding]:
    """Learners who have seen the held-out data.

    Theirs alone make the model better on it, the others' do not; and the model is about as good on
    it as on what they train on, and much better than on what the others train on.
    """
    held_out = effects[-1].loss if effects else 0.0
    names = effects.texts
    for about, one in sentences.items():
        own = [effect for effect in effects if effect.learner == one.learner]
        others = [effect for effect in effects if effect.learner != one.learner]
        if len(own) < FEWEST or len(names) < LEAST_LEARNERS or one.alone >= 0 or one.others < 0:
            continue
        # One who does harm lifts the others' mean, and makes no leak of what the honest have.
        if min(other.alone for other in sentences.values() if other != one) <= one.alone / 2:
            continue
        loss = fmean(effect.training_loss for effect in own)
        # One who diverges is no measure of what the others train on.
        usual = median(effect.training_loss for effect in others)
        always = sum(effect.alone < 0 for effect in own) > 0.9 * len(own)
        if always and abs(held_out - loss) < abs(held_out - usual) and loss < usual:
            yield Finding(
                severity="warning",
                about=about,
                sentence=f"it trains on the held-out data: there the model reaches {held_out:.4g}, "
                f"as this learner does ({loss:.4g}), where the others train at {usual:.4g}; scores "
                "say nothing any more",
                advice="take held-out data out of what it reads, and score on other data",
                runbook=LOSS_SPIKE,
                evidence=f"alone {one.alone:+.5f} on the held-out loss each, the others' "
                f"{one.others:+.5f}",
            )
