"""The cost of synchronization for a learner.

    python -m bench.stall [--pairs 10] [--preset 1m] [--devices 4 --mesh fsdp=2,tensor=2]
    python -m bench.stall cost [--intervals 10] [--step-ms 50] [--preset 1m] [--profile FOLDER]
    python -m bench.stall encode

**steps**, without a word: steps per second with it on against off. One learner, alone on one core
with all of its threads, trains the demo's model; aggregator and NATS server are on the other core.
Blocks of steps with synchronization (H = 24, P = 8, int4 both ways) alternate with blocks without,
in one process, so that all see the same noise. Synchronization is taken two ways: `Learner.step`,
as every training loop calls it, and the boundary under it alone.

**cost**: processor time of each update and its version. Ratios of noisy blocks do not show half a
per cent; sums of processor time do, whatever else the machine does. Counted, with the learner and
all its threads on one core, over intervals in which every fragment is sent and adopted once:

- training: the training thread within `Learner.step`. JAX's dispatch of encoding and adopting is
  in it, and whatever XLA computes on the thread that calls it.
- loop: the background thread's event loop: messages, records, heartbeats.
- pool: the threads that do blocking calls for it: packing, files, decoding, placing on devices.
- devices: XLA's own threads, which take the inner steps too; so it is measured by itself, in a loop
  that sends and adopts every fragment and does nothing else.

What the kernel does for a thread (files, sockets, fsync) is in that thread's time. Not counted:
other processes, and the kernel's own threads. A step's rest is slept, so that it takes `--step-ms`.

**encode**: float32 blocks on the device, as a learner's tensors lie, to codes on the device. Bytes
are those of the input; the ratio is to this machine's streaming bandwidth, which counts reading and
writing, so reading alone at full speed would show as 100 %.
"""

import argparse
import asyncio
import contextlib
import cProfile
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tomli_w

from bench.harness import Stream, median, run_part, seconds, table
from diloco.common.process import log
from diloco.common.process.config import Config, LearnerSection, RunSettings, load_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.process.probes import make_probes
from diloco.common.process.retry import Runtime
from diloco.common.protocol.codecs import CODECS, Encoded
from diloco.learner.background import Context
from diloco.learner.island import Island
from diloco.learner.library import Learner, alive
from diloco.learner.life import Life
from diloco.learner.member import Member
from diloco.learner.tensors.checkpoint import Folder
from diloco.learner.tensors.quantize_and_pack import encode, encode_blocks
from diloco.learner.wire.checkpoint_save_and_restore import Saver

# --- Steps per second


FLOOR = 0.99
ENCODES = 20
BLOCK_STEPS = 48  # two intervals: every fragment is sent twice in a block
Way = Literal["step", "boundary", "off"]
WAYS: tuple[Way, ...] = ("step", "boundary", "off")


class Loop:
    """A training loop, and its place in the run."""

    def __init__(self, island: Island, life: Life) -> None:
        self.learner = Learner(life, threading.Event())
        self.synchronizer = life.synchronizer
        self.params = self.learner.params
        self.inner_step = island.inner_step()
        self.state = island.init_state(self.params)
        self.batches = island.feed(self.learner.position)

    def inner(self) -> jax.Array:
        """One inner step; its loss, still being computed."""
        self.params, self.state, outcome = self.inner_step(
            self.params, self.state, next(self.batches), np.int32(0), np.uint32(0)
        )
        return outcome.loss

    def cross(self, way: Way, loss: jax.Array) -> None:
        """The boundary after it."""
        if way == "step":
            self.params = self.learner.step(self.params, loss=loss, save=self.state)
        elif way == "boundary":
            replica = self.synchronizer.replica
            if self.synchronizer.turn(lambda: self.params).effects:
                self.params = replica.trained


def write_config(folder: Path, url: str, task: dict[str, Any], mesh: str) -> Path:
    """The run's file: long enough never to end."""
    document = {
        "run": {"name": "stall", "steps": 1_000_000},
        "task": {"options": task},
        "sync": {"interval_steps": 24, "fragments": 8, "codec": "int4", "delta_codec": "int4"},
        "bus": {"url": url},
        "store": {"url": str(folder / "store")},
        "learner": {"mesh": mesh},
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document))
    return path


def report_encode(loop: Loop, settings: RunSettings) -> None:
    """How long the device encodes one interval's updates, as a share of the interval's steps."""
    sync_section, replica = settings.sync, loop.synchronizer.replica
    replica.trained = loop.params
    began_s = time.perf_counter()
    for _ in range(ENCODES):
        for fragment in range(sync_section.fragments):
            jax.block_until_ready(replica.send(fragment))
    encode_s = (time.perf_counter() - began_s) / ENCODES
    began_s = time.perf_counter()
    for _ in range(sync_section.interval_steps):
        loss = loop.inner()
    jax.block_until_ready(loss)
    share = encode_s / (time.perf_counter() - began_s)
    print(f"encoding all fragments: {1000 * encode_s:.1f} ms, {share:.3%} of an interval's steps")


