"""`diloco status`: a run on a terminal, or as one JSON object."""

import asyncio
import contextlib
import json as json_module
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from diloco.check.symptoms import Finding
from diloco.cli.opening import open_run
from diloco.cli.screen import SEVERITY_STYLES, STATE_STYLES
from diloco.cli.units import age, human_bytes
from diloco.common.service import cancel
from diloco.look import trends
from diloco.look.status import FragmentStatus, LearnerStatus, Status, Watch

REFRESH_S = 1.0
# So many fragments have a line each; of more, those that were longest without a version.
LINES = 16
# Learners that are shown, of a larger fleet, and alerts.
MOST = 50


def show_status(target: str, *, once: bool, json: bool) -> None:
    """Show RUN until it ends or Ctrl-C; with `once` or `json` only as it is now.

    Raises:
        DilocoError: no such run, or bus or store are away.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_show(target, once=once, json=json))


async def _show(target: str, *, once: bool, json: bool) -> None:
    console = Console()
    async with open_run(target, name="status", reads=True) as opened:
        watch = Watch(opened.context)
        status = await watch.begin()
        if json:
            print(json_module.dumps(asdict(status)), flush=True)  # noqa: T201 - the result itself
        elif once or opened.kept or not console.is_terminal or status.state == "ended":
            console.print(picture(status))
        else:
            await _follow(watch, status, console)


async def _follow(watch: Watch, status: Status, console: Console) -> None:
    following = asyncio.ensure_future(watch.follow())
    try:
        with Live(picture(status), console=console, auto_refresh=False) as live:
            while not following.done():
                await asyncio.sleep(REFRESH_S)
                live.update(picture(await watch.now()), refresh=True)
        following.result()
    finally:
        await cancel(following)


def picture(status: Status) -> RenderableType:
    """The run on a terminal."""
    parts = [_summary(status), Text()]
    learners = _worth_a_look(status.learners)
    if learners:
        parts += [_learners(learners, len(status.learners)), *_metrics(learners), Text()]
    if status.trends:
        shown = {one.name: status.trends[one.name] for one in learners if one.name in status.trends}
        parts += [trends.table(shown, title="lately"), Text()]
    parts.append(_fragments(status.fragments))
    if status.alerts:
        parts += [Text(), _alerts(status.alerts)]
    return Panel(Group(*parts), title=f"[bold]diloco[/] · run {status.run} · {status.state}")


def _summary(status: Status) -> RenderableType:
    made = sum(fragment.version for fragment in status.fragments)
    tape = human_bytes(status.tape_bytes)
    if status.tape_limit_bytes:
        tape += f" of {human_bytes(status.tape_limit_bytes)}"
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        f"step [bold]{status.global_step:,}[/] of {status.steps:,}",
        f"{made:,} versions, {status.versions_per_s * 60:.1f} a minute",
    )
    grid.add_row(
        f"{status.tokens_per_s:,.0f} tokens/s trained",
        f"{status.tokens_merged:,} tokens merged",
    )
    grid.add_row(
        f"up {human_bytes(status.bytes_up_per_s)}/s, tape {tape}",
        f"{status.updates_merged:,} updates merged, {status.updates_rejected:,} rejected",
    )
    return grid


def _table(*titles: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for title in titles:
        left = title in ("learner", "state", "owner")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    return table


def _worth_a_look(learners: tuple[LearnerStatus, ...]) -> tuple[LearnerStatus, ...]:
    """All learners, or of a large fleet those that something may be amiss with."""
    if len(learners) <= MOST:
        return learners

    def well(one: LearnerStatus) -> tuple[bool, int, float, float]:
        far = (one.staleness or 0.0, one.loss or 0.0)
        return one.state == "training", -one.rejected, -far[0], -far[1]

    return tuple(sorted(sorted(learners, key=well)[:MOST], key=lambda one: one.name))


def _learners(learners: tuple[LearnerStatus, ...], of: int) -> Table:
    table = _table(
        "learner", "state", "heard", "step", "loss", "tokens/s", "data", "stall", "stale", "rej.",
        "up",
    )  # fmt: skip
    styles = STATE_STYLES | {"left": "dim"}
    for one in learners:
        table.add_row(
            one.name,
            Text(one.state, style=styles.get(one.state, "red")),
            "never" if one.heard_s is None else age(one.heard_s),
            f"{one.local_step:,}",
            "-" if one.loss is None else f"{one.loss:.3f}",
            f"{one.tokens_per_s:,.0f}",
            f"{one.data_fraction:.1%}",
            f"{one.stall_fraction:.1%}",
            "-" if one.staleness is None else f"{one.staleness:.1f}",
            str(one.rejected),
            human_bytes(one.bytes_up),
        )
    if len(learners) < of:
        table.caption = f"{len(learners)} of {of:,} learners: silent, rejected, stale or far off"
    return table


def _metrics(learners: tuple[LearnerStatus, ...]) -> list[Text]:
    """What losses say beside themselves, a line for each learner whose loss says anything."""
    return [
        Text(
            f"{one.name}: " + ", ".join(f"{key} {value:.4g}" for key, value in one.metrics.items()),
            style="dim",
        )
        for one in learners[:LINES]
        if one.metrics
    ]


def _fragments(fragments: tuple[FragmentStatus, ...]) -> Table:
    shown = fragments
    if len(fragments) > LINES:
        oldest = sorted(fragments, key=lambda one: -one.version_s)[:LINES]
        shown = tuple(sorted(oldest, key=lambda one: one.fragment))
    table = _table("fragment", "version", "step", "owner", "last", "merged", "round", "waiting")
    for one in shown:
        table.add_row(
            str(one.fragment),
            f"{one.version:,}",
            f"{one.global_step:,}",
            one.owner or Text("nobody", style="dim"),
            age(one.version_s),
            f"{one.round_updates} of {one.live_learners}",
            f"{one.round_s:.2f} s",
            str(one.waiting),
        )
    if len(fragments) > LINES:
        table.caption = f"{LINES} of {len(fragments)} fragments: the longest without a version"
    return table


def _alerts(alerts: tuple[Finding, ...]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for found in alerts[:MOST]:
        colour = SEVERITY_STYLES.get(found.severity, "")
        where = f" [dim]{found.runbook}[/]" if found.runbook else ""
        grid.add_row(
            Text(found.severity, style=colour),
            escape(found.about),
            f"{escape(found.sentence)}{where}",
        )
    if len(alerts) > MOST:
        grid.add_row("", "", f"... and {len(alerts) - MOST:,} more: --json has all")
    return grid
