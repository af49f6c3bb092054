"""Logs in systemd's journal, where each line begins with its priority; and in others' programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.common.process import log


def logged(path: Path, monkeypatch: pytest.MonkeyPatch, *, journal: bool) -> list[str]:
    """A line of each level, and an error's, as a file that stands for the journal has them."""
    with path.open("w", buffering=1) as file:
        status = os.fstat(file.fileno())
        inode = status.st_ino if journal else 1
        monkeypatch.setattr(sys, "stderr", file)
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{inode}")
        log.configure("debug")
        for level in ("debug", "info", "warning", "error"):
            getattr(log.get(run="demo"), level)("happened")
        file.write(log.errors("error: one\nhint: two\n"))
    return path.read_text().splitlines()


def test_lines_have_their_priorities_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = logged(tmp_path / "journal", monkeypatch, journal=True)
    assert [line[:4] for line in lines[:4]] == ["<7>{", "<6>{", "<4>{", "<3>{"]
    assert lines[4:] == ["<3>error: one", "<3>hint: two"]


def test_elsewhere_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = logged(tmp_path / "file", monkeypatch, journal=False)
    assert {line[0] for line in lines[:4]} == {"{"}
    assert lines[4:] == ["error: one", "hint: two"]


IN_A_PROGRAM = """
import sys, structlog
from diloco.common.process import log
with log.within_anothers_program():
    log.get(run="demo").debug("for developers")
    log.get(run="demo").info("for the user")
print(structlog.is_configured())
structlog.configure(processors=[lambda _logger, _name, event: f"theirs: {event['event']}"])
with log.within_anothers_program():
    log.get().info("for the user")
"""


def test_a_program_of_the_users_own_has_its_output_for_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_A_PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["False", "theirs: for the user"]
    (line,) = done.stderr.splitlines()
    assert '"action": "for the user"' in line
