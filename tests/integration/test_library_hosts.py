"""Loops of a user's own on several hosts of one learner: they end at the same step, or together."""

import re
import signal
import time

import jax.numpy as jnp
import pytest
from harness import ENDLESS

import diloco
from diloco.common.process.nats_server import LOOPBACK, free_port


@pytest.fixture
def two_hosts(new_world):
    """Starts both hosts of a learner; what the second one does beside training."""

    def start(*does):
        world = new_world(create=False, run={**ENDLESS, "tokens_per_step": 8})
        del world.document["task"]
        world.variant("run", {})
        diloco.create(world.config_path, {"w": jnp.ones((64, 16))})
        coordinator = f"{LOOPBACK}:{free_port()}"
        own = [["lag"] if does == ("lag",) else [], list(does)]
        hosts = [
            world.start(
                f"a.{host}", str(world.config_path), "a", coordinator, "2", str(host), *own[host],
                program=("own_loop",),
            )
            for host in range(2)
        ]  # fmt: skip
        return world, *hosts

    return start


@pytest.mark.long
@pytest.mark.parametrize("does", [[], ["lag"]], ids=["at once", "one compiles long"])
def test_done_is_true_at_the_same_step_on_all_hosts(two_hosts, does):
    _, zero, one = two_hosts(*does)
    for host in (zero, one):
        while not host.events("started"):
            assert host.running, host.log()
            time.sleep(0.2)
    one.signal(signal.SIGTERM)
    said = []
    for host in (zero, one):
        assert host.wait() == 0, host.log()
        said += re.findall(r"done after (\d+) steps", host.log())
    assert len(said) == 2
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("does", "words"),
    [
        pytest.param("fail", "of a user's own program", marks=pytest.mark.long),
        ("end", "ended before `done`"),
    ],
)
def test_a_host_that_ends_early_ends_the_learner(two_hosts, does, words):
    _, zero, one = two_hosts(does)
    assert one.wait() != 0
    assert words in one.log()
    assert zero.wait() != 0
