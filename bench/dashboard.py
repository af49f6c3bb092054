"""Measures the start of a local run as a user sees it, and the cost of its page and report.

    .venv/bin/python -m bench.dashboard [--versions 400] [--learners 1000] [--seconds 30]
    .venv/bin/python -m bench.dashboard report [--versions 100000] [--learners 4] [--keep DIR]
    .venv/bin/python -m bench.dashboard start [OPTIONS OF diloco local ...]
    .venv/bin/python -m bench.dashboard followers [--followers 100] [--seconds 20] [--repeats 3]
    .venv/bin/python -m bench.dashboard deltas RUN [COUNT]

Of followers: what they cost a run whose learners pause after each step, beside that run alone, in
turn; and how long after its record each has a version. Some are killed every few seconds.

Of the start: two local runs, the second with what the first compiled. By the processes'
own logs, since the command: when the first and the last learner took its first step, when the run
ended; and the processor time of all processes, programs kept, held-out losses.

The tape is made up, on a real nats-server (`bench.tapes`); the command runs in a process of its
own. Live, with one page open: how long it reads what the tape holds, its processor time while the
run stands still and while versions come, its memory, and the bytes of what a page is sent. Of the
report: time and peak memory; evaluation is left out, which takes what the task takes.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Self

import ml_dtypes
import numpy as np
import psutil
import pyarrow as pa
import tomli_w

import diloco
from bench.harness import run_part
from bench.tapes import Forger, publish
from diloco.aggregator.rollback import find_versions
from diloco.common.process.config import load_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol.errors import DilocoError
from diloco.common.storage.tape import RunContext, last_record
from diloco.common.storage.views import load_version
from diloco.operate.create import create_from
from diloco.run.cli.opening import open_run
from diloco.show.page.server import FILES

# --- The report


RUN = "bench"
GOAL_S, GOAL_GB = 60.0, 2.0


async def make_tape(run_dir: Path, versions: int, learners: int) -> None:
    async with open_run(run_dir) as run:
        await Forger(run.context, [f"learner-{i}" for i in range(learners)]).forge(versions)


def prepare(run_dir: Path, url: str) -> None:
    document = {
        "run": {"name": RUN, "steps": 1 << 30},
        "bus": {"url": url},
        "store": {"url": str(run_dir / "store")},
    }
    path = run_dir / "run.toml"
    path.write_text(tomli_w.dumps(document))
    create_from(load_config(path), None)


def measure_report(run_dir: Path, out: Path) -> tuple[float, float, float]:
    """Seconds, processor seconds and peak gigabytes of the command."""
    command = [sys.executable, "-m", "diloco", "report", str(run_dir), "--evaluations", "0"]
    began_s = time.perf_counter()
    process = subprocess.Popen([*command, "--out", str(out)])
    _, status, usage = os.wait4(process.pid, 0)
    took_s = time.perf_counter() - began_s
    assert status == 0, f"diloco report ended with status {status}"
    # Linux counts in units of 1,024 bytes, macOS in bytes.
    peak_gb = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return took_s, usage.ru_utime + usage.ru_stime, peak_gb


def report_main() -> None:
    parser = argparse.ArgumentParser(description="time and memory of diloco report")
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--keep", type=Path, help="file that keeps the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        # Nobody cuts the power of a made-up tape.
        with NatsServer(run_dir / "nats", sync_interval="2m") as server:
            prepare(run_dir, server.url)
            began_s = time.perf_counter()
            asyncio.run(make_tape(run_dir, options.versions, options.learners))
            made_s = time.perf_counter() - began_s
            messages = options.versions * (options.learners + 1)
            print(f"tape of {options.versions:,} versions, {messages:,} messages: {made_s:.0f} s")
            took_s, used_s, peak_gb = measure_report(run_dir, options.keep or run_dir / "out.html")
    print(
        f"report: {took_s:.1f} s (goal {GOAL_S:.0f}), {used_s:.1f} s of processor time, "
        f"peak {peak_gb:.2f} GB (goal {GOAL_GB:g})"
    )


# --- Followers


PROCESSES = 4
# Between two SIGKILLs of a process of followers, each of which starts again.
KILL_S = 5.0


async def tell_lags(run_dir: str, seconds: float) -> None:
    """From the record that completes a version to that version in hand, of one follower."""
    async with diloco.follow(run_dir) as model:
        until_s = time.monotonic() + seconds
        await model.take_async()
        while (rest_s := until_s - time.monotonic()) > 0:
            if await model.take_async(rest_s) is not None:
                stored = [at.stored_at_s for at in model.standing().values()]
                print(time.time() - max(stored), flush=True)


def many_main() -> None:
    """Followers of one process: the words after the part are the run, how many, how long."""
    run_dir, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    async def all_of_them() -> None:
        await asyncio.gather(*(tell_lags(run_dir, seconds) for _ in range(count)))

    asyncio.run(all_of_them())


def followed(run_dir: Path, count: int, seconds: float) -> list[float]:
    """The lags of so many followers, in some processes that are killed; waits if there are none."""
    until_s, rng = time.monotonic() + seconds, random.Random(count)
    shares = [count // PROCESSES + (index < count % PROCESSES) for index in range(PROCESSES)]
    command = [sys.executable, "-m", "bench.dashboard", "many", str(run_dir)]

    def start(share: int) -> subprocess.Popen[str]:
        words = [*command, str(share), str(until_s - time.monotonic())]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    running, told = [(share, start(share)) for share in shares if share], ""
    while until_s - time.monotonic() > 2 * KILL_S:
        time.sleep(KILL_S)
        if count > 1:
            share, process = running.pop(rng.randrange(len(running)))
            process.kill()
            told += process.communicate()[0]
            running.append((share, start(share)))
    time.sleep(max(0.0, until_s - time.monotonic()))
    for _, process in running:
        told += process.communicate()[0]
    return [float(line) for line in told.splitlines()]


def standing_of(run_dir: Path) -> tuple[int, float]:
    """Versions of all fragments, and processor seconds of learners and aggregators."""

    async def versions() -> int:
        async with open_run(run_dir, reads=True) as run:
            fragments = range(len(run.context.layout.fragments))
            return sum([(await last_record(run.context, one))[0].version for one in fragments])

    used_s = 0.0
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run_dir) in " ".join(words) and {"learner", "aggregator"} & {*words}:
            times = process.cpu_times()
            used_s += times.user + times.system
    return asyncio.run(versions()), used_s


def followers_main() -> None:
    parser = argparse.ArgumentParser(description="what followers cost a run, and how far behind")
    parser.add_argument("--followers", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.1, help="that a step lasts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        local = [sys.executable, "-m", "diloco", "local", "--kill", "none", "--learners", "2"]
        local += ["--steps", "1000000", "--task", "bench.tasks:paced", "--cpu"]
        local += ["--set", f"task.options.step_s={options.step_s}"]
        quiet = subprocess.DEVNULL
        run = subprocess.Popen([*local, "--run-dir", str(run_dir)], stdout=quiet, stderr=quiet)
        try:
            wait_for_versions(run_dir)
            phases = [
                [Phase.of(run_dir, count, options.seconds) for count in (0, 1, options.followers)]
                for _ in range(options.repeats)
            ]
        finally:
            run.terminate()
            run.wait()
    print(f"medians of {options.repeats} repeats, beside the run alone in the same repeat:")
    for index in (1, 2):
        used, rates = (
            [getattr(one[index], what) / getattr(one[0], what) for one in phases]
            for what in ("used_s", "rate")
        )
        print(
            f"{phases[0][index].followers:4} followers: processor time a version "
            f"{statistics.median(used):.3f} ({min(used):.3f} to {max(used):.3f}), "
            f"versions a second {statistics.median(rates):.3f} "
            f"({min(rates):.3f} to {max(rates):.3f})"
        )


class Phase(NamedTuple):
    """A stretch of a run: versions a second, the run's processor seconds for each."""

    followers: int
    rate: float
    used_s: float

    @classmethod
    def of(cls, run_dir: Path, count: int, seconds: float) -> Self:
        before, used_s = standing_of(run_dir)
        began_s = time.monotonic()
        lags = sorted(followed(run_dir, count, seconds))
        took_s = time.monotonic() - began_s
        after, now_s = standing_of(run_dir)
        made = max(after - before, 1)
        found = cls(count, made / took_s, (now_s - used_s) / made)
        seen = "none"
        if lags:
            seen = f"{lags[len(lags) // 2]:.3f} s, worst {lags[-1]:.3f} of {len(lags):,}"
        print(
            f"{count:4} followers: {found.rate:.2f} versions/s, {found.used_s:.3f} processor s of "
            f"the run a version, lag {seen}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        return found


def deltas_main() -> None:
    """Lossless deltas of a run's model in bfloat16, between versions that follow each other."""
    run_dir, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4

    async def at(context: RunContext, version: int) -> np.ndarray:
        fragments = range(len(context.layout.fragments))
        found = await find_versions(context, dict.fromkeys(fragments, version))
        views = [await load_version(context, found[one].record) for one in fragments]
        return np.concatenate(views).astype(ml_dtypes.bfloat16).view(np.uint16)

    async def look() -> None:
        async with open_run(run_dir, reads=True) as run:
            newest = (await last_record(run.context, 0))[0].version
            for version in np.linspace(newest / count, newest - 1, count).astype(int).tolist():
                older, newer = [await at(run.context, version + more) for more in (-1, 0)]
                changed = older ^ newer
                # The two bytes of each apart: the upper one seldom changes.
                halves = changed.view(np.uint8).reshape(-1, 2).T.tobytes()
                stored = len(pa.compress(halves, codec="zstd", asbytes=True)) / len(changed)
                share = np.count_nonzero(changed) / len(changed)
                print(f"version {version}: {share:.1%} changed, {stored:.3f} bytes a parameter")

    asyncio.run(look())


def wait_for_versions(run_dir: Path) -> None:
    """Until a local run has made some."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        with contextlib.suppress(DilocoError, OSError):
            if standing_of(run_dir)[0] >= 8:
                return
        time.sleep(1.0)
    sys.exit("the run makes no versions")


# --- Live


PATIENCE_S = 600.0


class Viewer(threading.Thread):
    """An open page: reads the stream of events, and asks for learners as the page does."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.newest: dict[str, bytes] = {}
        self.counts: dict[str, int] = {}
        self.largest: dict[str, int] = {}

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        connection.request("GET", "/events")
        event = ""
        for line in connection.getresponse():
            key, _, value = line.strip().partition(b": ")
            if key == b"event":
                event = value.decode()
            elif key == b"data":
                self.note(event, value)
                if event == "drawn":
                    self.note("learners", self.get("/learners"))

    def note(self, what: str, data: bytes) -> None:
        self.newest[what] = data
        self.counts[what] = self.counts.get(what, 0) + 1
        self.largest[what] = max(self.largest.get(what, 0), len(data))

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        connection.request("GET", path)
        body = connection.getresponse().read()
        connection.close()
        return body

    def until_figures(self) -> None:
        ends_s = time.monotonic() + PATIENCE_S
        while "learners" not in self.newest:
            assert time.monotonic() < ends_s, "no figures came"
            time.sleep(0.05)


class Watched:
    """The command's process over a stretch of time."""

    def __init__(self, process: psutil.Process, viewer: Viewer) -> None:
        self.process, self.viewer = process, viewer

    def look(self, what: str, seconds: float) -> None:
        self.begin()
        time.sleep(seconds)
        self.tell(what)

    def begin(self) -> None:
        self.began_s, self.used_s = time.perf_counter(), self.used()
        self.events = dict(self.viewer.counts)

    def tell(self, what: str) -> None:
        took_s = time.perf_counter() - self.began_s
        share = (self.used() - self.used_s) / took_s
        came = {
            key: self.viewer.counts[key] - self.events.get(key, 0) for key in self.viewer.counts
        }
        memory = self.process.memory_info().rss / 1e6
        print(f"{what}: {took_s:.0f} s, {share:.1%} of a core, {memory:.0f} MB; events {came}")

    def used(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


async def more(run_dir: Path, learners: int, seconds: float, every_s: float) -> int:
    """Versions that come one by one."""
    ends_s, made = time.monotonic() + seconds, 0
    async with open_run(run_dir) as run:
        forger = Forger(run.context, [f"learner-{i}" for i in range(learners)])
        await forger.forge(0)
        newest = [(await last_record(run.context, 0))[0]]
        while time.monotonic() < ends_s:
            began_s = time.monotonic()
            await publish(run.context.bus, [*forger.round(newest, 0)])
            made += 1
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began_s)))
    return made