def report_checkpoint(loop: Loop, context: Context, folder: Path) -> None:
    """Report a checkpoint's cost: the training thread's part, and all of it on this one core."""
    section = LearnerSection(checkpoint_dir=str(folder))
    kept = Folder(folder, section.checkpoint_keep)
    dispatched_s, made_s = [], []
    for _ in range(ENCODES):
        saver = Saver(context, section, kept, 1)
        jax.block_until_ready(loop.inner())
        began_s = time.perf_counter()
        saver.save(loop.state, loop.synchronizer.progress())
        dispatched_s.append(time.perf_counter() - began_s)
        saver.close()
        made_s.append(time.perf_counter() - began_s)
    # The first one imports orbax.
    print(
        f"a checkpoint of {_size(loop.state) / 1e6:.1f} MB: the training thread "
        f"{1000 * statistics.median(dispatched_s[1:]):.2f} ms (max "
        f"{1000 * max(dispatched_s[1:]):.2f} ms), with the worker's part "
        f"{1000 * statistics.median(made_s[1:]):.0f} ms"
    )


def _size(state: Any) -> int:
    """Bytes of the inner optimizer's state."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


class Took(NamedTuple):
    """Time of a block: by the clock, and of the processor for all threads of this process."""

    wall_s: float
    cpu_s: float


def block(loop: Loop, way: Way) -> Took:
    """Take a block of steps, until the last of them is computed."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    previous = None
    for _ in range(BLOCK_STEPS):
        loss = loop.inner()
        loop.cross(way, loss)
        if previous is not None:
            previous.block_until_ready()
        previous = loss
    jax.block_until_ready(loop.params)
    return Took(time.perf_counter() - began_s, time.process_time() - began_cpu_s)


@contextlib.contextmanager
def alone(task: dict[str, Any], mesh: str = "fsdp=0") -> Iterator[tuple[Config, Path]]:
    """A run whose server and aggregator are on the last core, and this process on the first.

    Args:
        task: its options.
        mesh: of the learner's devices.

    Yields:
        The run's file as read, and a folder for a while.
    """
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.sched_setaffinity(0, {cores[-1]})
        with NatsServer(folder / "nats") as server:
            path = write_config(folder, server.url, task, mesh)
            command = [sys.executable, "-m", "diloco"]
            subprocess.run([*command, "run", "create", "--config", str(path)], check=True)
            aggregator = subprocess.Popen(
                [*command, "aggregator", "--config", str(path), "--log-level", "error"]
            )
            os.sched_setaffinity(0, {cores[0]})
            try:
                yield load_config(path), folder
            finally:
                aggregator.kill()
                aggregator.wait()


@contextlib.contextmanager
def learning(config: Config) -> Iterator[tuple[Loop, Life]]:
    """The one learner of a run, which leaves it in the end."""
    island = Island(config, "alone")
    member = Member.of(
        island.sharded_params(),
        learner="alone",
        anchor=island.anchor,
        tokens_per_step=island.task.tokens_per_batch,
        hint=island.hint,
    )
    runtime = Runtime()
    probes = make_probes(runtime.retries, run=config.run.name, learner="alone")
    with island.context(), alive(config, member, threading.Event(), runtime, probes) as life:
        yield Loop(island, life), life
        life.leave()


def measure(config: Config, folder: Path, rounds: int) -> list[dict[Way, Took]]:
    """Measure each way, round by round."""
    with learning(config) as (loop, life):
        timings = measure_rounds(loop, rounds)
        print(f"updates sent: {life.context.traffic.updates_sent}")
        report_encode(loop, config.settings())
        report_checkpoint(loop, life.context, folder / "checkpoints")
    return timings


def measure_rounds(loop: Loop, rounds: int) -> list[dict[Way, Took]]:
    """Blocks of each way, each in every place of a round in turn."""
    block(loop, "step")
    timings = []
    for number in range(rounds):
        first = number % len(WAYS)
        took = {way: block(loop, way) for way in WAYS[first:] + WAYS[:first]}
        timings.append(took)
        words = ", ".join(
            f"{way} {took[way].wall_s:.2f} s ({took[way].cpu_s:.2f} of cpu)" for way in WAYS
        )
        print(f"round {number + 1}/{rounds}: {words}")
    return timings


