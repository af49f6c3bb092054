"""A program that makes JSON lines of what libraries write to standard error.

    python -I -S stderr_lines.py [--journal | --plain] < what they write > what is logged

libtpu, CUDA, XLA and Gloo write to file descriptor 2, past Python. A daemon gives them a pipe to
write to (`log.take_stderr`), and this process reads it: one of its own, because what a library
says before it aborts is what one wants to know, and a thread of the daemon would die with it. It
ends when nobody can write to the pipe any more. It imports the standard library alone: it starts in
20 ms, and beside each daemon.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from datetime import UTC, datetime

READ_BYTES = 1 << 16
# A line that is longer is cut in pieces: a log's reader may have a limit of its own.
LINE_BYTES = 1 << 14
# How Google's C++ libraries mark what they write, and older ones did: "W0102 ...", "...: E ...".
_MARK = re.compile(r"^(?:([IWEF])\d{4} |\d{4}-\d\d-\d\d [\d:.]+: ([IWEF]) )")
# Their errors are no errors of the daemon: it goes on, or ends with one of its own.
_LEVELS = {"I": "info", "W": "warning", "E": "warning", "F": "error"}
# As in sd-daemon(3); `common/process/log.py` has all of them.
_PRIORITIES = {"info": b"<6>", "warning": b"<4>", "error": b"<3>"}
# Of Python's own last words.
_FATAL = ("Fatal Python error", "Segmentation fault", "terminate called")


def level_of(line: str) -> str:
    """The level that a line names, if it names one."""
    if line.startswith(_FATAL):
        return "error"
    mark = _MARK.match(line)
    return _LEVELS[mark[1] or mark[2]] if mark else "info"


def as_event(line: bytes, now: datetime, *, journal: bool = False) -> bytes:
    """A line of stderr as a line of the log; a child's log line stays as it is.

    For systemd's journal it begins with its priority.
    """
    if line.startswith(b"{"):
        try:
            event = json.loads(line)
        except ValueError:
            event = {}
        if "action" in event:
            return line + b"\n"
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
    """A line for a terminal, as `log_lines.py` has those of the log itself."""
    return f"{now.astimezone():%H:%M:%S}  said: ".encode() + line + b"\n"


def split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their ends, in pieces of a bearable length; the last one may have none."""
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
    """Read until the last writer is gone."""
    # Who ends the daemon with all its processes wants to read its last words too.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    chunks = iter(lambda: os.read(sys.stdin.fileno(), READ_BYTES), b"")
    journal, plain = "--journal" in sys.argv, "--plain" in sys.argv
    for line in split(chunks):
        # One write for each: whoever writes to the same place writes whole lines as well.
        now = datetime.now(UTC)
        told = as_line(line, now) if plain else as_event(line, now, journal=journal)
        os.write(sys.stdout.fileno(), told)


if __name__ == "__main__":
    main()