def measure(run_dir: Path, learners: int, seconds: float) -> None:
    command = [sys.executable, "-m", "diloco", "dashboard", str(run_dir), "--port", "0"]
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        address = started.stdout.readline().split("http://")[1].strip().rstrip("/")
        process, viewer = psutil.Process(started.pid), Viewer(address)
        viewer.start()
        viewer.until_figures()
        watched = Watched(process, viewer)
        read_s = time.perf_counter() - began_s
        memory = process.memory_info().rss / 1e6
        print(
            f"first figures: {read_s:.1f} s, {watched.used():.1f} s of processor, {memory:.0f} MB"
        )
        watched.look("still", seconds)
        watched.begin()
        made = asyncio.run(more(run_dir, learners, seconds, 1.0))
        watched.tell(f"{made} versions came")
        files = sum(len(viewer.get(f"/{name}")) for name in ("", *FILES))
        print(json.dumps({"page": files, **viewer.largest}))
        process.terminate()


def measure_start(folder: Path, name: str, options: list[str]) -> None:
    run_dir, own = folder / name, {"XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "diloco", "local", "--run-dir", str(run_dir), "--json"]
    before, began_s = os.times(), time.time()
    done = subprocess.run(
        [*command, *options], env=os.environ | own, check=True, text=True, stdout=subprocess.PIPE
    )
    took_s, after, summary = time.time() - began_s, os.times(), json.loads(done.stdout)
    logs = [path.read_text().splitlines() for path in (run_dir / "logs").glob("learner-*.log")]
    started = [
        next(one for one in map(json.loads, lines) if one.get("action") == "started")
        for lines in logs
    ]
    steps_s = [datetime.fromisoformat(one["timestamp"]).timestamp() - began_s for one in started]
    used_s = sum(after[2:4]) - sum(before[2:4])
    kept = len(list((folder / "cache").rglob("*-cache")))
    print(
        f"{name}: first step {min(steps_s):.1f} s, of the last learner {max(steps_s):.1f} s, end "
        f"{took_s:.1f} s; {used_s:.1f} s of processor time, {kept} programs kept, held-out loss "
        f"{summary['eval_loss_first']} to {summary['eval_loss_last']}; "
        f"load {os.getloadavg()[0]:.1f}"
    )


def start_main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fresh", "again"):
            measure_start(Path(folder), name, sys.argv[1:])


def live_main() -> None:
    parser = argparse.ArgumentParser(description="what a live page costs")
    parser.add_argument("--versions", type=int, default=400)
    parser.add_argument("--learners", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        with NatsServer(run_dir / "nats", sync_interval="2m") as server:
            prepare(run_dir, server.url)
            asyncio.run(make_tape(run_dir, options.versions, options.learners))
            print(f"{options.versions:,} versions, {options.learners:,} learners")
            measure(run_dir, options.learners, options.seconds)


if __name__ == "__main__":
    parts = {"live": live_main, "report": report_main, "start": start_main}
    run_part({**parts, "followers": followers_main, "many": many_main, "deltas": deltas_main})
