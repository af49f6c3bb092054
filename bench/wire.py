"""Bytes on the wire: a short real run, against float32 data-parallel.

    .venv/bin/python -m bench.wire [--learners 2] [--steps 60] [--preset 1m] [--set KEY=VALUE]

Read from the tape: every manifest says what its shards weigh, every record its delta. An update
carries each parameter of its fragment once, and so does a delta, so "bytes per parameter and
round" is bytes of objects over parameters that they cover. Manifests and records do not grow with
the model, and are shown apart. Data-parallel sends and receives 4 bytes a parameter every step.
"""

import argparse
import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from bench.system import run_local
from diloco.common import names, wire
from diloco.common.bus import Bus, jetstream
from diloco.common.config import Config, load_config
from diloco.common.layout import Layout, parse_layout
from diloco.common.nats_server import NatsServer
from diloco.common.store import open_store
from diloco.common.tape import load_specification

FLOAT32_BYTES = 4
FLOOR = 0.55


@dataclass
class Direction:
    """What went one way: objects and messages, in bytes; parameters that the objects cover."""

    objects_bytes: int = 0
    messages_bytes: int = 0
    count: int = 0
    parameters: int = 0

    def add(self, objects_bytes: int, messages_bytes: int, parameters: int) -> None:
        """Count an update or a delta with the message that announces it."""
        self.objects_bytes += objects_bytes
        self.messages_bytes += messages_bytes
        self.count += 1
        self.parameters += parameters

    def per_parameter(self, *, messages: bool) -> float:
        """Bytes per parameter and round."""
        total = self.objects_bytes + (self.messages_bytes if messages else 0)
        return total / self.parameters


@dataclass
class Traffic:
    """What a run's tape says of its traffic.

    `up` sums over all learners; `down` is what one learner reads; `steps` are inner steps by
    learner.
    """

    parameters: int
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    steps: dict[str, int] = field(default_factory=dict)

    def note_update(self, payload: bytes, layout: Layout) -> None:
        """Count a manifest of the tape and its shards."""
        manifest = wire.decode(wire.Manifest, payload)
        size = sum(shard.size_bytes for shard in manifest.shards)
        if manifest.attempt == 0:
            self.up.add(size, len(payload), layout.fragments[manifest.fragment].elements)
        else:
            self.up.messages_bytes += len(payload)
        known = self.steps.get(manifest.learner, 0)
        self.steps[manifest.learner] = max(known, manifest.position)

    def note_record(self, payload: bytes, layout: Layout) -> None:
        """Count a record of the tape and its delta."""
        record = wire.decode_record(payload)
        if isinstance(record, wire.Record) and record.delta is not None:
            elements = layout.fragments[record.fragment].elements
            self.down.add(record.delta.size_bytes, len(payload), elements)
        else:
            self.down.messages_bytes += len(payload)

    def of_data_parallel(self, direction: Direction, learners: int) -> float:
        """Bytes, messages included, over those of data-parallel for the same steps."""
        steps = sum(self.steps.values()) / len(self.steps) * learners
        ours = direction.objects_bytes + direction.messages_bytes
        return ours / (FLOAT32_BYTES * self.parameters * steps)


async def read_traffic(config: Config, url: str) -> Traffic:
    """What the tape of a finished run says."""
    bus = await jetstream.connect(url, name="bench-wire")
    try:
        return await _read(config, bus)
    finally:
        await bus.close()


async def _read(config: Config, bus: Bus) -> Traffic:
    run = config.run.name
    specification = await load_specification(bus, run)
    stored = open_store(config.store.url).get(names.layout_object(run, specification.layout))
    layout = parse_layout(stored, specification.layout)
    traffic = Traffic(sum(fragment.elements for fragment in layout.fragments))
    subjects = [names.update(run, "*", "*"), names.record(run, "*"), names.end(run)]
    async for message in bus.read(names.tape_stream(run), subjects, 1):
        match names.parse_subject(message.subject):
            case names.Subject(kind="update"):
                traffic.note_update(message.payload, layout)
            case names.Subject(kind="record"):
                traffic.note_record(message.payload, layout)
            case _:
                break
    return traffic


def measure(folder: Path, *, learners: int, steps: int, settings: list[str]) -> Traffic:
    """Run the system in a folder and read its tape."""
    run_dir = folder / "run"
    run_local(run_dir, learners=learners, steps=steps, settings=settings)
    config = load_config(run_dir / "run.toml")
    with NatsServer(run_dir / "nats") as server:
        return asyncio.run(read_traffic(config, server.url))


def show(traffic: Traffic) -> None:
    """Print the table, and whether the floor is held."""
    steps = sum(traffic.steps.values()) / len(traffic.steps)
    print(
        f"{traffic.parameters:,} parameters, {len(traffic.steps)} learners, {steps:.0f} steps each"
    )
    print(f"{'':24}{'up':>10}{'down':>10}   bytes per parameter and round (floor: {FLOOR})")
    ways = (traffic.up, traffic.down)
    for label, messages in (("objects", False), ("objects and messages", True)):
        values = [way.per_parameter(messages=messages) for way in ways]
        print(f"{label:24}{values[0]:10.4f}{values[1]:10.4f}")
    print(f"{'bytes a message':24}" + "".join(f"{w.messages_bytes / w.count:10.0f}" for w in ways))
    ratios = [
        traffic.of_data_parallel(traffic.up, len(traffic.steps)),
        traffic.of_data_parallel(traffic.down, 1),
    ]
    print(
        f"{'of data-parallel':24}{ratios[0]:10.5f}{ratios[1]:10.5f}   per step, messages included"
    )
    held = all(way.per_parameter(messages=False) <= FLOOR for way in ways)
    print("floor held" if held else "FLOOR MISSED")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--preset", default="1m")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    options = parser.parse_args()
    settings = [f'task.options.preset="{options.preset}"', *options.settings]
    with tempfile.TemporaryDirectory(prefix="bench-wire-") as folder:
        show(
            measure(Path(folder), learners=options.learners, steps=options.steps, settings=settings)
        )


if __name__ == "__main__":
    main()
