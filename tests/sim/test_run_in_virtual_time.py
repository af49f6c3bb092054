"""Whole runs in virtual time: production code, ledgers for tensors, every step accounted for."""

import asyncio

import pytest
from simactor import Actor
from simfault_rates import CALM, Faults
from simlearner import SimLearner
from simtensors import Ledger, Light
from simworld import World, ended

from diloco.common.protocol import names, wire
from diloco.learner.background import TrafficCounts
from diloco.learner.synchronizer import DELAYS, Meter

LEDGER = {
    "sync": {
        "interval_steps": 8,
        "fragments": 2,
        "min_steps": 2,
        "codec": "float32",
        "delta_codec": "float32",
        "block": 16,
        "snapshot_interval_versions": 3,
        "reannounce_timeout_s": 20.0,
    },
    "outer": {"optimizer": "sgd", "learning_rate": 1.0, "merge": "average"},
    "bounds": {"norm_clip": 1e8},
}


def settings(steps=60, **sections):
    document = {name: dict(section) for name, section in LEDGER.items()}
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return {"run": {"name": "sim", "steps": steps}, **document}


def make_world(seed=0, faults=CALM, steps=60, tensors=None, averaged=False, **sections):
    return World(
        settings(steps, **sections), seed=seed, tensors=tensors or Ledger(16 * 2048), faults=faults,
        averaged=averaged,
    )  # fmt: skip


async def run_fleet(world, learners):
    await world.create()
    aggregating = asyncio.ensure_future(world.keep_aggregating(lambda: (world.aggregator(), 1.0)))
    lives = [asyncio.ensure_future(learner.live()) for learner in learners]
    assert all(await asyncio.gather(*lives))
    await aggregating


def finished(world):
    """Checks that a run has ended with no update in flight; returns counts of updates by fate."""
    world.checkers.check_resolved()
    return world.checkers.fates()


def test_a_run_ends_by_itself_and_every_step_is_merged_once():
    world = make_world()
    learners = [SimLearner(world, index) for index in range(4)]
    world.run(lambda: run_fleet(world, learners))
    fates = finished(world)
    assert fates["rejected"] == 0
    # Each step is in one update of each of the two fragments.
    assert fates["steps"] == 2 * sum(learner.steps for learner in learners)
    assert fates["versions"] > 10
    assert all(abs(learner.steps - 60) < 12 for learner in learners)


def test_learners_say_how_long_answers_took_in_seconds_and_in_their_own_steps():
    world = make_world(steps=200)
    learners = [SimLearner(world, i, step_s=s) for i, s in enumerate((1.0, 1.0, 3.0))]
    world.run(lambda: run_fleet(world, learners))
    finished(world)
    for learner in learners:
        delays = learner.meter.delays
        assert len(delays) == DELAYS
        # The last of each of the two fragments is answered when no step follows.
        for steps, took_s in delays[:-2]:
            assert 0 < steps <= 24
            assert abs(took_s / learner.step_s - steps) <= 1 + steps / 10
        beat = learner.meter.heartbeat(1)
        assert beat.worst_delay_s == max(took_s for _, took_s in delays)
        assert beat.worst_delay_steps == max(steps for steps, _ in delays)
        assert beat.delay_steps == pytest.approx(sum(steps for steps, _ in delays) / DELAYS)
        assert 0 < beat.delay_s <= beat.worst_delay_s
        # Of a version only the way from its record counts, and not the wait for its round.
        adoptions = learner.meter.adoptions
        assert len(adoptions) == DELAYS
        assert 0 < beat.adoption_s < beat.delay_s
        assert beat.worst_adoption_s == max(took_s for _, took_s in adoptions)
        assert beat.adoption_steps == pytest.approx(beat.adoption_s / learner.step_s)
        assert beat.worst_adoption_steps == pytest.approx(beat.worst_adoption_s / learner.step_s)


