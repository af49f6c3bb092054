"""One bad machine among healthy ones: no fragment is stalled for longer than a lease and 10 s."""

import asyncio
import itertools
from functools import partial

import pytest
from simlearner import SimLearner
from simtensors import Light
from simworld import EPOCH_S, World, ended

STEPS, INTERVAL_STEPS = 64, 8
# What a fragment may be idle for, beside its lease's time to live.
IDLE_S = 10.0
LIMIT_S = 300.0
# When the store is away, in simulated seconds.
CUT_S = (20.0, 50.0)


def make_world(seed: int, bad_at: str = "") -> World:
    world = World(
        {
            "run": {"name": "sim", "steps": STEPS},
            "sync": {
                "interval_steps": INTERVAL_STEPS, "fragments": 3, "min_steps": 2,
                "codec": "float32", "delta_codec": "float32", "block": 16,
                "snapshot_interval_versions": 3,
            },
            "outer": {"optimizer": "sgd", "learning_rate": 1.0, "merge": "average"},
            "bounds": {"norm_clip": 1e8},
        },
        seed=seed, tensors=Light(32),
    )  # fmt: skip
    if bad_at:
        world.bad, world.bad_at = "two", bad_at
    return world


async def run_beside_a_bad_machine(world: World, lease_ttl_s: float) -> None:
    await world.create()

    async def keep(name: str) -> None:
        while True:
            actor = world.aggregator(name, lease_ttl_s)
            await ended(actor)
            if not actor.dead:
                return
            await asyncio.sleep(world.rng.uniform(0.5, 4.0))

    names = ["one", "two", "three"]
    world.rng.shuffle(names)
    work = [asyncio.ensure_future(keep(name)) for name in names]
    lives = [SimLearner(world, index).live() for index in range(3)]
    assert all(await asyncio.gather(*lives))
    await asyncio.gather(*work)


def longest_idle_s(world: World) -> float:
    """Returns the longest time between a fragment's versions, less the interval (steps of 1 s)."""
    gaps = [
        after.merged_at_s - before.merged_at_s
        for fragment in range(len(world.layout.fragments))
        for (_, before), (_, after) in itertools.pairwise(world.records(fragment))
    ]
    return max(gaps) - INTERVAL_STEPS


@pytest.mark.parametrize("bad_at", ["reads", "merges", "closes"])
def test_no_fragment_is_idle_beside_a_bad_machine(bad_at: str) -> None:
    failed = 0
    for seed in range(3):
        world, lease_ttl_s = make_world(seed, bad_at), (1.5, 3.0, 6.0)[seed % 3]
        world.run(partial(run_beside_a_bad_machine, world, lease_ttl_s), LIMIT_S)
        world.checkers.check_resolved()
        assert longest_idle_s(world) <= lease_ttl_s + IDLE_S, f"seed {seed}"
        failed += world.injected["bad_machine"]
    assert failed > 3


def makers(world: World) -> list[tuple[list[str], list[str]]]:
    """By fragment, who made its versions before the store was away, and afterwards."""
    found = []
    for fragment in range(len(world.layout.fragments)):
        made = [(one.merged_at_s - EPOCH_S, one.aggregator) for _, one in world.records(fragment)]
        early = [who for now_s, who in made if now_s < CUT_S[0]]
        found.append((early, [who for now_s, who in made if now_s > CUT_S[1]]))
    return found


@pytest.mark.parametrize("fault", ["store_is_away", "store_refuses_writes"])
@pytest.mark.parametrize("seed", range(3))
def test_no_fragment_is_idle_beside_a_machine_that_the_store_fails(seed: int, fault: str) -> None:
    world, lease_ttl_s = make_world(seed), (1.5, 3.0, 6.0)[seed]
    setattr(world, fault, lambda name, now_s: name == "two" and CUT_S[0] < now_s < CUT_S[1])
    world.run(partial(run_beside_a_bad_machine, world, lease_ttl_s), LIMIT_S)
    world.checkers.check_resolved()
    assert longest_idle_s(world) <= lease_ttl_s + IDLE_S
    # It serves a share before and after.
    assert any("two" in early for early, _ in makers(world))
    assert any("two" in late for _, late in makers(world))


@pytest.mark.parametrize("fault", ["store_is_away", "store_refuses_writes"])
@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_fails_everybody_for_a_while_costs_that_while(seed: int, fault: str) -> None:
    world, lease_ttl_s = make_world(seed), (1.5, 3.0, 6.0)[seed]
    setattr(world, fault, lambda _name, now_s: CUT_S[0] < now_s < CUT_S[1])
    world.run(partial(run_beside_a_bad_machine, world, lease_ttl_s), LIMIT_S)
    world.checkers.check_resolved()
    assert longest_idle_s(world) <= CUT_S[1] - CUT_S[0] + IDLE_S
    # No fragment has another owner for it.
    assert all({*early[-1:]} == {*late[:1]} for early, late in makers(world))
