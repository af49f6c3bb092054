"""The figures of a run's messages, and the sinks that are given them."""

import asyncio

import pytest
from runlab import Lab

from diloco.common.protocol import wire
from diloco.common.storage.tape import Entry
from diloco.show.trackers.follow import Points, Tracker


class RecordingSink:
    """A sink that remembers."""

    def __init__(self):
        self.points = []
        self.closed = False

    def write(self, point):
        self.points.append(point)

    def close(self):
        self.closed = True


def beat(**changes):
    fields = {
        "learner": "a", "incarnation": 1, "local_step": 9, "global_step": 7, "tokens": 90,
        "loss": 2.0, "tokens_per_s": 10.0, "step_time_s": 0.1, "stall_s": 1.0, "data_s": 2.0,
        "run_s": 10.0, "bytes_up": 0, "bytes_down": 0, "updates_sent": 1, "state": "training",
        "metrics": {"accuracy": 0.5},
    }  # fmt: skip
    return wire.Heartbeat(**(fields | changes))


def test_a_heartbeat_says_metrics_and_shares_of_time():
    point = Points().of_heartbeat(beat(), 100.0)
    assert (point.step, point.at_s) == (7, 100.0)
    assert point.values == {
        "learners/a/tokens_per_second": 10.0,
        "learners/a/accuracy": 0.5,
        "learners/a/stall_share": 0.1,
        "learners/a/data_wait_share": 0.2,
    }


@pytest.mark.parametrize("once", [True, False])
def test_a_run_is_followed_from_its_beginning(once):
    kept = RecordingSink()

    async def run():
        lab = Lab(sections={"run": {"name": "lab", "steps": 16}})
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.send_many("a", 2)
            await asyncio.sleep(0)
            tracker = Tracker(lab.context, [kept])
            if once:
                await tracker.follow(once=True)
            else:
                following = asyncio.ensure_future(tracker.follow(once=False))
                await lab.until(lambda: _async(len(kept.points) >= 4), "points of two rounds")
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            tracker.close()

    asyncio.run(asyncio.wait_for(run(), 300))
    names = [set(point.values) for point in kept.points]
    assert {"learners/a/loss", "learners/a/step_seconds"} in names
    rounds = [point for point in kept.points if "train/loss" in point.values]
    assert [point.values["round/updates"] for point in rounds] == [1, 1]
    assert kept.closed


async def _async(value):
    return value


def test_a_join_says_how_many_slices_train():
    points = Points()
    body = wire.Join(
        run="lab", learner="a", layout="0" * 32, host="h",
        slices=wire.LearnerSlices(present=3, given=4, least=1),
    )  # fmt: skip
    (point,) = points.of_entry(Entry(1, 5.0, "diloco.lab.join.a", body, 99))
    assert (point.at_s, point.values) == (5.0, {"learners/a/slices": 3.0})
    alone = body.model_copy(update={"slices": None})
    assert [*points.of_entry(Entry(1, 5.0, "diloco.lab.join.a", alone, 99))] == []
