"""A liar beside three honest learners, all of them processes: what its attacks do to the run.

    .venv/bin/python -m bench.attack_live [--steps 400] [--only NAME] [--merges A,B] [--seeds 1]

Two runs at the same time, so that whatever else the machine does meets both: each has a nats-server
with credentials and permissions (`diloco auth`), an aggregator, three learners that train
`examples/digits.py` at a pace that leaves the processor idle, and a folder as its store. Beside one
of them a process with a fourth learner's credentials (`bench/liar.py`) joins and lies. From then
until the first of the two has done its steps are counted versions and honest updates merged; at the
end, the held-out loss. Shown is the run with the liar in % of the run without, with the standard
error over spans of that time (of the loss: over seeds); the part of a core that the processes of
each used, without the liar's; how many cores the whole machine had in use, and its load.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from bench.flood import cpu_s
from bench.liar import ACTS, CODEC, FIRST, HONEST, LIAR, RUN, STEP_S, lie
from diloco import Task, load
from diloco.auth import files as auth
from diloco.cli.opening import open_run
from diloco.common import log, names, wire
from diloco.common.config import load_config
from diloco.common.nats_server import NatsServer
from diloco.common.tape import Entry, read_item
from diloco.learner.contract import build_task
from diloco.operate.create import create

DIGITS = "examples.digits:build"
# A run that has not ended by then is said not to end.
LATEST_S = 300.0
SPANS = 8


def build(*, steps: int, seed: int) -> Task:
    """The digits, at a pace."""
    task = build_task(DIGITS, steps=steps, seed=seed, options={})

    def paced(learner: str, position: int) -> Iterator[Any]:
        for batch in task.batches(learner, position):
            time.sleep(STEP_S)
            yield batch

    return dataclasses.replace(task, batches=paced)


class Merged(NamedTuple):
    """When a version was stored, and whose updates it holds."""

    at_s: float
    honest: int
    final: bool


class Used(NamedTuple):
    """Processor seconds of the run's own processes and of the whole machine, until a time."""

    at_s: float
    run_s: float
    machine_s: float


class Fleet:
    """A run's server, daemons and files below a folder; `name` is the attack, "" none."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        self.folder, self.name = folder, name
        self.seen: list[Merged] = []
        self.joined, self.begun, self.ended = (asyncio.Event() for _ in range(3))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._server = NatsServer(folder / "nats", extra_config=_credentials(folder))
        self._settings = settings

    def start(self) -> None:
        """Create the run, and start its daemons."""
        self._server.start()
        self._configure()
        create(load_config(self.file("operator")), None)
        self._start("agg", "diloco", ["aggregator"])
        for learner in HONEST:
            self._start(learner, "diloco", ["learner", "--learner", learner])
        if self.name:
            self._start(LIAR, "bench.attack_live", ["--lie", self.name])

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._server.stop()

    def file(self, name: str) -> Path:
        """Somebody's configuration."""
        return self.folder / f"{name}.toml"

    def _start(self, name: str, module: str, arguments: list[str]) -> None:
        command = [sys.executable, "-m", module, *arguments, "--config", str(self.file(name))]
        with (self.folder / f"{name}.log").open("wb") as file:
            self._processes[name] = subprocess.Popen(command, stderr=file)

    def _configure(self) -> None:
        for name in (*HONEST, LIAR, "agg", "operator"):
            bus = {
                "url": f"tls://127.0.0.1:{self._server.port}",
                "credentials": str(self.folder / "auth" / "credentials" / f"{name}.toml"),
                "tls_ca": str(self.folder / "auth" / "tls" / "ca.pem"),
            }
            document = {**self._settings, "bus": bus, "store": {"url": str(self.folder / "store")}}
            self.file(name).write_text(tomli_w.dumps(document))

    def used(self) -> Used:
        """What was used so far; the liar's is not the run's."""
        pids = [self._server.pid, *(p.pid for n, p in self._processes.items() if n != LIAR)]
        run_s = 0.0
        for pid in pids:
            with contextlib.suppress(FileNotFoundError, IndexError):
                run_s += cpu_s(pid or 0)
        busy = [int(value) for value in Path("/proc/stat").read_text().split()[1:9]]
        idle = busy[3] + busy[4]
        return Used(time.time(), run_s, (sum(busy) - idle) / os.sysconf("SC_CLK_TCK"))

    async def follow(self) -> None:
        """Read the run's tape to its end."""
        subjects = [names.record(RUN, "*"), names.join(RUN, LIAR), names.end(RUN)]
        async with open_run(str(self.file("operator")), name="watch", reads=True) as opened:
            async for message in opened.context.bus.read(opened.context.tape, subjects, 1):
                item = await read_item(opened.context, message)
                if message.subject == names.end(RUN):
                    self.ended.set()
                    return
                if isinstance(item, Entry) and isinstance(item.body, wire.Join):
                    self.joined.set()
                if isinstance(item, Entry) and isinstance(item.body, wire.Record):
                    self._take(item.time_s, item.body)

    def _take(self, at_s: float, record: wire.Record) -> None:
        if not record.inputs:
            return
        honest = [taken for taken in record.inputs if taken.learner in HONEST]
        self.seen.append(Merged(at_s, len(honest), any(taken.final for taken in honest)))
        if sum(one.honest for one in self.seen) >= FIRST * len(HONEST):
            self.begun.set()


