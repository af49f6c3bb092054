"""The processes of a local run: started as an operator would start them, watched, ended."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

from common.errors import DilocoError
from common.nats_server import NatsServer
from diloco.reaper import Reaper

# A process that fails so often within a minute is not started again.
FAILURES = 5
WITHIN_S = 60.0
TAIL_LINES = 12


@dataclass
class Daemon:
    """One process: how to start it, whether it runs, how often it came back."""

    name: str
    arguments: list[str]
    log_path: Path
    cores: set[int] | None = None
    process: "subprocess.Popen[bytes] | None" = None
    restarts: int = 0
    ended: bool = False
    failed_at_s: list[float] = field(default_factory=list)

    @property
    def pid(self) -> int | None:
        """Process id, while it runs."""
        return self.process.pid if self.process and self.process.poll() is None else None


class Fleet:
    """All daemons of a local run; none outlives it, however it ends."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._reaper = Reaper()
        self._files: list[IO[bytes]] = []
        self._server: NatsServer | None = None
        self.daemons: dict[str, Daemon] = {}

    @property
    def restarts(self) -> int:
        """How often a daemon was started again."""
        return sum(daemon.restarts for daemon in self.daemons.values())

    def adopt(self, server: NatsServer) -> None:
        """Look after a server that runs: start it again if it dies, end it should we die."""
        self._server = server
        self._watch_server()

    def _watch_server(self) -> None:
        if self._server is not None and self._server.pid is not None:
            self._reaper.watch(self._server.pid)

    def start(self, name: str, arguments: list[str], cores: set[int] | None = None) -> Daemon:
        """Start `diloco ARGUMENTS...` under a name, with a log file of its own."""
        daemon = Daemon(name, arguments, self._logs / f"{name}.log", cores)
        self.daemons[name] = daemon
        self._spawn(daemon)
        return daemon

    def _spawn(self, daemon: Daemon) -> None:
        log = daemon.log_path.open("ab")
        self._files.append(log)
        daemon.process = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", "diloco", *daemon.arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._reaper.watch(daemon.process.pid)
        if daemon.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(daemon.process.pid, daemon.cores)

    def kill(self, name: str) -> None:
        """SIGKILL a daemon and start it again."""
        if self.daemons[name].pid is not None:
            self.end(name)
            self.start_again(name)

    def end(self, name: str) -> None:
        """SIGKILL a daemon."""
        daemon = self.daemons[name]
        if daemon.pid is not None and daemon.process is not None:
            daemon.process.kill()
            self._collect(daemon)

    def start_again(self, name: str) -> None:
        """Start a daemon that was ended."""
        self.daemons[name].restarts += 1
        self._spawn(self.daemons[name])

    def look_after(self) -> None:
        """Note who has ended; start again who has failed.

        Raises:
            DilocoError: one fails again and again; the end of its log is shown.
        """
        if self._server is not None and not self._server.running:
            self._server.start()
            self._watch_server()
        for daemon in self.daemons.values():
            if daemon.ended or daemon.process is None or daemon.process.poll() is None:
                continue
            code = self._collect(daemon)
            if code == 0:
                daemon.ended = True
                continue
            now_s = time.monotonic()
            daemon.failed_at_s = [s for s in daemon.failed_at_s if now_s - s < WITHIN_S] + [now_s]
            if len(daemon.failed_at_s) >= FAILURES or not self._ran_long(daemon):
                raise DilocoError(
                    f"{daemon.name} ended with status {code}; the end of its log:\n"
                    f"{self.tail(daemon)}",
                    hint=f"the whole log is {daemon.log_path}",
                )
            daemon.restarts += 1
            self._spawn(daemon)

    def _ran_long(self, daemon: Daemon) -> bool:
        """Whether it ever got to work: one that never did is misconfigured, not unlucky."""
        return b'"started"' in daemon.log_path.read_bytes()

    def tail(self, daemon: Daemon) -> str:
        """The last lines of a daemon's log."""
        text = daemon.log_path.read_text(errors="replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def _collect(self, daemon: Daemon) -> int:
        assert daemon.process is not None
        code = daemon.process.wait()
        self._reaper.forget(daemon.process.pid)
        return code

    def stop(self, *, within_s: float) -> None:
        """Ask all to end, learners first, and end those that do not."""
        order = sorted(
            self.daemons.values(), key=lambda daemon: daemon.name.startswith("aggregator")
        )
        for group in (order[:-1], order[-1:]):
            for daemon in group:
                if daemon.pid is not None and daemon.process is not None:
                    daemon.process.terminate()
            deadline_s = time.monotonic() + within_s
            for daemon in group:
                self._end(daemon, deadline_s)

    def _end(self, daemon: Daemon, deadline_s: float) -> None:
        if daemon.process is None:
            return
        try:
            daemon.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            daemon.process.kill()
        self._collect(daemon)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self.daemons.values():
            if daemon.pid is not None and daemon.process is not None:
                daemon.process.kill()
                self._collect(daemon)
        self._reaper.__exit__()
        for file in self._files:
            file.close()
