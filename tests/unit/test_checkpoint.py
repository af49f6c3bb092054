"""Checkpoints of the inner optimizer: what comes back is what was there, or nothing does."""

import json
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from diloco.common.process.config import LearnerSection, MeshSection, RunSettings
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names
from diloco.common.protocol.errors import CheckpointError
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.common.storage.store import MemoryStore
from diloco.learner.background import Context
from diloco.learner.core.carry import Unsent
from diloco.learner.core.sync import Work
from diloco.learner.tensors import checkpoint
from diloco.learner.tensors.mesh import make_mesh
from diloco.learner.tensors.optimizer import Matrices, adamw, muon
from diloco.learner.wire.checkpoint_save_and_restore import (
    Restored,
    Saver,
    TrainingProgress,
    UnsentWork,
    open_folder,
    readable_parts,
    readable_snapshots,
    restore,
)
from diloco.run.model import own_leaves

PROGRESS = TrainingProgress(local_step=12, tokens=96, position=14, global_step=11)
MODULES = ("v", "w")
PARAMS = {
    "kernel": jnp.linspace(-1, 1, 24).reshape(4, 6),
    "half": jnp.linspace(0, 1, 6).astype(jnp.bfloat16),
    "none": jnp.zeros((0, 3)),
}
OPTIMIZERS = {
    "adamw": adamw(),
    "muon": muon(
        matrices=lambda name, shape: Matrices(shape, (0,), (1,)) if name == "kernel" else None
    ),
    "adam": optax.scale_by_adam(mu_dtype=jnp.bfloat16),
    "momentum and noise": optax.chain(optax.trace(0.9), optax.add_noise(0.1, 0.5, 3)),
    "nothing": optax.identity(),
    "masked": optax.masked(optax.scale_by_adam(), {"kernel": True, "half": False, "none": False}),
}


class Log:
    """Keeps what was logged."""

    def __init__(self):
        self.lines = []

    def info(self, action, **fields):
        self.lines.append((action, fields))

    debug = warning = info

    def fields(self, action):
        return [fields for name, fields in self.lines if name == action]


class Learner:
    """A learner's context, its folder, and what it does with them."""

    def __init__(self, tmp_path, store=None, name="one", run="r", width=16, holds=(), **section):
        if not section.pop("without_folder", False):
            section.setdefault("checkpoint_dir", str(tmp_path / "checkpoints"))
        self.section = LearnerSection(**section)
        self.logger = Log()
        layout = make_layout(
            [Tensor(name=name, shape=(width, 8), dtype="float32") for name in MODULES],
            fragments=2,
            block=16,
            hint=lambda name, _: TensorHint(module=name),
        )
        self.context = Context(
            settings=RunSettings(run={"name": run, "steps": 10}),
            layout=layout,
            epoch=0,
            bus=None,
            store=store or MemoryStore(),
            runtime=Runtime(),
            logger=self.logger,
            learner=name,
            holds=holds,
        )
        self.folder = open_folder(self.context, self.section)

    def save(self, state, local_step=12, unsent=None):
        saver = Saver(self.context, self.section, self.folder, 7)
        saver.save(state, PROGRESS._replace(local_step=local_step), unsent)
        saver.close()
        assert not self.logger.fields("checkpoint_failed")

    def restore(self, like) -> Restored | None:
        like = jax.eval_shape(lambda: like)
        return restore(self.context, self.section, self.folder, like, lambda _, read: read())

    @property
    def path(self) -> Path:
        return Path(self.section.checkpoint_dir) / self.context.run / self.context.learner

    def skipped(self):
        return [
            (found["where"], found["why"]) for found in self.logger.fields("checkpoint_skipped")
        ]


def adam_state(seed=0):
    """The state of Adam after a step, all of its leaves different."""
    adam = optax.scale_by_adam()
    gradient = jax.tree.map(lambda leaf: jnp.cos(leaf + seed), PARAMS)
    return adam.update(gradient, adam.init(PARAMS))[1]


