"""The honest learners' version rate while another learner floods the tape with manifests.

    .venv/bin/python -m bench.flood [--rate 1000] [--bytes 0] [--span 15] [--spans 3]

A real aggregator, one nats-server, two honest learners that do not train, and a process that sends
`--rate` manifests a second over every fragment: a quarter is no message, a quarter one update again
and again, the rest are updates of lives that never were. With `--bytes` each manifest has as many
shards as fit into so many bytes. Spans without and with the flood take turns; shown is the honest
versions a second in each, their ratio, and the processor time of the aggregator.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from bench.failover import (
    FRAGMENTS,
    Sender,
    Watch,
    create,
    fleet_in,
    prepare,
    store_updates,
)
from diloco.common import log, names, slices, wire
from diloco.common.bus import Bus, jetstream
from diloco.common.config import load_config
from diloco.common.nats_server import NatsServer
from diloco.common.service import cancel

GOAL = 0.95
PARAMETERS = 1 << 20
# As a learner in earnest, but quick: rounds of a fragment follow each other in about a second.
STEP_TIME_S = 0.4
NAME = "flooder"
LANES = 4
DEADLINE_S = 3.0
# Of those that never were; messages are told apart by their ids.
LIVES = 32


async def flood(config_path: Path, rate: float, size_bytes: int) -> None:
    """Send for ever; what was sent in each second is told on standard output."""
    config = load_config(config_path)
    bus = await jetstream.connect(config.bus.url, name=NAME)
    run = config.run.name
    message = wire.Join(run=run, learner=NAME, layout="0" * 32, host="bench")
    incarnation = await bus.publish(names.join(run, NAME), wire.encode(message))
    shards = filling(size_bytes)
    sent = 0

    async def lane(number: int) -> None:
        nonlocal sent
        began_s, count = time.monotonic(), 0
        while True:
            await _send(bus, run, incarnation, number + LANES * count, shards)
            count, sent = count + 1, sent + 1
            ahead_s = began_s + count * LANES / rate - time.monotonic()
            await asyncio.sleep(max(0.0, ahead_s))

    async def tell() -> None:
        nonlocal sent
        while True:
            await asyncio.sleep(1.0)
            print(sent, flush=True)
            sent = 0

    await asyncio.gather(tell(), *(lane(number) for number in range(LANES)))


def filling(size_bytes: int) -> tuple[wire.Shard, ...]:
    """Shards of a manifest of about so many bytes; one at least."""
    shard = wire.Shard(name="x", size_bytes=1, crc32c=0, slices=slices.of_range(0, 16, 16))
    if not size_bytes:
        return (shard,)
    shard = shard.model_copy(update={"slices": shard.slices * 16})
    bare, full = (len(wire.encode(_manifest("r", 1, 0, 0, (shard,) * count))) for count in (1, 101))
    return (shard,) * max(1, (size_bytes - bare) * 100 // (full - bare))


async def _send(
    bus: Bus, run: str, incarnation: int, number: int, shards: tuple[wire.Shard, ...]
) -> None:
    fragment = number % FRAGMENTS
    subject = names.update(run, NAME, fragment)
    kind = number // FRAGMENTS % 4
    if kind == 0:
        await bus.publish(subject, secrets.token_bytes(400 * len(shards)))
        return
    life = incarnation if kind == 1 else 10**12 + number % LIVES
    payload = _payload(run, life, fragment, shards)
    await bus.publish(subject, payload, msg_id=secrets.token_hex(16))


@lru_cache(2 * LIVES)
def _payload(run: str, life: int, fragment: int, shards: tuple[wire.Shard, ...]) -> bytes:
    """Kept, so that encoding what is long takes no time from those who are measured."""
    return wire.encode(_manifest(run, life, fragment, 0, shards))


def _manifest(
    run: str, life: int, fragment: int, attempt: int, shards: tuple[wire.Shard, ...]
) -> wire.Manifest:
    return wire.Manifest(
        run=run, learner=NAME, epoch=0, incarnation=life, seq=1, fragment=fragment, base_version=0,
        base_digest="0" * 32, layout="0" * 32, codec="int4", shards=shards, tokens=1, steps=1,
        position=1, local_step=1, loss=0.0, step_time_s=1.0, encode_s=0.0, upload_s=0.0,
        attempt=attempt, final=False,
    )  # fmt: skip


class Span(NamedTuple):
    """Versions a second, and the part of a core that the aggregator used."""

    versions: float
    core: float


async def measure(
    folder: Path, url: str, options: argparse.Namespace
) -> tuple[list[Span], list[Span], list[int]]:
    """Each span without and with the flood, and what was sent a second."""
    config = prepare(folder, url, PARAMETERS, deadline_s=DEADLINE_S)
    bus = await jetstream.connect(url, name="bench-flood")
    layout = await create(config, bus, PARAMETERS)
    stored = store_updates(config, layout)
    senders = [
        Sender(f"learner-{index}", bus, layout, config, stored, step_time_s=STEP_TIME_S)
        for index in range(2)
    ]
    # The first rounds wait for the flooder as well: it has joined, and never works.
    for sender in [*senders, Sender(NAME, bus, layout, config, stored)]:
        await sender.join()
    watch = Watch(config, bus, senders)
    following = asyncio.ensure_future(watch.follow())
    calm, flooded, sent = list[Span](), list[Span](), list[int]()
    try:
        with fleet_in(folder / "run.toml", folder) as fleet:
            owner = fleet.start("owner").pid
            await watch.until_all_by("owner", dict.fromkeys(range(FRAGMENTS), 5))
            for _ in range(options.spans):
                calm.append(await _span(watch, owner, options.span))
                flooder = _start(folder / "run.toml", options)
                try:
                    await asyncio.sleep(3.0)
                    flooded.append(await _span(watch, owner, options.span))
                finally:
                    flooder.kill()
                    said, _ = flooder.communicate()
                sent += [int(line) for line in said.splitlines()[2:]]
                print(
                    f"without {calm[-1].versions:.2f} versions/s, with {flooded[-1].versions:.2f}",
                    flush=True,
                )
                await asyncio.sleep(2.0)
    finally:
        await cancel(following)
        await bus.close()
    return calm, flooded, sent


def _start(config_path: Path, options: argparse.Namespace) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.flood", "--flooder", str(config_path)]
    command += ["--rate", str(options.rate), "--bytes", str(options.bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def _span(watch: Watch, owner: int, span_s: float) -> Span:
    before, used_s, began_s = sum(watch.versions().values()), cpu_s(owner), time.monotonic()
    await asyncio.sleep(span_s)
    took_s = time.monotonic() - began_s
    return Span(
        (sum(watch.versions().values()) - before) / took_s, (cpu_s(owner) - used_s) / took_s
    )


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--bytes", type=int, default=0, help="of each manifest")
    parser.add_argument("--span", type=float, default=15.0)
    parser.add_argument("--spans", type=int, default=3)
    parser.add_argument("--flooder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    log.configure("error")
    if options.flooder:
        asyncio.run(flood(options.flooder, options.rate, options.bytes))
        return
    with (
        tempfile.TemporaryDirectory(prefix="bench-flood-") as folder,
        NatsServer(Path(folder) / "nats") as server,
    ):
        calm, flooded, sent = asyncio.run(measure(Path(folder), server.url, options))
    (rate, core), (flooded_rate, flooded_core) = (
        [statistics.mean(column) for column in zip(*spans, strict=True)]
        for spans in (calm, flooded)
    )
    ratio = flooded_rate / rate
    print(
        f"{statistics.median(sent):,.0f} manifests/s (median); honest versions/s: "
        f"{rate:.2f} without, {flooded_rate:.2f} with: {ratio:.1%}; "
        f"the aggregator used {core:.2f} of a core without, {flooded_core:.2f} with"
    )
    print("goal reached" if ratio >= GOAL else "GOAL MISSED")


if __name__ == "__main__":
    main()