def test_unequal_learners_contribute_what_they_have():
    world = make_world()
    learners = [SimLearner(world, i, step_s=s) for i, s in enumerate((1.0, 1.0, 2.0, 4.0))]
    world.run(lambda: run_fleet(world, learners))
    fates = finished(world)
    assert fates["steps"] == 2 * sum(learner.steps for learner in learners)
    fast, slow = learners[0].steps, learners[3].steps
    assert slow == pytest.approx(fast / 4, rel=0.3)
    # The fast learners set the pace: one round about every H of their steps.
    assert len(world.digests()[0]) == pytest.approx(60 / 8 + 2, abs=2)
    inputs = [len(record.inputs) for _, record in world.records(0)[2:-2]]
    assert sum(inputs) / len(inputs) > 2.5


def test_in_the_warm_up_versions_are_made_more_often():
    world = make_world(sync={"warmup_steps": 24, "warmup_interval_steps": 4})
    learners = [SimLearner(world, index) for index in range(4)]
    world.run(lambda: run_fleet(world, learners))
    fates = finished(world)
    assert fates["rejected"] == 0
    assert fates["steps"] == 2 * sum(learner.steps for learner in learners)
    clocks = [[record.global_step for _, record in world.records(f)] for f in (0, 1)]
    assert clocks[0][1:11] == [2, 6, 10, 14, 18, 22, 28, 36, 44, 52]
    assert clocks[1][1:11] == [4, 8, 12, 16, 20, 32, 40, 48, 56, 60]
    # A round covers what was trained since the one before: few steps early, more later.
    steps = [max((taken.steps for taken in r.inputs), default=0) for _, r in world.records(0)]
    assert max(steps[2:6]) < min(steps[8:10])


def test_the_same_seed_gives_the_same_run():
    def trace(seed):
        world = make_world(
            seed=seed, faults=Faults(delay=0.5, lost_answer=0.05, store_refused=0.05)
        )
        learners = [SimLearner(world, index) for index in range(3)]
        world.run(lambda: run_fleet(world, learners))
        return [record for fragment in (0, 1) for _, record in world.records(fragment)]

    assert trace(7) == trace(7)
    assert trace(7) != trace(8)


LOCKSTEP = {
    "sync": {"mode": "lockstep"},
    "quorum": {"min_learners": 3, "deadline_s": 3600.0, "liveness_timeout_s": 3600.0},
}


def lockstep_digests(kill_at, *, before, steps=24):
    """Returns the digests of a run in lockstep whose first aggregator dies at effect `kill_at`."""
    world = make_world(1, steps=steps, tensors=Light(32), **LOCKSTEP)
    learners = [SimLearner(world, index) for index in range(3)]
    lives = []

    def next_life():
        actor = world.aggregator()
        if not lives:
            actor.kill_at, actor.killed_before = kill_at, before
        lives.append(actor)
        return actor, 0.0

    async def scenario():
        await world.create()
        aggregating = asyncio.ensure_future(world.keep_aggregating(next_life))
        await asyncio.gather(*(learner.live() for learner in learners))
        await aggregating

    world.run(scenario)
    finished(world)
    return world.digests(), lives


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_killing_the_aggregator_at_any_effect_changes_no_digest(before):
    undisturbed, (life,) = lockstep_digests(None, before=True)
    assert life.operations > 20
    for kill_at in range(1, life.operations + 1):
        digests, lives = lockstep_digests(kill_at, before=before)
        assert len(lives) == 2
        assert digests == undisturbed, f"killed at effect {kill_at}"


def test_two_aggregators_on_the_same_fragments_never_fork():
    world = make_world(3, Faults(delay=1.0, delay_s=0.05))
    learners = [SimLearner(world, index) for index in range(3)]

    async def scenario():
        await world.create()
        pair = [world.aggregator("one"), world.aggregator("two")]
        await asyncio.gather(*(learner.live() for learner in learners))
        await asyncio.gather(*(ended(actor) for actor in pair))

    world.run(scenario)
    finished(world)
    writers = {record.aggregator for f in (0, 1) for _, record in world.records(f)}
    assert writers == {"create", "one", "two"}


