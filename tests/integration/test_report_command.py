"""The commands on a real run: scores as it moves, its report, and text of the built-in model."""

import asyncio
import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ENDLESS, ROOT, World, environment, make_world

from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import Exit
from diloco.run.cli.opening import open_run
from diloco.run.model.evaluate import Scorer
from diloco.run.timeseries import TimeSeries
from diloco.show.page.lanes import make_lanes
from diloco.show.page.report import gather


def diloco(*arguments: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "diloco", *arguments], cwd=cwd, env=environment(),
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.long
def test_a_run_with_a_kill_from_beginning_to_report(new_world, own_nats_server: NatsServer) -> None:
    """Two learners, one killed and back; scores are followed, and shown in the report."""
    world: World = new_world(server=own_nats_server, run=ENDLESS)
    path = str(world.config_path)
    following = world.start("follow", "evaluate", path, "--follow", "--every-s", "0.5", "--json")
    world.aggregator()
    world.learner("a")
    victim = world.learner("b")
    world.until(lambda: world.steps("b") > 30, "b trains")
    victim.kill()
    again = world.learner("b")
    world.until(lambda: again.events("started"), "b is back")
    came = world.steps("b")
    world.until(lambda: world.steps("b") > came + 24, "b trains again")
    world.stop()
    assert following.wait() == 0, following.log()

    # Beside its scores stand its log lines.
    lines = [json.loads(line) for line in following.log().splitlines()]
    scores = [line for line in lines if "action" not in line]
    assert len(scores) >= 2
    assert scores[-1]["loss"] < 0.8 * scores[0]["loss"]
    assert scores[-1]["versions"] > scores[0]["versions"]

    out = world.folder / "new" / "page.html"
    done = diloco("report", path, "--out", str(out), cwd=world.folder)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip())
    assert page == out
    head = page.read_text()
    assert f"{scores[-1]['loss']:.3f}" in head
    assert "1 restart, 1 unclean end" in head


@pytest.fixture(scope="module")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The folder of a local run that a learner has trained to its end; its server is stopped."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    with contextlib.ExitStack() as stack:
        with NatsServer(folder / "nats") as server:
            world = make_world("ended", folder, server.url, run={"steps": 64})
            stack.callback(world.end)
            world.create()
            for process in (world.aggregator(), world.learner("a")):
                world.until(lambda process=process: not process.running, "the run's end")
        yield world


def look(target: Path, evaluations: int):
    return gather(str(target), evaluations, lambda *_: None)[0]


@pytest.mark.long
def test_views_of_earlier_times_are_scored_from_what_is_stored(ended_run: World) -> None:
    shown = look(ended_run.folder, 4)
    series: TimeSeries = shown.series
    assert series.ended_s is not None
    assert [lane.learner for lane in make_lanes(series)] == ["a"]
    losses = [score.loss for score in shown.scores]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert all(math.isfinite(loss) for loss in losses)

    async def newest() -> wire.Score:
        async with open_run(ended_run.folder) as run:
            return await (await Scorer.of_run(run.context)).newest()

    assert asyncio.run(newest()).loss == losses[-1], "the same view has the same score"


def test_views_that_garbage_collection_took_are_passed_over(ended_run: World) -> None:
    objects = ended_run.store / names.fragment_prefix(ended_run.name, 0)
    views = sorted(objects.glob("*-view-*"))[:-1]
    assert len(views) > 1
    with away(views):
        shown = look(ended_run.folder, 4)
    assert 1 <= len(shown.scores) < 4


@contextlib.contextmanager
def away(paths: list[Path]) -> Iterator[None]:
    """As if garbage collection had taken these files."""
    for path in paths:
        path.rename(path.with_name(f"hidden.{path.name}"))
    yield
    for path in paths:
        path.with_name(f"hidden.{path.name}").rename(path)


@pytest.mark.long
def test_a_task_that_writes_no_text(ended_run: World) -> None:
    done = diloco("sample", str(ended_run.folder), cwd=ended_run.folder)
    assert done.returncode == Exit.TASK
    assert "tiny_task:build cannot generate text" in done.stderr
    assert "Traceback" not in done.stderr


def test_lm_eval_takes_decoders_and_local_task_files(ended_run: World) -> None:
    file = ended_run.folder / "task.yaml"
    file.write_text("task: one\n")
    for name, wanted in ((str(file), "writes no folder that"), ("hellaswag", "a task file of")):
        words = ["evaluate", str(ended_run.folder), "--lm-eval", name]
        done = diloco(*words, cwd=ended_run.folder)
        assert done.returncode in (Exit.CONFIG, Exit.TASK)
        assert wanted in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["report", "evaluate", "sample"])
def test_a_run_that_is_not_there(command: str, tmp_path: Path) -> None:
    done = diloco(command, str(tmp_path / "nothing"))
    assert done.returncode == Exit.CONFIG
    assert "neither a configuration file nor the folder" in done.stderr
    assert "Traceback" not in done.stderr
