"""Logs in systemd's journal: each line begins with its priority."""

import os
import sys
from pathlib import Path

import pytest

from diloco.common import log


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
