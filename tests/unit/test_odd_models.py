"""Parameters as users may have them: each works, or is refused by a sentence that says what to do."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

import diloco
from diloco.common.process.config import SyncSection
from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.common.protocol.layout import Tensor, default_hint, make_layout
from diloco.learner.tensors import tree
from diloco.learner.tensors.placement import shardings_of
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.tensors.send_and_adopt_kernels import vector_of
from diloco.operate.create import check_storable

SHARED = np.full((4, 4), 0.5, np.float32)


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


@dataclasses.dataclass
class Unregistered:
    w: Any


def values(*shape, dtype=np.float32):
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape).astype(dtype)


def nested(levels):
    found = {"w": values(4)}
    for _ in range(levels):
        found = {"in": found}
    return found


def odd():
    """One tree of all that works."""
    return {
        "scalar": np.float32(0.5),
        "no axes": np.asarray(0.25, np.float32),
        "half": values(3, 5, dtype=np.float16),
        "brain": jnp.ones((2, 3), jnp.bfloat16),
        "a/b": values(2),
        "a": {"c.d": values(3), "..": values(2), "ümläut 模型": values(2), "line\nfeed": values(2)},
        "one array": (SHARED, SHARED),
        "tuple": Pair(values(2, 2), [values(3), None]),
        "class": Layer(values(2, 2), values(2)),
        "frozen dict": FrozenDict({"w": values(3)}),
        "flax": nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))[1],
        "strided": values(8, 8)[::2, ::-1],
        "columns first": np.asfortranarray(values(4, 6)),
        "axes": values(*[2] * 12),
        "deep": nested(300),
        "whole": np.arange(3),
        "yes": np.array([True]),
    }


def layout_of(params):
    tensors = tree.tensors_of(params)
    return make_layout(tensors, fragments=1, block=16, hint=default_hint)


def synced(params):
    """Layout, and the leaves that are synchronized."""
    layout = layout_of(params)
    return layout, tree.split(params, tree.synced_marks(params, layout))[0]


def test_odd_trees_come_back_as_they_were():
    layout, params = synced(odd())
    assert {tensor.name for tensor in layout.constants} == {"whole", "yes"}
    view = vector_of(layout, 0, tree.by_name(params))
    settings = SyncSection(codec="float32", block=16, fragments=1)
    replica = Replica(settings, layout, params, [view], shardings=shardings_of(params))
    found = replica.trained
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for (name, leaf), (_, before) in zip(
        tree.by_name(found).items(), tree.by_name(params).items(), strict=True
    ):
        assert (leaf.dtype, np.shape(leaf)) == (before.dtype, np.shape(before)), name
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(before), err_msg=name)
    replica.trained = jax.tree.map(lambda leaf: leaf, found)
    assert not np.any(replica.collect(0, replica.send(0)).codes)


def test_a_tree_may_have_thousands_of_leaves_or_one():
    many = {f"layer{number}": values(3) for number in range(2000)}
    assert len(layout_of(many).tensors) == 2000
    assert [tensor.name for tensor in layout_of(values(4)).tensors] == ["params"]


REFUSED = [
    pytest.param({"none": values(0, 3)}, r"without elements .*: none", id="no elements"),
    pytest.param({"w": 0.5}, "'w' of the parameters must be an array", id="a number"),
    pytest.param({"w": "relu"}, "'w' of the parameters must be an array", id="a string"),
    pytest.param(Unregistered(values(2)), "registered with JAX", id="an unknown class"),
    pytest.param({}, "no floating-point parameter", id="nothing"),
    pytest.param({"n": np.arange(3)}, "no floating-point parameter", id="whole numbers alone"),
    pytest.param({"k": jax.random.key(0)}, "'k' is key<", id="a random key"),
    pytest.param({"z": np.ones(2, np.complex64)}, "'z' is complex64", id="complex"),
    pytest.param({"f": jnp.ones(2, jnp.float8_e4m3fn)}, "'f' is float8", id="float8"),
    pytest.param({"o": np.array([object()])}, "'o' is object", id="objects"),
    pytest.param({"t": np.array(["a"])}, "'t' is <U1", id="texts"),
    pytest.param({"r": np.zeros(2, [("a", "f4")])}, "'r' is ", id="records"),
    pytest.param({"e": values(2, dtype=">f4")}, "byte order", id="byte order"),
    pytest.param({1: values(2), "x": values(2)}, "comparable", id="keys of two kinds"),
    pytest.param({"a/b": values(2), "a": {"b": values(2)}}, "both called 'a/b'", id="one name"),
    pytest.param(nested(3000), "nested", id="nested without end"),
]


@pytest.mark.parametrize(("params", "words"), REFUSED)
def test_what_no_run_can_hold_is_refused_in_a_sentence(params, words):
    with pytest.raises((TaskError, ConfigError)) as told:
        layout_of(params)
    assert told.value.hint
    assert told.match(words)


def test_doubles_are_refused_where_jax_has_none():
    layout = layout_of({"w": values(2, dtype=np.float64)})
    with pytest.raises(TaskError, match=r"'w' .* is float64, of which JAX makes float32"):
        tree.check_wide(layout)
    with jax.enable_x64(True):
        tree.check_wide(layout)


def test_a_fragment_that_could_not_be_stored_says_how_many_are_enough():
    """2^30 float32 have 2^32 bytes, which msgpack has no number for."""
    tensor = Tensor(name="x", shape=(3 << 10, 1 << 20), dtype="float32")
    with pytest.raises(ConfigError, match="1,073,741,823") as refused:
        check_storable(make_layout([tensor], fragments=2, block=64))
    enough = int(re.search(r"to (\d+) or more", refused.value.hint)[1])
    check_storable(make_layout([tensor], fragments=enough, block=64))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_run_does_not_begin_with_what_is_no_number(value, tmp_path, nats_server):
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        run = {{name = "spoilt", steps = 8, tokens_per_step = 1}}
        sync = {{fragments = 1}}
        bus = {{url = "{nats_server.url}"}}
        store = {{url = "{tmp_path / "store"}"}}
        """
    )
    params = {"fine": values(2), "spoilt": np.array([0, value], np.float32)}
    with pytest.raises(TaskError, match="not a number: spoilt"):
        diloco.create(file, params)
