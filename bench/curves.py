"""Tables and a figure of the quality sweep's results.

    .venv/bin/python -m bench.curves --results FILE [--task language|student|transfer|skills]
        [--plot PNG] [--proof PNG]

A ratio is the mean over seeds of the ratios of each seed, with its standard error: runs of one
seed begin alike and draw the same batches.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import sweep
from bench.sweep import Kind, known

# How figures look: few lines, in colours that the colour-blind tell apart (Okabe and Ito's);
# whatever colours say, line styles or markers say too.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, "#7F7F7F")
DASHES = ("-", "--", "-.", ":")
WIDTH_IN = 9.6

_RULES: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#404040",
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "path.simplify": True,
    "svg.hashsalt": "diloco",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}


@contextmanager
def look() -> Iterator[None]:
    """The style, for as long as the block lasts; figures are made and saved within it."""
    with mpl.rc_context(_RULES):
        yield


def panels(count: int, height_in: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels side by side."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    made = figure.subplots(1, count, squeeze=False, **options)
    return figure, list(made[0])


Losses = dict[int, float]
MAIN = {
    "data-parallel": (BLACK, "-", "data-parallel"),
    "synchronous": (BLUE, "--", "synchronous DiLoCo"),
    "uniform": (VERMILLION, "-", "this system, equal learners"),
    "unequal": (GREEN, "-.", "speeds 1, 1, ½, ¼"),
    "kills": (PURPLE, ":", "learners killed"),
}


# Tasks whose runs learners join.
JOINED = ("language", "student")
PROOF_BASES = ("adamw, data-parallel", "data-parallel")
PROOF_LABELS = {
    "adamw, data-parallel": "data-parallel, AdamW",
    "data-parallel": "data-parallel, Muon",
    "kills": "H = 6, learners killed",
    "equal": "H = 6, equal learners",
    "kills, tau = 2": "H = 6, learners killed, τ = 2",
    "equal, tau = 2": "H = 6, equal learners, τ = 2",
    "nesterov 0.5/0.5, kills": "H = 6, learners killed, outer Nesterov 0.5 / 0.5",
    "unequal": "H = 6, speeds 1, 1, ½, ¼, τ = 4",
    "unequal, tau = 2": "H = 6, speeds 1, 1, ½, ¼, τ = 2",
    "no latency": "H = 6, no latency",
    "a travel of H": "H = 6, latency of a whole H",
    "adamw, kills": "H = 6, learners killed, AdamW inside",
    "H = 24, kills": "H = 24, learners killed",
    "synchronous, H = 6": "synchronous DiLoCo, H = 6",
    "alone": "one learner alone",
}


class Results(NamedTuple):
    """Lines of the file by group, name and budget, and then by seed."""

    lines: dict[tuple[str, str, int], dict[int, dict[str, Any]]]

    def losses(self, group: str, name: str, budget: int) -> Losses:
        """Loss by seed."""
        found = self.lines.get((group, name, budget), {})
        return {seed: line["loss"] for seed, line in sorted(found.items())}

    def mean(self, group: str, name: str, budget: int, field: str) -> float:
        """Mean over seeds of a figure that each line has."""
        found = self.lines.get((group, name, budget), {})
        return float(np.mean([line[field] for line in found.values()])) if found else float("nan")

    def names(self, group: str) -> list[tuple[str, int]]:
        """(name, budget) of a group's rows, in the order in which they were run."""
        return [(name, budget) for found, name, budget in self.lines if found == group]


