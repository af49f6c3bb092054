"""The log on a terminal: lines for people, and JSON wherever else it goes."""

import json
import os
import pty
import subprocess
import sys
from datetime import UTC
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.process.log import as_line

SAYS = """
import sys
from diloco.common.process import log
if "take" in sys.argv: log.take_stderr()
log.configure()
log.get(run="r", learner="a").info("training", local_step=1240, loss=3.21456, tokens_per_s=12345.6)
if "take" in sys.argv: import os; os.write(2, b"from a library\\n")
"""


def event(action: str, **fields: Any) -> dict[str, Any]:
    return {"action": action, "level": "info", "timestamp": "2026-01-31T12:00:05.25Z", **fields}


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (event("started", run="r", learner="a", position=3), "12:00:05  started: position 3"),
        (event("stopped", run="r", aggregator="one"), "12:00:05  stopped"),
        (
            event("committed", aggregator="one", learners=["a", "b"], took_s=0.123456),
            "12:00:05  committed: learners a b, took 0.123 s",
        ),
        (
            event("quarantined", level="warning", aggregator="one", learner="a", reason="odd"),
            "12:00:05  warning: quarantined: learner a, reason odd",
        ),
        (
            event("checkpoint_saved", size_bytes=1_234_567, number=None, exception="Trace:\n x"),
            "12:00:05  checkpoint saved: size 1.2 MB, number None\nTrace:\n x",
        ),
    ],
)
def test_a_line(said: dict[str, Any], line: str) -> None:
    assert as_line(said, UTC) == line


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(fields=st.dictionaries(st.sampled_from(["took_s", "a_per_s", "size_bytes", "x"]), VALUES))
def test_every_value_has_a_line(fields: dict[str, Any]) -> None:
    assert as_line(event("said", **fields)).startswith("1")


def written(*arguments: str, terminal: bool) -> str:
    """Returns the text that a process writes to its standard error."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", SAYS, *arguments]
    with subprocess.Popen(command, stderr=theirs) as process:
        os.close(theirs)
        found = b""
        while True:
            try:
                read = os.read(ours, 4096)
            except OSError:  # As a terminal says that nobody writes to it any more.
                break
            if not read:
                break
            found += read
    os.close(ours)
    assert process.returncode == 0
    return found.decode()


@pytest.mark.parametrize("arguments", [(), ("take",)])
def test_a_terminal_has_lines_and_everything_else_json(arguments: tuple[str, ...]) -> None:
    lines = written(*arguments, terminal=True).splitlines()
    assert any("training: local step 1,240, loss 3.215, 12,346 tokens/s" in one for one in lines)
    assert any("from a library" in one for one in lines) == ("take" in arguments)
    assert not any(one.startswith("{") for one in lines)
    for one in written(*arguments, terminal=False).splitlines():
        assert json.loads(one)["action"] in ("training", "said")
