"""Draw what the headline benches kept.

    python -m bench.headline_figures FOLDER [--to docs]

FOLDER holds goodput.json and link.json; writes headline-goodput.png and headline-link.png.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.headline_goodput import goodputs
from diloco.figures import style

DPI = 110


def draw_goodput(rows: list[dict[str, Any]], path: Path) -> None:
    """Goodput of both over failures an hour, with what the schedule alone allows."""
    rows = sorted(goodputs(rows), key=lambda row: row["mtbf_s"] and 1 / row["mtbf_s"])
    hourly = [3600 * row["kills"] / row["seconds"] for row in rows]
    with style.look():
        figure, (axes,) = style.panels(1, 3.6)
        for key, label, colour, dash in (
            ("machine_share", "machines that are there: no system can use more", style.BLUE, ":"),
            ("ours_goodput", "this system", style.BLUE, "-"),
            ("all_there", "all are there: no job that needs all can use more",
             style.VERMILLION, ":"),
            ("data_parallel_goodput", "data-parallel", style.VERMILLION, "-"),
        ):  # fmt: skip
            values = [100 * row[key] for row in rows]
            axes.plot(hourly, values, dash, marker="o" if dash == "-" else "", color=colour,
                      label=label)  # fmt: skip
        first = rows[0]
        axes.set_title(f"Goodput of {first['machines']} machines under SIGKILLs")
        axes.set_xlabel(f"failures an hour, each for {first['return_s']:.0f} s on average")
        axes.set_ylabel("goodput, %")
        axes.set_ylim(0, 105)
        axes.legend(loc="lower left")
        figure.savefig(path, dpi=DPI)


def draw_link(rows: list[dict[str, Any]], path: Path) -> None:
    """Speed on the link as a share of the loopback interface's, and what was moved."""
    with style.look():
        figure, (shares, traffic) = style.panels(2, 3.2)
        labels = [f"{row['system']}, {row['islands']}" for row in rows]
        _bars(shares, labels, [100 * row["share"] for row in rows], "%", rows)
        shares.set_xlim(0, 115)
        shares.set_title("Speed, % of that on loopback")
        steps = [row["link"]["steps_per_s"] for row in rows]
        both = [row["link"]["mbit_out"] + row["link"]["mbit_in"] for row in rows]
        moved = [mbit / 8 / step for mbit, step in zip(both, steps, strict=True)]
        _bars(traffic, [""] * len(rows), moved, "MB", rows)
        traffic.set_xscale("log")
        traffic.set_xlim(min(moved) / 4, 6 * max(moved))
        traffic.set_title("Over the link, a step of one island")
        figure.savefig(path, dpi=DPI)


def _bars(
    axes: Axes, labels: list[str], values: list[float], unit: str, rows: list[dict[str, Any]]
) -> None:
    colours = [style.BLUE if row["system"] == "ours" else style.VERMILLION for row in rows]
    places = range(len(values))
    axes.barh(places, values, color=colours)
    axes.set_yticks(list(places), labels)
    axes.invert_yaxis()
    for place, value in zip(places, values, strict=True):
        axes.annotate(f" {value:.3g} {unit}", (value, place), va="center")


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--to", type=Path, default=Path("docs"))
    args = parser.parse_args()
    for name, draw in (("goodput", draw_goodput), ("link", draw_link)):
        kept = args.folder / f"{name}.json"
        if kept.exists():
            draw(json.loads(kept.read_text()), args.to / f"headline-{name}.png")
            print(args.to / f"headline-{name}.png")


if __name__ == "__main__":
    main()
