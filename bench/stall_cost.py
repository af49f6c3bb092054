"""What synchronization costs a learner itself: processor time of each update and its version.

Ratios of noisy blocks (`bench.stall`) do not show half a per cent; sums of processor time do,
whatever else the machine does. Counted, with the learner and all its threads on one core, over
intervals in which every fragment is sent and adopted once:

- training: the training thread within `Learner.step`. JAX's dispatch of encoding and adopting is
  in it, and whatever XLA computes on the thread that calls it.
- loop: the background thread's event loop: messages, records, heartbeats.
- pool: the threads that do blocking calls for it: packing, files, decoding, placing on devices.
- devices: XLA's own threads, which take the inner steps too; so it is measured by itself, in a loop
  that sends and adopts every fragment and does nothing else.

What the kernel does for a thread (files, sockets, fsync) is in that thread's time. Not counted:
other processes, and the kernel's own threads. A step's rest is slept, so that it takes `--step-ms`.

    python -m bench.stall_cost [--intervals 10] [--step-ms 50] [--preset 1m] [--profile FOLDER]
"""

import argparse
import asyncio
import cProfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from bench.stall import Loop, alone, learning
from bench.streaming import table
from diloco.common import log
from diloco.common.codec import Encoded
from diloco.common.config import RunSettings
from diloco.common.quantize import encode
from diloco.learner.life import Life

GOAL = 0.995
TURNS = 20
BATCH = 2  # so that a step of the demo's model fits in 50 ms on one core
TRAINING, LOOP = "MainThread", "background"


class Spent(NamedTuple):
    """Processor seconds of this process, by who took them; `rest_s`: no threads of Python's."""

    training_s: float
    loop_s: float
    pool_s: float
    rest_s: float

    @classmethod
    def now(cls) -> "Spent":
        """Read the clocks of all threads that there are."""
        taken = {TRAINING: 0.0, LOOP: 0.0, "pool": 0.0}
        for thread in threading.enumerate():
            assert thread.ident is not None
            clock = time.pthread_getcpuclockid(thread.ident)
            name = thread.name if thread.name in taken else "pool"
            taken[name] += time.clock_gettime(clock)
        rest_s = time.process_time() - sum(taken.values())
        return cls(taken[TRAINING], taken[LOOP], taken["pool"], rest_s)

    def since(self, before: "Spent") -> "Spent":
        """What was taken between two readings."""
        return Spent(*(now - then for now, then in zip(self, before, strict=True)))


class Cost(NamedTuple):
    """Milliseconds of processor time for an update and the version that answers it."""

    training: float
    loop: float
    pool: float
    devices: float


def devices_ms(loop: Loop, settings: RunSettings) -> float:
    """What XLA's own threads take to send and to adopt every fragment once."""
    replica, section = loop.synchronizer.replica, settings.sync
    replica.trained = loop.params
    payloads = []
    for fragment in range(section.fragments):
        zeros = np.zeros(len(replica.held(fragment)) * section.block, np.float32)
        encoded = encode(section.delta_codec, zeros, section.block)
        payloads.append(Encoded(*map(np.asarray, encoded)))

    def turn() -> None:
        for fragment, rows in enumerate(payloads):
            jax.block_until_ready(replica.send(fragment))
            replica.adopt(fragment, replica.place(fragment, rows), resolved=True)
            jax.block_until_ready(replica.trained)

    turn()
    began = Spent.now()
    for _ in range(TURNS):
        turn()
    loop.params = replica.trained
    return 1000 * Spent.now().since(began).rest_s / TURNS


def step(loop: Loop, step_s: float) -> float:
    """One step of at least that time, and its boundary; processor seconds of the latter."""
    began_s = time.monotonic()
    loss = loop.inner()
    jax.block_until_ready(loss)
    time.sleep(max(0.0, began_s + step_s - time.monotonic()))
    began_cpu_s = time.thread_time()
    loop.cross("step", loss)
    return time.thread_time() - began_cpu_s


def measure(loop: Loop, life: Life, steps: int, step_s: float) -> tuple[Cost, float, float]:
    """The cost of an update and its version, how many a step there were, and its milliseconds."""
    traffic = life.context.traffic
    began, began_s, sent = Spent.now(), time.monotonic(), traffic.updates_sent
    training_s = sum(step(loop, step_s) for _ in range(steps))
    took, took_s = Spent.now().since(began), time.monotonic() - began_s
    updates = traffic.updates_sent - sent
    each = 1000 / updates
    devices = devices_ms(loop, life.context.settings) / life.context.settings.sync.fragments
    cost = Cost(each * training_s, each * took.loop_s, each * took.pool_s, devices)
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


def main() -> None:
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
        cost, each_step, step_ms = measure(loop, life, steps, step_s)
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


if __name__ == "__main__":
    main()
