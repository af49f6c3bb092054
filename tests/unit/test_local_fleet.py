"""Daemons of a local run that fail: who is started again, and what is said of who is not."""

import os
import signal
import time
from pathlib import Path

import pytest

from diloco.common.protocol.errors import DilocoError
from diloco.operate.local.fleet import ALIKE, NICE, LocalDaemons, failure_kind, last_words

PATIENCE_S = 300.0
DIVERGED = """{"action": "started"}
error: the training loss is nan: this learner's parameters have diverged at step 17
hint: restart it
"""


def test_lives_that_end_alike_but_for_their_numbers() -> None:
    assert failure_kind(75, DIVERGED) == failure_kind(75, DIVERGED.replace("17", "4711"))
    assert failure_kind(75, DIVERGED) != failure_kind(76, DIVERGED)
    assert failure_kind(75, DIVERGED) != failure_kind(75, DIVERGED.replace("nan", "inf"))


def test_a_signal_says_nothing_of_why() -> None:
    assert failure_kind(-9, DIVERGED) == ""
    assert failure_kind(None, DIVERGED) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DIVERGED, "the training loss is nan: this learner's parameters have diverged at step 17"),
        ('Traceback:\n  File "x"\nValueError: no\n', "ValueError: no"),
        ('{"action": "started"}\n', ""),
        ("", ""),
    ],
)
def test_last_words(text: str, words: str) -> None:
    assert last_words(text) == words


def test_a_learner_that_fails_alike_is_given_up_and_the_last_one_ends_the_run(
    tmp_path: Path,
) -> None:
    logs, absent = tmp_path / "logs", str(tmp_path / "absent.toml")
    with LocalDaemons(logs) as fleet:
        for name in ("learner-0", "learner-1"):
            # As if a first life had trained: one that never did is misconfigured.
            (logs / f"{name}.log").write_text('{"action": "started"}\n')
            command = ["learner", "--config", absent, "--learner", name]
            fleet.start(name, command, spare=True)
        with pytest.raises(DilocoError) as caught:
            look_after(fleet)
        (said,) = fleet.given_up
        names = sorted(text.partition(" ")[0] for text in (said, caught.value.message))
        assert names == ["learner-0", "learner-1"]
        for text in (said, caught.value.message):
            assert f"failed the same way {ALIKE} times: there is no configuration file" in text
        assert [daemon.restarts for daemon in fleet.daemons.values()] == [ALIKE - 1] * 2


@pytest.mark.parametrize("before", ["", '{"action": "started"}\n'], ids=["never began", "began"])
def test_who_is_killed_comes_back_and_is_told(tmp_path: Path, before: str) -> None:
    logs = tmp_path / "logs"
    with LocalDaemons(logs) as fleet:
        (logs / "learner-0.log").write_text(before)
        command = ["learner", "--config", str(tmp_path / "absent.toml"), "--learner", "learner-0"]
        daemon = fleet.start("learner-0", command, spare=True)
        assert daemon.pid is not None
        os.kill(daemon.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + PATIENCE_S
        while not fleet.came_back and time.monotonic() < deadline_s:
            fleet.look_after()
            time.sleep(0.02)
        assert fleet.came_back == ["learner-0 was ended by SIGKILL, and starts again"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take niceness back")
def test_who_yielded_is_as_quick_as_others_once_nobody_else_is_there(tmp_path: Path) -> None:
    """All its threads: on a busy machine the last score of a run took minutes."""
    with LocalDaemons(tmp_path / "logs") as fleet:
        daemon = fleet.start("scores", ["dashboard", str(tmp_path), "--port", "0"], yields=True)
        assert daemon.pid is not None
        assert niceness(daemon.pid) == {NICE}
        fleet.hurry("scores")
        assert niceness(daemon.pid) == {0}
        assert not daemon.yields


def niceness(pid: int) -> set[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in threads}


def test_a_wrong_configuration_ends_the_run_at_once(tmp_path: Path) -> None:
    with LocalDaemons(tmp_path / "logs") as fleet:
        for name in ("learner-0", "learner-1"):
            command = ["learner", "--config", str(tmp_path / "absent.toml"), "--learner", name]
            fleet.start(name, command, spare=True)
        with pytest.raises(DilocoError, match="ended with status 2; the end of its log"):
            look_after(fleet)
        assert fleet.restarts == 0


def look_after(fleet: LocalDaemons) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        fleet.look_after()
        time.sleep(0.02)
