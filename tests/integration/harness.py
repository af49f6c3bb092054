"""Real runs for tests: processes as an operator starts them, a tape and a store to look into.

`World` is one run: its configuration, its processes, what its learners noted. `audit.py` beside
this file reads a run's tape and holds every invariant against it.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil
import pytest
import tomli_w

from diloco.aggregator.daemon import load_run
from diloco.common.process import log
from diloco.common.process.config import Config, load_config
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import Exit
from diloco.common.storage.bus import jetstream
from diloco.common.storage.bus.jetstream import NatsBus
from diloco.common.storage.store import open_store
from diloco.common.storage.tape import RunContext
from diloco.learner.load_and_check_task import load_task
from diloco.learner.tensors import tree
from diloco.operate.create import create_from
from diloco.run.model.view import load_params

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# A run of which its test says when it stops.
ENDLESS = {"steps": 1_000_000}
# Beside other work on a shared machine anything may take long; no test measures by this.
PATIENCE_S = 300.0
# Of each process's log, in characters, where a test fails.
LOG_SHOWN = 6000
# How a host ends whose peer was killed: amid a collective of CPUs gloo may abort it, where messages of
# two collectives meet.
PEER_LOST = {int(Exit.PASSING), -signal.SIGABRT}
T = TypeVar("T")


def eventually(
    condition: Callable[[], T], what: str, *, within_s: float = PATIENCE_S, every_s: float = 0.05
) -> T:
    """The first true value of `condition`, asked again and again."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:.0f} s: {what}")
        time.sleep(every_s)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes
    )


class _Compiled:
    """Where compiled programs are kept; set once for a session."""

    path: Path | None = None


COMPILED = _Compiled()


