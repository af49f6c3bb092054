"""The student of the benches at a pace, as learners that are machines of their own have one."""

import dataclasses
import time

from bench.tasks import student


def build(*, steps, seed, backdoor=-1):
    task = student(steps=steps, seed=seed, backdoor=backdoor)

    def batches(learner, position):
        for batch in task.batches(learner, position):
            if learner != "probe":
                time.sleep(0.04)
            yield batch

    return dataclasses.replace(task, batches=batches)
