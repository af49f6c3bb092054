"""Merging against this machine's streaming bandwidth: `python -m bench.merge`.

One fragment, RDA, Nesterov, `--learners` int4 updates, from their verified codes to the digests of
the version that they made. Each stage is charged the bytes that must move for it: codes and scales
once for their norms; codes and scales once more, and the sum read and written once for every eight
updates, to accumulate them, which measures the sum too; the sum, and parameters, momentum and view
read and written, for the outer step and the delta; each of the three for the digests. The last row
charges the whole round what a single pass would move: each update's codes and scales once, each
vector read and written once. A repeat measures the bandwidth before and after its stages; ratios
are within a repeat. Processor time is of all threads, divided by the cores: what the wall time
would be if nothing else ran.

The second part shows that memory does not depend on the number of learners: each in a process of
its own, the growth of its resident memory over a whole round, and until its view and outer state
are stored, in a folder, while updates of the next round wait already.

    python -m bench.merge flower PYTHON

A round of ours beside Flower's `aggregate`. PYTHON is the interpreter of an environment that has
flwr, which wants other versions of packages than the project:

    python -m venv flower && flower/bin/pip install flwr==1.41.0

Flower's is the weighted average of float32 arrays (`flwr.server.strategy.aggregate`). Ours is from
verified int4 codes to the digests of the version: norms, merge by RDA, Nesterov, delta, view.
In turns, each in a process of its own; wall and processor time of each.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bench.harness import Stream, median, run_part, seconds, table
from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.arrays.grid import Grid, make_grid, share_out
from diloco.aggregator.arrays.merge import (
    MOST_WAITING,
    Accumulator,
    Contribution,
    coefficients,
    factors,
    segment_norms,
)
from diloco.aggregator.arrays.outer import close_round, make_outer
from diloco.common.process import cores
from diloco.common.process.config import make_config
from diloco.common.protocol import shards
from diloco.common.protocol.codecs import Encoded, aligned_zeros
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.common.protocol.shards import pack, unpack
from diloco.common.storage.store.directory import DirectoryStore

BLOCK = 64
SEGMENTS = 16
REPEATS = 7
FLOOR = 0.2
SETTINGS = make_config(
    {"run": {"name": "merge", "steps": 1}, "store": {"url": "/nowhere"}}, source="this bench"
).settings()
STAGES = ("norms", "accumulate", "outer step, delta", "digests")


def merge_main() -> None:
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


def grid_of(size: int) -> Grid:
    tensor = Tensor(name="x", shape=(SEGMENTS, size // SEGMENTS), dtype="float32")
    layout = make_layout(
        [tensor], fragments=1, block=BLOCK, hint=lambda *_: TensorHint(norm_axes=1)
    )
    return make_grid(layout.fragments[0], BLOCK, 1 << 30)


def updates_of(grid: Grid, count: int) -> Iterator[Encoded]:
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
    passes = -(-learners // MOST_WAITING["int4"])
    return {
        "norms": learners * codes,
        "accumulate": learners * codes + passes * 8 * size,
        "outer step, delta": 28 * size + codes,
        "digests": 12 * size,
    }


def _least_bytes(size: int, learners: int) -> float:
    """Bytes that the round moves at least: sum, parameters, momentum, view twice, codes once."""
    return 32 * size + (learners + 1) * (size / 2 + 2 * size / BLOCK)


class Taken(NamedTuple):
    """The time of a stage; processor time of all threads.

    Attributes:
        processor_s: divided by the cores.
    """

    wall_s: float = 0.0
    processor_s: float = 0.0

    def plus(self, work: Callable[[], Any]) -> "Taken":
        began_s = time.process_time()
        wall_s = seconds(work)
        processor_s = (time.process_time() - began_s) / cores.available()
        return Taken(self.wall_s + wall_s, self.processor_s + processor_s)


def total_of(taken: dict[str, Taken]) -> tuple[float, float]:
    """Wall seconds of all stages, and processor seconds of all threads."""
    wall_s = sum(one.wall_s for one in taken.values())
    return wall_s, sum(one.processor_s for one in taken.values()) * cores.available()


class MergeRound:
    """One round on arrays that are kept from repeat to repeat, as in an aggregator."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._sum = Accumulator(grid, cores.available())
        self._optimizer = make_outer("nesterov")
        self._theta, self._view = aligned_zeros(grid.size), aligned_zeros(grid.size)
        self._state = self._optimizer.init(grid.size)

    def times(self, updates: Iterator[Encoded] | list[Encoded]) -> dict[str, Taken]:
        """The time of each stage."""
        taken = dict.fromkeys(STAGES, Taken())
        contributions: list[Contribution] = []
        self._sum.reset()
        for update in updates:
            taken["norms"] = taken["norms"].plus(partial(self._norms, update, contributions))
            taken["accumulate"] = taken["accumulate"].plus(
                partial(self._add, update, contributions)
            )
        taken["accumulate"] = taken["accumulate"].plus(lambda: self._factors(contributions))
        taken["outer step, delta"] = Taken().plus(self._close)
        taken["digests"] = Taken().plus(self._digests)
        return taken

    def store(self, updates: Iterator[Encoded]) -> None:
        """Store what the round made, while updates of the next wait to be added."""
        self._sum.reset()
        for update in updates:
            self._add(update, [Contribution(np.ones(SEGMENTS), 1.0)])
        arrays = FragmentArrays(SETTINGS, self._grid, self._view, self._theta, self._state)
        with tempfile.TemporaryDirectory() as folder:
            store = DirectoryStore(Path(folder))
            store.put("view", arrays.view_object())
            store.put("outer", arrays.outer_object())

    def _norms(self, update: Encoded, contributions: list[Contribution]) -> None:
        contributions.append(
            Contribution(segment_norms(self._grid, "int4", [update], cores.available()), 1e6, 0.7)
        )

    def _add(self, update: Encoded, contributions: list[Contribution]) -> None:
        self._sum.add("int4", [update], coefficients(self._grid, contributions[-1]))

    def _factors(self, contributions: list[Contribution]) -> None:
        self._factors_S = factors(self._grid, self._sum, contributions)

    def _close(self) -> None:
        close_round(
            self._grid,
            self._sum,
            self._factors_S,
            theta_N=self._theta,
            view_N=self._view,
            state=self._state,
            optimizer=self._optimizer,
            learning_rate=0.7,
            momentum=0.9,
            delta_codec="int4",
            threads=cores.available(),
        )

    def _digests(self) -> None:
        vectors = (self._view, self._theta, *self._state.values())
        share_out(shards.digest, vectors, len(vectors))


