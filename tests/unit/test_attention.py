"""The kernel for TPUs, interpreted, gives what attention by XLA does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.common.process.config import MeshSection
from diloco.common.protocol.errors import TaskError
from diloco.learner.tensors.mesh import make_mesh, within
from diloco.models.decoders import attention
from diloco.models.decoders.attention import make_attention
from diloco.models.decoders.config import parse_config
from tests.models.cases import GEMMA3

ROWS, LENGTH, HEADS, GROUPS, WIDTH = 2, 256, 4, 2, 128
MIXED = dataclasses.replace(
    parse_config(GEMMA3, source=""),
    heads=HEADS,
    kv_heads=GROUPS,
    head_width=WIDTH,
    window=100,
    query_scale=0.07,
    sliding=(True, False),
)
# Documents that end within blocks, and padding.
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 1, 2, 3]], [37, 91, 112, 16], axis=1).astype(np.int32)


def inputs():
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    return [
        jax.random.normal(key, (ROWS, LENGTH, count, WIDTH))
        for key, count in zip(keys, heads, strict=True)
    ]


def attended(config, kind, slides, mesh, *, gradient):
    """Returns a layer's output, and the gradient of its inner product with a constant."""
    *given, weight = inputs()

    def told(q, k, v):
        attend = make_attention(config, jnp.asarray(SEGMENTS), kind)
        y = attend(jnp.asarray(slides), q, k, v)
        return jnp.vdot(y, weight), y

    section = MeshSection.model_validate(mesh)
    devices = jax.devices()[: max(1, section.fsdp * section.tensor)]
    with within(make_mesh(section, devices), "highest"):
        if not gradient:
            return [jax.jit(told)(*given)[1]]
        (_, y), moved = jax.jit(jax.value_and_grad(told, (0, 1, 2), has_aux=True))(*given)
    return [y, *moved]


def assert_the_same(config, slides, mesh, *, gradient=True):
    wanted = attended(config, "plain", slides, mesh, gradient=gradient)
    found = attended(config, "splash", slides, mesh, gradient=gradient)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


@pytest.fixture(autouse=True)
def _two_blocks_in_a_row(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 128)


@pytest.mark.long
def test_a_window_within_documents_is_that_of_xla():
    config = dataclasses.replace(MIXED, sliding=(True, True))
    assert_the_same(config, False, "1", gradient=False)


@pytest.mark.long
def test_scores_that_are_capped_are_those_of_xla():
    config = dataclasses.replace(MIXED, sliding=(False, False), score_cap=0.5)
    assert_the_same(config, False, "1")
    plain = dataclasses.replace(config, score_cap=None)
    capped, other = (
        attended(each, "plain", False, "1", gradient=False)[0] for each in (config, plain)
    )
    assert float(jnp.abs(capped - other).max()) > 1e-2


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "sliding", "slides"),
    [
        ("fsdp=2,tensor=2", (True, False), True),
        ("fsdp=2,tensor=2", (True, False), False),
        ("1", (False, False), True),
    ],
)
def test_documents_windows_and_gradients_are_those_of_xla(mesh, sliding, slides):
    """Of a layer of a decoder with layers of both kinds, or of one, whatever it is told then."""
    assert_the_same(dataclasses.replace(MIXED, sliding=sliding), slides, mesh)


@pytest.mark.parametrize(
    ("changed", "length", "words"),
    [
        ({"head_width": 64}, LENGTH, "heads of width 64, which is no multiple of 128"),
        ({}, 200, "rows of length 200"),
        ({"kv_heads": 3}, LENGTH, "heads of keys in number 3, which is no multiple of 2"),
    ],
)
def test_what_does_not_fit_is_plain_unless_it_was_asked_for(changed, length, words, monkeypatch):
    config = dataclasses.replace(MIXED, **changed)
    segments = jnp.ones((ROWS, length), jnp.int32)
    monkeypatch.setattr(attention, "_platform", lambda: "tpu")
    mesh = make_mesh(MeshSection(fsdp=1, tensor=2), jax.devices()[:2])
    with within(mesh):
        assert "_plain" in make_attention(config, segments, "auto").__qualname__
        with pytest.raises(TaskError, match=words):
            make_attention(config, segments, "splash")
        fits = make_attention(MIXED, jnp.asarray(SEGMENTS), "auto")
    assert "_splash" in fits.__qualname__


def test_elsewhere_it_is_plain():
    with within(make_mesh(MeshSection(fsdp=1), jax.devices()[:1])):
        assert "_plain" in make_attention(MIXED, jnp.asarray(SEGMENTS), "auto").__qualname__
    assert "_plain" in make_attention(MIXED, jnp.asarray(SEGMENTS), "auto").__qualname__
    with pytest.raises(TaskError, match="there is no mesh"):
        make_attention(MIXED, jnp.asarray(SEGMENTS), "splash")
