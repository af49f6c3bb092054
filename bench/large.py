"""Quality at 10 and 35 million parameters on one accelerator, in pieces of some minutes.

    .venv/bin/python -m bench.large --folder runs/large [--size 10m] [--minutes 9] [--list]
        [--only NAME,...] [--seed 0] [--rate R] [--h 6] [--p 6] [--min-steps 3] [--tau 4]
        [--latency 0.5] [--batch 16] [--length 256] [--dtype bfloat16] [--corpus FOLDER]

Four learners train over 20 tokens a parameter in all, in one process and virtual time
(`bench/emulate.py`): learners on the accelerator in turn, the merge on the CPU, int4 both ways.
Beside them data-parallel AdamW and Muon, and one learner alone. A piece that is over leaves its
half-done run in the folder and ends with status 75; the same command goes on with it. Results
are lines of FOLDER/results.jsonl; what is there is not run again, so options may be varied.
"""

import argparse
import json
import os
import pickle
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import jax
import numpy as np

from bench import emulate, quality, sweep, tasks
from bench.sweep import Settings, SweepCase, known, settings_of
from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.arrays.outer import OuterOptimizer
from diloco.common.protocol.shards import digest
from diloco.learner.task import Task, params_shapes
from diloco.learner.tensors import tree

# --- A half-done object in a file, between two pieces
#
# It is pickled, and only read by the same program: an emulated world (`bench/emulate.py`) is its
# learners, aggregators and what is to happen. What cannot be pickled is named and found again: what
# the program compiles from its command line, and the devices.


Named = Mapping[str, Any]


def save(thing: Any, path: Path, named: Named) -> None:
    """Put `thing` into a file, whole or not at all; `named` are the objects that stay outside."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        _Pickler(file, named).dump(thing)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load(path: Path, named: Named) -> Any:
    """Load the object that `save` stored, with the same names of what stays outside."""
    with path.open("rb") as file:
        return _Unpickler(file, named).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, named: Named) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = {id(value): name for name, value in named.items()}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, jax.Device):
            return "device", (obj.platform, obj.id)
        name = self._names.get(id(obj))
        return None if name is None else ("named", name)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, jax.Array):
            return jax.device_put, (np.asarray(obj), obj.sharding)
        if isinstance(obj, MappingProxyType):
            return _read_only, (dict(obj),)
        if isinstance(obj, FragmentArrays):
            # Its outer optimizer is functions, which follow from its settings.
            kept = {k: v for k, v in vars(obj).items() if not isinstance(v, OuterOptimizer)}
            return _fragment_arrays, tuple(kept.pop(f.name) for f in fields(obj)), kept
        return NotImplemented


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def _fragment_arrays(*values: Any) -> FragmentArrays:
    return FragmentArrays(*values)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, named: Named) -> None:
        super().__init__(file)
        self._named = named

    def persistent_load(self, pid: Any) -> Any:
        kind, key = pid
        if kind == "named":
            return self._named[key]
        platform, number = key
        return next(d for d in jax.devices(platform) if d.id == number)


# --- A piece


GO_ON = 75
LOOKS = 20


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model and batch at which a case is measured."""

    preset: str
    batch: int
    length: int
    dtype: str
    corpus: str
    tokens_per_parameter: float

    def options(self) -> dict[str, Any]:
        """The options of the built-in task."""
        return {
            "preset": self.preset,
            "batch": self.batch,
            "length": self.length,
            "dtype": self.dtype,
            "corpus": self.corpus,
            "eval_batches": 64,
        }

    def budget(self) -> int:
        """Inner steps of each learner."""
        shapes = params_shapes(tasks.build(steps=1, seed=0, **self.options()))
        parameters: int = sum(leaf.size for _, leaf in tree.named_leaves(shapes))
        tokens = self.tokens_per_parameter * parameters
        steps: float = tokens / (sweep.LEARNERS * self.batch * self.length)
        return round(steps)


def matrix(size: Size, settings: Settings, latency_steps: float, seed: int) -> list[SweepCase]:
    """The cases to compare, the one that carries the claim and the one it must beat first."""
    budget = size.budget()

    def case(name: str, optimizer: sweep.Inner = "muon", **fields: Any) -> SweepCase:
        return SweepCase(
            group=size.preset, name=name, budget=budget, seed=seed, optimizer=optimizer, **fields
        )

    def system(name: str, optimizer: sweep.Inner = "muon", **fields: Any) -> SweepCase:
        return case(name, optimizer, settings=settings, latency_steps=latency_steps, **fields)

    return [
        case("adamw, data-parallel", "adamw", data_parallel=True),
        system("kills", fleet="kills"),
        case("data-parallel", data_parallel=True),
        system("equal"),
        system("unequal", fleet="unequal"),
        system("adamw, kills", "adamw", fleet="kills"),
        case("alone", alone=True),
    ]


def task_of(case: SweepCase, size: Size) -> Task:
    """The case's task, whose rate goes through its schedule once in the case's run."""
    return tasks.build(
        steps=case.steps(),
        seed=case.seed,
        optimizer=case.optimizer,
        learning_rate=case.rate,
        **size.options(),
    )


