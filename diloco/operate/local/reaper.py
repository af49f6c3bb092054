"""Kills the processes of a local run if the command that started them dies without ending them.

The reaper is a separate process, which reads lines "+PID" and "-PID" on standard input. The input
ends when the command ends, however it dies; then the reaper kills all processes still listed.
"""

import contextlib
import os
import signal
import subprocess
import sys
from typing import Self


def main() -> None:
    """Reads the list of processes until the input ends; then kills those that still run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alive: set[int] = set()
    for line in sys.stdin:
        change = alive.add if line[0] == "+" else alive.discard
        change(int(line[1:]))
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Reaper:
    """Starts the reaper, and names to it the processes to kill if this command dies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "diloco.operate.local.reaper"],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Adds a process to the reaper's list."""
        self._write(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Removes a process, which has ended, from the reaper's list."""
        self._write(f"-{pid}\n")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":
    main()