def check_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, jax.Array)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bits(one) == bits(other)


def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


@pytest.mark.parametrize("upload", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_was_saved_comes_back(tmp_path, name, upload):
    optimizer = OPTIMIZERS[name]
    state = optimizer.init(PARAMS)
    for step in range(3):
        gradient = jax.tree.map(lambda leaf, s=step: jnp.sin(leaf + s), PARAMS)
        _, state = optimizer.update(gradient, state, PARAMS)
    learner = Learner(tmp_path, checkpoint_upload=upload)
    learner.save(state)
    if upload:
        shutil.rmtree(learner.path)
    later = Learner(tmp_path, learner.context.store)
    restored = later.restore(optimizer.init(PARAMS))
    assert (restored.local_step, restored.tokens) == (12, 96)
    check_same(restored.state, state)
    (found,) = later.logger.fields("checkpoint_restored")
    assert (found["where"], found["of"]) == ("store" if upload else "folder", "one")
    # It can be trained on from.
    jax.jit(optimizer.update, donate_argnums=1)(PARAMS, restored.state, PARAMS)


@pytest.mark.parametrize("upload", [False, True])
def test_a_life_with_other_modules_has_the_leaves_of_both_lives(tmp_path, upload):
    def moments(*modules):
        return {name: jnp.full(1 << 16, ord(name), jnp.float32) for name in modules}

    def life(*holds):
        if upload:
            shutil.rmtree(learner.path)
        return Learner(tmp_path, learner.context.store, holds=holds, checkpoint_upload=upload)

    learner = Learner(tmp_path, checkpoint_upload=upload)
    learner.save(moments("v", "w"))
    learner = life("w")
    found = learner.restore(moments("w"))
    check_same(found.state, moments("w"))
    assert found.local_step == 12
    learner.save(moments("w"), 13)
    learner = life()
    found = learner.restore(moments("v", "w"))
    check_same(found.state["w"], moments("w")["w"])
    assert isinstance(found.state["v"], jax.ShapeDtypeStruct)
    assert found.local_step == 13
    assert not learner.skipped()
    if upload:  # Another learner's must fit: that of step 12.
        other = Learner(tmp_path, learner.context.store, "two", warm_start=True)
        check_same(other.restore(moments("v", "w")).state, moments("v", "w"))
        assert len(other.skipped()) == 1


def test_a_snapshot_has_unsent_work_beside_what_any_checkpoint_has(tmp_path):
    """The state comes back without it, and so do a learner's own leaves; uploads have none."""
    own, work = {"head": jnp.arange(3.0)}, {"ahead": jnp.full(5, 2.0), "flying": jnp.ones(5)}
    unsent = UnsentWork((Unsent(4, 1, Work(3, 24), Work(2, 16)),), work, lambda: 2.5)
    learner = Learner(tmp_path, checkpoint_upload=True, checkpoint_interval_s=1e-6)
    learner.save((adam_state(), own), 11)
    learner.save((adam_state(1), own), 12, unsent)
    check_same(learner.restore((adam_state(), own)).state, (adam_state(1), own))

    head = checkpoint.below(own_leaves._of_folder(learner.folder, 2), own_leaves.OWN)
    check_same(checkpoint.rebuild((None, own), head), (None, own))

    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), work
    )
    found = readable_snapshots(learner.context, learner.section, learner.folder, shapes)
    assert [*found] == [(7, 12)]
    facts = found[7, 12].facts
    assert (facts.unsent, facts.loss) == (unsent.stated, 2.5)
    check_same(found[7, 12].values(), work)
    # The checkpoint before it is no fault.
    assert not learner.skipped()

    (stored, _) = checkpoint.stored(learner.context.store, "r", "one")
    uploaded = checkpoint.unpack(learner.context.store.get(stored.name))
    assert stored.local_step == 12
    assert (uploaded.facts.unsent, uploaded.facts.loss) == ((), None)
    # A release that does not know it refuses the field.
    assert b"loss" not in learner.context.store.get(stored.name)
    assert len(uploaded.facts.leaves) == len(jax.tree.leaves((adam_state(), own)))


