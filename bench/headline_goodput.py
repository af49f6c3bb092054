"""Goodput under failures: this system and data-parallel under the same schedule of SIGKILLs.

Islands of both systems live on the same machines: machine i holds learner i of the run and rank i
of the job. With `--slices 2` a learner has two machines, and goes on with the one that is left. The
schedule says when a machine dies and when it is there again; whatever of either system is on it is
killed with SIGKILL by its process id, and started from nothing when it returns. Both systems run at
the same time, on emulated devices (`bench.tasks`), so that the load of the machine that the bench
runs on is the same for both.

Goodput is the useful tokens of a span over those of the same processes in a span of the same
length without faults: of ours, tokens whose updates the global model has taken; of data-parallel,
tokens of steps that are not lost at the end of the span. The sweep goes over the mean time between
a machine's failures, from never.

    python -m bench.headline_goodput [--machines 12] [--seconds 300] [--mtbf 0,1000,500,250]
    python -m bench.headline_goodput --short        two minutes: four machines, two rates
    python -m bench.headline_goodput --slices 2 --machines 6 --mtbf 0,500
    python -m bench.headline_goodput figures FOLDER [--to docs]

The last one draws FOLDER/goodput.json and FOLDER/link.json, what the headline benches kept.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from matplotlib.axes import Axes

from bench.curves import BLUE, VERMILLION, look, panels
from bench.data_parallel import POLL_S, Job, Scheduler, StepDone, best_interval_steps
from bench.harness import create, run_part, table
from diloco.common.process.nats_server import LOOPBACK, NatsServer, free_port
from diloco.common.storage.tape import records_of
from diloco.operate.local.fleet import LocalDaemons
from diloco.run.cli.opening import open_run

STEPS = 100_000  # of either system: more than a span holds
# Both have trained so long before a span begins.
SETTLE_S = 15.0
READY_S = 600.0
# Of learners with several slices, which train that many steps again at most.
SNAPSHOT_STEPS = 1
# What a checkpoint of the job costs; `--checkpoint` for other values.
STALL_S, TOOK_S = 0.02, 1.0


class Outage(NamedTuple):
    """A machine dies `at_s` seconds after the span's beginning and is there again at `back_s`."""

    at_s: float
    back_s: float
    machine: int


class Conditions(NamedTuple):
    """The failures that both systems meet; `mtbf_s` of one machine while it is there, 0: none."""

    machines: int
    mtbf_s: float
    return_s: float
    seconds: float
    step_s: float
    seed: int
    preset: str
    slices: int = 1


def make_schedule(conditions: Conditions) -> list[Outage]:
    """Each machine's failures come at random while it is there; so does each return."""
    outages = []
    for machine in range(conditions.machines):
        # A stream of chances of its own for each machine: fewer failures are not others.
        rng = random.Random(f"{conditions.seed}/{machine}")
        at_s = 0.0
        while conditions.mtbf_s:
            at_s += rng.expovariate(1) * conditions.mtbf_s
            if at_s >= conditions.seconds:
                break
            away_s = conditions.return_s * rng.uniform(0.5, 1.5)
            outages.append(Outage(at_s, at_s + away_s, machine))
            at_s += away_s
    return sorted(outages)


def all_there(conditions: Conditions, outages: list[Outage]) -> float:
    """Share of the span in which no machine is away: no job that needs all can use more."""
    changes = sorted([(o.at_s, 1) for o in outages] + [(o.back_s, -1) for o in outages])
    changes = [*changes, (conditions.seconds, 0)]
    there_s, since_s, away = 0.0, 0.0, 0
    for at_s, change in changes:
        now_s = min(at_s, conditions.seconds)
        there_s += (now_s - since_s) * (away == 0)
        since_s, away = now_s, away + change
    return there_s / conditions.seconds


def machine_share(conditions: Conditions, outages: list[Outage]) -> float:
    """Share of all machines' time in which they are there: no system can use more."""
    away_s = sum(min(o.back_s, conditions.seconds) - o.at_s for o in outages)
    return 1 - away_s / (conditions.seconds * conditions.machines)


# --- This system