def environment(*, tree: bool = True) -> dict[str, str]:
    """Of a process that can import the tests' tasks, and of which every warning is seen.

    Args:
        tree: whether the project comes from this tree.
    """
    path = os.pathsep.join([str(HERE), *([str(ROOT)] if tree else [])])
    clean = {key: value for key, value in os.environ.items() if not key.startswith("DILOCO_")}
    if COMPILED.path is not None:
        clean["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED.path)
        clean["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return {**clean, "PYTHONPATH": path, "PYTHONWARNINGS": "default"}


class Process:
    """One `diloco` process with its log; `kill` is SIGKILL. Without `python` it is this tree's.

    `within` are words before the command, such as those of `ip` that enter a network namespace.
    """

    def __init__(
        self,
        arguments: list[str],
        log_path: Path,
        *,
        cwd: Path,
        program: Sequence[str],
        python: Path | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.arguments = arguments
        self.log_path = log_path
        with log_path.open("xb") as log:
            self._process = subprocess.Popen(
                [*within, str(python or sys.executable), "-m", *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                env=environment(tree=python is None),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        self._process.terminate()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Its exit status."""
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.arguments} runs on; its log:\n{self.log()}") from None

    def check_not_failed(self) -> None:
        """Fails unless the process runs, ended as it should, or was killed by the test."""
        status = self._process.poll()
        fine = status is None or status == 0 or (status < 0 and status != -signal.SIGABRT)
        assert fine, f"{self.arguments}: {status}"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def events(self, action: str | None = None) -> list[dict[str, Any]]:
        """Its JSON lines, all or of one action."""
        found = []
        for line in self.log().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and action in (None, event.get("action")):
                    found.append(event)
        return found

    def check_clean_log(self) -> None:
        """No trace of a bug and no warning of Python's: only JSON lines."""
        strange = [line for line in self.log().splitlines() if not line.startswith("{")]
        assert not strange, f"{self.arguments}: {strange[:20]}"
        errors = [event for event in self.events() if event["level"] in ("error", "critical")]
        # A process that is killed while it writes one leaves a damaged program; all share them.
        errors += [e for e in self.events("warned") if "compilation cache" not in e["message"]]
        assert not errors, errors


class Note(NamedTuple):
    """A learner drew batch `position` at `at_s` (monotonic), in process `pid`."""

    pid: int
    iterator: int
    at_s: float
    position: int


@dataclass
class World:
    """One run: files, processes, access to its tape and store."""

    folder: Path
    document: dict[str, Any]
    processes: list[Process] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.document["run"]["name"])

    @property
    def config_path(self) -> Path:
        return self.folder / "run.toml"

    @property
    def config(self) -> Config:
        return load_config(self.config_path)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def files_of(self, name: str) -> list[Path]:
        """The files of an object: a folder keeps what was merged under a second name."""
        paths = (self.store / name, self.store / ".kept" / name)
        return [path for path in paths if path.exists()]

    @property
    def url(self) -> str:
        return str(self.document["bus"]["url"])

    def variant(self, name: str, changes: dict[str, dict[str, Any]]) -> Path:
        """A file like the run's, with some keys changed."""
        document = {key: dict(section) for key, section in self.document.items()}
        for section, keys in changes.items():
            document[section] = {**document.get(section, {}), **keys}
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(document))
        return path

    # Processes

    def start(
        self,
        name: str,
        *arguments: str,
        program: Sequence[str] = ("diloco",),
        **options: Any,
    ) -> Process:
        """Start `diloco ARGUMENTS...`, with a log of its own; `options` as in `Process`."""
        log_path = self.folder / f"{name}-{len(self.processes)}.log"
        process = Process([*arguments], log_path, cwd=self.folder, program=program, **options)
        self.processes.append(process)
        return process

    def create(self) -> None:
        """`diloco run create`, by its function: a process of its own would only cost time."""
        create_from(self.config, None)

    def aggregator(self, **options: Any) -> Process:
        """One aggregator; `options` as in `start`."""
        config = str(self.config_path)
        return self.start("aggregator", "aggregator", "--config", config, **options)

    def learner(self, name: str, further: Sequence[str] = (), **options: Any) -> Process:
        """One learner, with further arguments; `options` as in `start`."""
        arguments = ("--config", str(self.config_path), "--learner", name, *further)
        return self.start(name, "learner", *arguments, **options)

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                process.kill()

    def until(self, condition: Callable[[], T], what: str, *, every_s: float = 0.3) -> T:
        """As `eventually`, but a process that failed meanwhile is the news."""

        def asked() -> T:
            for process in self.processes:
                process.check_not_failed()
            return condition()

        with self.explained():
            return eventually(asked, what, every_s=every_s)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Adds the ends of all logs to a failure: one process often dies of another's fault."""
        try:
            yield
        except AssertionError as error:
            for process in self.processes:
                log, state = process.log(), "runs" if process.running else "has ended"
                error.add_note(f"--- {process.log_path.name}, which {state}:\n{log[-LOG_SHOWN:]}")
            raise

    def stop(self) -> None:
        """Say that the stop rule is met, so that a test need not guess a run's length."""
        stop = wire.Stop(run=self.name, global_step=0, reason="test", by="test")
        payload = wire.encode(stop)
        self.ask(lambda bus: bus.publish(names.stop(self.name), payload, expected_last=0))

    # What learners did

    def notes(self, learner: str) -> list[Note]:
        """Every batch a learner drew for training, in order."""
        path = self.folder / "notes" / learner
        if not path.exists():
            return []
        notes = []
        for line in path.read_text().splitlines():
            pid, iterator, at_s, position = line.split()
            notes.append(Note(int(pid), int(iterator), float(at_s), int(position)))
        # Besides training only compiling draws, once for each life, with an iterator of its own.
        drawn: dict[tuple[int, int], int] = {}
        for note in notes:
            drawn[note.pid, note.iterator] = drawn.get((note.pid, note.iterator), 0) + 1
        training = {}
        for pid, iterator in drawn:
            training[pid] = max(training.get(pid, 0), iterator)
        return [note for note in notes if training[note.pid] == note.iterator]

    def steps(self, learner: str) -> int:
        """How many batches a learner has drawn."""
        return len(self.notes(learner))

    # The bus and the store

    def params(self) -> dict[str, np.ndarray]:
        """The newest global view as the task's parameters, by name."""
        settings = self.config.settings()
        task = load_task(
            settings.task.build, steps=settings.run.steps, seed=settings.run.seed,
            options=settings.task.options,
        )  # fmt: skip

        async def load(bus: NatsBus) -> dict[str, np.ndarray]:
            store, runtime = open_store(str(self.store)), Runtime()
            layout, epoch = await load_run(self.config, bus, store, runtime)
            context = RunContext(
                settings=settings,
                layout=layout,
                epoch=epoch,
                bus=bus,
                store=store,
                runtime=runtime,
                logger=log.get(),
            )
            params, _ = await load_params(context, task)
            return {name: np.asarray(leaf) for name, leaf in tree.by_name(params).items()}

        return self.ask(load)

    def ask(self, work: Callable[[NatsBus], Coroutine[Any, Any, T]]) -> T:
        """Run `work` with a connection of its own."""

        async def connected() -> T:
            config = self.config.bus
            bus = await jetstream.connect(
                config.url,
                name="test",
                credentials=config.credentials,
                tls_ca=config.tls_ca,
                connect_timeout_s=30,
            )
            try:
                return await asyncio.wait_for(work(bus), PATIENCE_S)
            finally:
                await bus.close()

        return asyncio.run(connected())


def tiny_document(name: str, folder: Path, url: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """A configuration for quick runs; `changes` go over its sections."""
    document: dict[str, dict[str, Any]] = {
        "run": {"name": name, "steps": 96, "seed": 7},
        "task": {
            "build": "tiny_task:build",
            "options": {"notes": "notes", "sleep_s": 0.01},
        },
        "sync": {
            "interval_steps": 8,
            "fragments": 3,
            "block": 16,
            "shard_elements": 1024,
            "min_steps": 3,
            "snapshot_interval_versions": 3,
            "reannounce_timeout_s": 3.0,
        },
        "quorum": {"deadline_s": 8.0, "liveness_timeout_s": 4.0, "grace_cap_s": 1.0},
        "bus": {"url": url},
        "store": {"url": str(folder / "store")},
        "learner": {"heartbeat_interval_s": 0.25},
    }
    for section, keys in changes.items():
        document[section] = {**document.get(section, {}), **keys}
    return document


def make_world(name: str, folder: Path, url: str, **changes: dict[str, Any]) -> World:
    """Files of a new run; nothing is started."""
    (folder / "notes").mkdir(parents=True)
    world = World(folder, tiny_document(name, folder, url, **changes))
    world.config_path.write_text(tomli_w.dumps(world.document))
    return world


@contextlib.contextmanager
def open_world(
    name: str, folder: Path, url: str, *, create: bool = True, **changes: dict[str, Any]
) -> Iterator[World]:
    """A run, created unless told not to; no process of it outlives the block."""
    world = make_world(name, folder, url, **changes)
    try:
        if create:
            world.create()
        yield world
    finally:
        world.end()


@contextlib.contextmanager
def said_to_systemd(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the daemons that start within the block tell systemd."""
    said: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = f"\0{folder}"
        listener.bind(name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{folder}")

        def listen() -> None:
            while words := listener.recv(4096).decode():
                said.append(words)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield said
        finally:
            monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"", name)
            thread.join()