def steps_main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="rounds of blocks")
    parser.add_argument("--preset", default="1m")
    parser.add_argument("--devices", type=int, default=1, help="that the CPU is taken for")
    parser.add_argument("--mesh", default="fsdp=0", help="of those devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    log.configure("warning")
    with alone({"preset": options.preset}, options.mesh) as (config, folder):
        timings = measure(config, folder, options.pairs)
    step_ms = 1000 * statistics.median(took["off"].wall_s for took in timings) / BLOCK_STEPS
    print(f"step without synchronization: {step_ms:.1f} ms")
    for way in ("step", "boundary"):
        report(
            f"{way}: steps/s by the clock",
            [took["off"].wall_s / took[way].wall_s for took in timings],
        )
        report(
            f"{way}: steps per second of cpu",
            [took["off"].cpu_s / took[way].cpu_s for took in timings],
        )


def report(what: str, ratios: list[float]) -> None:
    """One row: with synchronization over without."""
    print(
        f"{what}, with / without synchronization: median {statistics.median(ratios):.4f}, "
        f"min {min(ratios):.4f}, max {max(ratios):.4f} (floor {FLOOR})"
    )


# --- Processor time


GOAL = 0.995
TURNS = 20
BATCH = 2  # so that a step of the demo's model fits in 50 ms on one core
TRAINING, LOOP = "MainThread", "loop"


class ProcessorTime(NamedTuple):
    """Processor seconds of this process, by who took them; `rest_s`: no threads of Python's."""

    training_s: float
    loop_s: float
    pool_s: float
    rest_s: float

    @classmethod
    def now(cls) -> "ProcessorTime":
        """Read the clocks of all threads that there are."""
        taken = {TRAINING: 0.0, LOOP: 0.0, "pool": 0.0}
        for thread in threading.enumerate():
            assert thread.ident is not None
            clock = time.pthread_getcpuclockid(thread.ident)
            name = thread.name if thread.name in taken else "pool"
            taken[name] += time.clock_gettime(clock)
        rest_s = time.process_time() - sum(taken.values())
        return cls(taken[TRAINING], taken[LOOP], taken["pool"], rest_s)

    def since(self, before: "ProcessorTime") -> "ProcessorTime":
        """The time taken between two readings."""
        return ProcessorTime(*(now - then for now, then in zip(self, before, strict=True)))


class UpdateCost(NamedTuple):
    """Milliseconds of processor time for an update and the version that answers it."""

    training: float
    loop: float
    pool: float
    devices: float


def devices_ms(loop: Loop, settings: RunSettings) -> float:
    """Milliseconds that XLA's own threads take to send and to adopt every fragment once."""
    replica, section = loop.synchronizer.replica, settings.sync
    replica.trained = loop.params
    payloads = []
    for fragment in range(section.fragments):
        zeros = np.zeros(len(replica.local_blocks(fragment)) * section.block, np.float32)
        encoded = encode(section.delta_codec, zeros, section.block)
        payloads.append(Encoded(*map(np.asarray, encoded)))

    def turn() -> None:
        for fragment, rows in enumerate(payloads):
            jax.block_until_ready(replica.send(fragment))
            replica.adopt(fragment, replica.place(fragment, rows), resolved=True)
            jax.block_until_ready(replica.trained)

    turn()
    began = ProcessorTime.now()
    for _ in range(TURNS):
        turn()
    loop.params = replica.trained
    return 1000 * ProcessorTime.now().since(began).rest_s / TURNS


def step(loop: Loop, step_s: float) -> float:
    """One step of at least that time, and its boundary; processor seconds of the latter."""
    began_s = time.monotonic()
    loss = loop.inner()
    jax.block_until_ready(loss)
    time.sleep(max(0.0, began_s + step_s - time.monotonic()))
    began_cpu_s = time.thread_time()
    loop.cross("step", loss)
    return time.thread_time() - began_cpu_s


def measure_cost(
    loop: Loop, life: Life, steps: int, step_s: float
) -> tuple[UpdateCost, float, float]:
    """The cost of an update and its version, how many a step there were, and its milliseconds."""
    traffic = life.context.traffic
    began, began_s, sent = ProcessorTime.now(), time.monotonic(), traffic.updates_sent
    training_s = sum(step(loop, step_s) for _ in range(steps))
    took, took_s = ProcessorTime.now().since(began), time.monotonic() - began_s
    updates = traffic.updates_sent - sent
    each = 1000 / updates
    devices = devices_ms(loop, life.context.settings) / life.context.settings.sync.fragments
    cost = UpdateCost(each * training_s, each * took.loop_s, each * took.pool_s, devices)
    return cost, updates / steps, 1000 * took_s / steps


def profiled(life: Life, folder: Path, run: Callable[[], None]) -> None:
    """Run with a profile of each thread, by its processor time, written to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    profiles: dict[str, cProfile.Profile] = {}
    loop = life.host.background.loop

    def begin() -> None:
        profile = profiles[threading.current_thread().name] = cProfile.Profile(time.thread_time)
        profile.enable()

    def end() -> None:
        name = threading.current_thread().name
        if name in profiles:  # The pool may have grown.
            profiles[name].disable()

    async def called(function: Callable[[], None]) -> None:
        function()

    def on_all(function: Callable[[], None]) -> None:
        function()
        asyncio.run_coroutine_threadsafe(called(function), loop).result()
        asyncio.run_coroutine_threadsafe(_on_pool(function), loop).result()

    on_all(begin)
    run()
    on_all(end)
    for name, profile in profiles.items():
        profile.dump_stats(folder / f"{name}.prof")


async def _on_pool(function: Callable[[], None]) -> None:
    """Call it once on each thread of the loop's pool."""
    threads = [one for one in threading.enumerate() if one.name.startswith("asyncio_")]
    together = threading.Barrier(len(threads))

    def call() -> None:
        together.wait()
        function()

    await asyncio.gather(*(asyncio.to_thread(call) for _ in threads))


def cost_main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--intervals", type=int, default=10, help="in each of which all is sent")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--preset", default="1m")
    parser.add_argument("--batch", type=int, default=BATCH, help="windows: less work in a step")
    parser.add_argument("--profile", type=Path, help="folder of a profile of each thread")
    options = parser.parse_args()
    log.configure("warning")
    with (
        alone({"preset": options.preset, "batch": options.batch}) as (config, _),
        learning(config) as (loop, life),
    ):
        interval_steps, step_s = config.sync.interval_steps, options.step_ms / 1000
        for _ in range(2 * interval_steps):
            step(loop, step_s)
        steps = options.intervals * interval_steps
        if options.profile:

            def run() -> None:
                for _ in range(steps):
                    step(loop, step_s)

            profiled(life, options.profile, run)
            return
        cost, each_step, step_ms = measure_cost(loop, life, steps, step_s)
    per_step_ms = sum(cost) * each_step
    print(f"{each_step * steps:.0f} updates in {steps} steps of {step_ms:.1f} ms")
    rows = [[name, f"{value:.3f}"] for name, value in cost._asdict().items()]
    rows.append(["all", f"{sum(cost):.3f}"])
    print(table([["ms of processor time an update and its version", ""], *rows]))
    for length_ms in (options.step_ms, 118.0):
        share = length_ms / (length_ms + per_step_ms)
        print(
            f"share of a step of {length_ms:g} ms not in synchronization: {share:.3%} ({GOAL:.1%})"
        )


