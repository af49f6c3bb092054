"""Commands started by timers wait while NATS or the store is unreachable, up to a limit."""

import asyncio
import socket
from pathlib import Path

import pytest

from diloco.common.protocol.errors import BusUnavailableError, StoreError
from diloco.operate.command import TimerOptions
from diloco.operate.run_garbage import timed


class Work:
    """Fails so often, with an error, before it gives its result."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.left = failures
        self.error = error

    async def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise self.error
        return "done"


def test_it_is_tried_again_while_nats_is_unreachable() -> None:
    work = Work(2, BusUnavailableError("no server"))
    assert asyncio.run(timed("run.toml", work, TimerOptions(wait_s=600.0))) == "done"


def test_without_a_wait_the_first_failure_is_told() -> None:
    work = Work(1, BusUnavailableError("no server"))
    with pytest.raises(BusUnavailableError):
        asyncio.run(timed("run.toml", work, TimerOptions(wait_s=0.0)))


def test_what_does_not_pass_is_not_waited_for() -> None:
    with pytest.raises(StoreError):
        asyncio.run(timed("run.toml", Work(1, StoreError("no")), TimerOptions(wait_s=600.0)))


def test_systemd_hears_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    monkeypatch.setenv("NOTIFY_SOCKET", "notify")
    heard: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("notify")
        listener.settimeout(60.0)

        async def work() -> None:
            while "STATUS=working; waits: run.toml" not in "".join(heard):
                heard.append(listener.recv(4096).decode())
                raise BusUnavailableError("no server")

        asyncio.run(timed("run.toml", work, TimerOptions(wait_s=600.0)))
        while "STATUS=done" not in heard[-1]:
            heard.append(listener.recv(4096).decode())
