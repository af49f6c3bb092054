"""The headline benches' baseline with real processes: a machine dies, the job goes on."""

import itertools
import time
from pathlib import Path

import pytest

from bench.data_parallel import Job, Scheduler

WITHIN_S = 400.0
STEPS = 60


def look(scheduler: Scheduler, until: int) -> None:
    """Let the job go on up to a step, or to its end."""
    deadline_s = time.monotonic() + WITHIN_S
    while not scheduler.done:
        progress = scheduler.progress()
        if progress and progress[-1].step >= until:
            return
        assert time.monotonic() < deadline_s, (scheduler.job.path / "log").read_text()[-3000:]
        scheduler.look()
        time.sleep(0.02)


@pytest.mark.slow
def test_the_job_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    job = Job(
        folder=str(tmp_path / "job"),
        hosts=["127.0.0.1"] * 2,
        steps=STEPS,
        seed=0,
        step_s=0.1,
        checkpoint_steps=5,
        task={"matrices": 1 << 16},
    )
    with Scheduler(job) as scheduler:
        for rank in range(2):
            scheduler.start(rank)
        look(scheduler, 20)
        scheduler.kill(1)
        killed_at = scheduler.progress()[-1].step
        scheduler.start(1)
        look(scheduler, STEPS + 1)
        progress = scheduler.progress()
    assert progress[-1].step == STEPS
    assert {step.life for step in progress} == {1, 2}
    again = next(step.step for step in progress if step.life == 2)
    assert 10 < again <= killed_at + 2
    assert (again - 1) % 5 == 0
    for one, two in itertools.pairwise(progress):
        assert two.step == (again if one.life != two.life else one.step + 1)
