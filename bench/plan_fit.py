"""Fit the planner's constants to Table 1 of Decoupled DiLoCo (arXiv 2604.21428).

    .venv/bin/python -m bench.plan_fit [--at merge_s=9 restart_s=85 hold_s=0]

Goodput and uptime of jobs alone, without rounds (which lose nothing there): the best constants of a
grid, or those of `--at` over the defaults, with the mean and the greatest error in points, and
what they make of a column that the fit does not see: data-parallel training on 2.4M chips, where
the paper has 18.
"""

import argparse
import itertools

import numpy as np

from diloco.plan import outages as plan_outages
from diloco.plan.outages import Outages

YEAR_S = 365.25 * 86400
CHIPS = (150_000, 300_000, 600_000, 1_200_000)
# (learners, elastic) -> goodput and uptime in %, by chips.
TABLE = {
    (1, False): ((72, 72), (57, 57), (38, 38), (27, 27)),
    (1, True): ((88, 88), (80, 81), (69, 69), (58, 59)),
    (2, True): ((94, 100), (88, 97), (80, 96), (70, 90)),
    (4, True): ((96, 100), (93, 100), (89, 99), (82, 99)),
    (8, True): ((98, 100), (96, 100), (94, 100), (88, 100)),
}
GRID = {
    "slice_chips": (64, 128, 256),
    "return_s": (600.0, 1200.0),
    "hold_s": (0.0, 30.0, 60.0),
    "reconfigure_s": (12.0, 15.0, 17.0),
    "restart_s": (70.0, 75.0, 80.0),
}


def errors(outages: Outages, failures: int, seed: int) -> np.ndarray:
    """Points by which each figure of the table is missed."""
    found = []
    for (learners, elastic), row in TABLE.items():
        for chips, published in zip(CHIPS, row, strict=True):
            rng = np.random.default_rng(seed)
            horizon_s = failures * outages.mtbi_s / chips
            traces = [
                plan_outages.simulate(outages, chips // learners, horizon_s, rng, elastic=elastic)
                for _ in range(learners)
            ]
            goodput = float(np.mean([trace.goodput for trace in traces]))
            planned = (100 * goodput, 100 * plan_outages.anyone_up(traces))
            found.append(np.abs(np.subtract(planned, published)))
    return np.concatenate(found)


def held_out(outages: Outages, failures: int, seed: int) -> float:
    """Goodput in % of data-parallel training on twice the chips of the last column."""
    chips = 2 * CHIPS[-1]
    rng = np.random.default_rng(seed)
    horizon_s = failures * outages.mtbi_s / chips
    return 100 * plan_outages.simulate(outages, chips, horizon_s, rng, elastic=False).goodput


def said(outages: Outages, failures: int, seed: int) -> tuple[float, float, float]:
    """Mean error, greatest error, and the column that is held out."""
    missed = errors(outages, failures, seed)
    return float(missed.mean()), float(missed.max()), held_out(outages, failures, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failures", type=int, default=1500, help="of each figure")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10, help="so many of the best")
    parser.add_argument("--at", nargs="*", metavar="NAME=VALUE", help="these constants alone")
    arguments = parser.parse_args()
    if arguments.at is not None:
        constants = {name: float(value) for name, value in (one.split("=") for one in arguments.at)}
        outages = Outages(mtbi_s=YEAR_S, **constants)  # type: ignore[arg-type]
        mean, most, held = said(outages, arguments.failures, arguments.seed)
        print(f"mean {mean:.2f}, greatest {most:.2f}, held out {held:.1f}: {constants}")
        return
    fits = []
    for values in itertools.product(*GRID.values()):
        constants = dict(zip(GRID, values, strict=True))
        outages = Outages(mtbi_s=YEAR_S, **constants)  # type: ignore[arg-type]
        missed = errors(outages, arguments.failures, arguments.seed)
        fits.append((float(missed.mean()), float(missed.max()), constants))
    fits.sort(key=lambda fit: fit[:2])
    unheld = next(fit for fit in fits if not fit[2]["hold_s"])
    for mean, most, constants in [*fits[: arguments.show], unheld]:
        shown = ", ".join(f"{name} {value:g}" for name, value in constants.items())
        print(f"mean {mean:.2f}, greatest {most:.2f}: {shown}")


if __name__ == "__main__":
    main()
