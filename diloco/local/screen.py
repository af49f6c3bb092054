"""What a local run shows while it goes on: a table on a terminal, a line now and then elsewhere."""

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.cli.screen import STATE_STYLES
from diloco.cli.units import human_bytes
from diloco.local.fleet import Daemon
from diloco.local.hardware import Hardware
from diloco.projections.live import LiveState

# A learner without a heartbeat for this time is shown as starting.
SILENT_S = 5.0
WIDTH = 100
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Everything one picture shows."""

    run: str
    steps: int
    fragments: int
    learners: dict[str, Hardware]
    daemons: dict[str, Daemon]
    observed: LiveState
    losses: list[float]
    note: str
    elapsed_s: float


def sparkline(values: list[float], width: int = 48) -> str:
    """The values' course in one line of text, at most `width` wide."""
    if len(values) < 2:
        return ""
    stride = max(1, -(-len(values) // width))
    shown = values[::stride]
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def state_of(frame: Frame, learner: str) -> str:
    """One word on what a learner does."""
    daemon = frame.daemons.get(learner)
    if daemon is None:
        return "waiting"
    if daemon.ended:
        return "failed" if daemon.failed else "done"
    seen = frame.observed.learners.get(learner)
    if daemon.pid is None:
        return "down"
    if seen is None or time.time() - seen.heard_at_s > SILENT_S:
        return "starting"
    return seen.heartbeat.state


def line(frame: Frame) -> str:
    """The run in one line, for output that is no terminal."""
    seen = frame.observed
    loss = f"{frame.losses[-1]:.3f}" if frame.losses else "-"
    return (
        f"{frame.elapsed_s:6.0f} s  step {seen.global_step}/{frame.steps}  loss {loss}  "
        f"versions {seen.versions_made}  merged {seen.updates_merged}  "
        f"rejected {seen.updates_rejected}  staleness {seen.staleness:.2f}  "
        f"up {human_bytes(seen.bytes_up)}  down {human_bytes(seen.bytes_down)}  {frame.note}"
    )


def picture(frame: Frame) -> RenderableType:
    """The run on a terminal."""
    return Panel(
        Group(_progress(frame), _learners(frame), _run(frame)),
        title=f"[bold]diloco[/] · run {frame.run}",
        subtitle=frame.note or None,
        width=WIDTH,
    )


def sentence(summary: dict[str, Any]) -> str:
    """The result in words, for rich."""
    return (
        f"held-out loss [bold]{summary['eval_loss_first']:.3f}[/] → "
        f"[bold]{summary['eval_loss_last']:.3f}[/] after {summary['steps']} steps and "
        f"{summary['tokens']:,} tokens in {summary['wall_s']:.0f} s; "
        f"{summary['updates_merged']} updates merged, {summary['updates_rejected']} rejected, "
        f"{summary['restarts']} restart(s); stalled {summary['stall_fraction']:.2%} of the time"
    )


def _progress(frame: Frame) -> RenderableType:
    seen = frame.observed
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=frame.steps, completed=min(seen.global_step, frame.steps), width=56)
    done = min(1.0, seen.global_step / frame.steps)
    left = f"about {frame.elapsed_s * (1 - done) / done:.0f} s left" if 0.05 < done < 1 else ""
    grid.add_row(f"step {seen.global_step}/{frame.steps}", bar, f"{frame.elapsed_s:.0f} s", left)
    return grid


def _learners(frame: Frame) -> RenderableType:
    table = Table(expand=True, box=None, header_style="bold", padding=(0, 1))
    words = [hardware.words() for hardware in frame.learners.values()]
    left = ["learner", *(["devices"] if any(words) else []), "state"]
    for title in (*left, "step", "loss", "tokens/s", "stall", "sent", "up", "restarts"):
        table.add_column(title, justify="left" if title in left else "right")
    for name, hardware in frame.learners.items():
        first = [name, *([hardware.words()] if any(words) else [])]
        state = state_of(frame, name)
        styled = Text(state, style=STATE_STYLES.get(state, "bold red"))
        seen = frame.observed.learners.get(name)
        restarts = frame.daemons[name].restarts if name in frame.daemons else 0
        if seen is None:
            table.add_row(*first, styled, *["-"] * 6, str(restarts))
            continue
        beat = seen.heartbeat
        stall = beat.stall_s / beat.run_s if beat.run_s else 0.0
        table.add_row(
            *first,
            styled,
            str(beat.local_step),
            f"{beat.loss:.3f}",
            f"{beat.tokens_per_s:,.0f}",
            f"{stall:.1%}",
            str(beat.updates_sent),
            human_bytes(beat.bytes_up),
            str(restarts),
        )
    return table


def _run(frame: Frame) -> RenderableType:
    seen = frame.observed
    versions = seen.versions.values()
    span = f"{min(versions)}-{max(versions)}" if versions else "-"
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_row(
        f"versions [bold]{span}[/] of {frame.fragments} fragments ({seen.versions_made} made)",
        f"updates [bold]{seen.updates_merged}[/] merged of {seen.updates_sent} sent, "
        f"{seen.updates_rejected} rejected",
    )
    grid.add_row(
        f"round size {seen.round_size:.1f}, staleness {seen.staleness:.2f}",
        f"up {human_bytes(seen.bytes_up)}, down {human_bytes(seen.bytes_down)}, "
        f"stall {seen.stall_fraction:.2%}",
    )
    if len(frame.losses) > 1:
        course = sparkline(frame.losses)
        grid.add_row(f"training loss {frame.losses[0]:.2f} → {frame.losses[-1]:.2f}", course)
    return grid
