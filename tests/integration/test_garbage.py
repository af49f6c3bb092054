"""Real processes beside garbage collection that leaves only what recovery needs."""

import signal

import pytest
from audit import Tape, read_tape
from harness import ENDLESS, Process, World

NOW = {"replay_window_s": 0.0}
QUICK = {"options": {"notes": "notes", "sleep_s": 0.005}}
# Of the tiny run: three fragments, of which one takes two shards.
FRAGMENTS, SNAPSHOT_EVERY, SHARDS = 3, 3, 2
# Versions from the floor to the newest: two snapshots' worth, and what a collection has not seen.
KEPT = 4 * SNAPSHOT_EVERY


def until_floor(world: World, least: int) -> Tape:
    """The tape once every fragment's oldest record is of a version so high."""

    def reached() -> Tape | None:
        tape = read_tape(world)
        oldest = [chain[0][1].version for chain in tape.records.values()]
        return tape if len(oldest) == FRAGMENTS and min(oldest) >= least else None

    return world.until(reached, f"collections up to version {least}")


def check_bounded(world: World, tape: Tape, learners: int) -> None:
    """Tape and store hold what some versions need, however many there were."""
    assert all(len(tape.records[f]) <= 2 * KEPT for f in range(FRAGMENTS))
    assert len(tape.times_s) <= FRAGMENTS * 2 * KEPT * (2 + learners)
    objects = [path for path in world.store.rglob("*") if path.is_file()]
    shards = [path for path in objects if "update" in path.parts]
    assert len(shards) <= FRAGMENTS * KEPT * learners * SHARDS
    assert len(objects) - len(shards) <= FRAGMENTS * 3 * KEPT


@pytest.mark.slow
def test_a_run_stays_small_and_whoever_was_away_comes_back(new_world):
    world = new_world(run=ENDLESS, task=QUICK, gc=NOW)
    aggregator = world.aggregator()
    worker, sleeper = world.learner("learner-0"), world.learner("learner-1")
    tape = until_floor(world, 2 * SNAPSHOT_EVERY)
    check_bounded(world, tape, 2)

    sleeper.signal(signal.SIGSTOP)
    slept_at = max(read_tape(world).versions())
    check_bounded(world, until_floor(world, slept_at + 2 * SNAPSHOT_EVERY), 2)

    aggregator.kill()
    successor = world.aggregator()
    until_floor(world, max(read_tape(world).versions()) + SNAPSHOT_EVERY)
    worker.kill()
    worker = world.learner("learner-0")
    until_floor(world, max(read_tape(world).versions()) + SNAPSHOT_EVERY)

    sleeper.signal(signal.SIGCONT)
    world.until(lambda: sleeper.events("reloading"), "the sleeper loads the newest view")
    awake = max(read_tape(world).versions())
    tape = until_floor(world, awake + SNAPSHOT_EVERY)
    check_bounded(world, tape, 2)
    assert any(update.learner == "learner-1" for update in tape.merged())

    check_command(world)
    world.stop()
    assert [process.wait() for process in (successor, worker, sleeper)] == [0, 0, 0]
    check_end(world, [aggregator, successor, worker, sleeper])


def check_command(world: World) -> None:
    """`diloco run gc` beside running aggregators, with collections of their own meanwhile."""
    for arguments in (["--dry-run"], []):
        process = world.start("gc", "run", "gc", str(world.config_path), *arguments)
        assert process.wait() == 0, process.log()
        shown = process.log()
        assert ("would be removed" in shown) == bool(arguments)
        assert "shard" in shown


def check_end(world: World, processes: list[Process]) -> None:
    tape = read_tape(world)
    tape.check(collected=True)
    assert tape.trimmed
    check_bounded(world, tape, 2)
    # What the end has left is collected as well, and the run's result stays.
    process = world.start("gc", "run", "gc", str(world.config_path))
    assert process.wait() == 0, process.log()
    read_tape(world).check(collected=True)
    assert world.params()
    for daemon in processes:
        daemon.check_clean_log()
        assert not daemon.events("not_collected")
