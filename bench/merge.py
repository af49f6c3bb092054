"""Merging against this machine's streaming bandwidth: `python -m bench.merge`.

One fragment, RDA, Nesterov, `--learners` int4 updates, from their verified codes to new master
parameters. Each stage is charged the bytes that must move for it: codes and scales once and the
sum twice (read and written) per update, codes and scales once more for its norms; the sum once
for the merged norms; sum, parameters and momentum for the outer step. The version delta and the
digests of view, parameters and momentum are shown besides. The last row charges the whole round
what a single pass would move: each update's codes and scales once, each vector read and written
once. A repeat measures the bandwidth before and after its stages; ratios are within a repeat.

The second part shows that memory does not depend on the number of learners: each in a process of
its own, the growth of its resident memory over a whole round.
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from bench.streaming import Stream, median, seconds, table
from diloco.aggregator.arrays.grid import Grid, make_grid
from diloco.aggregator.arrays.merge import (
    Accumulator,
    Contribution,
    coefficients,
    factors,
    segment_norms,
)
from diloco.aggregator.arrays.outer import Gradient, advance_view, make_outer
from diloco.common import cores, shards
from diloco.common.codec import Encoded
from diloco.common.layout import Tensor, TensorHint, make_layout
from diloco.common.shards import pack, unpack

BLOCK = 64
SEGMENTS = 16
REPEATS = 7
FLOOR = 0.6
STAGES = ("norms", "accumulate", "merged norms", "outer step")
AFTER = ("version delta", "digests")


def main() -> None:
    """Print the table; with --check, fail below the floor."""
    options = _options()
    if options.only_memory:
        print(_round_growth_bytes(options.size, options.learners))
        return
    ratio = _print_speed(options.size, options.learners)
    _print_memory(min(options.size, 1 << 24))
    if options.check and ratio < FLOOR:
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--size", type=int, default=1 << 26, help="elements of the fragment")
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--check", action="store_true", help="fail below the floor")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _grid(size: int) -> Grid:
    tensor = Tensor(name="x", shape=(SEGMENTS, size // SEGMENTS), dtype="float32")
    layout = make_layout(
        [tensor], fragments=1, block=BLOCK, hint=lambda *_: TensorHint(norm_axes=1)
    )
    return make_grid(layout.fragments[0], BLOCK, 1 << 30)


def _updates(grid: Grid, count: int) -> Iterator[Encoded]:
    """Updates of random codes and scales, each in memory of its own, as read from the store."""
    rng = np.random.default_rng(0)
    codes = rng.integers(1, 16, grid.size // 2, dtype=np.uint8)
    codes |= codes[::-1] << 4
    scales = rng.uniform(1e-4, 2e-4, grid.size // BLOCK).astype(ml_dtypes.bfloat16)
    data = memoryview(pack("int4", Encoded(scales, codes), BLOCK))
    for _ in range(count):
        yield unpack(data.tobytes(), codec="int4", count=grid.size, block=BLOCK)


def _stage_bytes(size: int, learners: int) -> dict[str, float]:
    codes = size / 2 + 2 * size / BLOCK
    return {
        "norms": learners * codes,
        "accumulate": learners * (codes + 8 * size),
        "merged norms": 4 * size,
        "outer step": 20 * size,
        "version delta": 12 * size + codes,
        "digests": 12 * size,
    }


def _least_bytes(size: int, learners: int) -> float:
    """What the whole round moves at least: sum, parameters, momentum and view twice, codes once."""
    return 32 * size + (learners + 1) * (size / 2 + 2 * size / BLOCK)


class _Round:
    """One round on arrays that are kept from repeat to repeat, as in an aggregator."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sum = Accumulator(grid)
        self._optimizer = make_outer("nesterov")
        self._theta, self._view = np.zeros((2, grid.size), np.float32)
        self._state = self._optimizer.init(grid.size)

    def times(self, updates: Iterator[Encoded] | list[Encoded]) -> dict[str, float]:
        """Seconds of each stage."""
        taken_s = dict.fromkeys((*STAGES, *AFTER), 0.0)
        contributions: list[Contribution] = []
        self._sum.reset()
        for update in updates:
            taken_s["norms"] += seconds(partial(self._norms, update, contributions))
            taken_s["accumulate"] += seconds(partial(self._add, update, contributions))
        taken_s["merged norms"] = seconds(lambda: self._factors(contributions))
        taken_s["outer step"] = seconds(self._outer)
        taken_s["version delta"] = seconds(
            lambda: advance_view(self._theta, self._view, "int4", BLOCK, cores.available())
        )
        taken_s["digests"] = seconds(self._digests)
        return taken_s

    def _norms(self, update: Encoded, contributions: list[Contribution]) -> None:
        contributions.append(Contribution(segment_norms(self._grid, "int4", [update]), 1e6, 0.7))

    def _add(self, update: Encoded, contributions: list[Contribution]) -> None:
        self._sum.add("int4", [update], coefficients(self._grid, contributions[-1]))

    def _factors(self, contributions: list[Contribution]) -> None:
        self._factors_S = factors(self._grid, self._sum, contributions)

    def _outer(self) -> None:
        factors_B = self._grid.per_block(self._factors_S)
        gradient = Gradient(tuple(self._sum.spans()), factors_B, BLOCK)
        self._optimizer.update(
            self._theta,
            gradient,
            self._state,
            learning_rate=0.7,
            momentum=0.9,
            threads=cores.available(),
        )

    def _digests(self) -> None:
        for vector in (self._view, self._theta, *self._state.values()):
            shards.digest(vector)