@dataclass
class Ours:
    """A run with a slice of a learner on each machine; aggregator and server are elsewhere."""

    folder: Path
    conditions: Conditions
    server: NatsServer
    fleet: LocalDaemons
    away: set[str] = field(default_factory=set)
    unplanned: int = 0
    spawned_s: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peers = [f"{LOOPBACK}:{free_port()}" for _ in range(self.conditions.machines)]

    @property
    def names(self) -> list[str]:
        """What each machine has of a learner."""
        return [f"learner-{index}" for index in range(self.conditions.machines)]

    @property
    def config(self) -> Path:
        return self.folder / "run.toml"

    def start(self) -> None:
        """Create the run and start everybody."""
        self.config.write_text(tomli_w.dumps(self._document()))
        create(self.fleet, self.config)
        self.fleet.start("aggregator", ["aggregator", "--config", str(self.config)])
        for machine, name in enumerate(self.names):
            self._spawned(name)
            learner = f"learner-{machine // self.conditions.slices}"
            arguments = ["learner", "--config", str(self._own(machine)), "--learner", learner]
            self.fleet.start(name, arguments)

    def _own(self, machine: int) -> Path:
        """The configuration file of a machine."""
        slices = self.conditions.slices
        if slices == 1:
            return self.config
        document, place = self._document(), machine % slices
        document["learner"] |= {
            "slices": slices,
            "host": place,
            "peers": self.peers[machine - place :][:slices],
            # As a machine's own chips, which nobody else has.
            "keep_batch": False,
            "checkpoint_dir": str(self.folder / f"checkpoints-{machine}"),
            "snapshot_steps": SNAPSHOT_STEPS,
            "cpu_devices": 1,
        }
        path = self.folder / f"machine-{machine}.toml"
        path.write_text(tomli_w.dumps(document))
        return path

    def _document(self) -> dict[str, Any]:
        conditions = self.conditions
        return {
            "run": {"name": "goodput", "steps": STEPS, "seed": conditions.seed},
            "task": {
                "build": "bench.tasks:paced",
                "options": {"preset": conditions.preset, "step_s": conditions.step_s},
            },
            "sync": {
                "interval_steps": 4,
                "fragments": 4,
                "min_steps": 1,
                "snapshot_interval_versions": 16,
            },
            "bus": {"url": self.server.url},
            "store": {"url": str(self.folder / "store")},
            "learner": {
                "compilation_cache_dir": str(self.folder.parent / "compiled"),
                "checkpoint_dir": str(self.folder / "checkpoints"),
                "checkpoint_interval_s": 10.0,
            },
        }

    def _spawned(self, name: str) -> None:
        self.spawned_s.setdefault(name, []).append(time.time())

    def ready(self) -> bool:
        """Whether every learner trains."""
        return all(b'"started"' in self._log(name) for name in self.names)

    def _log(self, name: str) -> bytes:
        return self.fleet.daemons[name].processes[0].log_path.read_bytes()

    def kill(self, machine: int) -> None:
        """SIGKILL."""
        self.away.add(self.names[machine])
        self.fleet.end(self.names[machine])

    def start_again(self, machine: int) -> None:
        """The machine is there again."""
        name = self.names[machine]
        self.away.discard(name)
        self._spawned(name)
        self.fleet.start_again(name)

    def look(self) -> None:
        """Start whoever ended unasked, as systemd would."""
        for name, daemon in self.fleet.daemons.items():
            if name not in self.away and daemon.pid is None:
                self.unplanned += 1
                self.fleet.start_again(name)

    def restarts_s(self) -> list[float]:
        """From the start of a process to its first step, of each later life that got there."""
        took = []
        for name in self.names:
            lines = self._log(name).splitlines()
            began = [_seconds(json.loads(line)) for line in lines if b'"started"' in line]
            for spawned_s, next_s in itertools.pairwise([*self.spawned_s[name][1:], float("inf")]):
                took += [s - spawned_s for s in began if spawned_s < s < next_s]
        return took

    async def tokens(self, from_s: float, until_s: float) -> float:
        """Tokens whose updates were merged in a span; a step's count once, not per fragment."""
        total = 0
        async with open_run(self.config, name="bench") as opened:
            fragments = opened.context.settings.sync.fragments
            for fragment in range(fragments):
                before = after = 0
                async for recorded in records_of(opened.context, fragment):
                    merged = recorded.record.totals.tokens_merged
                    if recorded.record.closed_at_s <= from_s:
                        before = merged
                    if recorded.record.closed_at_s <= until_s:
                        after = merged
                total += after - before
        return total / fragments