def test_nothing_is_restored_where_nothing_is(tmp_path):
    learner = Learner(tmp_path, warm_start=True)
    assert learner.restore(adam_state()) is None
    assert not learner.logger.lines


def test_the_newest_are_kept(tmp_path):
    learner = Learner(tmp_path, checkpoint_keep=2, checkpoint_upload=True)
    for local_step in (10, 20, 30, 40):
        learner.save(adam_state(local_step), local_step)
    assert learner.folder.numbers() == [4, 3]
    stored = checkpoint.stored(learner.context.store, "r", "one")
    assert [one.local_step for one in stored] == [40, 30]
    assert len(learner.context.store.list("")) == 2
    check_same(learner.restore(adam_state()).state, adam_state(40))


class Counted(MemoryStore):
    """Counts its objects after every change."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def put(self, name, data):
        super().put(name, data)
        self.counts.append(len(self.list("")))

    def delete(self, name):
        super().delete(name)
        self.counts.append(len(self.list("")))


def test_of_a_life_the_first_is_uploaded_and_each_third(tmp_path):
    learner = Learner(tmp_path, checkpoint_upload=True, checkpoint_upload_every=3)
    for first in 0, 100:
        saver = Saver(learner.context, learner.section, learner.folder, 7)
        for local_step in range(first, first + 5):
            saver.save(adam_state(local_step), PROGRESS._replace(local_step=local_step))
            saver._running.result()
        saver.close()
    found = [
        fields["name"].split("/")[-1] for fields in learner.logger.fields("checkpoint_uploaded")
    ]
    assert [int(name.split("-")[0]) for name in found] == [0, 3, 100, 103]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_store_has_the_checkpoints_to_keep_at_every_moment(tmp_path, keep):
    """A put that fails, or a crash between two steps, leaves a learner those that it had."""
    store = Counted()
    learner = Learner(tmp_path, store, checkpoint_keep=keep, checkpoint_upload=True)
    for local_step in range(10, 10 * (keep + 3), 10):
        learner.save(adam_state(local_step), local_step)
    assert len(store.list("")) == keep
    assert min(store.counts[keep - 1 :]) == keep


def test_a_line_of_checkpoints_that_was_left_goes(tmp_path):
    """With the newest damaged a learner goes on from fewer steps; the damaged one is not kept."""
    learner = Learner(tmp_path, checkpoint_keep=2, checkpoint_upload=True)
    for local_step in (30, 40, 35):
        learner.save(adam_state(local_step), local_step)
    assert learner.folder.numbers() == [3, 2]
    stored = checkpoint.stored(learner.context.store, "r", "one")
    assert [one.local_step for one in stored] == [35, 30]


def test_what_is_saved_is_of_the_step_at_which_it_was_asked(tmp_path):
    """The next step is given the old arrays to overwrite, while the copy waits for the worker."""
    big = {"kernel": jnp.ones((512, 512))}
    adam = optax.scale_by_adam()

    def update(state):
        for _ in range(4):
            _, state = adam.update(jax.tree.map(jnp.ones_like, big), state)
        return state

    step = jax.jit(update, donate_argnums=0)
    learner = Learner(tmp_path)
    saver = Saver(learner.context, learner.section, learner.folder, 7)
    state = step(adam.init(big))
    expected = jax.tree.map(np.array, state)
    gate = threading.Event()
    saver._worker.submit(gate.wait)
    saver.save(state, PROGRESS)
    for _ in range(5):
        state = step(state)
    gate.set()
    saver.close()
    assert not learner.logger.fields("checkpoint_failed")
    check_same(learner.restore(state).state, jax.tree.map(jnp.asarray, expected))


def test_one_at_a_time_and_only_when_due(tmp_path):
    learner = Learner(tmp_path, checkpoint_interval_s=1e-9)
    saver = Saver(learner.context, learner.section, learner.folder, 7)
    made = 0
    while made < 2:
        if saver.due():
            saver.save(adam_state(), PROGRESS)
            made += 1
            assert saver._worker._work_queue.qsize() <= 1
    saver.close()
    assert len(learner.logger.fields("checkpoint_saved")) == 2
    patient = Saver(learner.context, LearnerSection(), learner.folder, 7)
    assert not patient.due()
    patient.close()


# --- On several hosts


def test_no_host_is_asked_for_two_checkpoints_at_once(tmp_path):
    """Also one that is slower than host 0: a part that it left out would be in no checkpoint."""
    learner, others, told = Learner(tmp_path, checkpoint_interval_s=1e-6), set(), []
    saver = Saver(
        learner.context, learner.section, learner.folder, 7,
        made=told.append, others_made=others.__contains__,
    )  # fmt: skip
    assert saver.due()
    saver.save(adam_state(), PROGRESS)
    saver._running.result()
    assert told == [12]
    assert not saver.due()
    others.add(12)
    assert saver.due()
    # What could not be made counts, or none would be due any more.
    saver.save({"nan": jnp.array(jnp.nan)}, PROGRESS._replace(local_step=13))
    saver.close()
    assert told == [12, 13]


def parts(learner, folder, like, shardings):
    """Returns the pieces of leaves on host 1 of 2."""
    return readable_parts(
        learner.context, learner.section, folder, like, shardings, lambda _, read: read(),
        "host-1-of-2/",
    )  # fmt: skip


def test_a_hosts_part_comes_back_on_the_mesh_it_was_saved_on(tmp_path):
    """As of a host that holds all devices; its key, its count and its moments are all there."""
    state = {"mu": jnp.arange(64.0).reshape(8, 8), "count": jnp.int32(3), "key": jax.random.key(1)}
    mesh = make_mesh(MeshSection(), jax.devices()[:4])
    cut, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    shardings = {"mu": cut, "count": whole, "key": whole}
    like = jax.eval_shape(lambda: state)
    learner = Learner(tmp_path)
    folder = open_folder(learner.context, learner.section, names.checkpoint_part(1, 2))
    saver = Saver(learner.context, learner.section, folder, 7, "host-1-of-2/")
    for local_step in (10, 11, 12):
        saver.save(jax.device_put(state, shardings), PROGRESS._replace(local_step=local_step))
    saver.close()
    assert folder.numbers() == [3, 2]
    assert [saved["size_bytes"] for saved in learner.logger.fields("checkpoint_saved")] == 3 * [
        8 * 8 * 4 + 4 + 8
    ]
    found = parts(learner, folder, like, shardings)
    assert set(found) == {(7, 12), (7, 11)}
    restored = found[7, 12].restore().state
    check_same(restored, state)
    assert restored["mu"].sharding == cut
    other = {**shardings, "mu": NamedSharding(mesh, PartitionSpec(None, "fsdp"))}
    assert not parts(learner, folder, like, other)
    assert len(learner.skipped()) == 2
    (newest,) = tmp_path.rglob("3.safetensors")
    data = newest.read_bytes()
    for damaged in (data[:-9], flipped(data), b""):
        newest.chmod(0o644)
        newest.write_bytes(damaged)
        assert set(parts(learner, folder, like, shardings)) == {(7, 11)}


def test_a_host_whose_disk_is_gone_reads_its_part_from_the_store(tmp_path):
    """The newest two of its own are there, and those of the other host and of no host are not its."""
    state = {"mu": jnp.arange(64.0).reshape(8, 8)}
    mesh = make_mesh(MeshSection(), jax.devices()[:4])
    shardings = {"mu": NamedSharding(mesh, PartitionSpec("fsdp"))}
    like = jax.eval_shape(lambda: state)
    learner = Learner(tmp_path, checkpoint_upload=True)
    for host, steps in ((0, (20, 21)), (1, (10, 11, 12))):
        folder = open_folder(learner.context, learner.section, names.checkpoint_part(host, 2))
        saver = Saver(learner.context, learner.section, folder, 7, f"host-{host}-of-2/")
        for local_step in steps:
            saver.save(jax.device_put(state, shardings), PROGRESS._replace(local_step=local_step))
        saver.close()
    shutil.rmtree(tmp_path / "checkpoints")
    folder = open_folder(learner.context, learner.section, names.checkpoint_part(1, 2))
    found = parts(learner, folder, like, shardings)
    assert {number: one.where for number, one in found.items()} == {
        (7, 12): "store",
        (7, 11): "store",
    }
    check_same(found[7, 12].restore().state, state)
    silent = Learner(tmp_path, learner.context.store)
    assert not parts(silent, folder, like, shardings)


def test_of_a_moment_that_the_disk_has_the_store_is_not_read(tmp_path):
    state = {"mu": jnp.ones((8, 8))}
    mesh = make_mesh(MeshSection(), jax.devices()[:4])
    shardings = {"mu": NamedSharding(mesh, PartitionSpec("fsdp"))}
    like = jax.eval_shape(lambda: state)
    learner = Learner(tmp_path, checkpoint_upload=True)
    folder = open_folder(learner.context, learner.section, names.checkpoint_part(1, 2))
    saver = Saver(learner.context, learner.section, folder, 7, "host-1-of-2/")
    saver.save(jax.device_put(state, shardings), PROGRESS._replace(local_step=10))
    saver.close()
    found = parts(learner, folder, like, shardings)
    assert [one.where for one in found.values()] == ["folder"]
    assert learner.context.traffic.bytes_down == 0


# --- What is not healthy


def data_files(learner, number):
    """Files with the arrays' bytes, the largest first."""
    files = [path for path in (learner.path / str(number)).rglob("*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def flip_arrays(learner):
    state = learner.path / "2" / "state"
    for path in state.rglob("d/*"):
        flip(path)


def truncate(learner):
    for path in (learner.path / "2" / "state").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-7])