def _print_speed(size: int, learners: int) -> float:
    grid = grid_of(size)
    stream, round_ = Stream(size), MergeRound(grid)
    updates = list(updates_of(grid, learners))
    round_.times(updates)  # Compiles, and touches the memory.
    taken: list[dict[str, Taken]] = []
    bandwidths: list[float] = []
    processors: list[float] = []
    for _ in range(REPEATS):
        before = stream.bytes_per_s()
        taken.append(round_.times(updates))
        streaming = Taken().plus(lambda: bandwidths.append((before + stream.bytes_per_s()) / 2))  # noqa: B023
        processors.append(16 * size / streaming.processor_s)
    must_move = _stage_bytes(size, learners)
    rows = [["stage", "ms", "processor ms", "GB to move", "GB/s", "of streaming"]]
    rows += [
        _row(stage, must_move[stage], [one[stage] for one in taken], bandwidths) for stage in STAGES
    ]
    whole = [Taken(*map(sum, zip(*one.values(), strict=True))) for one in taken]
    rows.append(_row("all of these", sum(must_move.values()), whole, bandwidths))
    rows.append(_row("whole round, once through", _least_bytes(size, learners), whole, bandwidths))
    print(
        f"{size:,} parameters, {learners} learners, int4, RDA, Nesterov, {cores.available()} cores"
    )
    print(f"streaming in place, float32: {median(bandwidths) / 1e9:.1f} GB/s\n")
    print(table(rows))
    ratio = _ratio(_least_bytes(size, learners), whole, bandwidths)
    alone = [Taken(one.processor_s) for one in whole]
    by_processor = _ratio(_least_bytes(size, learners), alone, processors)
    print(f"\nthe whole round, by processor time of both: {by_processor:.0%}")
    verdict = "held" if ratio >= FLOOR else "MISSED"
    print(f"\nfloor of the whole round, {FLOOR:.0%}: {verdict}\n")
    return ratio


def _ratio(moved: float, taken: list[Taken], bandwidths: list[float]) -> float:
    pairs = zip(taken, bandwidths, strict=True)
    return median([moved / one.wall_s / bandwidth for one, bandwidth in pairs])


def _row(name: str, moved: float, taken: list[Taken], bandwidths: list[float]) -> list[str]:
    typical_s = median([one.wall_s for one in taken])
    return [
        name,
        f"{typical_s * 1e3:.1f}",
        f"{median([one.processor_s for one in taken]) * 1e3:.1f}",
        f"{moved / 1e9:.2f}",
        f"{moved / typical_s / 1e9:.1f}",
        f"{_ratio(moved, taken, bandwidths):.0%}",
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
    small = grid_of(1 << 16)
    MergeRound(small).times(updates_of(small, 2))
    before = _peak_bytes()
    grid = grid_of(size)
    round_ = MergeRound(grid)
    round_.times(updates_of(grid, learners))
    round_.store(updates_of(grid, min(learners, MOST_WAITING["int4"] - 1)))
    return _peak_bytes() - before


def _peak_bytes() -> int:
    """Peak resident memory; `getrusage` would count the parent's, from before this program."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- Beside Flower


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


def flower_main() -> None:
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
    round_, updates = MergeRound(grid), list(updates_of(grid, learners))
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
            sys.exit(f"{python} cannot run flwr; see `python -m bench.merge flower --help`")
        for _ in range(TURNS):
            ours.append(total_of(round_.times(updates)))
            flower.stdin.write("\n")
            flower.stdin.flush()
            wall, processor = flower.stdout.readline().split()
            flowers.append((float(wall), float(processor)))
        flower.stdin.close()
    return ours, flowers


if __name__ == "__main__":
    run_part({"merge": merge_main, "flower": flower_main})