def _seconds(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


# --- Data-parallel


def useful_steps(progress: list[StepDone], from_s: float, until_s: float) -> int:
    """How much further the job is at the end of a span than at its beginning, in steps."""
    before = [step.step for step in progress if step.at_s <= from_s]
    after = [step.step for step in progress if step.at_s <= until_s]
    return after[-1] - before[-1]


def restarts_s(progress: list[StepDone], there_s: list[float]) -> list[float]:
    """From the moment that all machines were there again to the first step after it."""
    took = []
    for at_s, next_s in itertools.pairwise([*there_s, float("inf")]):
        steps = [step.at_s for step in progress if at_s < step.at_s < next_s]
        took += [steps[0] - at_s] if steps else []
    return took


def lost_steps(progress: list[StepDone]) -> list[int]:
    """Steps that each restart took back."""
    pairs = itertools.pairwise(progress)
    return [one.step + 1 - two.step for one, two in pairs if one.life != two.life]


# --- Both


def measure(
    conditions: Conditions, folder: Path, checkpoint: tuple[float, float]
) -> dict[str, Any]:
    """Measure both systems in one span of these conditions."""
    folder.mkdir(parents=True)
    (folder.parent / "compiled").mkdir(exist_ok=True)  # both systems', for all rates
    stall_s, took_s = checkpoint
    mtbf_s = conditions.mtbf_s / conditions.machines or conditions.seconds
    every = best_interval_steps(stall_s, took_s, mtbf_s, conditions.step_s)
    job = Job(
        folder=str(folder / "job"),
        hosts=["127.0.0.1"] * conditions.machines,
        steps=STEPS,
        seed=conditions.seed,
        step_s=conditions.step_s,
        checkpoint_steps=every,
        programs=str(folder.parent / "compiled"),
        task={"preset": conditions.preset},
    )
    outages = make_schedule(conditions)
    with (
        NatsServer(folder / "nats") as server,
        LocalDaemons(folder / "logs") as fleet,
        Scheduler(job) as scheduler,
    ):
        fleet.adopt(server)
        ours = Ours(folder, conditions, server, fleet)
        ours.start()
        for rank in range(conditions.machines):
            scheduler.start(rank)
        _settle(ours, scheduler)
        began_s = time.time()
        there_s = _span(ours, scheduler, outages, conditions.seconds)
        ended_s = began_s + conditions.seconds
        merged = asyncio.run(ours.tokens(began_s, ended_s))
        progress = scheduler.progress()
        starts = ours.restarts_s()
        unplanned = ours.unplanned
    steps = useful_steps(progress, began_s, ended_s)
    in_span = [step for step in progress if began_s <= step.at_s <= ended_s]
    tokens_per_step = _tokens_per_batch(conditions)
    return {
        **conditions._asdict(),
        "kills": len(outages),
        "machine_share": machine_share(conditions, outages),
        "all_there": all_there(conditions, outages),
        "ours_steps": merged * conditions.slices / tokens_per_step / conditions.machines,
        "ours_start_s": starts,
        "ours_unplanned": unplanned,
        "data_parallel_steps": steps,
        "data_parallel_restart_s": restarts_s(progress, there_s),
        "data_parallel_lost_steps": lost_steps(in_span),
        "data_parallel_checkpoint_steps": every,
        "load": os.getloadavg()[1],
    }


def _tokens_per_batch(conditions: Conditions) -> int:
    from bench import tasks

    return tasks.plain(steps=STEPS, seed=0, preset=conditions.preset).tokens_per_batch


def _settle(ours: Ours, scheduler: Scheduler) -> None:
    """Until both have trained for a while."""
    deadline_s = time.monotonic() + READY_S
    while not (ours.ready() and scheduler.progress()):
        scheduler.look()
        if time.monotonic() > deadline_s:
            sys.exit(f"not ready after {READY_S:.0f} s; logs are in {ours.folder}")
        time.sleep(0.2)
    deadline_s = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        scheduler.look()
        time.sleep(POLL_S)


def _span(ours: Ours, scheduler: Scheduler, outages: list[Outage], seconds: float) -> list[float]:
    """Let the schedule happen; the times at which the last missing machine returned."""
    began_s = time.monotonic()
    events = [(o.at_s, "kill", o.machine) for o in outages]
    events += [(o.back_s, "back", o.machine) for o in outages]
    due = sorted(events, reverse=True)
    away: set[int] = set()
    there_s = []
    while (now_s := time.monotonic() - began_s) < seconds:
        while due and due[-1][0] <= now_s:
            _, what, machine = due.pop()
            for system in (ours, scheduler):
                if what == "kill":
                    system.kill(machine)
                elif system is ours:
                    ours.start_again(machine)
                else:
                    scheduler.start(machine)
            (away.add if what == "kill" else away.discard)(machine)
            if not away:
                there_s.append(time.time())
        scheduler.look()
        ours.look()
        time.sleep(POLL_S)
    return there_s


def goodputs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with both systems' goodput, by the row without faults."""
    calm = next((row for row in rows if not row["mtbf_s"]), None)
    if calm is None:
        return rows
    for row in rows:
        for system in ("ours", "data_parallel"):
            full = calm[f"{system}_steps"] * row["seconds"] / calm["seconds"]
            row[f"{system}_goodput"] = row[f"{system}_steps"] / full
    return rows


def describe(row: dict[str, Any]) -> list[str]:
    """A row of the printed table."""
    mtbf = f"{row['mtbf_s']:.0f} s" if row["mtbf_s"] else "never"
    cells = [mtbf, str(row["kills"]), f"{row['machine_share']:.1%}", f"{row['all_there']:.1%}"]
    for system in ("ours", "data_parallel"):
        goodput = row.get(f"{system}_goodput")  # of nothing, before the row without faults
        cells.append("-" if goodput is None else f"{goodput:.1%}")
    spans = [row[key] for key in ("ours_start_s", "data_parallel_restart_s")]
    spans += [row["data_parallel_lost_steps"]]
    return cells + [f"{sum(span) / len(span):.1f}" if span else "-" for span in spans]


HEADING = [
    "a machine fails every", "kills", "machines there", "all there", "ours", "data-parallel",
    "ours starts, s", "job restarts, s", "steps lost",
]  # fmt: skip


def main() -> None:
    """Measure each rate, print the table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--machines", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--mtbf", default="0,1000,500,250", help="seconds; 0: never")
    parser.add_argument("--return-s", type=float, default=20.0)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slices", type=int, default=1, help="machines of one learner")
    parser.add_argument("--checkpoint", default=f"{STALL_S},{TOOK_S}", help="stall,duration in s")
    parser.add_argument("--short", action="store_true", help="four machines, two rates")
    parser.add_argument("--folder", type=Path, help="of the processes' logs and state")
    parser.add_argument("--out", type=Path, help="a JSON file of the figures; rows are added to it")
    args = parser.parse_args()
    if args.machines % args.slices:
        parser.error(f"{args.machines} machines are no learners of {args.slices} slices each")
    if args.short:
        args.machines, args.seconds, args.mtbf, args.return_s = 4, 40.0, "0,40", 8.0
    stall_s, took_s = map(float, args.checkpoint.split(","))
    rows = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for mtbf_s in map(float, args.mtbf.split(",")):
            conditions = Conditions(
                args.machines, mtbf_s, args.return_s, args.seconds, args.step_s, args.seed,
                args.preset, args.slices,
            )  # fmt: skip
            rows.append(measure(conditions, folder / f"mtbf-{mtbf_s:g}", (stall_s, took_s)))
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))
            print(table([HEADING, *map(describe, goodputs(rows))]), flush=True)


# --- Figures


DPI = 110


def draw_goodput(rows: list[dict[str, Any]], path: Path) -> None:
    """Goodput of both over failures an hour, with what the schedule alone allows."""
    rows = sorted(goodputs(rows), key=lambda row: row["mtbf_s"] and 1 / row["mtbf_s"])
    hourly = [3600 * row["kills"] / row["seconds"] for row in rows]
    with look():
        figure, (axes,) = panels(1, 3.6)
        for key, label, colour, dash in (
            ("machine_share", "machines that are there: no system can use more", BLUE, ":"),
            ("ours_goodput", "this system", BLUE, "-"),
            ("all_there", "all are there: no job that needs all can use more",
             VERMILLION, ":"),
            ("data_parallel_goodput", "data-parallel", VERMILLION, "-"),
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
    with look():
        figure, (shares, traffic) = panels(2, 3.2)
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
    colours = [BLUE if row["system"] == "ours" else VERMILLION for row in rows]
    places = range(len(values))
    axes.barh(places, values, color=colours)
    axes.set_yticks(list(places), labels)
    axes.invert_yaxis()
    for place, value in zip(places, values, strict=True):
        axes.annotate(f" {value:.3g} {unit}", (value, place), va="center")


def draw() -> None:
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
    run_part({"measure": main, "figures": draw})
