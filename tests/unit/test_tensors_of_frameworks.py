"""Tensors of other frameworks as leaves of a run: names, transpositions, changes in place."""

import jax
import numpy as np
import pytest

from diloco.common.protocol.errors import ConfigError
from diloco.models.frameworks import loop
from diloco.models.frameworks.loop import check_on_cpu
from diloco.models.frameworks.tensors import HostTensors, Leaf, leaves_of

TABLE = {"hidden.weight": Leaf("hidden/kernel", (1, 0))}


def arrays():
    return {
        "hidden.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "hidden.bias": np.zeros(2, np.float32),
    }


def test_a_table_names_and_transposes():
    tensors = arrays()
    leaves = leaves_of(HostTensors(tensors), TABLE)
    assert {name: leaf.shape for name, leaf in leaves.items()} == {
        "hidden/kernel": (3, 2),
        "hidden/bias": (2,),
    }
    np.testing.assert_array_equal(np.asarray(leaves["hidden/kernel"]), tensors["hidden.weight"].T)


def test_what_is_taken_changes_the_tensor_itself():
    tensors = arrays()
    leaf = leaves_of(HostTensors(tensors), TABLE)["hidden/kernel"]
    new = np.arange(6, dtype=np.float32).reshape(3, 2) + 10
    leaf.take(new)
    np.testing.assert_array_equal(tensors["hidden.weight"], new.T)


def test_what_is_read_is_a_copy():
    tensors = arrays()
    leaf = leaves_of(HostTensors(tensors), {})["hidden/bias"]
    read = np.array(leaf)
    tensors["hidden.bias"] += 1
    assert read.tolist() == [0, 0]


def test_three_axes_come_back_where_they_were():
    tensor = {"conv": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
    before = tensor["conv"].copy()
    leaf = leaves_of(HostTensors(tensor), {"conv": Leaf("conv", (2, 0, 1))})["conv"]
    leaf.take(np.array(leaf))
    np.testing.assert_array_equal(tensor["conv"], before)


WRONG = {
    "unknown": ({"no.such": "x"}, "names tensors that are not here: no.such"),
    "twice": ({"hidden.weight": "x", "hidden.bias": "x"}, "two tensors one name: x"),
    "axes": ({"hidden.weight": Leaf("x", (0, 2))}, r"as \(0, 2\), but it has 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_table_that_cannot_be_is_refused(case):
    table, message = WRONG[case]
    with pytest.raises(ConfigError, match=message):
        leaves_of(HostTensors(arrays()), table)


def test_an_array_that_cannot_be_changed_is_refused():
    fixed = np.zeros(2, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ConfigError, match="cannot be changed in place"):
        HostTensors({"w": fixed})


def test_jax_on_an_accelerator_is_refused(monkeypatch):
    check_on_cpu()
    monkeypatch.setattr(loop.jax, "default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match="JAX has started on gpu"):
        check_on_cpu()
    monkeypatch.undo()
    assert jax.default_backend() == "cpu"