def _print_speed(size: int, learners: int) -> float:
    grid = _grid(size)
    stream, round_ = Stream(size), _Round(grid)
    updates = list(_updates(grid, learners))
    round_.times(updates)  # Compiles, and touches the memory.
    taken, bandwidths = [], []
    for _ in range(REPEATS):
        before = stream.bytes_per_s()
        taken.append(round_.times(updates))
        bandwidths.append((before + stream.bytes_per_s()) / 2)
    must_move = _stage_bytes(size, learners)
    rows = [["stage", "ms", "GB to move", "GB/s", "of streaming"]]
    totals = [sum(one[stage] for stage in STAGES) for one in taken]
    rows += [
        _row(stage, must_move[stage], [one[stage] for one in taken], bandwidths) for stage in STAGES
    ]
    core_bytes = must_move["accumulate"] + must_move["outer step"]
    cores = [one["accumulate"] + one["outer step"] for one in taken]
    rows.append(_row("accumulate + outer step", core_bytes, cores, bandwidths))
    moved = sum(must_move[stage] for stage in STAGES)
    rows.append(_row("all of these", moved, totals, bandwidths))
    rows += [
        _row(stage, must_move[stage], [one[stage] for one in taken], bandwidths) for stage in AFTER
    ]
    whole = [sum(one.values()) for one in taken]
    rows.append(_row("whole round, once through", _least_bytes(size, learners), whole, bandwidths))
    print(f"{size:,} parameters, {learners} learners, int4, RDA, Nesterov")
    print(f"streaming in place, float32: {median(bandwidths) / 1e9:.1f} GB/s\n")
    print(table(rows))
    ratio = _ratio(core_bytes, cores, bandwidths)
    verdict = "held" if ratio >= FLOOR else "MISSED"
    print(f"\nfloor of accumulate + outer step, {FLOOR:.0%}: {verdict}\n")
    return ratio


def _ratio(moved: float, taken_s: list[float], bandwidths: list[float]) -> float:
    return median([moved / t / b for t, b in zip(taken_s, bandwidths, strict=True)])


def _row(name: str, moved: float, taken_s: list[float], bandwidths: list[float]) -> list[str]:
    typical_s = median(taken_s)
    return [
        name,
        f"{typical_s * 1e3:.1f}",
        f"{moved / 1e9:.2f}",
        f"{moved / typical_s / 1e9:.1f}",
        f"{_ratio(moved, taken_s, bandwidths):.0%}",
    ]


def _print_memory(size: int) -> None:
    rows = [["learners", "growth MB", "bytes per parameter"]]
    for learners in (2, 32):
        command = [sys.executable, "-m", "bench.merge", "--only-memory"]
        arguments = ["--size", str(size), "--learners", str(learners)]
        done = subprocess.run(command + arguments, capture_output=True, text=True, check=True)
        growth = int(done.stdout)
        rows.append([str(learners), f"{growth / 1e6:.0f}", f"{growth / size:.1f}"])
    print(f"peak resident memory of a round, {size:,} parameters\n")
    print(table(rows))


def _round_growth_bytes(size: int, learners: int) -> int:
    """Growth of the peak resident memory from a small round's to a large one's."""
    small = _grid(1 << 16)
    _Round(small).times(_updates(small, 2))
    before = _peak_bytes()
    grid = _grid(size)
    _Round(grid).times(_updates(grid, learners))
    return _peak_bytes() - before


def _peak_bytes() -> int:
    """Peak resident memory; `getrusage` would count the parent's, from before this program."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
