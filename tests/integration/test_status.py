"""`diloco status`, asked of real runs."""

import asyncio
import io
import json
import subprocess
import sys

import pytest
from harness import ENDLESS, World, environment
from rich.console import Console
from tiny_task import BATCH

from diloco.common.process.config import BusSection
from diloco.run.cli.opening import open_run
from diloco.run.state import RunStatus
from diloco.run.watch import Watch, read_runs
from diloco.show.status.screen import picture


def diloco(world: World, *arguments: str) -> str:
    """Returns the output of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "diloco", *arguments], cwd=world.folder, env=environment(),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = """
import json, sys
from diloco.program import app
app(sys.argv[1:], standalone_mode=False)
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(world: World, command: list[str]) -> list[str]:
    """The modules that a command loads."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *command], cwd=world.folder, env=environment(),
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def status_of(world: World) -> RunStatus:
    async def look() -> RunStatus:
        async with open_run(world.config_path) as opened:
            return await Watch(opened.context).begin()

    return asyncio.run(look())


def drawn(status: RunStatus) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(picture(status))
    return console.export_text()


def about(status: RunStatus) -> set[str]:
    return {finding.about for finding in status.alerts}


# A learner whose speed is declared is credited whatever the time: on a busy machine an honest one that
# gathers speed again claims more steps than it was seen to take (`test_credit.py` holds that rule).
DECLARED = {"max_steps_per_s": 1000.0, "max_tokens_per_step": BATCH}


def test_a_run_is_shown_as_it_goes_on(new_world) -> None:
    world = new_world(run=ENDLESS, bounds={"learners": {"a": DECLARED, "b": DECLARED}})
    waiting = status_of(world)
    assert (waiting.state, waiting.learners) == ("waiting for learners", ())
    world.aggregator()
    world.learner("a")
    world.learner("b")
    under_way = world.until(
        lambda: (
            (found := status_of(world)).updates_merged >= 12
            # Of two that were started at once one may have had its updates merged alone.
            and [one.name for one in found.learners if one.merged and one.loss] == ["a", "b"]
            and {one.state for one in found.learners} == {"training"}
            and found
        ),
        "both train, and are merged",
    )
    assert [one.name for one in under_way.learners] == ["a", "b"]
    assert under_way.tokens_per_s > 0
    assert under_way.versions_per_s > 0
    assert under_way.tokens_merged > 0
    assert {one.owner for one in under_way.fragments} == {"aggregator"}
    assert all(one.loss and one.staleness is not None for one in under_way.learners)
    assert under_way.alerts == ()
    assert {"training", "aggregator", "a", "b"} <= set(drawn(under_way).split())

    document = json.loads(diloco(world, "status", world.config_path.name, "--json"))
    assert document["run"] == world.name
    assert {one["name"] for one in document["learners"]} == {"a", "b"}
    # Where there is no terminal it is shown once.
    assert "under way" in diloco(world, "status", world.config_path.name)
    for command in (
        ["status", "run.toml", "--json"],
        ["status", world.url],
        ["status", "run.toml", "--learners"],
    ):
        assert "jax" not in loaded_by(world, command)


@pytest.mark.slow
def test_alerts_come_with_what_is_amiss_and_go_with_it(new_world) -> None:
    world = new_world(run=ENDLESS, quorum={"liveness_timeout_s": 2.0, "deadline_s": 1.0},
                      sync={"reannounce_timeout_s": 0.5})  # fmt: skip
    aggregator = world.aggregator()
    learners = [world.learner("a"), world.learner("b")]
    world.until(
        lambda: [one.name for one in status_of(world).learners if one.merged] == ["a", "b"],
        "both are merged",
    )
    learners[0].kill()
    silent = world.until(
        lambda: "learner a" in about(found := status_of(world)) and found, "its silence is seen"
    )
    assert silent.learners[0].state == "silent"
    assert "runbooks/lagging-learner.md" in drawn(silent)

    aggregator.kill()
    world.until(
        lambda: {"fragment 0", "owners"} <= about(status_of(world)), "nobody makes versions"
    )

    world.aggregator()
    learners[1].terminate()
    left = world.until(
        lambda: (found := status_of(world)).learners[1].state == "left" and found, "it has left"
    )
    assert "learner b" not in about(left), left.alerts
    world.stop()
    ended = world.until(
        lambda: (found := status_of(world)).state == "ended" and found, "the run ends"
    )
    assert ended.alerts == ()


def test_the_end_of_a_long_tape_is_enough(new_world, monkeypatch) -> None:
    world = new_world(run=ENDLESS)
    world.aggregator()
    world.learner("a")
    world.until(lambda: status_of(world).updates_merged >= 12, "some updates are merged")
    whole = status_of(world)
    monkeypatch.setattr("diloco.run.watch.WINDOW", 2)
    short = status_of(world)
    assert [one.fragment for one in short.fragments] == [0, 1, 2]
    assert short.updates_merged >= whole.updates_merged
    assert short.global_step >= whole.global_step
    assert [one.name for one in short.learners] == ["a"]


@pytest.mark.long
def test_runs_of_a_bus_are_listed(new_world, own_nats_server) -> None:
    assert asyncio.run(read_runs(BusSection(url=own_nats_server.url))) == []
    world = new_world(server=own_nats_server)
    world.aggregator()
    world.learner("a")
    world.until(
        lambda: asyncio.run(read_runs(world.config.bus))[0].state == "ended", "the run ends"
    )
    [line] = asyncio.run(read_runs(world.config.bus))
    assert (line.run, line.epoch, len(line.fragments), line.steps) == (world.name, 0, 3, 96)
    assert line.global_step >= 88
    assert line.versions > 3
    assert world.name in diloco(world, "status", own_nats_server.url)
    [document] = json.loads(diloco(world, "status", world.config_path.name, "--runs", "--json"))
    assert document["run"] == world.name