class CasePart:
    """The part of a case that is run now.

    Args:
        case: what is run.
        size: at what size.
        path: of the file that holds the case between two pieces.
    """

    def __init__(self, case: SweepCase, size: Size, path: Path) -> None:
        self._case, self._path = case, path
        task = task_of(case, size)
        began = emulate.first(task, case.seed)
        settings = settings_of(case)
        start = emulate.Start(task, tree.task_layout(task, settings.sync), began)
        self._named = {"task": task, "began": began, "start": start}
        look_steps = max(1, case.budget // LOOKS)
        if path.exists():
            self._run = load(path, self._named)
        elif case.data_parallel or case.alone:
            learners = 1 if case.alone else sweep.LEARNERS
            self._run = quality.DataParallel(task, began, learners, case.budget, look_steps)
        else:
            weather = case.weather()._replace(look_steps=look_steps * sweep.LEARNERS)
            self._run = emulate.World(settings, start, weather)

    def run(self, pause: emulate.Pause) -> dict[str, Any] | None:
        """The case's result; None if it is to go on, from the file."""
        done = self._run.run(pause)
        if done is None:
            save(self._run, self._path, self._named)
            return None
        self._path.unlink(missing_ok=True)
        if isinstance(done, emulate.RunOutcome):
            return done._asdict()
        return {"loss": done, "looks": self._run.looks}


def key_of(case: SweepCase, size: Size) -> str:
    """Names a result by all that was chosen."""
    settings = ", ".join(f"{key}={value}" for key, value in case.settings.items())
    chosen = (case.group, case.name, case.budget, case.seed, case.rate, case.latency_steps)
    return "/".join(map(str, (*chosen, settings, size.batch, size.length, size.dtype)))


def run_piece(case: SweepCase, size: Size, folder: Path, until_s: float) -> dict[str, Any] | None:
    """Go on with a case; its line of results, or None if time was up before."""
    key = key_of(case, size)
    began_s = time.monotonic()
    piece = CasePart(case, size, folder / f"{digest(key.encode())}.half")
    result = piece.run(lambda: time.monotonic() > until_s)
    if result is None:
        return None
    line = {"key": key, **asdict(case), **asdict(size), **result}
    line["device"] = jax.devices()[0].device_kind
    line["last_piece_s"] = round(time.monotonic() - began_s, 1)
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def table(wanted: list[SweepCase], size: Size, found: dict[str, dict[str, Any]]) -> None:
    """Print the losses so far, and by how much they exceed both data-parallel baselines."""
    losses = {
        case.name: found[key_of(case, size)]["loss"]
        for case in wanted
        if key_of(case, size) in found
    }
    print("| system | loss | over data-parallel AdamW, % | over data-parallel Muon, % |")
    print("|---|---|---|---|")
    for name, loss in losses.items():
        cells = [
            f"{100 * (loss / losses[base] - 1):+.2f}" if base in losses and base != name else ""
            for base in ("adamw, data-parallel", "data-parallel")
        ]
        print(f"| {name} | {loss:.4f} | {' | '.join(cells)} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of results and half-done runs")
    parser.add_argument("--size", default="10m", help="a preset of the built-in task")
    parser.add_argument("--minutes", type=float, default=9.0, help="length of this piece")
    parser.add_argument("--only", default="", help="names of cases, joined by semicolons")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, help="peak inner rate in place of the preset's")
    parser.add_argument("--h", type=int, default=6, help="sync.interval_steps")
    parser.add_argument("--p", type=int, default=6, help="sync.fragments")
    parser.add_argument("--min-steps", type=int, default=3, help="sync.min_steps")
    parser.add_argument("--tau", type=int, default=4, help="sync.overlap_steps")
    parser.add_argument("--latency", type=float, default=0.5, help="steps that a message travels")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--corpus", default="stdlib", help="a folder of text")
    parser.add_argument("--tokens-per-parameter", type=float, default=20.0)
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    return parser.parse_args()


def _matrix(options: argparse.Namespace, size: Size) -> list[SweepCase]:
    settings: Settings = {
        "sync.interval_steps": options.h,
        "sync.fragments": options.p,
        "sync.min_steps": options.min_steps,
        "sync.overlap_steps": options.tau,
    }
    names = options.only.split(";") if options.only else None
    return [
        replace(case, rate=options.rate)
        for case in matrix(size, settings, options.latency, options.seed)
        if names is None or case.name in names
    ]


def main() -> int:
    """Go on for a piece; 0 when all is done, otherwise `GO_ON`."""
    options = _options()
    size = Size(
        preset=options.size,
        batch=options.batch,
        length=options.length,
        dtype=options.dtype,
        corpus=options.corpus,
        tokens_per_parameter=options.tokens_per_parameter,
    )
    until_s = time.monotonic() + 60 * options.minutes
    options.folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str((options.folder / "compiled").resolve()))
    results = options.folder / "results.jsonl"
    wanted = _matrix(options, size)
    left = [case for case in wanted if key_of(case, size) not in known(results)]
    steps = wanted[0].budget
    print(f"{len(wanted)} cases, {len(left)} to run, {steps} steps a learner", flush=True)
    for case in left:
        print(f"{case.name} ...", flush=True)
        if options.list:
            continue
        if run_piece(case, size, options.folder, until_s) is None:
            print(f"time is up; the same command goes on with {case.name!r}")
            table(wanted, size, known(results))
            return GO_ON
    table(wanted, size, known(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
