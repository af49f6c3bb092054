"""An operator's hand on a run of real processes: settings, rollback, checkpoint and resume."""

import asyncio
import os
import shutil
import signal

import pytest
from audit import Tape, judged, read_tape
from harness import ENDLESS, PATIENCE_S, World, open_world

from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError, RunMismatchError
from diloco.operate import change as operate

SLOWER = {"options": {"notes": "notes", "sleep_s": 0.02}}
LEARNERS = ("learner-0", "learner-1")


def ask(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


def start(world: World) -> list:
    return [world.aggregator(), *(world.learner(name) for name in LEARNERS)]


def until_versions(world: World, least: list[int]) -> Tape:
    """The tape once each fragment has at least so many versions."""

    def reached() -> Tape | None:
        tape = read_tape(world)
        there = all(have >= want for have, want in zip(tape.versions(), least, strict=True))
        return tape if there else None

    return world.until(reached, f"versions {least}")


def finish(world: World, processes: list) -> Tape:
    world.stop()
    assert [process.wait() for process in processes] == [0] * len(processes)
    tape = read_tape(world)
    tape.check()
    # Rates, shares and settings in force, exactly as the rules have them.
    assert not (findings := judged(world).findings), findings
    for process in processes:
        process.check_clean_log()
    return tape


def in_force(made: list[wire.Record], rate: float) -> bool:
    """Whether versions took outer steps of a rate; who is alone in a round takes its share of one."""
    return all(
        record.learning_rate == rate if len(record.inputs) > 1 else 0 < record.learning_rate <= rate
        for record in made
    )


def test_settings_change_while_the_run_goes_on(new_world):
    world = new_world(run=ENDLESS, task=SLOWER)
    target = str(world.config_path)
    processes = start(world)
    until_versions(world, [2, 2, 2])

    for fixed in ("sync.fragments=2", "sync.codec=int8", "run.steps=5", "outer.optimizer=nesterov"):
        with pytest.raises(ConfigError, match=fixed.partition("=")[0]):
            ask(operate.change(target, [fixed]))
    with pytest.raises(ConfigError, match="learning_rate"):
        ask(operate.change(target, ["outer.learning_rate=-1"]))

    changed, _ = ask(operate.change(target, ["sync.interval_steps=12", "outer.learning_rate=0.25"]))
    assert changed == ["sync.interval_steps: 8 -> 12", "outer.learning_rate: 0.9 -> 0.25"]
    assert ask(operate.change(target, ["outer.learning_rate=0.25"])) == ([], [])
    later = [version + 4 for version in read_tape(world).versions()]
    until_versions(world, later)

    # Whoever comes later works with them too.
    processes[0].kill()
    processes[0] = world.aggregator()
    later = [version + 2 for version in read_tape(world).versions()]
    until_versions(world, later)
    tape = finish(world, processes)
    for fragment, chain in tape.records.items():
        made = [record for _, record in chain if record.what == "version"]
        before = [record for record in made if not record.policy.settings_seq]
        assert len(before) >= 2
        assert in_force(before, 0.9), f"fragment {fragment}"
        assert in_force(made[len(before) :], 0.25), f"fragment {fragment}"
        steps = [r.global_step for _, r in chain if r.what == "version"]
        assert steps[-1] - steps[-2] == 12


def test_a_rollback_goes_on_from_earlier_contents(new_world):
    world = new_world(run=ENDLESS, task=SLOWER)
    target = str(world.config_path)
    processes = start(world)
    until_versions(world, [5, 5, 5])
    with pytest.raises(ConfigError, match="version 1000"):
        ask(operate.plan_rollback(target, "1000"))
    with pytest.raises(ConfigError, match="not a version, a checkpoint or a time"):
        ask(operate.plan_rollback(target, "yesterday"))

    moves = ask(operate.plan_rollback(target, "2,3,2"))
    assert [move.target.record.version for move in moves] == [2, 3, 2]
    # No aggregator is needed for it, and what one that died has begun is not done twice.
    os.kill(processes[0].pid, signal.SIGSTOP)
    assert len(ask(operate.roll_back(target, moves[:1]))) == 1
    made = ask(operate.roll_back(target, moves))
    assert made == ask(operate.roll_back(target, moves))
    os.kill(processes[0].pid, signal.SIGCONT)
    assert [record.restored_version for record in made] == [2, 3, 2]
    later = [record.version + 3 for record in made]
    until_versions(world, later)
    tape = finish(world, processes)
    for chain in tape.records.values():
        ((at, (_, restore)),) = [
            (index, item) for index, item in enumerate(chain) if item[1].what == "restore"
        ]
        (origin,) = [
            r for _, r in chain if r.version == restore.restored_version and r.what == "version"
        ]
        assert restore.view_digest == origin.view_digest
        assert restore.outer_digest == origin.outer_digest
        assert restore.global_step == origin.global_step
        assert all(taken.staleness <= r.version - 1 - restore.version
                   for _, r in chain[at + 1:] for taken in r.inputs)  # fmt: skip
        # What was on its way is answered: nothing is lost without a word.
        assert {taken.reason for _, r in chain for taken in r.rejected} <= {"rolled_back"}
    with pytest.raises(RunMismatchError, match="has stopped"):
        ask(operate.roll_back(target, moves))


@pytest.mark.long
def test_a_run_is_resumed_from_its_store_alone(own_nats_server, unique, tmp_path):
    with open_world(
        unique, tmp_path / "run", own_nats_server.url, run=ENDLESS, task=SLOWER
    ) as world:
        target = str(world.config_path)
        processes = start(world)
        until_versions(world, [3, 3, 3])
        with pytest.raises(ConfigError, match="no checkpoint"):
            ask(operate.resume(target, None))
        ask(operate.change(target, ["outer.learning_rate=0.5"]))
        marked = ask(operate.make_checkpoint(target))
        before = until_versions(world, [version + 2 for version in marked.versions])
        # On a busy machine one of them may have announced nothing by then.
        sent = {name: position_sent(before, name, marked) for name in LEARNERS}
        with pytest.raises(RunMismatchError, match="has its tape on this bus"):
            ask(operate.resume(target, None))
        with pytest.raises(ConfigError, match="no checkpoint '0000-000000000001'"):
            ask(operate.resume(target, "0000-000000000001"))

        for process in processes:
            process.kill()
        own_nats_server.kill()
        shutil.rmtree(own_nats_server.folder)
        with NatsServer(tmp_path / "fresh", port=own_nats_server.port):
            with pytest.raises(RunMismatchError, match="this bus has no tape of it"):
                world.create()
            resumed = ask(operate.resume(target, None))
            assert (resumed.checkpoint, resumed.epoch) == (marked.name, 1)
            assert resumed.versions == marked.versions
            assert ask(operate.resume(target, None)) == resumed  # Once more does no harm.
            processes = start(world)
            until_versions(world, [version + 3 for version in marked.versions])
            tape = finish(world, processes)
    assert not tape.rejected()
    for fragment, chain in tape.records.items():
        first, *later = [record for _, record in chain]
        assert (first.what, first.version) == ("restored", marked.versions[fragment])
        assert in_force([record for record in later if record.what == "version"], 0.5)
    for name in LEARNERS:
        assert min(m.position for _, m in tape.manifests if m.learner == name) > sent[name]


def position_sent(tape: Tape, learner: str, marked) -> int:
    """The highest data position that a learner had announced at a checkpoint's point."""
    point = int(marked.name.partition("-")[2])
    sent = (m.position for seq, m in tape.manifests if m.learner == learner and seq <= point)
    return max(sent, default=0)
