"""Shares of the data in a fleet that comes and goes: a daemon that is killed, a loop of one's own."""

import time

import jax
import optax
import pytest
from audit import read_items, read_tape
from harness import ENDLESS

pytest.importorskip("grain")

import shares_task

import diloco
from diloco.common import wire
from diloco.common.exits import Exit
from diloco.common.tape import Entry
from diloco.oracle import Oracle

EPOCH = shares_task.SHARES * (shares_task.EXAMPLES // shares_task.SHARES // shares_task.BATCH)


def claims(world):
    return [
        item.body
        for item in read_items(world)
        if isinstance(item, Entry) and isinstance(item.body, wire.Claim)
    ]


def judged(world):
    """The oracle, after all of the tape."""
    history = read_tape(world)
    oracle = Oracle(history.specification, history.layout)
    for item in read_items(world):
        oracle.take(item)
    return oracle


def train(world, learner, task, until):
    """A loop of one's own over the same data; trains until the event is set."""
    optimizer, data = optax.sgd(0.01), shares_task.data(seed=world.config.run.seed)
    step = jax.jit(jax.value_and_grad(lambda params, batch: task.loss(params, batch, None)[0]))
    like = jax.eval_shape(task.init, jax.random.key(0))
    with diloco.join(world.config_path, learner=learner, like=like) as island:
        params, state = island.params, optimizer.init(island.params)
        for batch in island.claimed(data):
            loss, gradient = step(params, batch)
            moves, state = optimizer.update(gradient, state)
            params = island.step(optax.apply_updates(params, moves), loss=loss)
            if until():
                island.leave()
            if island.done:
                break


def test_what_a_killed_learner_held_goes_to_others_and_nothing_is_merged_twice(new_world):
    world = new_world(
        run={**ENDLESS, "tokens_per_step": shares_task.BATCH},
        task={"build": "shares_task:build", "options": {"sleep_s": 0.2}},
        sync={"interval_steps": 4, "min_steps": 2, "fragments": 2, "block": 16},
        learner={"heartbeat_interval_s": 0.2, "drain_timeout_s": 60.0},
        aggregator={"share_expiry_s": 3.0},
        gc={"enabled": False},
    )
    world.aggregator()
    killed = world.learner("a")

    def sent():
        return sum(update.learner == "a" for update in read_tape(world).merged())

    world.until(lambda: sent() >= 3, "updates of a", every_s=0.5)
    killed.kill()
    (mine,) = [one for one in claims(world) if (one.learner, one.what) == ("a", "claim")][:1]
    task = shares_task.build(steps=1, seed=world.config.run.seed)
    taken = 0

    def ended():
        return next((c for c in claims(world) if (c.learner, c.what) == ("a", "end")), None)

    def enough():
        nonlocal taken
        taken += 1
        time.sleep(0.02)
        # Beyond the first epoch it goes on with the next ones, and comes back for what is left.
        return taken % 40 == 0 and (end := ended()) is not None and covered(end)

    def covered(end):
        merged = judged(world).shares.merged
        return all(
            sum(share < shares_task.SHARES for share, _ in merged(fragment)) >= EPOCH - lost
            for fragment, lost in enumerate(end.lost)
        )

    train(world, "b", task, enough)
    oracle = judged(world)
    assert not oracle.findings, oracle.findings
    end = ended()
    assert end.position > 0
    assert covered(end)
    again = [c for c in claims(world) if (c.learner, c.what, c.share) == ("b", "claim", mine.share)]
    assert [claim.first for claim in again] == [end.position]
    # It comes back, and takes part again.
    back = world.learner("a")
    world.until(
        lambda: any(
            one.learner == "a" and one.incarnation > end.incarnation for one in claims(world)
        ),
        "claims of a's new life",
    )
    world.stop()
    assert back.wait() == Exit.ENDED, back.log()