def _credentials(folder: Path) -> str:
    """Make everybody's; what the server's configuration says of them."""
    auth.init(folder / "auth", RUN, ["127.0.0.1"])
    for learner in (*HONEST, LIAR):
        auth.add(folder / "auth", learner, "learner")
    auth.add(folder / "auth", "agg", "aggregator")
    tls = folder / "auth" / "tls"
    extra = f'tls {{ cert_file: "{tls}/nats-1.pem", key_file: "{tls}/nats-1.key" }}\n'
    return extra + 'accounts { include "../auth/accounts.conf" }\n'


class Cores(NamedTuple):
    """In use by the run with the liar, the one without, and all that the machine did; its load."""

    lied: float
    alone: float
    machine: float
    load: float


class Outcome(NamedTuple):
    """Of the run with the liar over the one without: loss, and rates of each span, less 1.

    `rate` and `alone_loss` are those of the run without: versions a second, and held-out.
    """

    loss: float
    versions: tuple[float, ...]
    merged: tuple[float, ...]
    cores: Cores
    rate: float
    alone_loss: float


def play(folder: Path, name: str, settings: dict[str, Any]) -> Outcome:
    """Both runs, to their ends.

    Raises:
        TimeoutError: one of them does not come to its end.
    """
    alone, lied = Fleet(folder / "alone", "", settings), Fleet(folder / "lied", name, settings)
    try:
        for fleet in (alone, lied):
            fleet.start()
        began, ended = asyncio.run(_follow([alone, lied]))
        losses = [_loss(fleet, settings["run"]) for fleet in (alone, lied)]
    finally:
        for fleet in (alone, lied):
            fleet.stop()
    began_s = began[0].at_s
    until_s = min(next(one.at_s for one in f.seen if one.final) for f in (alone, lied))
    edges = np.linspace(began_s, until_s, SPANS + 1)
    versions, merged = (
        _change(_counted(alone, edges, by), _counted(lied, edges, by)) for by in ("each", "honest")
    )
    rate = float(_counted(alone, edges, "each").sum() / (until_s - began_s))
    loss = losses[1] / losses[0] - 1
    return Outcome(loss, versions, merged, _cores(began, ended), rate, losses[0])


def _cores(began: list[Used], ended: list[Used]) -> Cores:
    took_s = ended[0].at_s - began[0].at_s
    alone, lied = (
        (after.run_s - before.run_s) / took_s for before, after in zip(began, ended, strict=True)
    )
    machine = (ended[0].machine_s - began[0].machine_s) / took_s
    return Cores(lied, alone, machine, os.getloadavg()[0])


