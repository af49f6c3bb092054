"""A round of ours beside Flower's `aggregate`: `python -m bench.flower PYTHON`.

PYTHON is the interpreter of an environment that has flwr, which wants other versions of packages
than the project:

    python -m venv flower && flower/bin/pip install flwr==1.41.0

Flower's is the weighted average of float32 arrays (`flwr.server.strategy.aggregate`). Ours is from
verified int4 codes to the digests of the version: norms, merge by RDA, Nesterov, delta, view.
In turns, each in a process of its own; wall and processor time of each.
"""

import argparse
import subprocess
import sys

from bench.merge import Round, grid_of, total_of, updates_of
from bench.streaming import median, table

TURNS = 7
FLOWER = """
import sys, time
import numpy as np
from flwr.server.strategy.aggregate import aggregate
size, learners = map(int, sys.argv[1:])
results = [([np.full(size, n, np.float32)], 100 + n) for n in range(learners)]
aggregate(results)
print("ready", flush=True)
for _ in sys.stdin:
    wall_s, processor_s = time.perf_counter(), time.process_time()
    aggregate(results)
    print(time.perf_counter() - wall_s, time.process_time() - processor_s, flush=True)
"""


def main() -> None:
    """Print both, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("python", help="interpreter that can import flwr")
    parser.add_argument("--size", type=int, default=1 << 24, help="parameters")
    parser.add_argument("--learners", type=int, default=8)
    options = parser.parse_args()
    ours, flowers = _turns(options.python, options.size, options.learners)
    rows = [["8 updates to one", "wall ms", "processor ms"]]
    for name, taken in (("diloco, int4, whole round", ours), ("flwr, float32, aggregate", flowers)):
        wall_s, processor_s = (median(list(each)) for each in zip(*taken, strict=True))
        rows.append([name, f"{wall_s * 1e3:.1f}", f"{processor_s * 1e3:.1f}"])
    print(f"{options.size:,} parameters, {options.learners} learners\n")
    print(table(rows))
    for kind, what in enumerate(("wall", "processor")):
        pairs = zip(flowers, ours, strict=True)
        print(f"times as fast, {what} time: {median([f[kind] / o[kind] for f, o in pairs]):.1f}")


def _turns(
    python: str, size: int, learners: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Wall and processor seconds, of ours and of Flower's."""
    grid = grid_of(size)
    round_, updates = Round(grid), list(updates_of(grid, learners))
    round_.times(updates)  # Compiles, and touches the memory.
    ours, flowers = [], []
    with subprocess.Popen(
        [python, "-c", FLOWER, str(size), str(learners)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as flower:
        assert flower.stdin is not None
        assert flower.stdout is not None
        if flower.stdout.readline() != "ready\n":
            sys.exit(f"{python} cannot run flwr; see `python -m bench.flower --help`")
        for _ in range(TURNS):
            ours.append(total_of(round_.times(updates)))
            flower.stdin.write("\n")
            flower.stdin.flush()
            wall, processor = flower.stdout.readline().split()
            flowers.append((float(wall), float(processor)))
        flower.stdin.close()
    return ours, flowers


if __name__ == "__main__":
    main()
