"""Shares of the data in a fleet that comes and goes: a daemon that is killed, a loop of one's own."""

import asyncio
import time

import jax
import nats
import numpy as np
import optax
import pytest
from audit import judged, read_items, read_tape
from harness import ENDLESS
from test_unequal_slices import start, until_merged

pytest.importorskip("grain")

import shares_task

import diloco
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import Exit
from diloco.common.storage.tape import Entry

EPOCH = shares_task.SHARES * (shares_task.EXAMPLES // shares_task.SHARES // shares_task.BATCH)


def claims(world):
    return [
        item.body
        for item in read_items(world)
        if isinstance(item, Entry) and isinstance(item.body, wire.Claim)
    ]


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


@pytest.mark.long
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
            sum(
                span.stop - span.first
                for span in merged(fragment)
                if span.share < shares_task.SHARES
            )
            >= EPOCH - lost
            for fragment, lost in enumerate(end.lost)
        )

    train(world, "b", task, enough)
    oracle = judged(world)
    assert not oracle.findings, oracle.findings
    end = ended()
    assert end.position > 0
    assert covered(end)
    held = [c for c in claims(world) if (c.learner, c.what) == ("a", "claim")]
    # Of what it held the last that it had begun; which that is, is a matter of when it was killed.
    mine = [claim for claim in held if claim.position <= end.position][-1]
    again = [c for c in claims(world) if (c.learner, c.what, c.share) == ("b", "claim", mine.share)]
    assert [claim.first for claim in again] == [mine.first + end.position - mine.position]
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


@pytest.mark.long
def test_hosts_of_a_learner_read_their_rows_of_its_shares_and_keep_what_is_not_trained(new_world):
    """Frozen leaves are never sent, and averaged state has versions; also of two hosts."""
    world = new_world(
        run=ENDLESS,
        task={"build": "shares_task:build", "options": {"apart": True}},
        sync={"interval_steps": 4, "min_steps": 2, "fragments": 2, "block": 16},
        learner={"heartbeat_interval_s": 0.2},
        gc={"enabled": False},
    )
    world.aggregator()
    hosts = start(world, "a", hosts=2, devices=1)
    start(world, "b", hosts=1, devices=1)
    for name in ("a", "b"):
        until_merged(world, name, 8)
    world.stop()
    for process in world.processes:
        assert process.wait() == 0, process.log()
    tape = read_tape(world)
    tape.check()
    oracle = judged(world)
    assert not oracle.findings, oracle.findings
    for fragment in tape.layout.fragments:
        assert oracle.shares.merged(fragment.index)
    assert {tensor.name for tensor in tape.layout.tensors} == {
        "trained/first",
        "trained/second",
        "state/mean",
    }
    (state,) = [fragment.index for fragment in tape.layout.fragments if fragment.averaged]
    versions = [record for _, record in tape.records[state] if record.inputs]
    assert {one.learner for record in versions for one in record.inputs} == {"a", "b"}
    # Both hosts have the same place in the same shares.
    params = world.params()
    np.testing.assert_allclose(params["state/mean"], 1, atol=0.8)
    begun = shares_task.build(steps=1, seed=world.config.run.seed, apart=True)
    key = jax.random.key(world.config.run.seed)
    assert len(hosts) == 2
    np.testing.assert_array_equal(params["frozen/base"], begun.init(key).frozen["base"])


def test_a_run_that_has_no_place_for_claims_is_refused_in_a_sentence(new_world):
    """As of an earlier release, which made streams without them."""
    world = new_world(
        run={**ENDLESS, "tokens_per_step": shares_task.BATCH},
        task={"build": "shares_task:build", "options": {}},
    )

    async def forget_claims():
        client = await nats.connect(world.url)
        js = client.jetstream()
        config = (await js.stream_info(names.tape_stream(world.name))).config
        config.subjects.remove(names.claim(world.name, "*"))
        await js.update_stream(config)
        await client.close()

    asyncio.run(forget_claims())
    learner = world.learner("a")
    assert learner.wait() == Exit.MISMATCH
    assert "has no place for claims of shares of the data" in learner.log()
    assert "GrainData(...) without `shares`" in learner.log()