def forget_facts(learner):
    shutil.rmtree(learner.path / "2" / "facts")


def spoil_facts(learner):
    (path,) = [p for p in (learner.path / "2" / "facts").rglob("*") if p.name == "metadata"]
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "surprise": 1}))


def other_digest(learner):
    (path,) = [p for p in (learner.path / "2" / "facts").rglob("*") if p.name == "metadata"]
    facts = json.loads(path.read_text())
    facts["leaves"][1]["digest"] = "0" * 32
    path.write_text(json.dumps(facts))


def half_written(learner):
    """As a process leaves it that is killed before the end of a save."""
    shutil.rmtree(learner.path / "2" / "state")
    for path in (learner.path / "2").glob("*"):
        if path.is_file():
            path.unlink()


def empty(learner):
    shutil.rmtree(learner.path / "2")
    (learner.path / "2").mkdir()


DAMAGES = [flip_arrays, truncate, forget_facts, spoil_facts, other_digest, half_written, empty]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_one_is_skipped_for_the_one_before(tmp_path, damage):
    learner = Learner(tmp_path)
    learner.save(adam_state(1), 10)
    learner.save(adam_state(2), 20)
    damage(learner)
    later = Learner(tmp_path)
    restored = later.restore(adam_state())
    assert restored.local_step == 10
    check_same(restored.state, adam_state(1))
    assert [where for where, _ in later.skipped()] == ["folder"]
    # And the next one can be made, though the name was taken by the damaged one.
    later.save(adam_state(3), 15)
    check_same(Learner(tmp_path).restore(adam_state()).state, adam_state(3))


