"""The honest learners' version rate while another learner floods the tape with manifests.

    .venv/bin/python -m bench.flood [--rate 1000] [--span 15] [--spans 3]

A real aggregator, one nats-server, two honest learners that do not train, and a process that sends
`--rate` manifests a second over every fragment: a quarter is no message, a quarter one update again
and again, the rest are updates of lives that never were. Spans without and with the flood take
turns; shown is the honest versions a second in each, and their ratio.
"""

import argparse
import asyncio
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


async def flood(config_path: Path, rate: float) -> None:
    """Send for ever; what was sent in each second is told on standard output."""
    config = load_config(config_path)
    bus = await jetstream.connect(config.bus.url, name=NAME)
    run = config.run.name
    message = wire.Join(run=run, learner=NAME, layout="0" * 32, host="bench")
    incarnation = await bus.publish(names.join(run, NAME), wire.encode(message))
    sent = 0

    async def lane(number: int) -> None:
        nonlocal sent
        began_s, count = time.monotonic(), 0
        while True:
            await _send(bus, run, incarnation, number + LANES * count)
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


async def _send(bus: Bus, run: str, incarnation: int, number: int) -> None:
    fragment = number % FRAGMENTS
    subject = names.update(run, NAME, fragment)
    kind = number // FRAGMENTS % 4
    if kind == 0:
        await bus.publish(subject, secrets.token_bytes(400))
        return
    life = incarnation if kind == 1 else 10**12 + number
    manifest = wire.Manifest(
        run=run, learner=NAME, epoch=0, incarnation=life, seq=1, fragment=fragment, base_version=0,
        base_digest="0" * 32, layout="0" * 32, codec="int4",
        shards=(
            wire.Shard(name="x", size_bytes=1, crc32c=0, slices=slices.of_range(0, 16, 16)),
        ), tokens=1, steps=1,
        position=1, local_step=1, loss=0.0, step_time_s=1.0, encode_s=0.0, upload_s=0.0,
        attempt=number, final=False,
    )  # fmt: skip
    await bus.publish(subject, wire.encode(manifest), msg_id=secrets.token_hex(16))


async def measure(
    folder: Path, url: str, options: argparse.Namespace
) -> tuple[list[float], list[float], list[int]]:
    """Versions a second in each span without and with the flood, and what was sent a second."""
    config = prepare(folder, url, PARAMETERS)
    bus = await jetstream.connect(url, name="bench-flood")
    layout = await create(config, bus, PARAMETERS)
    stored = store_updates(config, layout)
    senders = [
        Sender(f"learner-{index}", bus, layout, config, stored, step_time_s=STEP_TIME_S)
        for index in range(2)
    ]
    for sender in senders:
        await sender.join()
    watch = Watch(config, bus, senders)
    following = asyncio.ensure_future(watch.follow())
    calm, flooded, sent = list[float](), list[float](), list[int]()
    try:
        with fleet_in(folder / "run.toml", folder) as fleet:
            fleet.start("owner")
            await watch.until_all_by("owner", dict.fromkeys(range(FRAGMENTS), 2))
            for _ in range(options.spans):
                calm.append(await _rate(watch, options.span))
                flooder = _start(folder / "run.toml", options.rate)
                try:
                    await asyncio.sleep(3.0)
                    flooded.append(await _rate(watch, options.span))
                finally:
                    flooder.kill()
                    said, _ = flooder.communicate()
                sent += [int(line) for line in said.splitlines()[2:]]
                print(
                    f"without {calm[-1]:.2f} versions/s, with {flooded[-1]:.2f} versions/s",
                    flush=True,
                )
                await asyncio.sleep(2.0)
    finally:
        await cancel(following)
        await bus.close()
    return calm, flooded, sent


def _start(config_path: Path, rate: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bench.flood", "--flooder", str(config_path)]
    command += ["--rate", str(rate)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def _rate(watch: Watch, span_s: float) -> float:
    before, began_s = sum(watch.versions().values()), time.monotonic()
    await asyncio.sleep(span_s)
    return (sum(watch.versions().values()) - before) / (time.monotonic() - began_s)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--span", type=float, default=15.0)
    parser.add_argument("--spans", type=int, default=3)
    parser.add_argument("--flooder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    log.configure("error")
    if options.flooder:
        asyncio.run(flood(options.flooder, options.rate))
        return
    with (
        tempfile.TemporaryDirectory(prefix="bench-flood-") as folder,
        NatsServer(Path(folder) / "nats") as server,
    ):
        calm, flooded, sent = asyncio.run(measure(Path(folder), server.url, options))
    ratio = sum(flooded) / sum(calm)
    print(
        f"{statistics.median(sent):,.0f} manifests/s (median); honest versions/s: "
        f"{statistics.mean(calm):.2f} without, {statistics.mean(flooded):.2f} with: {ratio:.1%}"
    )
    print("goal reached" if ratio >= GOAL else "GOAL MISSED")


if __name__ == "__main__":
    main()
