"""`diloco local`: a run from beginning to end, and however it ends no process is left behind."""

import asyncio
import json
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from audit import read_tape
from harness import PATIENCE_S, ROOT, World, all_gone, environment, eventually

from diloco.common.protocol.errors import Exit
from diloco.common.storage.tape import last_record
from diloco.program import main
from diloco.run.cli.opening import open_run

SMALL = ["--set", "sync.interval_steps=8", "--set", "sync.fragments=3", "--set", "sync.block=16"]
FIELDS = {
    "run": str,
    "learners": int,
    "steps": int,
    "tokens": int,
    "eval_loss_first": float,
    "eval_loss_last": float,
    "versions": int,
    "updates_sent": int,
    "updates_merged": int,
    "updates_rejected": int,
    "bytes_up": int,
    "bytes_down": int,
    "stall_fraction": float,
    "wall_s": float,
    "restarts": int,
}


def local(run_dir: Path, *options: str) -> "subprocess.Popen[str]":
    """Start `diloco local` as from a terminal's shell, with a process group of its own."""
    return started("--run-dir", str(run_dir), *options)


def started(*options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "diloco", "local", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )


def family(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """All that a process has started, directly or not."""
    return psutil.Process(process.pid).children(recursive=True)


def until_training(process: "subprocess.Popen[str]", run_dir: Path, learners: int) -> None:
    """Until its learners have made versions."""

    def trains() -> bool:
        assert process.poll() is None, process.communicate()
        logs = [run_dir / "logs" / f"learner-{index}.log" for index in range(learners)]
        aggregator = run_dir / "logs" / "aggregator.log"
        return all(log.exists() and '"started"' in log.read_text() for log in logs) and (
            '"committed"' in aggregator.read_text()
        )

    eventually(trains, "learners train", every_s=0.2)


@pytest.fixture
def tidy():
    """Whatever a test has started ends with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            family_of = family(process)
            process.kill()
            for child in family_of:
                if child.is_running():
                    child.kill()
        process.communicate()


@pytest.mark.long
def test_a_task_of_the_users_own_from_beginning_to_end(tmp_path, tidy):
    """Two learners of unequal speed, one killed on the way: the digits are learned."""
    run_dir = tmp_path / "run"
    process = local(
        run_dir, "--task", "examples.digits:build", "--learners", "2", "--steps", "160", "--json",
        "--kill", "learner-1@40", "--speed", "1,0.5", "--set", "outer.momentum=0", *SMALL,
        # However slow this machine is, the run is not over before the killed one is back.
        "--set", "quorum.min_learners=2", "--set", "quorum.liveness_timeout_s=600",
        "--set", "quorum.deadline_s=600",
    )  # fmt: skip
    tidy.append(process)
    eventually(lambda: family(process), "processes")
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert len(out.splitlines()) == 1, "standard output is for the summary alone"
    summary = json.loads(out)
    assert {key: type(value) for key, value in summary.items()} == FIELDS
    assert summary["learners"] == 2
    assert summary["steps"] == 160
    assert summary["restarts"] == 1
    assert summary["eval_loss_last"] < 0.5 * summary["eval_loss_first"]
    scored = (run_dir / "logs" / "scores.log").read_text().splitlines()
    steps = [json.loads(line)["global_step"] for line in scored if "global_step" in line]
    assert (steps[0], steps[-1]) == (0, 160), "beside the run, from its beginning to its end"
    assert 0 <= summary["stall_fraction"] < 1
    assert summary["updates_rejected"] == 0
    assert "dashboard: http://127.0.0.1:" in err

    tape = read_tape(World(run_dir, tomllib.loads((run_dir / "run.toml").read_text())))
    tape.check()
    assert summary["versions"] == sum(tape.versions())
    assert summary["updates_merged"] == len(tape.merged())
    # Who is late back, by the load on this machine, may send after the end.
    in_time = [seq for seq in tape.sent().values() if seq < tape.end[0]]
    assert summary["updates_sent"] == len(in_time)
    assert len(tape.lives("learner-1")) == 2
    assert len(tape.lives("learner-0")) == 1
    code = f"import diloco; past = diloco.open({str(run_dir)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr, "a script that closes nothing ends quietly"


def commits(run_dir: Path) -> int:
    return (run_dir / "logs" / "aggregator.log").read_text().count('"committed"')


def check_server_returns(process: "subprocess.Popen[str]", run_dir: Path) -> None:
    """A nats-server that dies is started again, and the run goes on."""
    (server,) = [child for child in family(process) if "nats-server" in child.name()]
    server.kill()
    eventually(lambda: server not in family(process), "it is dead")
    before = commits(run_dir)
    eventually(lambda: commits(run_dir) > before + 3, "commits after nats-server died")


@pytest.mark.long
def test_no_process_is_left_however_it_ends(tmp_path, tidy):
    """Ctrl-C, and SIGKILL of the command itself, with a nats-server that died on the way."""
    ways = {signal.SIGINT: tmp_path / "interrupted", signal.SIGKILL: tmp_path / "killed"}
    started = {}
    for number, run_dir in ways.items():
        started[number] = local(
            run_dir, "--task", "tiny_task:build", "--learners", "2", "--steps", "1000000",
            "--set", "task.options={sleep_s = 0.01}", *SMALL,
        )  # fmt: skip
        tidy.append(started[number])
    for number, process in started.items():
        until_training(process, ways[number], learners=2)
        check_server_returns(process, ways[number])
        children = family(process)
        names = {" ".join(child.cmdline()) for child in children}
        assert sum("diloco learner" in name for name in names) == 2, names
        assert sum("nats-server" in name for name in names) == 1, names
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
        eventually(lambda c=children: all_gone(c), f"all gone: {children}")
        assert process.returncode == (130 if number == signal.SIGINT else -number), err
        assert "Traceback" not in out + err
    logs = ways[signal.SIGINT] / "logs"
    assert all('"left"' in (logs / f"learner-{index}.log").read_text() for index in range(2))
    assert '"stopped"' in (logs / "aggregator.log").read_text()
    check_resumes(ways[signal.SIGKILL], tmp_path / "elsewhere", tidy)


def check_resumes(crashed: Path, moved: Path, tidy: list["subprocess.Popen[str]"]) -> None:
    """Checks that killed processes resume, in another folder, until their terminal is closed."""
    made = sum(versions_of(crashed))
    crashed.rename(moved)
    before = commits(moved)
    process = started("--resume", str(moved))
    tidy.append(process)
    eventually(lambda: commits(moved) > before + 3, "commits after it was resumed")
    second = started("--resume", str(moved))
    tidy.append(second)
    assert "is running" in second.communicate(timeout=PATIENCE_S)[1]
    children = family(process)
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=PATIENCE_S)
    eventually(lambda: all_gone(children), f"all gone: {children}")
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    assert not crashed.exists()
    assert sum(versions_of(moved)) > made


def versions_of(run_dir: Path) -> list[int]:
    async def look() -> list[int]:
        async with open_run(run_dir, reads=True) as run:
            fragments = range(len(run.context.layout.fragments))
            return [(await last_record(run.context, fragment))[0].version for fragment in fragments]

    return asyncio.run(look())


def test_wrong_options_are_answered_with_a_sentence(tmp_path, monkeypatch, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    wrong = {
        ("--speed", "1,2"): "expected 2 shares of full speed in (0, 1]",
        ("--speed", "fast"): "expected numbers joined by commas",
        ("--kill", "nobody@3"): "expected NAME@STEP with one of learner-0, learner-1",
        ("--kill", "learner-0"): "expected NAME@STEP",
        ("--set", "momentum=0"): "expected section.key=value",
        ("--set", "sync.fragmets=3"): "unknown key 'sync.fragmets'",
        ("--set", "outer.momentum=2"): "outer.momentum",
        ("--config", "absent.toml"): "absent.toml",
        ("--run-dir", str(full)): "is not empty",
        ("--task", "nowhere:build"): "nowhere",
        ("--learners", "0"): "--learners",
        ("--steps", "0"): "--steps",
    }
    for number, (options, sentence) in enumerate(wrong.items()):
        folder = str(tmp_path / str(number))
        words = ["diloco", "local", "--run-dir", folder, "--learners", "2", *options]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().err
        assert ended.value.code in (Exit.CONFIG, Exit.TASK, Exit.FAILED), (options, said)
        assert sentence in said, (options, said)
        assert "Traceback" not in said, (options, said)
    assert [path.name for path in full.iterdir()] == ["file"]
