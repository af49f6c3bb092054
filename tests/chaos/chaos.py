"""Chaos: a run of real processes under a schedule of faults that follows from a seed.

    python tests/chaos/chaos.py --seconds 600 --seed 7

Learners, aggregators and nats-server are killed and paused, the network is cut and stalled, the
store's disk is filled. Then all recovers, the run is stopped, and every invariant is held against
the tape as it was followed from the beginning, and against tape and store as they are at the end
(`diloco doctor --deep`). The last line of standard output is the result as JSON.

It runs in a mount namespace of its own, so that the disk that it fills leaves no trace; where that
is not permitted the disk is not filled, and it says so.
"""

import argparse
import asyncio
import contextlib
import heapq
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE.parent / "integration"), str(ROOT)]

import tomli_w  # noqa: E402
from chaosfaults import BrokenError, Stage, mount_disk, unmount_disk  # noqa: E402
from figures import merged_steps, records_in_time, recoveries  # noqa: E402
from harness import environment, tiny_document  # noqa: E402
from proxy import Network  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from schedule import make_schedule  # noqa: E402

from diloco.common.process.config import make_config  # noqa: E402
from diloco.common.process.nats_server import NatsServer  # noqa: E402
from diloco.common.protocol import names, wire  # noqa: E402
from diloco.common.storage.bus import Message, jetstream  # noqa: E402
from diloco.common.storage.tape import read_message  # noqa: E402
from diloco.judge.audit import audit  # noqa: E402
from diloco.judge.doctor import Report, examine, show  # noqa: E402
from diloco.judge.objects import check_objects  # noqa: E402
from diloco.operate.create import create_from  # noqa: E402
from diloco.operate.local.fleet import LocalDaemons  # noqa: E402
from diloco.run.cli.opening import open_run  # noqa: E402
from diloco.run.health_findings import AGGREGATOR_DOWN  # noqa: E402
from diloco.run.history import History, read_history  # noqa: E402

LEARNERS = [f"learner-{index}" for index in range(3)]
AGGREGATORS = [f"aggregator-{index}" for index in range(2)]
CALM_S = 10.0
# Beside other work anything may take long; this is the end of patience, and no figure.
PATIENCE_S = 120.0
NAMESPACE = "DILOCO_CHAOS_NAMESPACE"


class Follower:
    """Reads the tape from the beginning, in a thread, so that nothing is trimmed before it is seen."""

    def __init__(self, url: str, run: str) -> None:
        self.messages: list[Message] = []
        self._url, self._run = url, run
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="follower", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            asyncio.run(self._follow())
        except BaseException as error:
            self._error = error

    async def _follow(self) -> None:
        bus = await jetstream.connect(self._url, name="chaos")
        reading = asyncio.ensure_future(self._read(bus))
        # Asked again and again: a thread of the loop's that waited would outlive what failed.
        while not self._stop.is_set() and not reading.done():
            await asyncio.wait([reading], timeout=0.1)
        await bus.close()
        await reading

    async def _read(self, bus: jetstream.NatsBus) -> None:
        subjects = names.tape_subjects(self._run)
        async for message in bus.read(names.tape_stream(self._run), subjects, 1):
            self.messages.append(message)

    def check(self) -> None:
        if self._error is not None:
            raise BrokenError("the tape could not be followed") from self._error

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


