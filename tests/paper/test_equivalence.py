"""docs/design/design.md's invariant 7: without what is asynchronous, the system is what it decouples.

In lockstep with K = M, float32, plain average and no overlap it equals synchronous DiLoCo
(arXiv 2311.08105, Algorithm 1); with one fragment, H = 1, inner and outer SGD, data-parallel
training. Both are written here as plain loops; the system runs in virtual time.
"""

import asyncio
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "sim"))

from simlearner import SimLearner
from simtensors import Covers, Ledger
from simworld import World

LEARNERS, SIZE, INNER_RATE = 3, 64, 0.05
_chance = np.random.default_rng(5)
CURVATURE_N = _chance.uniform(0.5, 2.0, SIZE).astype(np.float32)


def target(learner, position):
    """Where a learner's batch at a data position pulls the parameters."""
    return np.random.default_rng([learner, position]).normal(size=SIZE).astype(np.float32)


def gradient(theta_N, learner, position):
    """Of a loss that is not quadratic, so that averages over steps and learners do not commute."""
    distance_N = theta_N - target(learner, position)
    return CURVATURE_N * np.tanh(distance_N)


class Trained(Ledger):
    """The simulation's tensors, really trained: by one step of inner SGD at a time."""

    def train(self, replica, learner, position):
        (name, theta_N) = next(iter(replica.trained.items()))
        step_N = np.float32(INNER_RATE) * gradient(np.asarray(theta_N), learner, position)
        replica.trained = {name: theta_N - jnp.asarray(step_N)}

    def covers(self, _store, manifest, _block):
        """Returns the manifest's own account; the values cannot tell."""
        learner = int(manifest.learner.rpartition("-")[2])
        return Covers(learner, manifest.position - manifest.steps, manifest.position)


def views_of_the_system(*, interval_steps, steps, outer):
    """The view of every scheduled version, from a run of the system in lockstep."""
    settings = {
        "run": {"name": "sim", "steps": steps},
        "sync": {
            "mode": "lockstep",
            "interval_steps": interval_steps,
            "min_steps": 1,
            "fragments": 1,
            "codec": "float32",
            "delta_codec": "float32",
            "block": 16,
            "snapshot_interval_versions": 1,
            "overlap_steps": 0,
        },
        "outer": {"merge": "average", **outer},
        "quorum": {"min_learners": LEARNERS, "deadline_s": 3600.0},
    }
    world = World(settings, seed=0, tensors=Trained(SIZE))
    learners = [SimLearner(world, i) for i in range(LEARNERS)]

    async def scenario():
        await world.create()
        aggregating = asyncio.ensure_future(
            world.keep_aggregating(lambda: (world.aggregator(), 0.0))
        )
        await asyncio.gather(*(learner.live() for learner in learners))
        await aggregating

    world.run(scenario)
    views = [
        np.frombuffer(world.store.get(record.snapshot.name), np.float32)[:SIZE]
        for _, record in world.records(0)
        if record.what == "version"
    ]
    return views[: steps // interval_steps + 1]


OUTER = {
    "sgd": {"optimizer": "sgd", "learning_rate": 0.8},
    "nesterov": {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9},
}


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
def test_in_lockstep_it_equals_synchronous_diloco(outer):
    interval, rounds = 6, 8
    theta_N = np.zeros(SIZE, np.float32)
    momentum_N = np.zeros(SIZE, np.float32)
    expected = [theta_N]
    for round_ in range(rounds):
        changes = []
        for learner in range(LEARNERS):
            local_N = theta_N.copy()
            for step in range(interval):
                position = round_ * interval + step
                local_N = local_N - INNER_RATE * gradient(local_N, learner, position)
            changes.append(theta_N - local_N)
        outer_gradient_N = np.mean(changes, axis=0)
        momentum_N = outer.get("momentum", 0.0) * momentum_N + outer_gradient_N
        ahead_N = outer_gradient_N + outer.get("momentum", 0.0) * momentum_N
        step_N = ahead_N if outer["optimizer"] == "nesterov" else outer_gradient_N
        theta_N = theta_N - outer["learning_rate"] * step_N
        expected.append(theta_N)
    views = views_of_the_system(interval_steps=interval, steps=interval * rounds, outer=outer)
    assert len(views) == rounds + 1
    np.testing.assert_allclose(np.stack(views), np.stack(expected), atol=2e-5)
    assert np.abs(views[-1]).max() > 0.1


def test_with_one_step_and_plain_sgd_it_equals_data_parallel_training():
    steps = 25
    theta_N = np.zeros(SIZE, np.float32)
    expected = [theta_N]
    for step in range(steps):
        gradients = [gradient(theta_N, learner, step) for learner in range(LEARNERS)]
        theta_N = theta_N - INNER_RATE * np.mean(gradients, axis=0)
        expected.append(theta_N)
    views = views_of_the_system(
        interval_steps=1, steps=steps, outer={"optimizer": "sgd", "learning_rate": 1.0}
    )
    assert len(views) == steps + 1
    np.testing.assert_allclose(np.stack(views), np.stack(expected), atol=1e-5)
