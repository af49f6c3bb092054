"""How much synchronization slows a learner: steps per second with it on against off.

One learner, alone on one core with all of its threads, trains the demo's model; aggregator and
NATS server are on the other core. Blocks of steps with synchronization (H = 24, P = 8, int4 both
ways) alternate with blocks without, in one process, so that all see the same noise. Synchronization
is taken two ways: `Learner.step`, as every training loop calls it, and the boundary under it alone.

    python -m bench.stall [--pairs 10] [--preset 1m] [--devices 4 --mesh fsdp=2,tensor=2]
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tomli_w

from diloco.common import log
from diloco.common.config import Config, LearnerSection, RunSettings, load_config
from diloco.common.nats_server import NatsServer
from diloco.common.probes import make_probes
from diloco.common.service import Runtime
from diloco.learner.checkpoint import Folder
from diloco.learner.context import Context
from diloco.learner.island import Island
from diloco.learner.library import Learner, alive
from diloco.learner.life import Life
from diloco.learner.member import Member
from diloco.learner.recovery import Saver

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
        self.inner_step = island.inner_step(judging=False)
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
    """What a checkpoint costs: the training thread's part, and all of it on this one core."""
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
        island.params_lying(),
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
    """What each way took, round by round."""
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


def main() -> None:
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


if __name__ == "__main__":
    main()
