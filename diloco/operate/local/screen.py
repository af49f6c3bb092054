"""The screen of a local run: a table on a terminal, a line now and then elsewhere."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.operate.local.fleet import Daemon
from diloco.operate.local.hardware import Hardware
from diloco.run.cli.format_numbers import human_bytes
from diloco.run.cli.screen import STATE_STYLES, plain_table
from diloco.run.comparison import TIMES, gap
from diloco.run.state import RunStatus
from diloco.show.status.screen import spark

# A learner without a heartbeat for this many seconds is shown as starting.
SILENT_S = 5.0
WIDTH = 100
COURSE = 48


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The figures of a local run at one moment.

    Attributes:
        observed: the run's state from tape and heartbeats.
        losses: the median of the learners' training losses, at each refresh so far.
        note: a sentence to show; may be empty.
        behind: whether the tape's past is still being read.
        elapsed_s: seconds since this command began.
    """

    run: str
    learners: dict[str, Hardware]
    daemons: dict[str, Daemon]
    observed: RunStatus
    losses: list[float]
    note: str
    behind: bool
    elapsed_s: float


def state_of(frame: Picture, learner: str) -> str:
    """Returns one word for a learner's state: that of its process, or of its last heartbeat."""
    daemon = frame.daemons.get(learner)
    if daemon is None:
        return "waiting"
    if daemon.ended:
        return "failed" if daemon.failed else "done"
    seen = frame.observed.learner(learner)
    if daemon.pid is None:
        return "down"
    if seen is None or seen.heard_s is None or seen.heard_s > SILENT_S:
        return "starting"
    return seen.state


def line(frame: Picture) -> str:
    """Returns the run in one line, for output other than a terminal."""
    seen = frame.observed
    loss = f"{frame.losses[-1]:.3f}" if frame.losses else "-"
    far = "".join(f" ({name}: {own:.4g})" for name, own in _far(frame))
    return (
        f"{frame.elapsed_s:6.0f} s  step {seen.global_step}/{seen.steps}  loss {loss}{far}  "
        f"versions {seen.versions}  merged {seen.updates_merged}  "
        f"rejected {seen.updates_rejected}  staleness {seen.staleness:.2f}  "
        f"up {human_bytes(seen.bytes_up)}  down {human_bytes(seen.bytes_down)}  {frame.note}"
    )


def _far(frame: Picture) -> Iterator[tuple[str, float]]:
    """Yields (learner, loss) of learners whose loss is far from the median, which hides them."""
    for one in frame.observed.learners:
        if one.loss is not None and abs(gap(one.loss, frame.losses[-1])) >= math.log(TIMES):
            yield one.name, one.loss


def picture(frame: Picture) -> RenderableType:
    """Returns the run's figures as a panel for a terminal."""
    return Panel(
        Group(_progress(frame), _learners(frame), _run(frame)),
        title=f"[bold]diloco[/] · run {frame.run}",
        subtitle=frame.note or None,
        width=WIDTH,
    )


def sentence(summary: dict[str, Any]) -> str:
    """Returns the summary of a run as a sentence, with rich's markup."""
    return (
        f"held-out loss [bold]{summary['eval_loss_first']:.4g}[/] → "
        f"[bold]{summary['eval_loss_last']:.4g}[/] after {summary['steps']} steps and "
        f"{summary['tokens']:,} tokens in {summary['wall_s']:.0f} s; "
        f"{summary['updates_merged']} updates merged, {summary['updates_rejected']} rejected, "
        f"{summary['restarts']} restart(s); stalled {summary['stall_fraction']:.2%} of the time"
    )


def _progress(frame: Picture) -> RenderableType:
    seen = frame.observed
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=seen.steps, completed=min(seen.global_step, seen.steps), width=56)
    done = min(1.0, seen.global_step / seen.steps)
    left = f"about {frame.elapsed_s * (1 - done) / done:.0f} s left" if 0.05 < done < 1 else ""
    grid.add_row(f"step {seen.global_step}/{seen.steps}", bar, f"{frame.elapsed_s:.0f} s", left)
    return grid


def _learners(frame: Picture) -> RenderableType:
    words = [hardware.words() for hardware in frame.learners.values()]
    left = ["learner", *(["devices"] if any(words) else []), "state"]
    table = plain_table(
        *left, "step", "loss", "tokens/s", "stall", "sent", "up", "restarts", words=left
    )
    table.expand = True
    for name, hardware in frame.learners.items():
        first = [name, *([hardware.words()] if any(words) else [])]
        state = state_of(frame, name)
        styled = Text(state, style=STATE_STYLES.get(state, "bold red"))
        seen = frame.observed.learner(name)
        restarts = frame.daemons[name].restarts if name in frame.daemons else 0
        if seen is None or seen.heard_s is None:
            table.add_row(*first, styled, *["-"] * 6, str(restarts))
            continue
        table.add_row(
            *first,
            styled,
            str(seen.local_step),
            f"{seen.loss or 0.0:.3f}",
            f"{seen.tokens_per_s:,.0f}",
            f"{seen.stall_fraction:.1%}",
            str(seen.updates_sent),
            human_bytes(seen.bytes_up),
            str(restarts),
        )
    return table


def _run(frame: Picture) -> RenderableType:
    seen = frame.observed
    versions = [one.version for one in seen.fragments]
    span = f"{min(versions)}-{max(versions)}" if versions else "-"
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_row(
        f"versions [bold]{span}[/] of {len(versions)} fragments ({seen.versions} made)",
        f"updates [bold]{seen.updates_merged}[/] merged of {seen.updates_sent} sent, "
        f"{seen.updates_rejected} rejected",
    )
    grid.add_row(
        f"round size {seen.round_size:.1f}, staleness {seen.staleness:.2f}",
        f"up {human_bytes(seen.bytes_up)}, down {human_bytes(seen.bytes_down)}, "
        f"stall {seen.stall_fraction:.2%}",
    )
    if len(frame.losses) > 1:
        course = spark(frame.losses, COURSE)
        grid.add_row(f"training loss {frame.losses[0]:.2f} → {frame.losses[-1]:.2f}", course)
    return grid