def test_no_step_waits_while_bus_and_store_are_away():
    world = make_world(4)
    learners = [SimLearner(world, index) for index in range(3)]

    async def scenario():
        await world.create()
        aggregating = asyncio.ensure_future(
            world.keep_aggregating(lambda: (world.aggregator(), 1.0))
        )
        lives = [asyncio.ensure_future(learner.live()) for learner in learners]
        await asyncio.sleep(20)
        for actor in world.actors:
            actor.bus_cut_until_s = actor.store_cut_until_s = world.loop.now_s + 25
        before = [learner.steps for learner in learners]
        await asyncio.sleep(25)
        stepped = [learner.steps - steps for learner, steps in zip(learners, before, strict=True)]
        assert min(stepped) >= 23
        await asyncio.gather(*lives)
        await aggregating

    world.run(scenario)
    assert finished(world)["steps"] == 2 * sum(learner.steps for learner in learners)


EVERYBODY = {"quorum": {"min_learners": 2, "deadline_s": 3600.0, "liveness_timeout_s": 4.0}}


def test_the_first_of_two_processes_with_one_name_ends_and_the_second_goes_on():
    world = make_world(6, **EVERYBODY)
    first, second, other = (SimLearner(world, index) for index in (0, 0, 1))

    async def scenario():
        await world.create()
        aggregating = asyncio.ensure_future(
            world.keep_aggregating(lambda: (world.aggregator(), 1.0))
        )
        lives = [asyncio.ensure_future(one.live()) for one in (first, other)]
        await asyncio.sleep(20)
        lives.append(asyncio.ensure_future(second.live()))
        assert await asyncio.gather(*lives) == [False, True, True]
        await aggregating

    world.run(scenario)
    finished(world)
    assert first.superseded
    assert not second.superseded
    assert first.steps < 30
    assert second.steps > 30


def test_a_superseded_life_that_goes_on_is_not_waited_for():
    """The older life does not learn of the second process, which has died."""
    world = make_world(7, steps=120, **EVERYBODY)
    first, second, other = (SimLearner(world, index) for index in (0, 0, 1))

    async def beat_for_ever():
        bus = Actor("ghost", world).bus
        subject = names.heartbeat(world.run_name, first.name)
        beat = Meter(first.name, TrafficCounts()).heartbeat(first.incarnation)
        while True:
            await bus.publish(subject, wire.encode(beat))
            await asyncio.sleep(1.0)

    async def scenario():
        await world.create()
        aggregator = world.aggregator()
        lives = [asyncio.ensure_future(one.live()) for one in (first, other)]
        await asyncio.sleep(20)
        lives.append(asyncio.ensure_future(second.live()))
        ghost = asyncio.ensure_future(beat_for_ever())
        await asyncio.sleep(10)
        second.actor.kill()
        made = len(world.digests()[0])
        await asyncio.sleep(40)
        found = len(world.digests()[0])
        for task in (ghost, *lives):
            task.cancel()
        aggregator.kill()
        return found - made

    # A round of the other alone takes about H steps.
    assert world.run(scenario) >= 3


def test_a_damaged_fragment_stops_alone():
    world = make_world(5)
    learners = [SimLearner(world, index) for index in range(2)]

    async def scenario():
        await world.create()
        (_, beginning) = world.records(0)[0]
        world.store._objects[beginning.outer.name] = b"rotten"
        world.damaged = True
        actor = world.aggregator()
        lives = [asyncio.ensure_future(learner.live()) for learner in learners]
        await asyncio.sleep(40)
        assert not any(task.done() for task in (actor.tasks[0], *lives))
        for life in lives:
            life.cancel()

    world.run(scenario)
    assert len(world.digests()[0]) == 1
    assert len(world.digests()[1]) > 3
