"""How much synchronization slows a learner: steps per second with it on against off.

One learner, alone on one core with all of its threads, trains the demo's model; aggregator and
NATS server are on the other core. Blocks of steps with synchronization (H = 24, P = 8, int4 both
ways) alternate with blocks without, in one process, so that both see the same noise.

    python -m bench.stall [--pairs 10] [--preset 1m] [--devices 4 --mesh fsdp=2,tensor=2]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import tomli_w

from diloco.common import log
from diloco.common.config import Config, LearnerSection, RunSettings, load_config
from diloco.common.nats_server import NatsServer
from diloco.common.probes import make_probes
from diloco.common.service import Runtime
from diloco.learner.background import Background, running_loop
from diloco.learner.checkpoint import Folder
from diloco.learner.context import Context
from diloco.learner.island import Island
from diloco.learner.lead import lead
from diloco.learner.life import Host
from diloco.learner.recovery import Saver
from diloco.learner.train import Trainer

FLOOR = 0.99
ENCODES = 20
BLOCK_STEPS = 48  # two intervals: every fragment is sent twice in a block


def write_config(folder: Path, url: str, preset: str, mesh: str) -> Path:
    """The run's file: long enough never to end."""
    document = {
        "run": {"name": "stall", "steps": 1_000_000},
        "task": {"options": {"preset": preset}},
        "sync": {"interval_steps": 24, "fragments": 8, "codec": "int4", "delta_codec": "int4"},
        "bus": {"url": url},
        "store": {"url": str(folder / "store")},
        "learner": {"mesh": mesh},
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document))
    return path


def report_encode(trainer: Trainer, settings: RunSettings) -> None:
    """How long the device encodes one interval's updates, as a share of the interval's steps."""
    sync_section = settings.sync
    began_s = time.perf_counter()
    for _ in range(ENCODES):
        for fragment in range(sync_section.fragments):
            jax.block_until_ready(trainer.replica.send(fragment))
    encode_s = (time.perf_counter() - began_s) / ENCODES
    began_s = time.perf_counter()
    for _ in range(sync_section.interval_steps):
        loss = trainer.step(0)
    jax.block_until_ready(loss)
    share = encode_s / (time.perf_counter() - began_s)
    print(f"encoding all fragments: {1000 * encode_s:.1f} ms, {share:.3%} of an interval's steps")


def report_checkpoint(trainer: Trainer, context: Context, folder: Path) -> None:
    """What a checkpoint costs: the training thread's part, and all of it on this one core."""
    section = LearnerSection(checkpoint_dir=str(folder))
    kept = Folder(folder, section.checkpoint_keep)
    dispatched_s, made_s = [], []
    for _ in range(ENCODES):
        saver = Saver(context, section, kept, 1)
        jax.block_until_ready(trainer.step(0))
        began_s = time.perf_counter()
        saver.save(trainer.optimizer_state, trainer.progress())
        dispatched_s.append(time.perf_counter() - began_s)
        saver.close()
        made_s.append(time.perf_counter() - began_s)
    # The first one imports orbax.
    print(
        f"a checkpoint of {state_bytes(trainer) / 1e6:.1f} MB: the training thread "
        f"{1000 * statistics.median(dispatched_s[1:]):.2f} ms (max "
        f"{1000 * max(dispatched_s[1:]):.2f} ms), with the worker's part "
        f"{1000 * statistics.median(made_s[1:]):.0f} ms"
    )


def state_bytes(trainer: Trainer) -> int:
    """Size of the inner optimizer's state."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.optimizer_state))


class Took(NamedTuple):
    """Time of a block: by the clock, and of the processor for all threads of this process."""

    wall_s: float
    cpu_s: float


def block(trainer: Trainer, *, synchronize: bool) -> Took:
    """Take a block of steps, until the last of them is computed."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    previous = None
    for _ in range(BLOCK_STEPS):
        loss = trainer.step(0)
        if synchronize:
            trainer.turn()
        if previous is not None:
            previous.block_until_ready()
        previous = loss
    jax.block_until_ready(trainer.replica.trained)
    return Took(time.perf_counter() - began_s, time.process_time() - began_cpu_s)


def measure(config: Config, folder: Path, pairs: int) -> list[tuple[Took, Took]]:
    """(with, without) of each pair of blocks."""
    runtime = Runtime()
    with running_loop() as loop:
        host = Host(
            config=config,
            island=Island(config, "alone"),
            runtime=runtime,
            probes=make_probes(runtime.retries, run=config.run.name, learner="alone"),
            background=Background(loop),
            asked_to_leave=lambda: False,
        )
        with lead(host) as life:
            trainer = life.trainer
            timings = measure_pairs(trainer, pairs)
            print(f"updates sent: {life.context.traffic.updates_sent}")
            report_encode(trainer, config.settings())
            report_checkpoint(trainer, life.context, folder / "checkpoints")
            life.leave()
    return timings


def measure_pairs(trainer: Trainer, pairs: int) -> list[tuple[Took, Took]]:
    """Blocks with and without, in turns."""
    block(trainer, synchronize=True)
    timings = []
    for pair in range(pairs):
        order = (True, False) if pair % 2 else (False, True)
        took = {on: block(trainer, synchronize=on) for on in order}
        timings.append((took[True], took[False]))
        print(
            f"pair {pair + 1}/{pairs}: on {took[True].wall_s:.2f} s ({took[True].cpu_s:.2f} of cpu)"
            f", off {took[False].wall_s:.2f} s ({took[False].cpu_s:.2f})"
        )
    return timings


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--preset", default="1m")
    parser.add_argument("--devices", type=int, default=1, help="that the CPU is taken for")
    parser.add_argument("--mesh", default="fsdp=0", help="of those devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    log.configure("warning")
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.sched_setaffinity(0, {cores[-1]})
        with NatsServer(folder / "nats") as server:
            path = write_config(folder, server.url, options.preset, options.mesh)
            command = [sys.executable, "-m", "diloco"]
            subprocess.run([*command, "run", "create", "--config", str(path)], check=True)
            aggregator = subprocess.Popen(
                [*command, "aggregator", "--config", str(path), "--log-level", "error"]
            )
            os.sched_setaffinity(0, {cores[0]})
            try:
                timings = measure(load_config(path), folder, options.pairs)
            finally:
                aggregator.kill()
                aggregator.wait()
    step_ms = 1000 * statistics.median(off.wall_s for _, off in timings) / BLOCK_STEPS
    print(f"step without synchronization: {step_ms:.1f} ms")
    report("steps/s by the clock", [off.wall_s / on.wall_s for on, off in timings])
    report("steps per second of cpu", [off.cpu_s / on.cpu_s for on, off in timings])


def report(what: str, ratios: list[float]) -> None:
    """One row: with synchronization over without."""
    print(
        f"{what}, with / without synchronization: median {statistics.median(ratios):.4f}, "
        f"min {min(ratios):.4f}, max {max(ratios):.4f} (floor {FLOOR})"
    )


if __name__ == "__main__":
    main()
