"""Three nats-servers on the loopback interface, with the files that `diloco auth init` writes.

The files are taken as they are, word for word. Only the ports come from the command line, since
three machines' servers share one here.
"""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness import eventually

from diloco.common.process.nats_server import _DIE_WITH_PARENT, find_binary, free_port
from diloco.common.storage.bus.jetstream import NatsBus, connect
from diloco.operate.auth import nats_config_and_credentials as auth

HOST = "127.0.0.1"
NODES = 3


class Ports(NamedTuple):
    """Where one server listens: for clients, for the other servers, for who watches it."""

    client: int
    cluster: int
    monitor: int


@dataclass
class Node:
    """One server of the cluster; `kill` is SIGKILL, and `start` brings it back on its folder."""

    name: str
    config: Path
    ports: Ports
    routes: str
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        command = [
            *(sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())),
            *(str(find_binary()), "-c", str(self.config)),
            *("-a", HOST, "-p", str(self.ports.client), "-m", str(self.ports.monitor)),
            *("--cluster", f"nats://{HOST}:{self.ports.cluster}", "--routes", self.routes),
        ]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log_path(self) -> Path:
        return self.config.with_suffix(".log")

    @property
    def store(self) -> Path:
        """Its disk, as its file says."""
        return self.config.parent / "jetstream" / self.name

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def asked(self, path: str) -> Any:
        """Returns the server's own account of itself, or None if it gives none (yet)."""
        url = f"http://{HOST}:{self.ports.monitor}/{path}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=300) as answer:
            return json.load(answer)
        return None

    def healthy(self) -> bool:
        """True if all its streams have leaders, and the server lags in none."""
        return (self.asked("healthz") or {}).get("status") == "ok"


@dataclass
class Cluster:
    """The servers of run `run`, and who may connect to them."""

    folder: Path
    run: str
    nodes: list[Node] = field(default_factory=list)

    @property
    def url(self) -> str:
        return ",".join(f"tls://{HOST}:{node.ports.client}" for node in self.nodes)

    def section(self, name: str) -> dict[str, Any]:
        """Keys of `bus` for one party."""
        return {
            "url": self.url,
            "credentials": str(self.folder / "credentials" / f"{name}.toml"),
            "tls_ca": str(self.folder / "tls" / "ca.pem"),
            "replicas": NODES,
        }

    @contextlib.asynccontextmanager
    async def enter(self, name: str) -> AsyncIterator[NatsBus]:
        own = self.section(name)
        bus = await connect(
            self.url, name=name, credentials=own["credentials"], tls_ca=own["tls_ca"]
        )
        try:
            yield bus
        finally:
            await bus.close()

    def wait_healthy(self) -> None:
        for node in self.nodes:
            eventually(node.healthy, f"{node.name} is healthy", every_s=0.2)

    def leader(self, stream: str) -> Node:
        """Returns a stream's leader by the servers that live; waits out an election."""
        return eventually(lambda: self._led(stream), f"a leader of {stream}", every_s=0.2)

    def _led(self, stream: str) -> Node | None:
        for node in self.nodes:
            found = node.asked("jsz?accounts=true&streams=true") if node.process else None
            for account in (found or {}).get("account_details", ()):
                for detail in account.get("stream_detail", ()):
                    name = detail.get("cluster", {}).get("leader")
                    if detail["name"] == stream and name:
                        return next(one for one in self.nodes if one.name == name)
        return None

    def end(self) -> None:
        for node in self.nodes:
            node.kill()


@contextlib.contextmanager
def open_cluster(folder: Path, run: str, learners: list[str]) -> Iterator[Cluster]:
    """A cluster that runs and is healthy, with the operator, aggregator `agg` and learners."""
    _, servers = auth.init(folder, run, [HOST] * NODES)
    auth.add(folder, "agg", "aggregator")
    for learner in learners:
        auth.add(folder, learner, "learner")
    ports = [Ports(free_port(), free_port(), free_port()) for _ in servers]
    routes = ",".join(f"tls://{HOST}:{port.cluster}" for port in ports)
    cluster = Cluster(folder, run)
    cluster.nodes = [
        Node(config.stem, config, own, routes) for config, own in zip(servers, ports, strict=True)
    ]
    try:
        for node in cluster.nodes:
            node.start()
        cluster.wait_healthy()
        yield cluster
    finally:
        cluster.end()
