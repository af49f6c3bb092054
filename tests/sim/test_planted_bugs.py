"""The simulation finds bugs: each of these, planted in production code, within 500 seeds."""

import asyncio
from unittest import mock

import pytest
from simrun import KINDS, Trial, simulate
from simshrink import commit, explain, shrink

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.context import Context
from diloco.aggregator.core import garbage
from diloco.aggregator.core.state import State, UpdateId
from diloco.common import slices
from diloco.common.tape import data_position

SEEDS = 500


def position_before_the_commit():
    """Records say that all is resolved that was seen, also what waits."""
    return mock.patch("diloco.aggregator.core.memory.position", lambda state: state.seen_seq + 1)


def no_fence():
    """Records are published whatever the subject's last message is."""

    async def publish(
        context: Context, subject: str, payload: bytes, attempt_id: str, _expected: int
    ) -> int:
        return await context.runtime.retry(
            "publishing",
            lambda: context.bus.publish(subject, payload, msg_id=attempt_id),
            logger=context.logger,
        )

    return mock.patch("diloco.aggregator.swap.swap", publish)


def merged_again_out_of_order():
    """Recovery merges the inputs of a version in another order than its record says."""

    class Reversed(FragmentArrays):
        def merge_again(self, record, read):
            backwards = record.model_copy(update={"inputs": record.inputs[::-1]})
            super().merge_again(backwards, read)

    return mock.patch("diloco.aggregator.recovery.FragmentArrays", Reversed)


def redelivery_merged_again():
    """The machine looks for an update among those that wait, and forgets those it has resolved."""

    def is_known(state: State, update: UpdateId) -> bool:
        return update in state.pending

    return mock.patch("diloco.aggregator.core.memory.is_known", is_known)


def garbage_one_version_early():
    """Collection takes what the oldest version that it keeps is to be made from."""
    floor = garbage._floor

    def early(entries, replay_window_s):
        index = floor(entries, replay_window_s)
        return None if index is None else min(index + 1, len(entries) - 1)

    return mock.patch("diloco.aggregator.core.garbage._floor", early)


def blocks_where_they_come():
    """Shards are put together one after the other, whatever blocks they hold."""
    scatter = slices.scatter

    def in_a_row(rows_BxW, parts, rows_nxW):
        scatter(rows_BxW, slices.of_range(0, len(rows_nxW), 1), rows_nxW)

    return mock.patch("diloco.common.slices.scatter", in_a_row)


def position_from_any_replica():
    """A learner that comes back believes whatever replica answers where its data goes on."""
    return mock.patch("simworld.position_after_join", lambda c: data_position(c, c.learner))


def deaf_to_newer_joins():
    """A learner never looks whether another process has joined under its name."""

    async def never(_context, _life):
        await asyncio.Event().wait()

    return mock.patch("simworld.end_when_superseded", never)


BUGS = {
    # Beside a newer life for ever, it may hide how far that one got.
    deaf_to_newer_joins: {"superseded", "data"},
    position_from_any_replica: {"data"},
    position_before_the_commit: {"position"},
    no_fence: {"chain"},
    merged_again_out_of_order: {"stopped"},
    garbage_one_version_early: {"garbage", "trim"},
    # The simulated arithmetic sees it at once; production's would see another norm.
    blocks_where_they_come: {"breaks", "stopped"},
    # What is merged again is read again, also when its shards were to be collected.
    redelivery_merged_again: {"resolved", "garbage"},
}


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, record_property):
    with plant():
        for seed in range(SEEDS):
            violation = simulate(Trial(seed=seed)).violation
            if violation is not None:
                break
        else:
            pytest.fail(f"not found within {SEEDS} seeds")
    record_property("seeds", seed + 1)
    print(f"{plant.__name__} is found after {seed + 1} seeds: {violation}")
    assert violation.rule in BUGS[plant]


def test_a_failure_is_shown_by_seed_commit_and_minimal_trace():
    with no_fence():
        failed = simulate(Trial(seed=0))
        smallest = shrink(failed)
        text = explain(smallest)
    assert smallest.violation.rule == failed.violation.rule
    assert len(smallest.plan.kinds) < len(KINDS) / 2
    assert smallest.plan.learners * smallest.plan.fragments < 8
    assert text.startswith(f"seed 0 at commit {commit()} fails after")
    assert "diloco.sim.record.0 version" in text
