"""TPUs that are not here; what needs their compiler runs in `make tpu`."""

import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from diloco.common.process.config import make_config
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import ConfigError
from diloco.learner.dry_run import compile_step, device_bytes, dry_run
from diloco.learner.island import Island
from diloco.learner.tensors.quantize_and_pack import decode_blocks
from diloco.learner.topology import GPUS, gpu_devices, tpu_devices

compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs `make tpu`: libtpu is not installed"
)


gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs `make cuda`: JAX's CUDA plugin is not installed",
)


@pytest.fixture(autouse=True)
def _environment_stays(monkeypatch):
    """Sets the variables that the search for a slice changes, so that they are restored."""
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


@pytest.fixture
def _nothing_kept():
    """Disables the cache: a program for devices that are not here could not be read from it."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def island_of(mesh, devices=None, **learner):
    return Island(config_of(mesh, **learner), "l0", devices)


def config_of(mesh, **learner):
    return make_config(
        {
            "run": {"name": "small", "steps": 100},
            "task": {"options": {"preset": "1m", "length": 16, "batch": 8}},
            "store": {"url": "unused"},
            "learner": {"mesh": mesh, **learner},
        },
        source="test",
    )


@pytest.mark.parametrize("mesh", ["fsdp=4,tensor=2", "tensor=8", "data=8"])
def test_a_batch_lies_as_it_is_placed(mesh):
    island = island_of(mesh)
    placed = next(island.feed(0))
    for shape, leaf in zip(
        jax.tree.leaves(island.sharded_batch()), jax.tree.leaves(placed), strict=True
    ):
        assert (shape.shape, shape.dtype) == (np.shape(leaf), leaf.dtype)
        assert shape.sharding == getattr(leaf, "sharding", None)


@pytest.mark.parametrize("name", ["v6e", "2x4", "v6e:2x", "v6e:2x4;", ""])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ConfigError, match="is not the name of a slice"):
        tpu_devices(name)


def test_without_the_compiler_it_is_named(monkeypatch):
    def missing(**_):
        raise RuntimeError("no libtpu.so")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(ConfigError, match=r"no libtpu\.so") as caught:
        tpu_devices("v6e:2x4")
    assert "diloco[tpu]" in caught.value.hint


@pytest.mark.parametrize("name", ["", "h100:", "h100:0", "b9", "h100:8x2", "H100", "h100:8 "])
def test_a_gpu_that_is_none_is_refused(name):
    with pytest.raises(ConfigError, match="is not a GPU and a number of them") as caught:
        gpu_devices(name)
    assert "a100, h100, h200" in caught.value.hint


def test_without_the_gpus_compiler_it_is_named(monkeypatch):
    def missing(**_):
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(ConfigError, match="Unknown backend cuda") as caught:
        gpu_devices("h100:8")
    assert "diloco[cuda]" in caught.value.hint


@gpu_compiler
@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize("name", sorted(GPUS))
def test_a_learner_compiles_for_gpus_that_are_not_here(name):
    found = gpu_devices(f"{name}:4")
    assert {device.device_kind for device in found} == {GPUS[name].name}
    figures = dry_run(config_of("fsdp=4"), "l0", devices=found)
    assert (figures.platform, figures.devices) == ("gpu", 4)
    assert figures.memory.activations > 0
    # The view, float32, is cut over four and read to send.
    for one in figures.fragments:
        assert one.send.moved_bytes > one.elements


@compiler
def test_a_slice_that_there_is_not():
    with pytest.raises(ConfigError, match="gives no slice v6e:7x9"):
        tpu_devices("v6e:7x9")


@compiler
def test_a_codec_compiles_for_a_chip_that_is_not_here():
    place = SingleDeviceSharding(tpu_devices("v5e:2x2")[0])
    codes = jax.ShapeDtypeStruct((1024, 64), np.int8, sharding=place)
    scales = jax.ShapeDtypeStruct((1024,), jax.numpy.bfloat16, sharding=place)
    made = jax.jit(lambda one: decode_blocks("int8", one, 64)).lower(Encoded(scales, codes))
    assert made.compile().memory_analysis().output_size_in_bytes >= 4 * 1024 * 64


@compiler
def test_an_inner_step_compiles_for_a_slice_that_is_not_here():
    island = island_of("fsdp=4,tensor=2", tpu_devices("v6e:2x4"))
    with island.context():
        step = compile_step(island)
    assert step.memory_analysis().argument_size_in_bytes >= device_bytes(island.sharded_params())


@compiler
def test_a_mesh_that_does_not_follow_a_slices_links_is_refused():
    with pytest.raises(ConfigError, match=r"expert=8.* cannot be laid over the links") as caught:
        island_of("fsdp=8,expert=8", tpu_devices("v5p:4x4x4"))
    assert "4, 16 or 64 on 4x4x4" in caught.value.hint