def saved_by(tmp_path, state=None, **other):
    """A checkpoint of a learner that is not quite this one, in its place, before a good one."""
    good = Learner(tmp_path)
    good.save(adam_state(1), 10)
    wrong = Learner(tmp_path, **other)
    wrong.folder = good.folder
    wrong.save(adam_state(2) if state is None else state, 20)
    return Learner(tmp_path)


WRONG = {
    "another run": ({"run": "other"}, None, "run other, not r"),
    "another learner": ({"name": "two"}, None, "learner two, not one"),
    "another layout": ({"width": 32}, None, "layout"),
    "another shape": ({}, "shape", "float32[5, 6], not"),
    "another optimizer": ({}, "trace", "leaf .trace"),
    "fewer leaves": ({}, "fewer", "leaves, not"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_foreign_one_is_skipped_for_the_one_before(tmp_path, name):
    other, kind, why = WRONG[name]
    states = {
        None: lambda: None,
        "shape": lambda: optax.scale_by_adam().init(PARAMS | {"kernel": jnp.ones((5, 6))}),
        "trace": lambda: optax.trace(0.9).init(PARAMS),
        "fewer": lambda: optax.ScaleByAdamState(adam_state().count, adam_state().mu, ()),
    }
    later = saved_by(tmp_path, states[kind](), **other)
    restored = later.restore(adam_state())
    assert restored.local_step == 10
    ((where, found),) = later.skipped()
    assert where == "folder"
    assert why in found


def test_what_is_not_finite_is_neither_saved_nor_restored(tmp_path, monkeypatch):
    learner = Learner(tmp_path)
    learner.save(adam_state(1), 10)
    broken = adam_state(2)._replace(nu=PARAMS | {"kernel": PARAMS["kernel"].at[0, 0].set(jnp.nan)})
    saver = Saver(learner.context, learner.section, learner.folder, 7)
    saver.save(broken, PROGRESS)
    saver.close()
    ((failed),) = learner.logger.fields("checkpoint_failed")
    assert "not finite" in failed["why"]
    assert learner.folder.numbers() == [1]
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "_check_finite", lambda path, array: None)
        other = Learner(tmp_path)
        other.save(broken, 20)
    later = Learner(tmp_path)
    assert later.restore(adam_state()).local_step == 10
    assert "not finite" in later.skipped()[0][1]


def test_training_goes_on_when_a_checkpoint_cannot_be_written(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    learner = Learner(tmp_path)
    saver = Saver(learner.context, learner.section, learner.folder, 7)
    saver.save(adam_state(), PROGRESS)
    saver.close()
    assert len(learner.logger.fields("checkpoint_failed")) == 1


def test_the_health_check_speaks_of_checkpoints_only_while_they_fail(tmp_path):
    learner = Learner(tmp_path)
    saver = Saver(learner.context, learner.section, learner.folder, 7)
    good = adam_state()
    broken = good._replace(nu=PARAMS | {"kernel": PARAMS["kernel"].at[0, 0].set(jnp.nan)})
    for state, fails in ((good, False), (broken, True), (broken, True), (good, False)):
        saver.save(state, PROGRESS)
        saver._running.result(timeout=60)
        assert ("checkpoint" in learner.context.health.troubles) == fails
    saver.close()


# --- In the store


def uploaded(store):
    return [info.name for info in store.list("r/learner/")]


def replace(store, name, data):
    """Other bytes, under a name that fits them."""
    store.delete(name)
    from diloco.common.protocol import shards

    store.put(f"{name.rsplit('-', 1)[0]}-{shards.digest(data)}", data)


def flipped(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


HOSTILE = {
    "other bytes": lambda data: flipped(data),
    "truncated": lambda data: data[:-5],
    "no header": lambda data: b"\xff" * 64,
    "nothing": lambda data: b"",
    "no metadata": lambda data: data.replace(b'"facts"', b'"fakts"', 1),
    "too large": lambda data: data + bytes(1 << 20),
    "pickle": lambda data: b"\x80\x04cos\nsystem\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_object_of_another_learner_is_skipped(tmp_path, name):
    store = MemoryStore()
    Learner(tmp_path, store, "two", checkpoint_upload=True).save(adam_state(2), 20)
    (object_name,) = uploaded(store)
    replace(store, object_name, HOSTILE[name](store.get(object_name)))
    Learner(tmp_path, store, "three", checkpoint_upload=True).save(adam_state(1), 10)
    learner = Learner(tmp_path, store, without_folder=True, warm_start=True)
    restored = learner.restore(adam_state())
    check_same(restored.state, adam_state(1))
    assert (restored.local_step, restored.tokens) == (0, 0), "another one's counters"
    assert [where for where, _ in learner.skipped()] == ["warm_start"]
    (found,) = learner.logger.fields("checkpoint_restored")
    assert (found["where"], found["of"]) == ("warm_start", "three")


def miscounted(data):
    """Of a number in the header, which no array's digest covers, the first digit is another."""
    return re.sub(rb'(tokens\\":)(\d)', lambda m: m[1] + (b"1" if m[2] != b"1" else b"2"), data)


@pytest.mark.parametrize("change", [flipped, miscounted])
def test_bytes_that_are_not_those_of_the_name(tmp_path, change):
    store = MemoryStore()
    Learner(tmp_path, store, checkpoint_upload=True).save(adam_state(2), 20)
    (name,) = uploaded(store)
    data = store.get(name)
    store.delete(name)
    store.put(name, change(data))
    assert change(data) != data
    learner = Learner(tmp_path / "elsewhere", store)
    assert learner.restore(adam_state()) is None
    assert "digest" in learner.skipped()[0][1]


def test_a_warm_start_only_if_asked_and_only_without_ones_own(tmp_path):
    store = MemoryStore()
    Learner(tmp_path, store, "two", checkpoint_upload=True).save(adam_state(2), 20)
    assert Learner(tmp_path, store).restore(adam_state()) is None
    cold = Learner(tmp_path / "elsewhere", store, without_folder=True)
    assert cold.restore(adam_state()) is None
    own = Learner(tmp_path, store, warm_start=True)
    own.save(adam_state(1), 10)
    check_same(own.restore(adam_state()).state, adam_state(1))


def test_an_object_that_goes_meanwhile_and_a_name_of_no_checkpoint(tmp_path):
    store = MemoryStore()
    store.put("r/learner/two/update/0/0-1-1.0", b"a shard")
    store.put("r/learner/two/checkpoint/notes", b"not ours")
    Learner(tmp_path, store, "two", checkpoint_upload=True).save(adam_state(2), 20)
    learner = Learner(tmp_path, store, warm_start=True)
    (found,) = checkpoint.stored(store, "r")
    learner.context.store.delete(found.name)
    assert learner.restore(adam_state()) is None
    assert not learner.logger.lines


DTYPES = [
    "bool", "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_safetensors_library_reads_and_writes_the_same_file(dtype):
    shapes = [(), (3, 2), (0, 4), (5,)]
    arrays = {
        f"{index:05d}": np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
        for index, shape in enumerate(shapes)
    }
    arrays["00001"] = arrays["00001"].reshape(2, 3).T  # not contiguous
    facts = checkpoint.Facts(
        run="r", learner="x", layout="0" * 32, epoch=0, incarnation=1, local_step=1, tokens=1,
        position=1, global_step=1, leaves=checkpoint.describe(list(arrays.values()), arrays),
    )  # fmt: skip
    data = bytes(checkpoint.pack(checkpoint.HostCheckpoint(facts, arrays)))
    theirs = {key: np.require(array, requirements="C") for key, array in arrays.items()}
    written = safetensors.numpy.save(theirs, {"facts": facts.model_dump_json()})
    for name, tensor in safetensors.deserialize(data):
        assert dict(safetensors.deserialize(written))[name] == tensor
    for found in checkpoint.unpack(data).arrays, checkpoint.unpack(written).arrays:
        assert list(found) == list(arrays)
        for key, array in arrays.items():
            assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape)
            assert found[key].tobytes() == array.tobytes()


def test_a_random_key_of_another_kind_is_refused():
    key = jax.random.key(0, impl="rbg")
    arrays = checkpoint.on_host(key)
    with pytest.raises(CheckpointError, match="random key"):
        checkpoint._on_device("key", arrays["00000"], key)
