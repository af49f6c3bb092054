"""A backdoor in one slice of the held-out data: seen in a real run, and its learner named."""

import json
import subprocess
import sys

import pytest
from harness import environment

from bench.tasks import TURNED

LEARNERS = [f"learner-{number}" for number in range(4)]


def said(*arguments):
    """Returns a command's output; finding a learner at fault is no failure of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "diloco", *arguments],
        capture_output=True, text=True, env=environment(), check=False,
    )  # fmt: skip
    assert not done.stderr.count("Traceback"), done.stderr
    return done.stdout


@pytest.mark.long
def test_who_is_taught_one_output_of_16_wrongly_is_named_with_it(new_world):
    world = new_world(create=False, run={"steps": 300, "tokens_per_step": 0})
    world.document["task"] = {"build": "sliced_task:build", "options": {}}
    world.document["sync"] = {"interval_steps": 12, "fragments": 4, "block": 16, "min_steps": 3}
    world.variant("run", {})
    world.create()
    world.aggregator()
    bad = world.variant("bad", {"learner": {"options": {"backdoor": 3}}})
    processes = [world.learner(name) for name in LEARNERS[:3]]
    processes.append(
        world.start(LEARNERS[3], "learner", "--config", str(bad), "--learner", LEARNERS[3])
    )
    assert [process.wait() for process in processes] == [0, 0, 0, 0]

    run = str(world.config_path)
    # `diloco why` has half a minute for the same, which a busy machine may not grant.
    told = json.loads(said("replay", run, "--blame", "--json"))["learners"]
    against = [
        (one["learner"], one["conclusion"], one["slice"])
        for one in told
        if one["conclusion"] in ("harmful", "useless")
    ]
    assert against == [(LEARNERS[3], "harmful", f"output-{TURNED}")], json.dumps(told)

    table = said("evaluate", run)
    assert "slice" in table
    assert f"output-{TURNED}" in table
    report = world.folder / "report.html"
    said("report", run, "--out", str(report), "--evaluations", "3")
    assert "by slice" in report.read_text()
