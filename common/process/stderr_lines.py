"""A program that turns text that libraries write to standard error into JSON lines.

    python -I -S stderr_lines.py [--journal | --plain] < text of the libraries > the log

libtpu, CUDA, XLA and Gloo write to file descriptor 2, past Python. A daemon replaces the descriptor
by a pipe (`log.take_stderr`), and this program reads the pipe. The program is a process of its own,
because a thread would die with the daemon, and the last lines before a library aborts the daemon
matter most. The program ends when no process can write to the pipe any more. It imports the
standard library alone, so that it starts in 20 ms beside each daemon.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

READ_BYTES = 1 << 16
# Longer lines are cut in pieces, as a log's reader may have a limit of its own.
LINE_BYTES = 1 << 14
# The level's letter in lines of Google's C++ libraries, new and old: "W0102 ...", "...: E ...".
_MARK = re.compile(r"^(?:([IWEF])\d{4} |\d{4}-\d\d-\d\d [\d:.]+: ([IWEF]) )")
# A library's error becomes a warning: the daemon goes on, or ends with an error of its own.
_LEVELS = {"I": "info", "W": "warning", "E": "warning", "F": "error"}
# As in sd-daemon(3); `common/process/log.py` has all of them.
_PRIORITIES = {"info": b"<6>", "warning": b"<4>", "error": b"<3>"}
# How lines about a crash begin.
_FATAL = ("Fatal Python error", "Segmentation fault", "terminate called")
# How the sentence begins with which a command of the project ends, and its advice.
_OWN = ("error: ", "hint: ")


def level_of(line: str) -> str:
    """Returns the log level for a library's line.

    Google's C++ libraries begin a line with a letter: I, W, E or F. The level is "error" for F, for
    a crash and for the last sentence of a command, "warning" for W and E, and else "info".
    """
    if line.startswith((*_FATAL, *_OWN)):
        return "error"
    mark = _MARK.match(line)
    return _LEVELS[mark[1] or mark[2]] if mark else "info"


def as_event(line: bytes, now: datetime, *, journal: bool = False) -> bytes:
    """Returns a line of standard error as a JSON line of the log.

    A line that is a JSON event already, from the log of a child process, stays as it is.

    Args:
        line: the line without its line end.
        now: the time in UTC that the JSON line states.
        journal: True to put the priority for systemd's journal before the JSON line.
    """
    if line.startswith(b"{"):
        try:
            event = json.loads(line)
        except ValueError:
            event = {}
        if "action" in event:
            priority = _PRIORITIES.get(str(event.get("level")), b"") if journal else b""
            return priority + line + b"\n"
    text = line.decode(errors="replace")
    event = {
        "logger": "stderr",
        "message": text,
        "level": level_of(text),
        "timestamp": now.isoformat().replace("+00:00", "Z"),
        "action": "said",
    }
    priority = _PRIORITIES[event["level"]] if journal else b""
    return priority + json.dumps(event).encode() + b"\n"


def as_line(line: bytes, now: datetime) -> bytes:
    """Returns a line for a terminal, in the form of the log's own lines (`log.as_line`)."""
    return f"{now.astimezone():%H:%M:%S}  said: ".encode() + line + b"\n"


def split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the lines of `chunks` without line ends, cut in pieces of at most LINE_BYTES."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        while len(rest) > LINE_BYTES:
            lines.append(rest[:LINE_BYTES])
            rest = rest[LINE_BYTES:]
        for line in lines:
            yield from _pieces(line.rstrip(b"\r"))
    yield from _pieces(rest)


def _pieces(line: bytes) -> Iterator[bytes]:
    for start in range(0, len(line), LINE_BYTES):
        yield line[start : start + LINE_BYTES]


def main() -> None:
    """Copies lines from standard input to the log until no process can write to the pipe."""
    # Ignore signals to the whole process group, to relay the daemon's last lines too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    chunks = iter(lambda: os.read(sys.stdin.fileno(), READ_BYTES), b"")
    journal, plain = "--journal" in sys.argv, "--plain" in sys.argv
    for line in split(chunks):
        # One write for each line, so that lines of several writers do not mix.
        now = datetime.now(UTC)
        told = as_line(line, now) if plain else as_event(line, now, journal=journal)
        os.write(sys.stdout.fileno(), told)


if __name__ == "__main__":
    main()
