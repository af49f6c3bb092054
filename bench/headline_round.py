"""One synchronization round, beside torchft's DiLoCo over Gloo on the same machine.

16,777,216 float32 parameters, 2 and 4 workers on loopback. A round is what a worker waits between
an inner step, computed, and the moment that it holds the new global parameters. Ours: learners in
lockstep mode, one fragment, an interval of one step, so that every step is a round; it is durable:
updates, version and record are on disk, with fsync, before anybody adopts. Of torchft: pseudo-
gradients summed by Gloo in float32 and the outer step; nothing is stored, unless asked for, when
rank 0 writes parameters and outer state to disk before it goes on. Systems take turns;
the table has the median of the turns.

    python -m bench.headline_round --peer PYTHON [--workers 2,4] [--rounds 10] [--turns 2]
    python -m bench.headline_round --short

PYTHON has torch and torchft (`pip install torch torchft`, for which a CPU build of torch will do);
without --peer this system is measured alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import tomli_w

import diloco
from bench.harness import create, run_part, table
from bench.tasks import plain
from diloco.common.process.nats_server import NatsServer
from diloco.learner.task import Params, params_shapes
from diloco.operate.local.fleet import LocalDaemons

PARAMETERS = 1 << 24
WARM_ROUNDS = 3
READY_S = 600.0
PEER = Path(__file__).with_name("headline_torchft.py")
OURS = ("ours float32", "ours int4")
THEIRS = ("torchft float32", "torchft float32, stored")


# --- This system


def ours(codec: str, workers: int, parameters: int, rounds: int, folder: Path) -> list[float]:
    """Mean seconds of a round, by worker."""
    folder.mkdir(parents=True)
    with NatsServer(folder / "nats") as server, LocalDaemons(folder / "logs") as fleet:
        document = {
            "run": {"name": "round", "steps": 100_000},
            "task": {"build": "bench.tasks:plain", "options": {"matrices": parameters}},
            "sync": {
                "mode": "lockstep",
                "interval_steps": 1,
                "fragments": 1,
                "min_steps": 1,
                "codec": codec,
                "delta_codec": codec,
                "snapshot_interval_versions": 64,
            },
            "quorum": {"min_learners": workers, "pace": 0.0},
            "bus": {"url": server.url},
            "store": {"url": str(folder / "store")},
        }
        path = folder / "run.toml"
        path.write_text(tomli_w.dumps(document))
        create(fleet, path)
        fleet.start("aggregator", ["aggregator", "--config", str(path)])
        return _measured(
            [
                [
                    *(
                        sys.executable,
                        "-m",
                        "bench.headline_round",
                        "worker",
                        "--config",
                        str(path),
                    ),
                    *("--learner", f"learner-{index}", "--parameters", str(parameters)),
                    *("--rounds", str(WARM_ROUNDS + rounds)),
                ]
                for index in range(workers)
            ],
            rounds,
            folder / "log",
        )


# --- torchft


def theirs(
    python: Path, workers: int, parameters: int, rounds: int, folder: Path, *, stored: bool
) -> list[float]:
    """Mean seconds of a round, by worker."""
    folder.mkdir(parents=True)
    command = [str(python), str(PEER), "--workers", str(workers), "--parameters", str(parameters)]
    command += ["--rounds", str(WARM_ROUNDS + rounds)]
    command += ["--durable", str(folder / "state")] if stored else []
    lighthouse: list[str] = []

    def started(process: subprocess.Popen[str]) -> None:
        """The first one says where the lighthouse is."""
        if not lighthouse:
            assert process.stdout is not None
            lighthouse.extend(["--lighthouse", process.stdout.readline().strip()])

    commands = ([*command, "--rank", str(rank), *lighthouse] for rank in range(workers))
    return _measured(commands, rounds, folder / "log", started)


def _measured(
    commands: Iterable[list[str]],
    rounds: int,
    log_path: Path,
    started: Callable[[subprocess.Popen[str]], None] = lambda _process: None,
) -> list[float]:
    """Mean seconds of a round, by worker: what each prints, without the first `WARM_ROUNDS`."""
    processes: list[subprocess.Popen[str]] = []
    with log_path.open("w") as log:
        try:
            for command in commands:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
                processes.append(process)
                started(process)
            printed = [process.communicate(timeout=READY_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    took = [[float(line) for line in text.split()][WARM_ROUNDS:] for text in printed]
    if not all(len(each) == rounds for each in took):
        sys.exit(f"a worker failed: {log_path.read_text()[-2000:]}")
    return [statistics.mean(each) for each in took]


def main() -> None:
    """Take turns, print the table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peer", type=Path, help="a Python with torch and torchft")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--systems", help=f"some of: {', '.join((*OURS, *THEIRS))}, by ';'")
    parser.add_argument("--short", action="store_true", help="a small model, one turn")
    parser.add_argument("--folder", type=Path, help="of the processes' logs and state")
    parser.add_argument("--out", type=Path, help="a JSON file of the figures; rows are added to it")
    args = parser.parse_args()
    if args.short:
        args.parameters, args.turns, args.rounds = 1 << 20, 1, 5
    systems = args.systems.split(";") if args.systems else [*OURS, *(THEIRS if args.peer else ())]
    rows = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for workers in map(int, args.workers.split(",")):
            took: dict[str, list[float]] = {}
            for turn in range(args.turns):
                for system in systems:
                    inner = folder / f"{system.replace(' ', '-')}-{workers}-{turn}"
                    common = (workers, args.parameters, args.rounds, inner)
                    if system in OURS:
                        found = ours(system.split()[1], *common)
                    else:
                        found = theirs(args.peer, *common, stored=system.endswith("stored"))
                    took.setdefault(system, []).append(statistics.mean(found))
                    print(f"{system}, {workers} workers: {took[system][-1]:.3f} s", flush=True)
            rows += [
                {"system": system, "workers": workers, "parameters": args.parameters, "rounds_s": s}
                for system, s in took.items()
            ]
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))
    cells = [
        [row["system"], str(row["workers"]), f"{statistics.median(row['rounds_s']):.3f}"]
        for row in rows
    ]
    print(table([["system", "workers", "seconds a round"], *cells]))


def worker() -> None:
    """One worker of this system in lockstep: takes rounds, one after each inner step.

    Prints a line for each: the seconds from parameters that are computed, at the end of an inner
    step, to the new global parameters, computed too. (`stall_s` of heartbeats is not that: where a
    step is still computing when its boundary begins, it has the step in it, and what adopting
    computes after the boundary it has not.)
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--learner", required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    like = params_shapes(plain(steps=1, seed=0, matrices=args.parameters))
    sign = 1 if args.learner.endswith("0") else -2

    @jax.jit
    def inner(params: Params) -> Params:
        return jax.tree.map(lambda w: w + sign * 1e-3 * w * w, params)

    with diloco.join(args.config, learner=args.learner, like=like, tokens_per_step=1) as island:
        params = island.params
        for _ in range(args.rounds):
            params = jax.block_until_ready(inner(params))
            began_s = time.perf_counter()
            params = jax.block_until_ready(island.step(params, loss=1.0))
            print(time.perf_counter() - began_s, flush=True)


if __name__ == "__main__":
    run_part({"measure": main, "worker": worker})
