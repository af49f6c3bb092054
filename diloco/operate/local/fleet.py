"""The processes of a local run: starts the commands of an operator, watches and restarts them.

A *life* of a daemon is the time from one start of its processes to their end.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from diloco.common.process.config import environment_with
from diloco.common.process.nats_server import LOOPBACK, NatsServer, free_port, is_full
from diloco.common.protocol.errors import DilocoError, find
from diloco.operate.local.reaper import Reaper

# A daemon is not restarted after this many failures within WITHIN_S seconds.
FAILURES = 5
WITHIN_S = 60.0
# Nor after this many failures of the same kind in a row, however long it ran.
ALIKE = 3
TAIL_LINES = 12
# The niceness of daemons that yield: the lowest priority.
NICE = 19
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
# When a learner's host has ended, its other hosts are killed after this many seconds.
HOSTS_END_S = 30.0


@dataclass
class Process:
    """One process of a daemon.

    Attributes:
        name: the daemon's name, or NAME.HOST for a host of a learner.
        arguments: those of the command `diloco`.
        environment: changes to the environment of `diloco local`; None removes a variable.
        running: its newest process; None before the first start.
    """

    name: str
    arguments: list[str]
    log_path: Path
    environment: Mapping[str, str | None]
    running: "subprocess.Popen[bytes] | None" = None

    @property
    def pid(self) -> int | None:
        """The process id; None if it does not run."""
        return self.running.pid if self.running and self.running.poll() is None else None

    @property
    def status(self) -> int | None:
        """The exit status (-N after signal N); None before it has ended."""
        return self.running.poll() if self.running else None


@dataclass
class Daemon:
    """A daemon and its restarts: one process, or one for each host of a learner.

    Attributes:
        cores: the CPU cores that its processes use; None: any.
        ended: True once it has ended and is not started again.
        failed_at_s: when it failed recently, by the monotonic clock.
        failure_kinds: how its lives failed (`failure_kind`).
        spare: True if the run can continue without it, while another spare daemon runs.
        yields: True if it runs at the lowest priority.
        failed: the process that failed first in this life. The others cannot continue without it.
        failing_since_s: when this failure was noticed, by the monotonic clock.
        killed: True if `LocalDaemons.kill` killed a host in this life.
    """

    name: str
    processes: list[Process]
    cores: set[int] | None = None
    restarts: int = 0
    ended: bool = False
    failed_at_s: list[float] = field(default_factory=list)
    failure_kinds: list[str] = field(default_factory=list)
    spare: bool = False
    yields: bool = False
    failed: Process | None = None
    failing_since_s: float = 0.0
    killed: bool = False

    @property
    def pid(self) -> int | None:
        """Process id of the first process; None unless all run."""
        pids = [process.pid for process in self.processes]
        return None if None in pids else pids[0]

    @property
    def status(self) -> int | None:
        """The first exit status that is not 0, else 0; None before all processes have ended."""
        found = [process.status for process in self.processes]
        if None in found:
            return None
        return next((status for status in found if status), 0)


class LocalDaemons:
    """The daemons of a local run. No daemon outlives the command `diloco local`, however that ends.

    Args:
        logs: the folder of their log files.

    Attributes:
        daemons: by name.
        given_up: sentences on daemons that are not restarted any more.
        came_back: sentences on daemons that failed and were restarted.
    """

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._reaper = Reaper()
        self._files: list[IO[bytes]] = []
        self._server: NatsServer | None = None
        self.daemons: dict[str, Daemon] = {}
        self.given_up: list[str] = []
        self.came_back: list[str] = []

    @property
    def restarts(self) -> int:
        """The number of restarts of all daemons."""
        return sum(daemon.restarts for daemon in self.daemons.values())

    def adopt(self, server: NatsServer) -> None:
        """Watches a running NATS server: restarts it if it dies, and has the reaper end it."""
        self._server = server
        self._watch_server()

    def _watch_server(self) -> None:
        if self._server is not None and self._server.pid is not None:
            self._reaper.watch(self._server.pid)

    def start(
        self,
        name: str,
        *arguments: list[str],
        cores: set[int] | None = None,
        environments: Sequence[Mapping[str, str | None]] | None = None,
        spare: bool = False,
        yields: bool = False,
    ) -> Daemon:
        """Starts `diloco ARGUMENTS...` under a name, with a separate log file.

        Args:
            name: the daemon's name.
            arguments: one list of arguments; or several, one for each host of a learner. Each host
                is also told its number and the address of host 0, with a new port in each life.
            cores: the CPU cores to use; None: any.
            environments: for each process, changes to the environment of `diloco local`.
            spare: as in `Daemon`.
            yields: as in `Daemon`.
        """
        names = [name] if len(arguments) == 1 else [f"{name}.{i}" for i in range(len(arguments))]
        changes = environments or [{} for _ in arguments]
        daemon = Daemon(
            name,
            [
                Process(one, own, self._logs / f"{one}.log", changed)
                for one, own, changed in zip(names, arguments, changes, strict=True)
            ],
            cores,
            spare=spare,
            yields=yields,
        )
        self.daemons[name] = daemon
        self._spawn(daemon)
        return daemon

    def _spawn(self, daemon: Daemon) -> None:
        daemon.failed, daemon.killed = None, False
        hosts = len(daemon.processes)
        coordinator = f"{LOOPBACK}:{free_port()}" if hosts > 1 else ""
        for host, process in enumerate(daemon.processes):
            place = ["--hosts", str(hosts), "--host", str(host), "--coordinator", coordinator]
            self._spawn_process(process, place if hosts > 1 else [], daemon)

    def _spawn_process(self, process: Process, place: list[str], daemon: Daemon) -> None:
        log = process.log_path.open("ab")
        self._files.append(log)
        process.running = subprocess.Popen(  # noqa: S603 - our own command
            # -P: no file of the current folder goes before a library's, as for `diloco` itself.
            [sys.executable, "-P", "-m", "diloco", *process.arguments, *place],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment_with(process.environment),
            start_new_session=True,
        )
        self._reaper.watch(process.running.pid)
        if daemon.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.running.pid, daemon.cores)
        if daemon.yields:
            os.setpriority(os.PRIO_PROCESS, process.running.pid, NICE)

    def hurry(self, name: str) -> None:
        """Gives a daemon that yields the usual priority, where the system permits that."""
        daemon = self.daemons[name]
        daemon.yields = False
        for process in daemon.processes:
            if process.pid is not None:
                with contextlib.suppress(OSError):  # Only root may take niceness back.
                    # Of the group, which is this process with all its threads.
                    os.setpriority(os.PRIO_PGRP, process.pid, 0)

    def kill(self, name: str) -> str:
        """Kills a daemon by SIGKILL and restarts it; returns a name of what was killed.

        Of a learner of several hosts the last host is killed. The others then end by themselves,
        and `look_after` restarts all of them.
        """
        daemon = self.daemons[name]
        last = len(daemon.processes) - 1
        if last > 0:
            daemon.killed = True
            self._kill(daemon.processes[last])
            return f"host {last} of {name}"
        if daemon.pid is not None:
            self.end(name)
            self.start_again(name)
        return name

    def end(self, name: str) -> None:
        """Kills all processes of a daemon by SIGKILL."""
        for process in self.daemons[name].processes:
            self._kill(process)

    def _kill(self, process: Process) -> None:
        if process.pid is not None and process.running is not None:
            process.running.kill()
            self._collect(process)

    def start_again(self, name: str) -> None:
        """Restarts a daemon whose processes have ended."""
        self.daemons[name].restarts += 1
        self._spawn(self.daemons[name])

    def look_after(self, *names: str) -> None:
        """Checks the NATS server and the named daemons (all without names); restarts failed ones.

        Raises:
            DilocoError: a daemon fails again and again, or its configuration or task is wrong; the
                message has the end of its log.
        """
        if self._server is not None and not self._server.running:
            self._server.start()
            self._watch_server()
            self.came_back.append("nats-server ended, and is started again")
        for daemon in [self.daemons[name] for name in names or self.daemons]:
            if not daemon.ended:
                self._look_after(daemon)

    def _look_after(self, daemon: Daemon) -> None:
        now_s = time.monotonic()
        if daemon.failed is None:
            daemon.failed = next((one for one in daemon.processes if one.status), None)
            daemon.failing_since_s = now_s
        if daemon.status is None:
            if daemon.failed is not None and now_s - daemon.failing_since_s > HOSTS_END_S:
                self.end(daemon.name)
            return
        for process in daemon.processes:
            self._collect(process)
        # The first process is host 0, which speaks to the run.
        if daemon.processes[0].status == 0:
            daemon.ended = True
            return
        if daemon.killed:
            self.start_again(daemon.name)
            return
        assert daemon.failed is not None
        daemon.failure_kinds.append(failure_kind(daemon.failed.status, _read(daemon.failed)))
        newest = daemon.failure_kinds[-ALIKE:]
        if len(newest) == ALIKE and len({*newest}) == 1 and newest[-1]:
            self._give_up(daemon, daemon.failed)
            return
        daemon.failed_at_s = [s for s in daemon.failed_at_s if now_s - s < WITHIN_S] + [now_s]
        if len(daemon.failed_at_s) >= FAILURES or self._is_wrong(daemon, daemon.failed):
            raise DilocoError(
                f"{daemon.failed.name} ended with status {daemon.failed.status}; the end of its "
                f"log:\n{self.tail(daemon)}",
                hint=_hint(daemon.failed.log_path),
            )
        self.came_back.append(f"{daemon.failed.name} {how_ended(daemon.failed)}, and starts again")
        self.start_again(daemon.name)

    def _give_up(self, daemon: Daemon, failed: Process) -> None:
        """Notes that a daemon is not restarted any more; the run continues if another like it runs.

        Raises:
            DilocoError: there is no other.
        """
        said = f"{failed.name} failed the same way {ALIKE} times: {last_words(_read(failed))}"
        others = [one for one in self.daemons.values() if one.spare and not one.ended]
        if not daemon.spare or others == [daemon]:
            raise DilocoError(said, hint=_hint(failed.log_path))
        daemon.ended = True
        self.given_up.append(f"{said}; it is not started again ({_hint(failed.log_path)})")

    def _is_wrong(self, daemon: Daemon, failed: Process) -> bool:
        """True if a daemon that never logged "started" says that a new start does not help it."""
        began = all('"started"' in _read(process) for process in daemon.processes)
        return not began and not find(failed.status or 0).restart

    def tail(self, daemon: Daemon) -> str:
        """Returns the last lines of a daemon's log; of several hosts, of the first that failed."""
        text = _read(daemon.failed or daemon.processes[0])
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def _collect(self, process: Process) -> None:
        assert process.running is not None
        process.running.wait()
        self._reaper.forget(process.running.pid)

    def stop(self, *, within_s: float) -> None:
        """Asks all daemons to end, the last aggregator after all others.

        It kills those that have not ended `within_s` seconds after they were asked.
        """
        order = sorted(
            self.daemons.values(), key=lambda daemon: daemon.name.startswith("aggregator")
        )
        for group in (order[:-1], order[-1:]):
            processes = [process for daemon in group for process in daemon.processes]
            for process in processes:
                if process.pid is not None and process.running is not None:
                    process.running.terminate()
            deadline_s = time.monotonic() + within_s
            for process in processes:
                self._end(process, deadline_s)

    def _end(self, process: Process, deadline_s: float) -> None:
        if process.running is None:
            return
        try:
            process.running.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.running.kill()
        self._collect(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.daemons:
            self.end(name)
        self._reaper.__exit__()
        for file in self._files:
            file.close()


def failure_kind(status: int | None, text: str) -> str:
    """Returns how a process failed: status and error with numbers replaced, to compare failures.

    It is "" after a signal.
    """
    if status is None or status < 0:
        return ""
    return f"{status}: {_NUMBER.sub('N', last_words(text))}"


def how_ended(process: Process) -> str:
    """Returns how a process ended, as text: by which signal, or with which status and error."""
    status = process.status or 0
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    words = last_words(_read(process))
    return f"ended with status {status}{f': {words}' if words else ''}"


def last_words(text: str) -> str:
    """Returns the error at the end of a log's text: its last "error:" line, else its last line."""
    lines = [line for line in text.splitlines() if line and not line.startswith(("{", "hint: "))]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].strip()


def _hint(log_path: Path) -> str:
    if is_full(log_path.parent):
        return f"the disk of {log_path.parent} is full: free space, or use another --run-dir"
    return f"the whole log is {log_path}"


def _read(process: Process) -> str:
    return process.log_path.read_text(errors="replace")