async def _follow(fleets: Sequence[Fleet]) -> tuple[list[Used], list[Used]]:
    """What both had used when the liar had joined, and when the first run ended."""
    async with asyncio.timeout(LATEST_S), asyncio.TaskGroup() as group:
        following = [group.create_task(fleet.follow()) for fleet in fleets]
        for fleet in fleets:
            await fleet.begun.wait()
            if fleet.name:
                await fleet.joined.wait()
        began = [fleet.used() for fleet in fleets]
        await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
        ended = [fleet.used() for fleet in fleets]
    return began, ended


def _counted(fleet: Fleet, edges: np.ndarray, by: str) -> np.ndarray:
    """Versions, or honest updates, of each span: what lies over an edge counts for both in part."""
    counts = [one.honest if by == "honest" else 1 for one in fleet.seen]
    times = [one.at_s for one in fleet.seen]
    return np.diff(np.interp(edges, times, np.cumsum(counts)))


def _change(before: np.ndarray, after: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in (after - before) / before.mean())


def _loss(fleet: Fleet, run: dict[str, Any]) -> float:
    evaluate: Any = build_task(DIGITS, steps=run["steps"], seed=run["seed"], options={}).evaluate
    return float(evaluate(load(fleet.file("operator"))))


# The table


def rows(options: argparse.Namespace, merges: Sequence[str]) -> Iterator[str]:
    """The table, line by line."""
    heads = [f"{merge}: loss, % | versions a second, % | honest updates, %" for merge in merges]
    yield f"| the liar beside three | {' | '.join(heads)} | cores: with, without, machine; load |"
    yield f"|{' --- |' * (2 + 3 * len(merges))}"
    every = []
    for name in ("", *ACTS):
        if options.only in name:
            found = {merge: _all(options, name, merge) for merge in merges}
            every += [one for made in found.values() for one in made]
            yield _row(name or "nobody", found)
    rate, loss = fmean(one.rate for one in every), fmean(one.alone_loss for one in every)
    yield f"\nWithout a liar: {rate:.2f} versions a second, held-out loss {loss:.4f}"


def _row(name: str, found: dict[str, list[Outcome]]) -> str:
    cells = []
    for made in found.values():
        versions = [value for one in made for value in one.versions]
        merged = [value for one in made for value in one.merged]
        losses = [one.loss for one in made]
        cells += [_percent(v) if v else "no end" for v in (losses, versions, merged)]
    every = [one.cores for made in found.values() for one in made]
    used = [f"{fmean(column):.2f}" for column in zip(*every, strict=True)]
    return f"| {name} | {' | '.join((*cells, ', '.join(used)))} |"


def _all(options: argparse.Namespace, name: str, merge: str) -> list[Outcome]:
    found = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory(prefix="bench-live-") as folder:
            try:
                found.append(play(Path(folder), name, settings(merge, options.steps, seed)))
            except TimeoutError:
                print(json.dumps([name, merge, seed, "no end"]), file=sys.stderr, flush=True)
                continue
        print(json.dumps([name, merge, *found[-1]]), file=sys.stderr, flush=True)
    return found


def settings(merge: str, steps: int, seed: int) -> dict[str, Any]:
    """Of a run, but for where its bus and store are."""
    return {
        "run": {"name": RUN, "steps": steps, "seed": seed},
        "task": {"build": "bench.attack_live:build"},
        "sync": {"fragments": 2, "interval_steps": 12, "codec": CODEC, "block": 16},
        "outer": {"merge": merge},
        # The end waits no longer for who never sends its last update.
        "quorum": {"deadline_s": 5.0, "read_timeout_s": 5.0},
    }


def _percent(values: Sequence[float]) -> str:
    error = f" ± {100 * stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):+.1f}{error}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="bench.attack_live", description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--merges", default="rda,centered_clipping", help="of outer.merge")
    parser.add_argument("--lie", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    log.configure("error")
    if options.lie:
        asyncio.run(lie(options.lie, options.config))
        return
    for line in rows(options, options.merges.split(",")):
        print(line, flush=True)


if __name__ == "__main__":
    main()
