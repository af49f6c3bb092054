"""Refusals at the start: a sentence with both sides, a status, no traceback."""

import jax
import numpy as np
import pytest
import tiny_task
from audit import read_tape
from harness import ENDLESS, Process, eventually, make_world
from safetensors.numpy import save_file

from diloco.common.process.nats_server import NatsServer, free_port
from diloco.common.protocol.errors import Exit


def refused(process: Process, status: Exit, *expected: str) -> None:
    """Checks that a process ended with this status, and said why and what to do, a line each."""
    assert process.wait() == status, process.log()
    said = process.log()
    error, *hint = [line for line in said.splitlines() if not line.startswith("{")]
    assert error.startswith("error: "), said
    assert not hint or (len(hint) == 1 and hint[0].startswith("hint: ")), said
    for part in expected:
        assert part in said, said


@pytest.mark.long
def test_daemons_that_do_not_fit_the_run_are_refused(new_world):
    world = new_world()
    other_codec = world.variant("codec", {"sync": {"codec": "int8"}, "outer": {"momentum": 0.5}})
    other_layout = world.variant("layout", {"sync": {"fragments": 2}})
    other_task = world.variant("task", {"task": {"build": "examples.digits:build", "options": {}}})
    other_model = world.variant("model", {"task": {"options": {"odd": True}}})
    no_run = world.variant("none", {"run": {"name": "nobody"}})
    unknown_key = world.variant("key", {"sync": {"fragmets": 3}})
    out_of_range = world.variant("range", {"sync": {"min_steps": 9}})
    no_task = world.variant("no-task", {"task": {"build": "nowhere.task:build"}})
    bad_url = world.variant("url", {"bus": {"url": "http://localhost:1"}})
    not_toml = world.folder / "not.toml"
    not_toml.write_text("[run\nname=")

    def start(name: str, *arguments: object) -> Process:
        return world.start(name, *map(str, arguments))

    def learner(name: str, config: object, who: str = "learner-0") -> Process:
        return start(f"learner-{name}", "learner", "--config", config, "--learner", who)

    def aggregator(name: str, config: object) -> Process:
        return start(f"aggregator-{name}", "aggregator", "--config", config)

    both = (
        Exit.MISMATCH,
        "sync.codec: 'int8' here, 'int4' in the run",
        "outer.momentum: 0.5 here, 0.9 in the run",
    )
    fragments = Exit.MISMATCH, "sync.fragments: 2 here, 3 in the run"
    nobody = Exit.NO_RUN, "there is no run 'nobody'", "diloco run create"
    expected = {
        learner("codec", other_codec): both,
        aggregator("codec", other_codec): both,
        learner("layout", other_layout): (*fragments, "layout digest: "),
        start(
            "learner-hosts",
            "learner",
            "--config",
            world.config_path,
            "--learner",
            "learner-0",
            "--coordinator",
            "auto",
        ): (Exit.CONFIG, "nothing says where the hosts of this learner meet", "srun"),
        learner("task", other_task): (
            Exit.MISMATCH,
            "'examples.digits:build' here, 'tiny_task:build' in the run",
        ),
        learner("model", other_model): (Exit.MISMATCH, "task.options", "layout digest: "),
        learner("none", no_run): nobody,
        aggregator("none", no_run): nobody,
        learner("key", unknown_key): (Exit.CONFIG, "unknown key 'sync.fragmets'", "key.toml"),
        aggregator("range", out_of_range): (
            Exit.CONFIG,
            "min_steps (9) is more than interval_steps (8)",
        ),
        learner("no-task", no_task): (Exit.TASK, "nowhere"),
        learner("toml", not_toml): (
            Exit.CONFIG,
            "not valid TOML",
        ),
        aggregator("file", world.folder / "absent.toml"): (
            Exit.CONFIG,
            "there is no configuration file",
        ),
        learner("url", bad_url): (
            Exit.CONFIG,
            "'localhost:1' is not a NATS URL",
            "nats://host:4222",
        ),
        learner("name", world.config_path, "Learner_0"): (
            Exit.CONFIG,
            "'Learner_0' is not a valid learner name",
        ),
    }
    for process, parts in expected.items():
        refused(process, *parts)
    tape = read_tape(world)
    assert not tape.joins, "a refused learner announced itself"
    assert tape.versions() == [0, 0, 0]


def test_daemons_wait_for_nats_until_they_are_asked_to_end(tmp_path):
    """They say so in their logs; what starts first has not to be known."""
    port = free_port()
    world = make_world("early", tmp_path / "early", f"nats://127.0.0.1:{port}", run=ENDLESS)
    try:
        daemons = [world.aggregator(), world.learner("learner-0"), world.learner("leaves")]
        for daemon in daemons:
            (waits,) = eventually(lambda daemon=daemon: daemon.events("waiting"), "it waits")
            assert waits["what"] == "connecting to NATS"
            assert f"no connection to NATS at 127.0.0.1:{port}" in waits["error"]
        early = daemons.pop()
        early.terminate()
        assert early.wait() == Exit.ENDED, early.log()
        with NatsServer(world.folder / "nats", port=port):
            # Until there is a run they end, as what a restart mends.
            for daemon in daemons:
                refused(daemon, Exit.NO_RUN, "there is no run 'early'")
    finally:
        world.end()


