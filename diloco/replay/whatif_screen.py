"""What would have been, as a table and a figure."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.table import Table

from diloco.common.errors import ConfigError
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
    from matplotlib.figure import Figure

    from diloco.figures.style import BLUE, VERMILLION

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    steps = [point.global_step for point in result.points]
    axes.plot(steps, [p.loss for p in result.points], "o-", color=BLUE, label="as it was")
    axes.plot(steps, [p.loss_if for p in result.points], "s--", color=VERMILLION, label="what if")
    axes.set_xlabel("global step")
    axes.set_ylabel("held-out loss")
    axes.set_title("\n".join(plan.changed) or UNCHANGED, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the figure {str(path)!r}: {error}") from error
