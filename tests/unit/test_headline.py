"""The headline benches' own arithmetic: the schedule, what counts as useful, when to save."""

import itertools

import pytest

from bench import headline_goodput as goodput
from bench.data_parallel import StepDone, best_interval_steps
from bench.tasks import Device, paced

CONDITIONS = goodput.Conditions(
    machines=3, mtbf_s=50.0, return_s=10.0, seconds=1000.0, step_s=1.0, seed=1, preset="tiny"
)


def test_a_schedule_is_its_seed_s() -> None:
    one = goodput.make_schedule(CONDITIONS)
    assert one == goodput.make_schedule(CONDITIONS)
    assert one != goodput.make_schedule(CONDITIONS._replace(seed=2))
    assert goodput.make_schedule(CONDITIONS._replace(mtbf_s=0.0)) == []


def test_a_machine_dies_only_while_it_is_there() -> None:
    for machine in range(3):
        own = [outage for outage in goodput.make_schedule(CONDITIONS) if outage.machine == machine]
        assert own
        assert all(one.back_s <= two.at_s for one, two in itertools.pairwise(own))
        assert all(5 <= outage.back_s - outage.at_s <= 15 for outage in own)


def test_a_higher_rate_has_the_same_chances_sooner() -> None:
    seldom = goodput.make_schedule(CONDITIONS._replace(mtbf_s=100.0, machines=1))
    often = goodput.make_schedule(CONDITIONS._replace(mtbf_s=50.0, machines=1))
    assert often[0].at_s == pytest.approx(seldom[0].at_s / 2)


def test_shares_of_the_span() -> None:
    outages = [
        goodput.Outage(100.0, 200.0, 0),
        goodput.Outage(150.0, 300.0, 1),
        goodput.Outage(900.0, 1100.0, 2),
    ]
    assert goodput.all_there(CONDITIONS, outages) == pytest.approx(0.7)
    assert goodput.machine_share(CONDITIONS, outages) == pytest.approx(1 - 350 / 3000)
    assert goodput.all_there(CONDITIONS, []) == 1


def test_steps_that_are_taken_again_count_once() -> None:
    progress = [
        StepDone(1.0, 1, 8),
        StepDone(2.0, 1, 9),
        StepDone(3.0, 1, 10),
        StepDone(6.0, 2, 9),
        StepDone(7.0, 2, 10),
        StepDone(8.0, 2, 11),
        StepDone(9.0, 2, 12),
    ]
    assert goodput.useful_steps(progress, 2.5, 8.5) == 2
    assert goodput.lost_steps(progress) == [2]
    assert goodput.restarts_s(progress, [0.5, 5.0]) == [0.5, 1.0]


def test_goodput_is_of_the_row_without_faults() -> None:
    calm = {"mtbf_s": 0.0, "seconds": 100.0, "ours_steps": 90.0, "data_parallel_steps": 100}
    faulty = {"mtbf_s": 9.0, "seconds": 50.0, "ours_steps": 36.0, "data_parallel_steps": 10}
    rows = goodput.goodputs([faulty, calm])
    assert rows[0]["ours_goodput"] == pytest.approx(0.8)
    assert rows[0]["data_parallel_goodput"] == pytest.approx(0.2)
    assert "ours_goodput" not in goodput.goodputs([{"mtbf_s": 9.0}])[0]


def test_checkpoints_as_often_as_loses_least() -> None:
    # Young: sqrt(2 x 0.5 s x 100 s) = 10 s.
    assert best_interval_steps(0.5, 1.0, 100.0, 1.0) == 10
    assert best_interval_steps(0.5, 30.0, 100.0, 1.0) == 30
    assert best_interval_steps(0.0, 0.1, 100.0, 1.0) == 1


def test_a_device_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept_s = [100.0], []
    monkeypatch.setattr("bench.tasks.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("bench.tasks.time.sleep", slept_s.append)
    device = Device(3.0)
    device.wait()
    device.begin()
    now_s[0] += 0.5
    device.wait(1 / 3)
    device.wait()
    now_s[0] += 9
    device.wait()
    assert slept_s == pytest.approx([0.0, 0.5, 2.5, 0.0])


def test_pace_does_not_change_the_batches() -> None:
    task = paced(steps=10, seed=0, step_s=0.0, matrices=1 << 15)
    first = task.batches("learner-0", 0)
    resumed = task.batches("learner-0", 1)
    next(first)
    assert next(first) == next(resumed)
