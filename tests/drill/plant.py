"""Plants the drill's troubles in real runs, each in a folder of its own that is kept.

    python tests/drill/plant.py FOLDER [NAME ...]       NAME: a kind, or honest-01 to honest-20

Each run has a nats-server, an aggregator and four learners, processes as an operator starts them,
and is looked at with `diloco why` while the trouble lasts where it goes away, else once it has
ended: `judge.py` reads what was written beside it. Runs are planted in the order that was drawn.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "integration")]

import harness
from harness import Process, World, make_world
from kinds import LEARNERS, Planted, drawn, honest

from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import Exit, final

STEPS = 640
# Kinds that are a matter of the machine and not of the task.
OF_MACHINE = {"release": "percent", "link": "seconds", "clock": "seconds"}
# A run that goes wrong may never end: it is looked at as it is then.
LONGEST_S = 240.0
SETTINGS = {
    "run": {"steps": STEPS, "seed": 5},
    "task": {"build": "drill_task:build", "options": {"sleep_s": 0.03}},
    "sync": {
        "interval_steps": 8, "fragments": 2, "block": 16, "shard_elements": 8192, "min_steps": 3,
        "snapshot_interval_versions": 4, "reannounce_timeout_s": 3.0,
    },
    "gc": {"enabled": False},
    "outer": {"learning_rate": 0.7},
    "quorum": {"deadline_s": 8.0, "liveness_timeout_s": 4.0, "grace_cap_s": 1.0},
    "learner": {"heartbeat_interval_s": 0.5},
}  # fmt: skip


class Rig:
    """One run with its processes, which are started again when they fail, as systemd does."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.began_s = time.monotonic()
        self._units: list[tuple[Callable[[], Process], Process]] = []

    def unit(self, start: Callable[[], Process]) -> int:
        """Start a process and keep it; its number."""
        self._units.append((start, start()))
        return len(self._units) - 1

    def process(self, number: int) -> Process:
        return self._units[number][1]

    def learner(
        self, name: str, options: dict | None = None, machine: tuple[str, float] | None = None
    ) -> int:
        """A learner with options of its own, on a machine with a trouble."""
        further = {"learner": {**SETTINGS["learner"], "options": options or {}}}
        path = self.world.variant(f"{name}-own", further)
        program = (
            (
                "troubled",
                machine[0],
                str(machine[1]),
            )
            if machine
            else ("diloco",)
        )
        return self.unit(
            lambda: self.world.start(
                name, "learner", "--config", str(path), "--learner", name, program=program
            )
        )

    def look(self) -> bool:
        """Start again what failed; whether something still runs."""
        for number, (start, process) in enumerate(self._units):
            if process.running:
                continue
            status = process._process.returncode
            if status != Exit.ENDED and status not in final():
                self._units[number] = (start, start())
        return any(process.running for _, process in self._units)

    def version(self) -> int:
        """The newest version of fragment 0."""

        async def newest(bus):
            message = await bus.last(
                names.tape_stream(self.world.name), names.record(self.world.name, 0)
            )
            return wire.decode_record(message.payload).version if message else 0

        return self.world.ask(newest)

    def until(self, done: Callable[[], bool]) -> bool:
        """Look until something is so; False if it takes too long, or everything has ended."""
        while not done():
            if not self.look() or time.monotonic() - self.began_s > LONGEST_S:
                return False
            time.sleep(0.3)
        return True

    def until_version(self, version: int) -> bool:
        return self.until(lambda: self.version() >= version)

    def end(self) -> None:
        """Wait for the run's end."""
        self.until(lambda: False)


def plant(rig: Rig, one: Planted) -> bool:
    """Run with a trouble; whether it is to be looked at while it goes on."""
    how, world = one.parameters, rig.world
    aggregator = rig.unit(world.aggregator)
    for name in LEARNERS:
        machine = None
        options: dict = {}
        if name == one.culprit and one.kind in OF_MACHINE:
            machine = one.kind, float(how[OF_MACHINE[one.kind]])
        elif name == one.culprit and one.kind not in ("twice", "deleted"):
            options = {"trouble": one.kind, "how": how}
        rig.learner(name, options, machine)
    if "after_versions" in how:
        rig.until_version(
            int(how["after_versions"]) + (2 if one.kind in ("old", "damaged", "deleted") else 0)
        )
    match one.kind:
        case "aggregator":
            rig.until_version(2)
            for _ in range(int(how["kills"])):
                rig.process(aggregator).kill()
                ready_s = time.monotonic() + float(how["every_s"])
                rig.until(lambda until_s=ready_s: time.monotonic() > until_s)
        case "twice":
            rig.learner(one.culprit)
        case "setting":
            change = f"outer.learning_rate={how['rate']}"
            command = ["run", "set", str(world.config_path), change, "--yes"]
            subprocess.run([sys.executable, "-m", "diloco", *command], check=True, cwd=world.folder)
        case "away":
            world.store.rename(world.folder / "moved")
            time.sleep(3)
            return True
        case "old" | "damaged":
            replace(world, int(how["after_versions"]), how)
        case "deleted":
            delete(world, one.culprit, int(how["after_versions"]))
    rig.end()
    return False


