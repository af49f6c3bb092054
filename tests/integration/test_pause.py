"""A run of real processes that is paused, made longer, continued and ended early."""

import asyncio
import time

import numpy as np
import pytest
from audit import judged, read_tape
from harness import ENDLESS, PATIENCE_S, World, eventually

from diloco.common.process.config import load_config
from diloco.common.protocol.errors import RunMismatchError
from diloco.operate import change as operate
from diloco.operate.create import create_from
from diloco.run.model.files import run_export
from diloco.show.status.screen import look_back

SHORT, LONG = 32, 64
SLOWER = {"options": {"notes": "notes", "sleep_s": 0.02}}
LEARNERS = ("learner-0", "learner-1")
STILL_S = 2.0


def ask(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


def steps_of(world: World) -> list[int]:
    """How many batches each learner has drawn."""
    return [len((world.folder / "notes" / name).read_text().splitlines()) for name in LEARNERS]


def stand_still(world: World) -> bool:
    before = steps_of(world)
    time.sleep(STILL_S)
    return steps_of(world) == before


def test_a_run_is_paused_made_longer_continued_and_ended(new_world):
    world = new_world(run=ENDLESS, task=SLOWER)
    target = str(world.config_path)
    processes = [world.aggregator(), *(world.learner(name) for name in LEARNERS)]
    world.until(lambda: min(read_tape(world).versions()) >= 2, "versions")

    ask(operate.change(target, ["run.paused=true"]))
    eventually(lambda: stand_still(world), "learners wait")
    assert all(process.running for process in processes)
    paused = steps_of(world)
    longer = f"run.steps={ENDLESS['steps'] + 1000}"
    shown = ask(operate.preview(target, [longer]))
    assert [line.partition(":")[0] for line in shown.changed] == ["run.steps"]
    assert any("horizon stays" in line for line in shown.rates)
    ask(operate.change(target, [longer, "run.paused=false"]))
    made = min(read_tape(world).versions())
    world.until(lambda: min(read_tape(world).versions()) >= made + 2, "further versions")
    assert all(now > then for now, then in zip(steps_of(world), paused, strict=True))

    assert ask(operate.end(target)) > 0
    with pytest.raises(RunMismatchError, match="has stopped"):
        ask(operate.end(target))
    assert [process.wait() for process in processes] == [0] * len(processes)
    tape = read_tape(world)
    tape.check()
    done = ask(look_back(target, everything=False))
    assert [event.what.split()[0].rstrip(":") for event in done] == [
        "created", "paused", "settings", "stop", "end",
    ]  # fmt: skip
    assert all(event.by.startswith("operator ") for event in done[1:4])


@pytest.mark.long
def test_a_run_is_made_longer_while_nobody_runs_and_is_joined_with_the_old_file(
    new_world, tmp_path
):
    world = new_world(run={"steps": SHORT})
    target, before = str(world.config_path), world.config_path.read_text()
    ask(operate.change(target, ["run.steps=50"]))
    first = [world.aggregator(), world.learner("learner-0")]
    world.until(lambda: min(read_tape(world).versions()) >= 1, "versions")
    # Of the stopped processes nobody can hear of the change; whoever starts later finds it.
    for process in first:
        process.terminate()
    assert [process.wait() for process in first] == [0, 0]
    ask(operate.change(target, [f"run.steps={LONG}"]))
    assert world.config_path.read_text() == before
    processes = [world.aggregator(), *(world.learner(name) for name in LEARNERS)]
    assert [process.wait() for process in processes] == [0] * 3
    tape = read_tape(world)
    tape.check()
    assert SHORT < max(record.global_step for record in tape.all_records()) <= LONG
    assert judged(world).findings == []

    # Once it has ended it goes on as another run, from its parameters.
    with pytest.raises(RunMismatchError, match="has stopped") as refused:
        ask(operate.change(target, ["run.steps=96"]))
    assert "diloco export RUN DIR" in str(refused.value.hint)
    ended = world.params()
    folder = tmp_path / "model"
    run_export(target, folder, "safetensors", None)
    name = f"{world.name}-longer"
    new = world.variant("longer", {"run": {"name": name, "steps": 96}})
    create_from(load_config(new), folder / "model.safetensors")
    world.document["run"]["name"] = name
    world.config_path.write_text(new.read_text())
    for leaf, value in world.params().items():
        assert np.array_equal(value, ended[leaf])
