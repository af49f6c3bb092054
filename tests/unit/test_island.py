"""A learner's program on a mesh: the same training as on one device, and errors for what fits not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from diloco.common.process.config import MeshSection, make_config
from diloco.common.protocol.codecs import decode_numpy
from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.learner.island import Island
from diloco.learner.tensors import mesh, tree
from diloco.learner.tensors.send_and_adopt_kernels import vector_of

STEPS = 3
DOCUMENT = {
    "run": {"name": "r", "steps": 100},
    "task": {"options": {"preset": "1m", "batch": 8, "length": 16, "eval_batches": 1}},
    "sync": {"fragments": 3, "interval_steps": 6, "codec": "float32"},
    "store": {"url": "unused"},
}


def island_of(sizes, devices, optimizer="adamw", **learner):
    section = dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))
    options = DOCUMENT["task"]["options"] | {"optimizer": optimizer}
    document = DOCUMENT | {"task": {"options": options}}
    config = make_config({**document, "learner": {"mesh": section, **learner}}, source="test")
    return Island(config, "one", jax.devices()[:devices])


def updates(island):
    """Returns a learner's updates of each fragment after a few steps from the same start."""
    layout = island.layout
    leaves = tree.by_name(jax.jit(island.task.init)(jax.random.key(0)))
    views = [vector_of(layout, fragment.index, leaves) for fragment in layout.fragments]
    with island.context():
        replica = island.replica(views)
        state, batches = island.init_state(replica.trained), island.feed(5)
        step = island.inner_step()
        for number in range(STEPS):
            replica.trained, state, outcome = step(
                replica.trained, state, next(batches), np.int32(number)
            )
        found = []
        for fragment in layout.fragments:
            rows = replica.collect(fragment.index, replica.send(fragment.index))
            found.append(decode_numpy("float32", rows, layout.block))
        for leaf, lies in zip(
            jax.tree.leaves(state), jax.tree.leaves(island.state_shardings), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(lies, leaf.ndim)
    return found, float(outcome.loss)


@pytest.fixture(scope="module")
def alone():
    return updates(island_of((1, 1, 1), 1))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [pytest.param((1, 2, 1), marks=pytest.mark.slow), (1, 4, 2)])
def test_muon_on_a_mesh_trains_as_on_one_device(sizes):
    expected, alone_loss = updates(island_of((1, 1, 1), 1, "muon"))
    found, loss = updates(island_of(sizes, int(np.prod(sizes)), "muon"))
    assert loss == pytest.approx(alone_loss, rel=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        assert np.linalg.norm(mine - theirs) < 2e-3 * np.linalg.norm(theirs)


@pytest.mark.parametrize("sizes", [(2, 2, 2), pytest.param((1, 4, 1), marks=pytest.mark.slow)])
def test_a_mesh_trains_as_one_device_does(alone, sizes):
    island = island_of(sizes, int(np.prod(sizes)))
    (found, loss), (expected, alone_loss) = updates(island), alone
    assert loss == pytest.approx(alone_loss, rel=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        assert np.abs(theirs).max() > 1e-4
        # Adam divides by small numbers: a few elements magnify what the order of sums rounds.
        difference = np.abs(mine - theirs)
        assert np.linalg.norm(difference) < 2e-3 * np.linalg.norm(theirs)
        assert np.quantile(difference, 0.999) < 1e-5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_lie_as_their_parameters_do(optimizer):
    island = island_of((1, 4, 2), 8, optimizer)
    cut = [s.spec for s in jax.tree.leaves(island.state_shardings)]
    assert PartitionSpec(None, "fsdp", "tensor") in cut
    sizes = [leaf.size for leaf in jax.tree.leaves(island.state)]
    whole = sum(size for size, spec in zip(sizes, cut, strict=True) if spec == PartitionSpec())
    assert whole < 0.01 * sum(sizes)


def test_a_host_reads_its_rows_of_the_same_batches():
    task = island_of((1, 1, 1), 1).task
    whole, part = task.batches("one", 7), task.rows("one", 7, 2, 6)
    for _ in range(3):
        assert np.array_equal(next(whole)[2:6], next(part))


def test_a_batch_is_cut_along_data_and_fsdp():
    island = island_of((2, 2, 2), 8)
    batch = next(island.feed(0))
    assert batch.sharding.spec == PartitionSpec(mesh.ROWS)
    assert np.array_equal(np.asarray(batch), next(island.task.batches("one", 0)))


def test_options_of_one_learner_are_its_own():
    islands = {"one": {"options": {"batch": 16, "dtype": "bfloat16"}, "mesh": "fsdp=2"}}
    island = island_of((1, 1, 1), 2, islands=islands)
    assert island.task.tokens_per_batch == 16 * 16
    assert island.mesh.shape["fsdp"] == 2


# --- What does not fit


def test_a_mesh_of_another_number_of_devices_is_refused():
    with pytest.raises(ConfigError, match="does not fit the 6 devices"):
        island_of((1, 4, 1), 6)
    assert mesh.make_mesh(MeshSection(fsdp=0, tensor=2), jax.devices()[:6]).shape["fsdp"] == 3


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="a batch of 8 rows"):
        island_of((1, 3, 1), 3)


@pytest.mark.parametrize(
    "spec", ["fsdp", PartitionSpec("rows"), PartitionSpec("fsdp", "fsdp"), PartitionSpec(*"abc")]
)
def test_a_partition_that_is_none_is_refused(spec):
    island = island_of((1, 2, 1), 2)
    task = type("T", (), {"partition": staticmethod(lambda _n, _s: spec), "hint": None})
    with pytest.raises(TaskError, match=r"Task\.partition"):
        mesh.param_shardings(
            task, island.layout, {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}, island.mesh
        )


def test_a_tensor_axis_needs_a_partition():
    island = island_of((1, 2, 1), 2)
    task = type("T", (), {"partition": None, "hint": None})
    cut = mesh.make_mesh(MeshSection(tensor=2), jax.devices()[:2])
    with pytest.raises(ConfigError, match="no `partition`"):
        mesh.param_shardings(task, island.layout, {}, cut)


def test_an_axis_of_experts_needs_some():
    island = island_of((1, 2, 1), 2)
    cut = mesh.make_mesh(MeshSection(expert=2), jax.devices()[:2])
    with pytest.raises(ConfigError, match="no experts"):
        mesh.param_shardings(island.task, island.layout, island.shapes, cut)