def objects(world: World, version: int, fragment: int = 0) -> list[Path]:
    folder = world.store / names.global_prefix(world.name) / str(fragment)
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and f"{version:06d}" in path.name
    )


def replace(world: World, version: int, how: dict) -> None:
    """Give an object of a version other bytes: damaged ones, or those of an earlier version's."""
    found = sorted(files_of_version(world, version))
    for path in found[:1]:
        data = bytearray(path.read_bytes())
        if "bytes" in how:
            places = random.Random(1).sample(range(len(data)), min(len(data), int(how["bytes"])))
            for place in places:
                data[place] ^= 0xFF
        else:
            kind = path.name.split("-")[1]
            (earlier,) = [
                one for one in files_of_version(world, version - int(how["back"]))
                if one.name.split("-")[1] == kind
            ][:1]  # fmt: skip
            data = bytearray(earlier.read_bytes())
        for one in (path, world.store / ".kept" / path.relative_to(world.store)):
            if one.exists():
                one.chmod(0o644)
                one.unlink()
                one.write_bytes(data)
        print(f"  {path.relative_to(world.store)} has other bytes", flush=True)


def files_of_version(world: World, version: int) -> Iterator[Path]:
    for path in (world.store / world.name).rglob("*"):
        if path.is_file():
            made = names.parse_version_object(world.name, 0, str(path.relative_to(world.store)))
            if made is not None and made.version == version:
                yield path


def delete(world: World, learner: str, version: int) -> None:
    """Delete a shard of a learner that a version has merged."""

    async def shard(bus):
        async for message in bus.read(
            names.tape_stream(world.name), [names.record(world.name, 0)], 1
        ):
            record = wire.decode_record(message.payload)
            for taken in record.inputs:
                if record.version >= version and taken.learner == learner:
                    return taken.shards[0].name
        raise LookupError(f"nothing of {learner} is merged")

    path = world.store / world.ask(shard)
    path.unlink()
    print(f"  {path.relative_to(world.store)} is deleted", flush=True)


def be_honest(rig: Rig, conditions: tuple[str, str]) -> None:
    """A run of an honest fleet under two conditions."""
    world, rng = rig.world, random.Random(str(conditions))
    rig.unit(world.aggregator)
    here = LEARNERS[:2] if "two" in conditions else LEARNERS
    late = here[-1] if "late" in conditions else ""
    options: dict[str, dict] = {name: {} for name in here}
    if "own data" in conditions:
        for place, name in enumerate(here, 1):
            options[name] |= {"own": place, "length": rng.randint(8, 16)}
    if "unequal" in conditions:
        options[here[0]] |= {"sleep_s": 0.03 * rng.uniform(3, 6)}
    numbers = {name: rig.learner(name, options[name]) for name in here if name != late}
    busy = []
    if "busy" in conditions:
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    if "restarts" in conditions:
        for version in (6, 14, 22):
            if rig.until_version(version):
                rig.process(numbers[here[1]]).kill()
    if late and rig.until_version(STEPS // 8 // 3):
        rig.learner(late, options[late])
    if "leaves" in conditions and rig.until_version(STEPS // 8 * 2 // 3):
        rig.process(numbers[here[1]]).terminate()
    rig.end()
    for process in busy:
        process.kill()
        process.wait()


def run(folder: Path, name: str, act: Callable[[Rig], bool | None], changes: dict) -> None:
    """One run in a new folder; what `diloco why` says of it lies beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {section: {**keys, **changes.get(section, {})} for section, keys in SETTINGS.items()}
    with NatsServer(folder / "nats") as server:
        world = make_world(name, folder, server.url, **settings)
        (folder / "local.json").write_text("{}")
        world.create()
        rig = Rig(world)
        try:
            if act(rig):
                why(folder)
        finally:
            world.end()
    print(f"{name}: {time.monotonic() - rig.began_s:.0f} s", flush=True)


def why(folder: Path) -> None:
    """Records the output of `diloco why` on a screen of 80 columns, and how long it took."""
    began_s = time.monotonic()
    said = subprocess.run(
        [sys.executable, "-m", "diloco", "why", str(folder)],
        capture_output=True, text=True, check=False, env=harness.environment() | {"COLUMNS": "80"},
    )  # fmt: skip
    found = {
        "status": said.returncode,
        "took_s": time.monotonic() - began_s,
        "said": said.stdout,
        "errors": said.stderr,
    }
    (folder / "why.json").write_text(json.dumps(found))


def main() -> None:
    root, wanted = Path(sys.argv[1]).absolute(), set(sys.argv[2:])
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    # Every process compiles the same programs.
    harness.COMPILED.path = root / "compiled"
    harness.HERE = Path(__file__).parent
    for one in drawn():
        if not wanted or one.kind in wanted:
            run(root / one.kind, one.kind, lambda rig, one=one: plant(rig, one), {})
    for number, conditions in enumerate(honest(), 1):
        name = f"honest-{number:02}"
        if not wanted or name in wanted:
            changes = {"quorum": {"pace": 0.0}} if "unpaced" in conditions else {}
            run(
                root / name,
                name,
                lambda rig, conditions=conditions: be_honest(rig, conditions),
                changes,
            )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.suppress(KeyboardInterrupt):
        main()
