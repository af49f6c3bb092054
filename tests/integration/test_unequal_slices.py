"""Learners of several devices and several hosts beside others, in one run."""

import os
import shutil
import signal

import pytest
from audit import Tape, read_tape
from harness import ENDLESS, PEER_LOST, Process, World

from diloco.common.process.nats_server import LOOPBACK, free_port

# Of a slice that is lost whole; more where the machine has cores for them.
HOSTS = int(os.environ.get("TESTS_HOSTS", "2"))
# The tape keeps every life's messages, to be looked at afterwards.
WHOLE = {"enabled": False}
# Amid training, on each host by itself.
OFTEN = {
    "heartbeat_interval_s": 0.25,
    "checkpoint_dir": "checkpoints",
    "checkpoint_interval_s": 1.0,
}


def start(world: World, name: str, hosts: int, devices: int) -> list[Process]:
    """The hosts of a learner, each with so many devices."""
    coordinator = f"{LOOPBACK}:{free_port()}"
    place = ["--hosts", str(hosts), "--coordinator", coordinator] if hosts > 1 else []
    arguments = ["learner", "--config", str(world.config_path), "--learner", name, *place]
    arguments += ["--cpu-devices", str(devices)]
    own = [["--host", str(host)] if hosts > 1 else [] for host in range(hosts)]
    return [world.start(f"{name}.{host}", *arguments, *one) for host, one in enumerate(own)]


def until_merged(world: World, name: str, more: int = 4) -> None:
    """Until so many more updates of a learner are in versions."""
    before = merged(read_tape(world), name)
    world.until(
        lambda: merged(read_tape(world), name) >= before + more,
        f"{more} more updates of {name} are merged",
        every_s=1.0,
    )


def merged(tape: Tape, name: str) -> int:
    return sum(update.learner == name for update in tape.merged())


def end(world: World) -> Tape:
    """Let the run end; every invariant holds, and nobody logged anything strange."""
    world.stop()
    alive = [process for process in world.processes if process.running]
    for process in alive:
        assert process.wait() == 0, process.log()
    for process in alive:
        process.check_clean_log()
    tape = read_tape(world)
    tape.check()
    return tape


@pytest.mark.long
def test_one_run_of_unequal_slices_loses_a_host(new_world):
    """Two hosts of four devices each, one of two, one of one; then one of the two is killed."""
    world = new_world(run=ENDLESS, gc=WHOLE, learner=OFTEN)
    world.aggregator()
    zero, one = start(world, "a", hosts=2, devices=4)
    others = {
        "b": start(world, "b", hosts=1, devices=2),
        "c": start(world, "c", hosts=1, devices=1),
    }
    for name in ("a", "b", "c"):
        until_merged(world, name)
    for host in (zero, one):
        world.until(lambda host=host: host.events("checkpoint_saved")[1:], "two checkpoints")

    one.kill()
    steps = {name: world.steps(name) for name in others}
    with world.explained():
        assert zero.wait() in PEER_LOST
    world.processes.remove(zero)
    for name, before in steps.items():
        world.until(lambda name=name, before=before: world.steps(name) > before, "others train on")
        until_merged(world, name, more=2)

    again = start(world, "a", hosts=2, devices=4)
    for host in again:
        world.until(lambda host=host: host.events("checkpoint_restored"), "it goes on")
    until_merged(world, "a")
    restored = [host.events("checkpoint_restored")[0]["local_step"] for host in again]
    assert restored[0] == restored[1] > 0
    tape = end(world)
    assert [len(tape.lives(name)) for name in ("a", "b", "c")] == [2, 1, 1]
    # Each host stored its part, and the parts are the whole.
    for _, manifest in tape.manifests:
        if manifest.learner != "a":
            continue
        senders = {shard.name.rsplit("-", 1)[-1] for shard in manifest.shards}
        assert len(senders) > 1


@pytest.mark.long
def test_a_slice_whose_machines_are_gone_goes_on_from_the_store(new_world, tmp_path):
    """Killed, and each host begins again with an empty disk: with the inner optimizer of before."""
    world = new_world(run=ENDLESS, gc=WHOLE, learner={**OFTEN, "checkpoint_upload": True})
    world.aggregator()
    hosts = start(world, "a", hosts=HOSTS, devices=1)
    for host in hosts:
        world.until(lambda host=host: host.events("checkpoint_uploaded")[1:], "two are stored")
    # Both at once: one that is left would end by itself, with a status of its own.
    for host in hosts:
        host.signal(signal.SIGSTOP)
    for host in hosts:
        host.kill()
    disks = [path for path in tmp_path.rglob("host-*-of-*") if "checkpoints" in path.parts]
    assert len(disks) == HOSTS
    for disk in disks:
        shutil.rmtree(disk)
    again = start(world, "a", hosts=HOSTS, devices=1)
    for host in again:
        world.until(lambda host=host: host.events("checkpoint_restored"), "it goes on")
    found = [host.events("checkpoint_restored")[0] for host in again]
    assert {one["where"] for one in found} == {"store"}
    assert len({one["local_step"] for one in found}) == 1
    assert found[0]["local_step"] > 0
    until_merged(world, "a", more=1)


@pytest.mark.slow
def test_a_learner_returns_in_another_shape(new_world):
    """2 x 2, killed; 1 x 1, asked to leave; 1 x 4: its data goes on, and nothing counts twice."""
    world = new_world(run=ENDLESS, gc=WHOLE)
    world.aggregator()
    for hosts, devices in ((2, 2), (1, 1), (1, 4)):
        life = start(world, "a", hosts=hosts, devices=devices)
        until_merged(world, "a")
        if hosts == 2:
            for process in life:
                process.kill()
        elif devices == 1:
            life[0].terminate()
            assert life[0].wait() == 0
    tape = end(world)
    assert len(tape.lives("a")) == 3