# --- Encoding on the device


Work = Callable[[], Any]
ENCODE_REPEATS = 11
FLOOR_BYTES_PER_S = 4e9


def encode_main() -> None:
    """Print the table; with --check, fail below the floor."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--size", type=int, default=1 << 24, help="elements")
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="fail below the floor")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (options.size // options.block, options.block)
    new, old = ((jax.device_put(rng.standard_normal(shape, dtype=np.float32)),) for _ in range(2))
    works: dict[str, Work] = {codec: partial(encode_blocks, codec, new) for codec in CODECS}
    works["int4 of a difference"] = partial(encode_blocks, "int4", new, old)
    speeds, bandwidths = _measure_encoding(works, options.size)
    rows = [["codec", "ms", "GB/s of input", "of streaming"]]
    for name, each in speeds.items():
        ratio = median([speed / band for speed, band in zip(each, bandwidths, strict=True)])
        taken_s = 4 * options.size / median(each)
        rows.append([name, f"{taken_s * 1e3:.1f}", f"{median(each) / 1e9:.1f}", f"{ratio:.0%}"])
    held = median(speeds["int4"]) >= FLOOR_BYTES_PER_S
    print(f"{options.size:,} elements, blocks of {options.block}")
    print(f"streaming in place, float32: {median(bandwidths) / 1e9:.1f} GB/s\n")
    print(table(rows))
    print(f"\nfloor of int4, {FLOOR_BYTES_PER_S / 1e9:.0f} GB/s: {'held' if held else 'MISSED'}")
    if options.check and not held:
        sys.exit(1)


def _measure_encoding(
    works: dict[str, Work], size: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Bytes of input per second of each work, and the bandwidth, in turns."""
    stream = Stream(size)
    speeds: dict[str, list[float]] = {name: [] for name in works}
    bandwidths = []
    for work in works.values():
        seconds(work)
    for _ in range(ENCODE_REPEATS):
        bandwidths.append(stream.bytes_per_s())
        for name, work in works.items():
            speeds[name].append(4 * size / seconds(work))
    return speeds, bandwidths


if __name__ == "__main__":
    run_part({"steps": steps_main, "cost": cost_main, "encode": encode_main})