class Chaos:
    """One chaos run."""

    def __init__(self, stage: Stage, seed: int, seconds: float, *, disk: bool) -> None:
        self.stage = stage
        self.seconds = seconds
        self.schedule = make_schedule(seed, seconds, LEARNERS, AGGREGATORS, disk=disk)
        self.run = str(stage.document["run"]["name"])
        self.follower = Follower(stage.server.url, self.run)
        self._history: History | None = None

    def go(self, console: Console) -> dict[str, Any]:
        """Suffer, recover, stop, and account for everything; the result."""
        began_s = time.monotonic()
        self.stage.start()
        self._until(lambda: self._all_merge(0.0), "everybody is merged")
        calm = (time.time(), self._sleep(CALM_S))
        console.print(
            f"calm for {CALM_S:.0f} s, then {len(self.schedule)} faults in {self.seconds:.0f} s"
        )
        chaos_s = (time.time(), self._suffer(console))
        console.print("no more faults; everything recovers")
        self._until(lambda: self._all_merge(chaos_s[1]), "everybody is merged again")
        self._end_run()
        self.follower.end()
        result = self._account(calm, chaos_s)
        result["wall_s"] = round(time.monotonic() - began_s, 1)
        return result

    def _suffer(self, console: Console) -> float:
        """Carry out the schedule; when it was over."""
        began_s = time.monotonic()
        order = itertools.count()
        todo = [(fault.at_s, next(order), self.stage.begin, fault) for fault in self.schedule]
        heapq.heapify(todo)
        while todo:
            at_s, _, act, fault = heapq.heappop(todo)
            self._sleep(began_s + at_s - time.monotonic())
            if act == self.stage.begin:
                console.print(
                    f"{time.monotonic() - began_s:6.1f} s  {fault.kind}: {fault.victim}"
                    + (f", {fault.lasts_s:.1f} s" if fault.lasts_s else "")
                )
                heapq.heappush(todo, (at_s + fault.lasts_s, next(order), self.stage.finish, fault))
            act(fault)
        self._sleep(began_s + self.seconds - time.monotonic())
        return time.time()

    def _sleep(self, seconds: float) -> float:
        """Wait, and see that nobody ends whom we did not kill; the time then."""
        until_s = time.monotonic() + seconds
        while True:
            self.stage.check()
            self.follower.check()
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return time.time()
            time.sleep(min(left_s, 0.2))

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > until_s:
                raise BrokenError(f"not within {PATIENCE_S:.0f} s: {what}")
            self._sleep(0.3)

    def history(self) -> History:
        """The tape as followed so far."""
        if self._history is None:
            self._history = asyncio.run(self._read_history())
        known = self._history
        fresh = History(known.specification, known.settings, known.layout, known.store)
        for message in [*self.follower.messages]:
            fresh.take(read_message(message, known.store, known.layout))
        return fresh

    async def _read_history(self) -> History:
        async with open_run(self.stage.folder / "run.toml", name="chaos") as run:
            return await read_history(run.context)

    def _all_merge(self, since_s: float) -> bool:
        """Whether each learner was merged, and each fragment made two versions, since then."""
        history = self.history()
        late = [stored for stored in records_in_time(history) if stored.at_s > since_s]
        made = [stored.record.fragment for stored in late if stored.record.inputs]
        merged = {
            taken.learner
            for stored in late
            for taken in stored.record.inputs
            if stored.at_s > since_s
        }
        fragments = range(len(history.layout.fragments))
        return merged >= {*LEARNERS} and all(made.count(fragment) > 1 for fragment in fragments)

    def _end_run(self) -> None:
        """Meet the stop rule; everybody leaves by themselves."""

        async def say() -> None:
            stop = wire.encode(wire.Stop(run=self.run, global_step=0, reason="chaos", by="test"))
            bus = await jetstream.connect(self.stage.server.url, name="chaos")
            await bus.publish(names.stop(self.run), stop, expected_last=0)
            await bus.close()

        asyncio.run(say())
        daemons = self.stage.fleet.daemons
        until_s = time.monotonic() + PATIENCE_S
        while any(daemon.pid is not None for daemon in daemons.values()):
            if time.monotonic() > until_s:
                still = [name for name, daemon in daemons.items() if daemon.pid is not None]
                raise BrokenError(f"not within {PATIENCE_S:.0f} s: {still} leave after the stop")
            time.sleep(0.2)
        for name, daemon in daemons.items():
            if daemon.status:
                tail = self.stage.fleet.tail(daemon)
                raise BrokenError(
                    f"{name} ended with status {daemon.status} after the stop:\n{tail}"
                )

    def _account(self, calm: tuple[float, float], chaos: tuple[float, float]) -> dict[str, Any]:
        history = self.history()
        found = audit(history)
        rate = merged_steps(history, *calm) / (calm[1] - calm[0])
        suffered_rate = merged_steps(history, *chaos) / (chaos[1] - chaos[0])
        trained = sum(
            len((self.stage.folder / "notes" / name).read_text().splitlines()) for name in LEARNERS
        )
        return {
            "faults": len(self.stage.suffered),
            "chaos_s": round(chaos[1] - chaos[0], 1),
            "restarts": self.stage.fleet.restarts
            + sum(fault.kind == "kill nats-server" for fault in self.stage.suffered),
            "goodput": round(suffered_rate / rate, 3),
            "steps_per_s_undisturbed": round(rate, 1),
            "steps_trained": trained,
            "steps_merged": round(merged_steps(history, 0.0, time.time())),
            "versions": sum(history.versions()),
            "tape": len(history.times_s),
            "tape_seen_from": history.whole_from,
            "objects_collected": check_objects(history).missing,
            "account": vars(found.account),
            "recoveries": recoveries(history, self.stage.suffered).table(),
            "breaches": [str(breach) for breach in found.breaches],
        }


