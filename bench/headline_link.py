"""A slow link between islands: this system and data-parallel, each against its own loopback speed.

Two network namespaces are joined by a link of 50 ms round trip and 200 Mbit/s; half of the islands
are in each. Of this system, server, store (Google's API on a socket) and aggregator are in the
first one, so that the second half's updates and versions all cross the link; of data-parallel, the
ring of gradients crosses it once each way. Then the same processes once more on the loopback
interface. Devices are emulated (`bench.tasks`): a step takes the same time everywhere.

It needs root and a program that makes the namespaces (`--link`: NS_A NS_B RTT_MS MBIT LOSS MTU).

    python -m bench.headline_link [--islands 2,4] [--seconds 60] [--step-s 0.25] [--parameters N]
    python -m bench.headline_link --short
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import tomli_w

from bench.data_parallel import POLL_S, Job, Scheduler
from bench.harness import table
from diloco.common.process.nats_server import find_binary
from diloco.common.process.tasks import cancel
from diloco.operate.local.reaper import Reaper
from diloco.run.cli.opening import open_run
from diloco.run.observed import Observed
from diloco.run.watch import Watch

ROOT = Path(__file__).parents[1]
STORE = ROOT / "tests" / "gcs_server.py"
MTU = 9000  # the relay is a Python program: fewer packets
STEPS = 100_000
READY_S = 600.0
NATS_PORT, STORE_PORT = 14222, 14223


class Endpoint(NamedTuple):
    """The place where a process runs: its address, and the first words of its command."""

    address: str
    prefix: tuple[str, ...] = ()


class EmulatedLink(NamedTuple):
    """The link between the islands; `rtt_ms` 0 for the loopback interface."""

    rtt_ms: float = 0.0
    mbit: float = 0.0


class LinkCase(NamedTuple):
    """A case to measure: islands with a model of so many parameters, its size alone counts."""

    islands: int
    parameters: int
    step_s: float
    seconds: float
    seed: int

    @property
    def task(self) -> dict[str, Any]:
        """Options of `bench.tasks.plain`."""
        return {"matrices": self.parameters}


class LinkBytes(NamedTuple):
    """Bytes that crossed the link each way, headers and all, as the first namespace counts."""

    sent: int
    received: int


@contextmanager
def joined(link: EmulatedLink, program: Path) -> Iterator[tuple[Endpoint, Endpoint]]:
    """The two places, for as long as the block lasts."""
    if not link.rtt_ms:
        yield Endpoint("127.0.0.1"), Endpoint("127.0.0.1")
        return
    names = [f"headline{os.getpid()}{side}" for side in "ab"]
    command = [sys.executable, str(program), *names, str(link.rtt_ms), str(link.mbit), "0"]
    relay = subprocess.Popen([*command, str(MTU)], stdout=subprocess.PIPE, text=True)
    try:
        assert relay.stdout is not None
        if relay.stdout.readline().strip() != "up":
            sys.exit(f"{program} could not make the link; is this root?")
        enter = [("ip", "netns", "exec", name) for name in names]
        yield Endpoint("10.99.0.1", enter[0]), Endpoint("10.99.0.2", enter[1])
    finally:
        relay.terminate()
        relay.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def moved(place: Endpoint) -> LinkBytes:
    """Bytes that have crossed since the link was made; nothing on loopback."""
    if not place.prefix:
        return LinkBytes(0, 0)
    command = [*place.prefix, "cat", "/proc/net/dev"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = next(line for line in lines.splitlines() if "wan" in line).split(":")[1].split()
    return LinkBytes(sent=int(fields[8]), received=int(fields[0]))


def rates(before: LinkBytes, after: LinkBytes, took_s: float) -> dict[str, float]:
    """Mbit/s each way."""
    sent, received = after.sent - before.sent, after.received - before.received
    return {"mbit_out": sent * 8e-6 / took_s, "mbit_in": received * 8e-6 / took_s}


# --- This system


class Processes:
    """Programs at places; none outlives the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reaper = Reaper()
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, place: Endpoint, *command: str) -> subprocess.Popen[bytes]:
        """Start a program; its log has its number."""
        with (self._folder / f"{len(self.running)}.log").open("ab") as log:
            process = subprocess.Popen(
                [*place.prefix, *command], stdout=log, stderr=log, start_new_session=True
            )
        self._reaper.watch(process.pid)
        self.running.append(process)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
                process.wait()
            self._reaper.forget(process.pid)
        self._reaper.__exit__()