def read(path: Path, task: str) -> Results:
    """The results of a task in a file."""
    lines: dict[tuple[str, str, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in known(path).values():
        if line["task"] == task:
            lines[line["group"], line["name"], line["budget"]][line["seed"]] = line
    return Results(dict(lines))


def excess(losses: Losses, base: Losses) -> tuple[float, float, int]:
    """By how many percent losses exceed others of the same seeds: mean, standard error, seeds."""
    both = [seed for seed in losses if seed in base]
    percent = [100 * (losses[seed] / base[seed] - 1) for seed in both]
    if not percent:
        return float("nan"), float("nan"), 0
    error = np.std(percent, ddof=1) / np.sqrt(len(percent)) if len(percent) > 1 else float("nan")
    return float(np.mean(percent)), float(error), len(percent)


def _percent(losses: Losses, base: Losses) -> str:
    mean, error, seeds = excess(losses, base)
    if not seeds:
        return ""
    return f"{mean:+.2f}" + (f" ± {error:.2f}" if seeds > 1 else "")


def main_table(results: Results) -> None:
    """A table of the systems at each budget: loss, and its excess over the two baselines."""
    print(
        "| steps a learner | system | seeds | loss | over data-parallel, % | over synchronous, % |"
    )
    print("|---|---|---|---|---|---|")
    for budget in sorted({budget for _, budget in results.names("main")}):
        parallel = results.losses("main", "data-parallel", budget)
        synchronous = results.losses("main", "synchronous", budget)
        for name in MAIN:
            losses = results.losses("main", name, budget)
            if losses:
                mean = np.mean(list(losses.values()))
                over = _percent(losses, parallel) if name != "data-parallel" else ""
                behind = _percent(losses, synchronous) if name not in list(MAIN)[:2] else ""
                print(f"| {budget} | {name} | {len(losses)} | {mean:.4f} | {over} | {behind} |")


def group_table(results: Results, group: str) -> None:
    """A group's rows, each against the run of `main` with the same fleet and budget."""
    print(f"\n| {group} | seeds | loss | over the defaults, % | updates a version | staleness |")
    print("|---|---|---|---|---|---|")
    for name, budget in results.names(group):
        key, losses = (group, name, budget), results.losses(group, name, budget)
        fleet = next(iter(results.lines[key].values()))["fleet"]
        fleet = "uniform" if fleet in ("equal", "scavenging") else fleet
        over = _percent(losses, results.losses("main", fleet, budget))
        mean = np.mean(list(losses.values()))
        inputs, stale = (results.mean(*key, field) for field in ("inputs", "staleness"))
        print(f"| {name} | {len(losses)} | {mean:.4f} | {over} | {inputs:.2f} | {stale:.2f} |")


def proof_table(results: Results) -> None:
    """Muon inside, against both data-parallel baselines."""
    names = results.names("proof")
    if not names:
        return
    print("\n| system | seeds | loss | over data-parallel AdamW, % | over data-parallel Muon, % |")
    print("|---|---|---|---|---|")
    for name, budget in names:
        losses = results.losses("proof", name, budget)
        over = [
            _percent(losses, results.losses("proof", base, budget)) if name != base else ""
            for base in PROOF_BASES
        ]
        mean = np.mean(list(losses.values()))
        print(f"| {name} | {len(losses)} | {mean:.4f} | {' | '.join(over)} |")


def _beside(values: Losses, base: Losses) -> str:
    """How far values exceed others of the same seeds, in points of a percent, with the error."""
    apart = [100 * (values[seed] - base[seed]) for seed in values if seed in base]
    if not apart:
        return ""
    error = np.std(apart, ddof=1) / np.sqrt(len(apart)) if len(apart) > 1 else float("nan")
    return f"{np.mean(apart):+.1f}" + (f" ± {error:.1f}" if len(apart) > 1 else "")


def _mean_and_error(values: Losses, form: str) -> str:
    """The mean over seeds of values, with its standard error."""
    given = list(values.values())
    error = f" ± {np.std(given, ddof=1) / np.sqrt(len(given)):{form}}" if len(given) > 1 else ""
    return f"{np.mean(given):{form}}{error}"


def skills_table(results: Results, when: str) -> None:
    """Loss and exact answers, in percent, of each system beside data-parallel of its optimizer.

    `when`: "before" or "after" the fine-tuning.
    """

    def by_seed(name: str, budget: int, skill: str, figure: str) -> Losses:
        """A figure by seed, of a skill or, where that is "", of all."""
        lines = sorted(results.lines.get(("skills", name, budget), {}).items())
        found = ((seed, line[when]) for seed, line in lines)
        return {
            seed: (scored["slices"][skill] if skill else scored["figures"])[figure]
            for seed, scored in found
        }

    rows = results.names("skills")
    line = next(iter(results.lines["skills", *rows[0]].values()))
    skills = list(line[when]["slices"])
    titles = (f"{when} fine-tuning", "seeds", "loss", "over data-parallel, %", *skills,
              "all", "over data-parallel, points")  # fmt: skip
    print(f"\n| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
    for name, budget in rows:
        of_adamw = name.startswith("adamw")
        base = "adamw, data-parallel" if of_adamw else "data-parallel"
        loss, exact = (by_seed(name, budget, "", figure) for figure in ("loss", "exact"))
        cells = [name, str(len(loss)), _mean_and_error(loss, ".4f")]
        cells += [_percent(loss, by_seed(base, budget, "", "loss")) if name != base else ""]
        for skill in (*skills, ""):
            values = by_seed(name, budget, skill, "exact")
            cells.append(_mean_and_error({k: 100 * v for k, v in values.items()}, ".1f"))
        cells += [_beside(exact, by_seed(base, budget, "", "exact")) if name != base else ""]
        print(f"| {' | '.join(cells)} |")


def rates_table(results: Results) -> None:
    """Loss at each peak rate."""
    if results.names("rates"):
        print("\n| optimizer, system, rate | seeds | loss |")
        print("|---|---|---|")
    for name, budget in results.names("rates"):
        losses = results.losses("rates", name, budget)
        print(f"| {name} | {len(losses)} | {np.mean(list(losses.values())):.4f} |")


def _proof_label(name: str) -> str:
    system, blended, share = name.partition(", blend ")
    return PROOF_LABELS[system] + (f", blend {share}" if blended else "")


def proof_plot(results: Results, path: Path) -> None:
    """Plot how far each system of the proof exceeds data-parallel AdamW, the best first."""
    rows = []
    for name, budget in results.names("proof"):
        base = results.losses("proof", PROOF_BASES[0], budget)
        mean, error, seeds = excess(results.losses("proof", name, budget), base)
        if seeds:
            rows.append((mean, error if seeds > 1 else 0.0, f"{_proof_label(name)} ({seeds})"))
    rows.sort(reverse=True)
    with look():
        figure, (axes,) = panels(1, 0.5 + 0.3 * len(rows))
        for height, (mean, error, label) in enumerate(rows):
            colour = BLACK if "data-parallel" in label else VERMILLION
            axes.errorbar(mean, height, xerr=error, fmt="o", color=colour, ms=4, capsize=2)
        axes.axvline(0, color=BLACK, lw=0.8)
        axes.set_yticks(range(len(rows)), [label for _, _, label in rows])
        axes.set(xlabel="held-out loss over data-parallel AdamW (%); seeds in brackets")
        figure.savefig(path, dpi=150)


def scavenging_table(results: Results) -> None:
    """Time and loss of runs that learners join, against the run that nobody joins."""
    print("\n| learners that join | time, share of +0% | 0.5 + 0.5 / (1 + r) | loss over +0%, % |")
    print("|---|---|---|---|")
    for name, budget in results.names("scavenging"):
        key, base = ("scavenging", name, budget), ("scavenging", "+0%", budget)
        extra = next(iter(results.lines[key].values()))["extra"]
        time = results.mean(*key, "took_s") / results.mean(*base, "took_s")
        over = _percent(results.losses(*key), results.losses(*base))
        print(f"| {name} | {time:.3f} | {sweep.expected_time(extra):.3f} | {over} |")


def plot(results: Results, all_tasks: dict[str, Results], path: Path) -> None:
    """Loss and gap over the budget, and the time of runs that learners join, of every task."""
    with look():
        figure, (left, middle, right) = panels(3, 3.2)
        budgets = sorted({budget for _, budget in results.names("main")})
        for name, (colour, dash, label) in MAIN.items():
            _curve(results, left, name, budgets, colour, dash, label)
            if name != "data-parallel":
                _gap(results, middle, name, budgets, colour, dash)
        left.set(title="held-out loss (nats per byte)", xlabel="steps a learner")
        left.legend(fontsize=7.5)
        middle.set(title="above data-parallel (%)", xlabel="steps a learner")
        middle.set_ylim(bottom=0)
        for axes in (left, middle):
            axes.set_xscale("log")
            axes.set_xticks(budgets, [str(budget) for budget in budgets])
            axes.minorticks_off()
        _times(all_tasks, right)
        figure.savefig(path, dpi=150)


def _curve(
    results: Results,
    axes: Axes,
    name: str,
    budgets: list[int],
    colour: str,
    dash: str,
    label: str,
) -> None:
    points = [(b, list(results.losses("main", name, b).values())) for b in budgets]
    points = [(budget, losses) for budget, losses in points if losses]
    means = [np.mean(losses) for _, losses in points]
    axes.plot([b for b, _ in points], means, dash, color=colour, label=label, marker="o", ms=3)
    for budget, losses in points:
        axes.plot([budget] * len(losses), losses, "_", color=colour, ms=5, alpha=0.5)


def _gap(
    results: Results, axes: Axes, name: str, budgets: list[int], colour: str, dash: str
) -> None:
    found = []
    for budget in budgets:
        parallel = results.losses("main", "data-parallel", budget)
        mean, error, seeds = excess(results.losses("main", name, budget), parallel)
        if seeds:
            found.append((budget, mean, error if seeds > 1 else 0.0))
    if found:
        x, means, errors = zip(*found, strict=True)
        axes.errorbar(x, means, yerr=errors, fmt=f"o{dash}", color=colour, ms=3, capsize=2)


def _times(all_tasks: dict[str, Results], axes: Axes) -> None:
    grid = np.linspace(0, 300, 100)
    ideal = [sweep.expected_time(extra / 100) for extra in grid]
    axes.plot(grid, ideal, "-", color=BLACK, lw=1, label="0.5 + 0.5 / (1 + r)")
    looks = zip(all_tasks.items(), ("o", "x"), (VERMILLION, BLUE), strict=True)
    for (task, results), marker, colour in looks:
        extras, times = [], []
        for name, budget in results.names("scavenging"):
            line = next(iter(results.lines["scavenging", name, budget].values()))
            base = results.mean("scavenging", "+0%", budget, "took_s")
            extras.append(100 * line["extra"])
            times.append(results.mean("scavenging", name, budget, "took_s") / base)
        if times:
            axes.plot(extras, times, marker, color=colour, ms=5, mfc="none", label=task)
    axes.set(title="time, if r % join at half", xlabel="learners that join (%)", ylim=(0.5, 1.05))
    axes.legend()


def main() -> None:
    """Print the tables and draw the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--task", default="language", choices=get_args(Kind))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--proof", type=Path, help="a figure of the proof alone")
    options = parser.parse_args()
    results = read(options.results, options.task)
    if results.names("main"):
        main_table(results)
    for group in dict.fromkeys(group for group, _, _ in results.lines):
        if group not in ("main", "scavenging", "proof", "rates", "skills"):
            group_table(results, group)
    if results.names("scavenging"):
        scavenging_table(results)
    rates_table(results)
    proof_table(results)
    if results.names("skills"):
        skills_table(results, "before")
        skills_table(results, "after")
    if options.proof:
        proof_plot(results, options.proof)
    if options.plot:
        all_tasks = {task: read(options.results, task) for task in JOINED}
        plot(results, all_tasks, options.plot)


if __name__ == "__main__":
    main()
