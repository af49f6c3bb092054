"""`diloco learners`: who takes part in a run, what became of what they sent, who is shut out."""

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean

from rich.table import Table
from rich.text import Text

from diloco.aggregator.quarantine import quarantine
from diloco.check.directions import cosines_of
from diloco.cli.opening import open_run, operator_context
from diloco.cli.units import age
from diloco.common.errors import ConfigError, RunMismatchError, StoreError
from diloco.look import trends
from diloco.projections.learners import Learner, read_learners, read_roster

REASONS = 3
STYLES = {"live": "green", "quarantined": "bold red", "silent": "yellow", "left": "dim"}


async def look(target: str) -> list[Learner]:
    """Everybody who has joined a run, by name.

    Raises:
        ConfigError, BusError, StoreError: RUN cannot be opened or read.
    """
    async with open_run(target, reads=True) as opened:
        context, roster = opened.context, await read_roster(opened.context)
        found = roster.learners()
        sync, store = context.settings.sync, context.store
        with contextlib.suppress(StoreError):  # Without the store, all but this.
            cosines = await context.runtime.call(
                cosines_of, context.layout, sync, store, roster.rounds
            )
            for one in found:
                one.cosine = fmean(cosines[one.name]) if one.name in cosines else None
        return found


async def judge(target: str, name: str, *, active: bool, reason: str) -> None:
    """Shut a learner out, or let it in again.

    Raises:
        RunMismatchError: no learner of that name has joined the run.
        ConfigError, BusError: RUN cannot be opened, or takes no words.
    """
    async with open_run(target) as opened:
        known = [one.name for one in await read_learners(opened.context)]
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
    return [
        asdict(one) | {"reasons": dict(one.reasons), "less": dict(one.less)} for one in learners
    ]


def table(learners: Iterable[Learner]) -> Table:
    """For people; what has no place in 80 columns is in the JSON."""
    shown = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    left = ("learner", "state")
    for title in (
        "learner",
        "state",
        "heard",
        "lives",
        "merged",
        "rej.",
        "offences",
        "tokens",
        "loss",
        "norm",
    ):
        shown.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    shown.add_column("rejected for, or counted less by")
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
            "-" if one.loss is None else f"{one.loss:.4g}",
            "-" if one.norms is None else f"{one.norms:.2f}",
            ", ".join(
                [f"{reason} x {count}" for reason, count in reasons]
                + [f"{what} less x {count}" for what, count in one.less.most_common()]
            ),
        )
    return shown


def over_the_run(learners: Sequence[Learner]) -> Table:
    """How each one's loss, norm and agreement went."""
    cosines = {one.name: [one.cosine] for one in learners if one.cosine is not None}
    return trends.table({one.name: one.trend for one in learners}, cosines)
