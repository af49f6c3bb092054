"""What would have been, as a table and a figure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from diloco.figures import curves
from diloco.figures.curves import Curve, Curves
from diloco.replay.whatif import UNCHANGED, MergePlan, Result


def table(plan: MergePlan, result: Result) -> Table:
    """Both models side by side."""
    title = "; ".join(plan.changed) or UNCHANGED
    rows = Table("time (UTC)", "step", "as it was", "what if", "difference", title=title)
    for column in rows.columns[1:]:
        column.justify = "right"
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
    """Both models' held-out loss over the run's clock, as a picture.

    Raises:
        ConfigError: it cannot be written.
    """
    points = result.points
    steps = [point.global_step for point in points]
    both = [
        Curve(steps, [point.loss for point in points], "as it was", "o-"),
        Curve(steps, [point.loss_if for point in points], "what if", "s--"),
    ]
    curves.draw(Curves("\n".join(plan.changed) or UNCHANGED, "held-out loss", both), path)