def test_daemons_wait_for_the_stores_folder_until_they_are_asked_to_end(new_world):
    """The run is there, the disk of its store is not mounted yet."""
    world = new_world(run=ENDLESS)
    away = world.store.rename(world.folder / "away")
    daemons = [world.aggregator(), world.learner("learner-0"), world.learner("leaves")]
    for daemon, what in zip(daemons, ("reading the run", *["opening the store"] * 2), strict=True):
        (waits,) = eventually(lambda daemon=daemon: daemon.events("waiting"), "it waits")
        assert waits["what"] == what
        assert "there is no store in the folder" in waits["error"]
    early = daemons.pop()
    early.terminate()
    assert early.wait() == Exit.ENDED, early.log()
    assert early.events("left")
    away.rename(world.store)
    for daemon in daemons:
        eventually(lambda daemon=daemon: daemon.events("started"), "it starts by itself")


def test_creating_again(new_world):
    """The same again is harmless; other settings, or a run that has moved on, are refused."""
    world = new_world(run={"steps": 24})
    before = read_tape(world)

    def create(name: str, config: object = world.config_path, *more: object) -> Process:
        return world.start(name, "run", "create", "--config", str(config), *map(str, more))

    save_file(parameters(odd=False), world.folder / "first.safetensors")
    other = world.variant("other", {"run": {"steps": 25}})
    again = create("again")
    with_other_steps = create("other", other)
    with_other_values = create("values", world.config_path, "--from", "first.safetensors")
    assert again.wait() == 0, again.log()
    assert "created run" in again.log()
    refused(with_other_steps, Exit.MISMATCH, "run.steps: 25 here, 24 in the run")
    refused(with_other_values, Exit.MISMATCH, "does not begin as this configuration says")
    assert read_tape(world).times_s == before.times_s, "a second creation left something"

    world.aggregator(), world.learner("learner-0")
    assert [process.wait() for process in world.processes[-2:]] == [0, 0]
    moved = read_tape(world)
    refused(
        create("moved"),
        Exit.MISMATCH,
        f"run '{world.name}' exists",
        "is past version 0",
    )
    assert read_tape(world).times_s == moved.times_s
    moved.check()


def parameters(*, odd: bool) -> dict[str, np.ndarray]:
    """Parameters of the tiny task with values that its init does not give."""
    values = np.random.default_rng(0)
    like = jax.eval_shape(tiny_task.build(steps=1, seed=7, odd=odd).init, jax.random.key(0))
    drawn = {name: values.normal(size=leaf.shape) * 10 for name, leaf in like.items()}
    return {name: np.asarray(drawn[name]).astype(leaf.dtype) for name, leaf in like.items()}


@pytest.mark.long
def test_from_safetensors(new_world):
    """A run begins with exactly what the file holds; a file that does not fit is refused."""
    world = new_world(create=False, task={"options": {"notes": "notes", "odd": True}})
    wanted = parameters(odd=True)
    save_file(wanted, world.folder / "fits.safetensors")
    missing = {name: leaf for name, leaf in wanted.items() if name != "gain"}
    save_file(missing, world.folder / "missing.safetensors")
    (world.folder / "text.safetensors").write_text("no such thing")

    def create(name: str) -> Process:
        path = f"{name}.safetensors"
        return world.start(
            name, "run", "create", "--config", str(world.config_path), "--from", path
        )

    wrong = {"missing": "gain", "text": "cannot read", "absent": "cannot read"}
    processes = {name: create(name) for name in wrong}
    for name, process in processes.items():
        refused(process, Exit.CONFIG, wrong[name], f"{name}.safetensors")
    assert create("fits").wait() == 0
    found = world.params()
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf, strict=True)


@pytest.mark.long
def test_odd_leaves_survive_a_run_and_a_restart(new_world):
    """Scalars are trained; integers and bools stay; a learner of a second life begins with both."""
    world = new_world(task={"options": {"notes": "notes", "odd": True, "sleep_s": 0.005}})
    before = world.params()
    aggregator, learner = world.aggregator(), world.learner("learner-0")
    eventually(lambda: world.steps("learner-0") > 40, "some steps")
    learner.kill()
    learner = world.learner("learner-0")
    assert [learner.wait(), aggregator.wait()] == [0, 0]
    learner.check_clean_log()
    after = world.params()
    for name in ("shift", "mask"):
        np.testing.assert_array_equal(after[name], before[name], strict=True)
    for name in ("first", "bias", "second", "gain"):
        assert after[name].dtype == before[name].dtype
        assert after[name].shape == before[name].shape
        assert not np.array_equal(after[name], before[name]), f"{name} was not trained"
    read_tape(world).check()