def ours(fleet: LinkCase, places: tuple[Endpoint, Endpoint], folder: Path) -> dict[str, Any]:
    """Speed, utilization and traffic of a run."""
    here = places[0]
    folder.mkdir(parents=True)
    config = _write_config(fleet, here, folder)
    os.environ["STORAGE_EMULATOR_HOST"] = f"http://{here.address}:{STORE_PORT}"
    diloco = (sys.executable, "-m", "diloco")
    with Processes(folder) as processes:
        processes.start(here, str(find_binary()), "-c", str(folder / "nats.conf"))
        store = (sys.executable, str(STORE), str(folder / "store"), "--bucket", "link")
        processes.start(here, *store, "--host", here.address, "--port", str(STORE_PORT))
        time.sleep(2)
        creation = processes.start(here, *diloco, "run", "create", "--config", str(config))
        if creation.wait():
            sys.exit(f"`diloco run create` failed; logs are in {folder}")
        processes.start(here, *diloco, "aggregator", "--config", str(config))
        for index in range(fleet.islands):
            place = places[2 * index // fleet.islands]
            name = f"learner-{index}"
            processes.start(place, *diloco, "learner", "--config", str(config), "--learner", name)
        observe = [sys.executable, "-m", "bench.headline_link", "--observe", str(config)]
        observe += ["--islands", str(fleet.islands), "--seconds", str(fleet.seconds)]
        watching = subprocess.Popen(
            [*here.prefix, *observe], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert watching.stdout is not None
        try:
            if watching.stdout.readline().strip() != "steady":
                sys.exit(f"the run did not become steady; logs are in {folder}")
            before, began_s = moved(here), time.monotonic()
            found: dict[str, Any] = json.loads(watching.stdout.readline())
            return {**found, **rates(before, moved(here), time.monotonic() - began_s)}
        finally:
            watching.kill()
            watching.wait()


def _write_config(fleet: LinkCase, here: Endpoint, folder: Path) -> Path:
    document = {
        "run": {"name": "link", "steps": STEPS, "seed": fleet.seed},
        "task": {
            "build": "bench.tasks:paced",
            "options": {**fleet.task, "step_s": fleet.step_s},
        },
        "sync": {"interval_steps": 24, "fragments": 8, "codec": "int4", "delta_codec": "int4"},
        "bus": {"url": f"nats://{here.address}:{NATS_PORT}"},
        "store": {"url": "gs://link/runs", "emulator": True},
        "learner": {"compilation_cache_dir": str(folder.parent / "compiled")},
    }
    (folder / "nats.conf").write_text(
        f'listen: "{here.address}:{NATS_PORT}"\n'
        f'jetstream {{ store_dir: "{folder / "nats"}", sync_interval: always }}\n'
    )
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document))
    return path


async def observe(config: Path, islands: int, seconds: float) -> None:
    """Print "steady" once every learner has adopted versions, and what the next seconds brought."""
    async with open_run(config, name="bench") as opened:
        section = opened.context.settings.sync
        watch = Watch(opened.context)
        following = asyncio.ensure_future(watch.follow())
        deadline_s = time.monotonic() + READY_S
        while not _steady(watch.observed, islands, 2 * section.interval_steps):
            await asyncio.sleep(0.2)
            if time.monotonic() > deadline_s:
                sys.exit("not steady in time")
        print("steady", flush=True)
        before = _snapshot(watch.observed)
        began_s = time.monotonic()
        await asyncio.sleep(seconds)
        after = _snapshot(watch.observed)
        run = watch.observed.run(time.time())
        took_s = time.monotonic() - began_s
        await cancel(following)
    spans = [_difference(before["beats"][name], beat) for name, beat in after["beats"].items()]
    merged = (after["merged"] - before["merged"]) / section.fragments / took_s
    print(
        json.dumps(
            {
                "steps_per_s": sum(span["local_step"] / span["run_s"] for span in spans),
                "merged_steps_per_s": merged,
                "stall": sum(span["stall_s"] for span in spans)
                / sum(span["run_s"] for span in spans),
                "staleness": run.staleness,
                "round_size": run.round_size,
            }
        ),
        flush=True,
    )


def _steady(observed: Observed, islands: int, steps: int) -> bool:
    beats = [view.heartbeat for view in observed.beats.values()]
    return len(beats) == islands and all(beat.local_step >= steps for beat in beats)


def _snapshot(observed: Observed) -> dict[str, Any]:
    beats = {name: view.heartbeat.model_dump() for name, view in observed.beats.items()}
    totals = [recorded.record.totals for recorded in observed.records.values()]
    merged = sum(one.tokens_merged for one in totals)
    return {"beats": beats, "merged": merged}


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    return {key: after[key] - before[key] for key in ("local_step", "run_s", "stall_s")}


