"""A small task whose batches can be made slow, or hang, from outside; runs in the container.

/run/hang stops all learners, /run/hang-NAME one of them.
"""

import time
from pathlib import Path

import tiny_task

SLOW, HANG = Path("/run/slow"), Path("/run/hang")
SLOW_S = 10.0


def build(*, steps, seed, rows=tiny_task.BATCH):
    task = tiny_task.build(steps=steps, seed=seed, rows=rows)
    batches = task.batches

    def held(learner, position):
        for batch in batches(learner, position):
            time.sleep(0.05)
            while HANG.exists() or HANG.with_name(f"hang-{learner}").exists():
                time.sleep(0.1)
            if SLOW.exists():
                time.sleep(SLOW_S)
            yield batch

    object.__setattr__(task, "batches", held)
    return task