def check_logs(logs: Path) -> list[str]:
    """Lines that no daemon should write: traces, warnings of Python's, errors."""
    return [
        f"{path.name}: {line[:300]}"
        for path in sorted(logs.glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if not line.startswith("{") or '"level": "error"' in line or '"level": "critical"' in line
    ]


def tell(result: dict[str, Any], console: Console) -> None:
    table = Table(title="time to recover", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in result["recoveries"][0]:
        table.add_column(column, justify="left" if column == "kind" else "right")
    for row in result["recoveries"]:
        table.add_row(*("-" if value is None else str(value) for value in row.values()))
    console.print(table)
    account = result["account"]
    console.print(
        f"{result['chaos_s']:.0f} s of chaos, {result['faults']} faults, {result['restarts']} "
        f"restarts, {result['versions']} versions, {result['objects_collected']} objects "
        f"collected; goodput {result['goodput']:.2f} of the "
        f"undisturbed {result['steps_per_s_undisturbed']} steps/s"
    )
    console.print(
        f"updates: {account['sent']} sent = {account['merged']} merged + {account['rejected']} "
        f"rejected + {account['in_flight']} in flight; tokens: {account['tokens_sent']} = "
        f"{account['tokens_merged']} + {account['tokens_rejected']} + {account['tokens_in_flight']}"
    )


def perform(seed: int, seconds: float, folder: Path, console: Console) -> dict[str, Any]:
    """Set the stage, run, examine; the result, with `failures`.

    Raises:
        BrokenError: the run did not get to its end.
    """
    # Without garbage collection as much as this is written.
    disk = os.environ.get(NAMESPACE) == "own" and mount_disk(
        folder / "disk", (64 << 20) + int(seconds * (300 << 10))
    )
    if not disk:
        console.print("no right to mount a small disk: the store's disk is not filled")
    (folder / "notes").mkdir()
    with (
        NatsServer(folder / "nats") as server,
        LocalDaemons(folder / "logs") as fleet,
        Network() as network,
    ):
        fleet.adopt(server)
        document = chaos_document(folder, server.url)
        (folder / "run.toml").write_text(tomli_w.dumps(document))
        create_from(make_config(document, source="chaos"), None)
        stage = Stage(folder, document, LEARNERS, AGGREGATORS, server, fleet, network)
        result = Chaos(stage, seed, seconds, disk=disk).go(console)
        report = asyncio.run(examine(str(folder / "run.toml"), deep=True))
        strange = check_logs(folder / "logs")
    show(report, console)
    tell(result, console)
    unhealthy = found_wrong(report, result["faults"])
    result["failures"] = [*result.pop("breaches"), *unhealthy, *strange]
    return result


def found_wrong(report: Report, faults: int) -> list[str]:
    """Returns what the doctor finds wrong, but that fragments changed hands at most once a fault.

    Chaos ends, pauses and cuts off aggregators again and again.
    """
    now = report.run_now
    ours = now is not None and len(now.takeovers) <= faults
    return [
        f"diloco doctor: {one.sentence}"
        for one in report.findings
        if one.severity == "error"
        and not (ours and (one.about, one.runbook) == ("aggregators", AGGREGATOR_DOWN))
    ] + ([] if report.exists else ["diloco doctor: the run is not there"])


def chaos_document(folder: Path, url: str) -> dict[str, Any]:
    """A run that is quick, and collects its garbage at once."""
    return tiny_document(
        f"chaos-{secrets.token_hex(4)}",
        folder,
        url,
        run={"steps": 1_000_000},
        task={"options": {"notes": str(folder / "notes"), "sleep_s": 0.05}},
        sync={"interval_steps": 16, "min_steps": 4},
        quorum={
            "min_learners": 2,
            "deadline_s": 6.0,
            "liveness_timeout_s": 3.0,
            "grace_cap_s": 1.0,
        },
        store={"url": str(folder / "disk" / "store")},
        gc={"replay_window_s": 1.0},
        aggregator={"lease_ttl_s": 3.0},
        learner={
            "heartbeat_interval_s": 0.5,
            "compilation_cache_dir": str(folder / "compiled"),
            "checkpoint_dir": str(folder / "checkpoints"),
            "checkpoint_interval_s": 3.0,
            "checkpoint_upload": True,
        },
    )


def in_namespace() -> None:
    """Go on in a mount namespace of our own, if that is permitted."""
    if NAMESPACE in os.environ:
        return
    unshare = shutil.which("unshare")
    options = ["-m"] if os.geteuid() == 0 else ["-rm"]
    allowed = unshare and not subprocess.run([unshare, *options, "true"], check=False).returncode
    os.environ[NAMESPACE] = "own" if allowed else "shared"
    if unshare and allowed:
        os.execv(unshare, [unshare, *options, sys.executable, *sys.argv])


@contextlib.contextmanager
def work_folder(keep: Path | None) -> Iterator[Path]:
    """A folder that is removed if all went well; with the store's objects if not."""
    folder = keep or Path(tempfile.mkdtemp(prefix="diloco-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):
            # The disk goes with our namespace.
            shutil.copytree(
                folder / "disk", folder / "kept", ignore=shutil.ignore_patterns("filler")
            )
        print(f"logs, streams and objects are in {folder}", file=sys.stderr)
        raise
    if keep is None:
        unmount_disk(folder / "disk")
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="A run under a seeded schedule of faults.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None, help="kept; else a temporary one")
    options = parser.parse_args()
    in_namespace()
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    console = Console(stderr=True, soft_wrap=True, highlight=False, width=120)
    again = f"python tests/chaos/chaos.py --seconds {options.seconds:g} --seed {seed}"
    console.print(f"seed {seed}: {again}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update(environment(), PYTHONWARNINGS="default")
    try:
        with work_folder(options.folder and options.folder.absolute()) as folder:
            result = perform(seed, options.seconds, folder, console)
            if result["failures"]:
                raise BrokenError("\n".join(result["failures"][:20]))
    except BrokenError as error:
        console.print(f"failed with seed {seed}: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    print(json.dumps({"seed": seed, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
