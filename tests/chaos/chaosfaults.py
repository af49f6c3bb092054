"""The processes of a chaos run, and what is done to them. Only processes of our own are signalled."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from figures import Suffered
from proxy import Network, Proxy
from schedule import ALL, Fault

from diloco.common.process.nats_server import NatsServer
from diloco.operate.local.fleet import LocalDaemons


class BrokenError(Exception):
    """A process ended that nobody killed."""


def mount_disk(folder: Path, size_bytes: int) -> bool:
    """Put a small disk of its own at `folder`; False where that is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def unmount_disk(folder: Path) -> None:
    """Undo `mount_disk`, if it did something."""
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


@dataclass
class Stage:
    """Daemons, server, disk and network of one run."""

    folder: Path
    document: dict[str, Any]
    learners: list[str]
    aggregators: list[str]
    server: NatsServer
    fleet: LocalDaemons
    network: Network
    proxies: dict[str, Proxy] = field(default_factory=dict)
    suffered: list[Suffered] = field(default_factory=list)
    down: set[str] = field(default_factory=set)
    _since_s: dict[Fault, float] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        return Path(self.document["store"]["url"]).parent

    def config(self, name: str) -> Path:
        """A file for one daemon: its own way to the server, its own name."""
        self.proxies[name] = self.network.proxy(self.server.port)
        own = {
            **self.document,
            "bus": {**self.document.get("bus", {}), "url": self.proxies[name].url},
        }
        if name in self.aggregators:
            own["aggregator"] = {**own.get("aggregator", {}), "name": name}
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(own))
        return path

    def start(self) -> None:
        """Start all daemons."""
        for name in self.aggregators:
            self.fleet.start(name, ["aggregator", "--config", str(self.config(name))])
        for name in self.learners:
            arguments = ["learner", "--config", str(self.config(name)), "--learner", name]
            self.fleet.start(name, arguments)

    def check(self) -> None:
        """Nobody has ended whom we did not kill."""
        for name, daemon in self.fleet.daemons.items():
            if name not in self.down and daemon.pid is None:
                raise BrokenError(
                    f"{name} ended with status {daemon.status}:\n{self.fleet.tail(daemon)}"
                )
        if "nats-server" not in self.down and not self.server.running:
            raise BrokenError(f"nats-server ended; its log is {self.server.log_path}")

    # Faults

    def begin(self, fault: Fault) -> None:
        self._since_s[fault] = time.time()
        match fault.kind.split():
            case ["kill", "nats-server"]:
                self.down.add("nats-server")
                self.server.kill()
            case ["pause", "nats-server"]:
                self._signal_server(signal.SIGSTOP)
            case ["kill", _]:
                self.down.add(fault.victim)
                self.fleet.end(fault.victim)
            case ["pause", _]:
                self._signal(fault.victim, signal.SIGSTOP)
            case ["cut", _]:
                for proxy in self._ways(fault.victim):
                    proxy.cut()
            case ["stall", _]:
                for proxy in self._ways(fault.victim):
                    proxy.stall()
            case ["full", _]:
                self._fill()

    def finish(self, fault: Fault) -> None:
        ended_s = time.time()
        match fault.kind.split():
            case ["kill", "nats-server"]:
                self.server.start()
                self.fleet.adopt(self.server)
                self.down.discard("nats-server")
                ended_s = time.time()
            case ["pause", "nats-server"]:
                self._signal_server(signal.SIGCONT)
            case ["kill", _]:
                self.fleet.start_again(fault.victim)
                self.down.discard(fault.victim)
                ended_s = self._since_s[fault]
            case ["pause", _]:
                self._signal(fault.victim, signal.SIGCONT)
            case ["cut" | "stall", _]:
                for proxy in self._ways(fault.victim):
                    proxy.heal()
            case ["full", _]:
                self._filler.unlink()
        at_s = self._since_s.pop(fault)
        self.suffered.append(Suffered(fault.kind, fault.victim, at_s, ended_s))

    def _signal(self, name: str, number: int) -> None:
        pid = self.fleet.daemons[name].pid
        assert pid is not None
        os.kill(pid, number)

    def _signal_server(self, number: int) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, number)

    def _ways(self, victim: str) -> list[Proxy]:
        return [*self.proxies.values()] if victim == ALL else [self.proxies[victim]]

    @property
    def _filler(self) -> Path:
        return self.disk / "filler"

    def _fill(self) -> None:
        """Write until the disk is full."""
        with self._filler.open("wb", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while filler.write(bytes(size)):
                        pass
