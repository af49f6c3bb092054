"""Text that libraries write past Python becomes log lines, whole, also if the process aborts."""

import json
import subprocess
import sys
import textwrap
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.process.stderr_lines import LINE_BYTES, as_event, level_of, split

NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)


def daemon(body: str) -> tuple[int, list[str]]:
    """The exit status of a process that has given its standard error away, and its log's lines."""
    code = f"from diloco.common.process import log\nlog.take_stderr()\nlog.configure()\n{textwrap.dedent(body)}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stderr.splitlines()


def events(lines: list[str]) -> list[dict[str, str]]:
    return [json.loads(line) for line in lines]


def test_foreign_lines_and_our_own() -> None:
    status, lines = daemon("""
        import os
        os.write(2, b"W0000 00:00:1 pjrt.cc:7] no chip\\n[Gloo] Rank 0 is conn")
        log.get().info("started", position=3)
        os.write(2, b"ected\\nno end")
    """)
    assert status == 0
    found = {event.get("message", event["action"]): event for event in events(lines)}
    assert set(found) == {"W0000 00:00:1 pjrt.cc:7] no chip", "[Gloo] Rank 0 is connected",
                          "no end", "started"}  # fmt: skip
    assert found["no end"] | {"timestamp": ""} == {
        "logger": "stderr", "message": "no end", "level": "info", "timestamp": "", "action": "said",
    }  # fmt: skip


@pytest.mark.parametrize(
    "end", ["os.abort()", "os.kill(os.getpid(), 11)", "os.kill(os.getpid(), 9)"]
)
def test_last_words_come_out(end: str) -> None:
    status, lines = daemon(f"""
        import os
        os.write(2, b"F0000 00:00:1 client.cc:7] this is why")
        {end}
    """)
    assert status < 0
    said = events(lines)
    assert said[0]["level"] == "error"
    assert said[0]["message"].startswith("F0000 00:00:1 client.cc:7] this is why")
    if "9" not in end:
        assert "most recent call first" in " ".join(event["message"] for event in said)


def test_the_trace_of_a_bug_is_plain() -> None:
    status, lines = daemon("raise RuntimeError('a bug')")
    assert status == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: a bug"


def test_what_libraries_log() -> None:
    _, lines = daemon("""
        import logging
        logging.getLogger("jax._src.xla_bridge").error("a GPU %s", "may be present")
        logging.getLogger("other").info("not said")
    """)
    (event,) = events(lines)
    assert (event["logger"], event["message"]) == ("jax._src.xla_bridge", "a GPU may be present")
    assert (event["action"], event["level"]) == ("said", "warning")


def test_a_child_of_the_daemon_writes_too() -> None:
    _, lines = daemon("""
        import subprocess
        subprocess.run(["sh", "-c", "echo one >&2; echo '{\\"action\\": \\"own\\"}' >&2"])
    """)
    one, own = events(lines)
    assert one["message"] == "one"
    assert own == {"action": "own"}


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_chunks_cut_anywhere_give_the_same_lines(chunks: list[bytes]) -> None:
    whole = [line.rstrip(b"\r") for line in b"".join(chunks).split(b"\n")]
    last = b"".join(chunks).split(b"\n")[-1]
    found = list(split(iter(chunks)))
    assert found == [line for line in [*whole[:-1], last] if line]


def test_a_line_of_any_length() -> None:
    data = b"x" * (3 * LINE_BYTES + 5)
    pieces = list(split(iter([data[:7], data[7:], b"\nend"])))
    assert b"".join(pieces) == data + b"end"
    assert max(map(len, pieces)) == LINE_BYTES


@given(st.binary())
def test_any_bytes_are_an_event(line: bytes) -> None:
    assert isinstance(json.loads(as_event(line.replace(b"\n", b""), NOON)), dict)


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("I0000 00:00:1733 x.cc:1] a", "info"),
        ("E1122 03:04:05.1 7 x.cc:1] a", "warning"),
        ("2021-12-03 14:10:23.408083: W external/xla.cc:1] a", "warning"),
        ("F0102 x", "error"),
        ("Fatal Python error: Aborted", "error"),
        ("Error: of whom?", "info"),
        ("error: a batch of 1 rows cannot be divided", "error"),
    ],
)
def test_levels(line: str, level: str) -> None:
    assert level_of(line) == level


def test_in_the_journal_a_line_begins_with_its_priority() -> None:
    assert as_event(b"W0102 x", NOON, journal=True).startswith(b'<4>{"logger"')
    failed = b'{"level": "error", "action": "failed"}'
    assert as_event(failed, NOON, journal=True) == b"<3>" + failed + b"\n"
    assert as_event(failed, NOON) == failed + b"\n"
