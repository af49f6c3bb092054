"""Model FLOPs utilization: the count, the peak, and what a learner tells of it."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from diloco.common.protocol.errors import TaskError
from diloco.learner.background import TrafficCounts
from diloco.learner.synchronizer import Meter
from diloco.learner.tensors.utilization import (
    MEMORY_BYTES,
    full_tokens_per_s,
    memory_bytes,
    peak_flops,
)
from diloco.models.bytes_lm import model
from diloco.models.decoders.sizes import SIZES, size_named
from diloco.models.decoders.tensor_names_and_shapes import operations

ROWS, LENGTH = 2, 64
# Billions that a token passes, where a name does not say it, as the model cards do.
ACTIVE = {
    "qwen3-30b-a3b": 3.3,
    "mixtral-8x7b": 12.9,
    "gemma-2-2b": 2.6,
    "gemma-4-e2b": 2.3,
    "gemma-4-e4b": 4.5,
    "gemma-4-26b-a4b": 3.8,
}


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_the_count_is_the_compilers(mlp):
    """XLA counts masks, norms and the softmax too, which are few operations in a wide model."""
    config = model.ModelConfig(layers=1, width=512, heads=4, mlp=mlp, remat=False)
    decoder = model.Decoder(config)
    tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    step = jax.jit(jax.grad(lambda params, tokens: decoder.apply(params, tokens).sum()))
    counted = step.lower(params, tokens).compile().cost_analysis()["flops"] / tokens.size
    assert counted == pytest.approx(config.flops_per_token(LENGTH), rel=0.05)


@pytest.mark.parametrize("name", SIZES)
def test_a_published_size_takes_six_operations_for_each_parameter(name):
    """But for the embedding's rows, and attention, which is little in short rows."""
    config = size_named(name)
    length = 128
    named = {"b": 1e9, "m": 1e6}[name[-1]]
    billions = named * (ACTIVE.get(name) or float(name.rpartition("-")[2][:-1]))
    untied = 0 if config.tied else config.vocab * config.width
    assert operations(config, length) == pytest.approx(6 * (billions - untied), rel=0.3)
    windowed = operations(config, 65536) / operations(config, 1)
    assert (windowed < 3.0) == any(config.sliding) or config.window is None


def test_the_longest_beginning_of_a_devices_kind_counts():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5") == 459e12
    assert peak_flops("cpu") is None
    assert memory_bytes("TPU v5 lite") == 16 << 30
    assert memory_bytes("TPU v5") == 95 << 30
    assert memory_bytes("NVIDIA H100 PCIe") is None
    # Whatever has a known memory has a known peak.
    assert all(peak_flops(kind) for kind in MEMORY_BYTES)


def test_of_devices_that_are_not_known_nothing_is_told():
    chip, cpu = (types.SimpleNamespace(device_kind=kind) for kind in ("TPU v6 lite", "cpu"))
    assert full_tokens_per_s([chip, chip], 6e9) == pytest.approx(2 * 918e12 / 6e9)
    assert full_tokens_per_s([chip, cpu], 6e9) == 0
    assert full_tokens_per_s([chip], None) == 0
    assert full_tokens_per_s([], 6e9) == 0


def test_a_heartbeat_tells_it():
    told, untold = (
        Meter("a", TrafficCounts(), full_tokens_per_s=1000.0),
        Meter("a", TrafficCounts()),
    )
    for meter in (told, untold):
        meter.stepped(2.0, 400, None)
        meter.stepped(2.0, 400, 1.0)
    assert told.heartbeat(1).metrics == {"mfu": pytest.approx(0.2)}
    assert untold.heartbeat(1).metrics == {}


@pytest.mark.parametrize("wrong", [0, -1.0, "6e9", float("nan")])
def test_a_task_that_says_it_wrongly_is_refused(wrong):
    task = model.build(steps=10, seed=0, preset="1m")
    with pytest.raises(TaskError, match="flops_per_token must be a number above 0"):
        dataclasses.replace(task, flops_per_token=wrong)
