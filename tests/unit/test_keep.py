"""A run in pieces is the run in one: what is kept between them is all there is."""

import itertools

import pytest

from bench import emulate, large, quality, sweep
from bench.sweep import SweepCase
from diloco.learner.tensors import tree


def world_of(fleet):
    case = SweepCase(group="test", name="", budget=60, seed=0, task="student", fleet=fleet)
    task, began = sweep.task_of(sweep.Recipe.of(case), 0), sweep.start_of(case)
    settings = sweep.settings_of(case)
    start = emulate.Start(task, tree.task_layout(task, settings.sync), began)
    weather = case.weather()._replace(look_steps=100)
    return emulate.World(settings, start, weather), {"start": start}


def after(calls):
    """A pause after so many questions."""
    count = itertools.count()
    return lambda: next(count) >= calls


@pytest.mark.long
@pytest.mark.parametrize("fleet", ["kills", "unequal"])
def test_an_emulated_run_goes_on_from_a_file(fleet, tmp_path):
    whole, _ = world_of(fleet)
    outcome = whole.run()
    assert len(outcome.looks) == 2
    world, named = world_of(fleet)
    path, pieces = tmp_path / "half", 0
    while (found := world.run(after(250))) is None:
        large.save(world, path, named)
        world, pieces = large.load(path, named), pieces + 1
    assert pieces >= 2
    assert found == outcome


def test_a_data_parallel_run_goes_on_from_a_file(tmp_path):
    case = SweepCase(group="test", name="", budget=30, seed=0, task="student", data_parallel=True)
    task = sweep.task_of(sweep.Recipe.of(case), 0)
    whole = quality.DataParallel(task, sweep.start_of(case), 4, 30, look_steps=10)
    loss = whole.run()
    began = sweep.start_of(case)
    first = quality.DataParallel(task, began, 4, 30, look_steps=10)
    assert first.run(after(17)) is None
    named = {"task": task, "began": began}
    large.save(first, tmp_path / "half", named)
    again = large.load(tmp_path / "half", named)
    assert again.step == 17
    assert again.run() == loss
    assert again.looks == whole.looks
