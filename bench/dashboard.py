"""What is seen of a run, and when: a local run's start; the page's cost, live and as a report.

    .venv/bin/python -m bench.dashboard [--versions 400] [--learners 1000] [--seconds 30]
    .venv/bin/python -m bench.dashboard report [--versions 100000] [--learners 4] [--keep DIR]
    .venv/bin/python -m bench.dashboard start [OPTIONS OF diloco local ...]
    .venv/bin/python -m bench.dashboard followers [--followers 100] [--seconds 20] [--repeats 3]

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
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path

import psutil
import tomli_w

import diloco
from bench.harness import run_part
from bench.tapes import Forger, publish
from diloco.common.process.config import load_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol.errors import DilocoError
from diloco.common.storage.tape import last_record
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


async def lags_s(run_dir: str, seconds: float) -> list[float]:
    """From the record that completes a version to that version in hand, of one follower."""
    found: list[float] = []
    async with diloco.follow(run_dir) as model:
        until_s = time.monotonic() + seconds
        await model.take_async()
        while (rest_s := until_s - time.monotonic()) > 0:
            if await model.take_async(rest_s) is not None:
                stored = [at.stored_at_s for at in model.standing().values()]
                found.append(time.time() - max(stored))
    return found


def many_main() -> None:
    """Followers of one process: the words after the part are the run, how many, how long."""
    run_dir, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    async def all_of_them() -> list[list[float]]:
        return await asyncio.gather(*(lags_s(run_dir, seconds) for _ in range(count)))

    print(json.dumps([lag for lags in asyncio.run(all_of_them()) for lag in lags]))


def followed(run_dir: Path, count: int, seconds: float) -> list[float]:
    """The lags of so many followers, in some processes, beside a run; waits if there are none."""
    if not count:
        time.sleep(seconds)
        return []
    shares = [count // PROCESSES + (index < count % PROCESSES) for index in range(PROCESSES)]
    command = [sys.executable, "-m", "bench.dashboard", "many", str(run_dir)]
    running = [
        subprocess.Popen([*command, str(share), str(seconds)], stdout=subprocess.PIPE)
        for share in shares if share
    ]  # fmt: skip
    return [lag for one in running for lag in json.loads(one.communicate()[0])]


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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        local = [sys.executable, "-m", "diloco", "local", "--kill", "none", "--learners", "2"]
        local += ["--steps", "1000000", "--task", "bench.tasks:build"]
        quiet = subprocess.DEVNULL
        run = subprocess.Popen([*local, "--run-dir", str(run_dir)], stdout=quiet, stderr=quiet)
        try:
            wait_for_versions(run_dir)
            for repeat in range(options.repeats):
                for count in (0, 1, options.followers):
                    before, used_s = standing_of(run_dir)
                    began_s = time.monotonic()
                    lags = sorted(followed(run_dir, count, options.seconds))
                    took_s = time.monotonic() - began_s
                    after, now_s = standing_of(run_dir)
                    made = max(after - before, 1)
                    print(
                        f"{repeat} {count:4} followers: {made / took_s:.2f} versions/s, "
                        f"{(now_s - used_s) / made:.3f} processor s of the run a version",
                        flush=True,
                    )
                    if lags:
                        middle, worst = lags[len(lags) // 2], lags[-1]
                        print(f"  lag {middle:.3f} s, worst {worst:.3f} of {len(lags)}", flush=True)
        finally:
            run.terminate()
            run.wait()


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
    run_part({**parts, "followers": followers_main, "many": many_main})