# --- Data-parallel


def data_parallel(
    fleet: LinkCase, places: tuple[Endpoint, Endpoint], folder: Path, gradient: str
) -> dict[str, Any]:
    """Speed and traffic of a job."""
    programs = folder.parent / f"programs-{fleet.islands}-{gradient}"
    programs.mkdir(parents=True, exist_ok=True)
    of_rank = [places[2 * rank // fleet.islands] for rank in range(fleet.islands)]
    job = Job(
        folder=str(folder),
        hosts=[place.address for place in of_rank],
        steps=STEPS,
        seed=fleet.seed,
        step_s=fleet.step_s,
        gradient=gradient,
        programs=str(programs),
        task=fleet.task,
    )
    with Scheduler(job, lambda rank: list(of_rank[rank].prefix)) as scheduler:
        for rank in range(fleet.islands):
            scheduler.start(rank)
        deadline_s = time.monotonic() + READY_S
        while len(scheduler.progress()) < 3:
            scheduler.look()
            if time.monotonic() > deadline_s:
                sys.exit(f"data-parallel did not start; its log is {folder / 'log'}")
            time.sleep(POLL_S)
        before, began_s = moved(places[0]), time.time()
        while time.time() < began_s + fleet.seconds:
            scheduler.look()
            time.sleep(POLL_S)
        after, took_s = moved(places[0]), time.time() - began_s
        steps = [step for step in scheduler.progress() if step.at_s >= began_s]
    # Whole steps between the first and the last one that ended in the span.
    step_s = (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)
    speed = fleet.islands / step_s
    return {"steps_per_s": speed, "step_s": step_s, **rates(before, after, took_s)}


# --- Both


def measure(
    fleet: LinkCase, link: EmulatedLink, program: Path, folder: Path
) -> list[dict[str, Any]]:
    """Rows of all systems, each with its speed as a share of its own on loopback."""
    rows = []
    systems = ("ours", "data-parallel float32", "data-parallel bfloat16")
    for system in systems:
        found = {}
        for where, joins in (("loopback", EmulatedLink()), ("link", link)):
            with joined(joins, program) as places:
                inner = folder / f"{system.replace(' ', '-')}-{where}-{fleet.islands}"
                if system == "ours":
                    found[where] = ours(fleet, places, inner)
                else:
                    found[where] = data_parallel(fleet, places, inner, system.split()[1])
        share = found["link"]["steps_per_s"] / found["loopback"]["steps_per_s"]
        met = {**fleet._asdict(), **link._asdict()}
        rows.append({"system": system, **met, **found, "share": share})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    for row in rows:
        row["ratio"] = rows[0]["link"]["steps_per_s"] / row["link"]["steps_per_s"]
    return rows


HEADING = [
    "system", "islands", "steps/s loopback", "link", "share", "busy", "Mbit/s out", "in",
    "ours is faster by",
]  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """A row of the printed table."""
    link = row["link"]
    return [
        row["system"],
        str(row["islands"]),
        f"{row['loopback']['steps_per_s']:.1f}",
        f"{link['steps_per_s']:.1f}",
        f"{row['share']:.1%}",
        f"{1 - link['stall']:.2%}" if "stall" in link else "-",
        f"{link['mbit_out']:.1f}",
        f"{link['mbit_in']:.1f}",
        f"{row['ratio']:.1f}",
    ]


def main() -> None:
    """Measure, print the table, keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--islands", default="2,4")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--parameters", type=int, default=1 << 25)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="two islands, a small model, 15 s")
    parser.add_argument("--link", type=Path, default="netns.py", help="program of the link")
    parser.add_argument("--folder", type=Path, help="of the processes' logs and state")
    parser.add_argument("--out", type=Path, help="a JSON file of the figures; rows are added to it")
    parser.add_argument("--observe", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.observe:
        asyncio.run(observe(args.observe, int(args.islands), args.seconds))
        return
    if args.short:
        args.islands, args.seconds, args.parameters = "2", 15.0, 1 << 22
    if not args.link.exists():
        sys.exit(f"there is no {args.link}; give a program that joins two namespaces: --link")
    rows = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        for islands in map(int, args.islands.split(",")):
            fleet = LinkCase(islands, args.parameters, args.step_s, args.seconds, args.seed)
            link = EmulatedLink(args.rtt_ms, args.mbit)
            rows += measure(fleet, link, args.link, args.folder or Path(temporary))
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1))
            print(table([HEADING, *map(describe, rows)]), flush=True)


if __name__ == "__main__":
    main()
