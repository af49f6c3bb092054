"""Averaged state: the mean by tokens, in float32, whatever the run's settings say of parameters."""

import numpy as np
import pytest

from diloco.aggregator.arrays.fragment import FragmentArrays, payload_of
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.updates import Admitted, UpdateCredit
from diloco.common.process.config import make_config, settings_of
from diloco.common.protocol import slices, wire
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.judge.oracle import numbers
from diloco.learner.tensors.quantize_and_pack import encode

BLOCK = 16
LAYOUT = make_layout(
    [Tensor(name="w", shape=(64,), dtype="float32"), Tensor(name="var", shape=(20,), dtype="float32")],
    fragments=2, block=BLOCK,
    hint=lambda name, _: TensorHint(kind="averaged" if name == "var" else "trained"),
)  # fmt: skip
SETTINGS = make_config(
    {
        "run": {"name": "demo", "steps": 1}, "store": {"url": "unused"},
        "sync": {"fragments": 2, "block": BLOCK},
        "outer": {"optimizer": "nesterov", "learning_rate": 0.7, "merge": "rda"},
    }, source="a test",
).settings()  # fmt: skip
STATE = 1
RULES = formulas.fragment_rules(SETTINGS, LAYOUT, STATE)
SIZE = LAYOUT.fragments[STATE].size
SHARD = wire.Shard(name="x", size_bytes=1, crc32c=0, slices=slices.of_range(0, SIZE, BLOCK))


def admitted(learner, tokens, steps, staleness=0):
    manifest = wire.Manifest(
        run="demo", learner=learner, epoch=0, incarnation=1, seq=1, fragment=STATE, base_version=0,
        base_digest="0" * 32, layout=LAYOUT.digest, codec="float32", shards=(SHARD,),
        tokens=tokens, steps=steps, position=0, local_step=0, loss=0.0, step_time_s=0.0,
        encode_s=0.0, upload_s=0.0, attempt=0, final=False,
    )  # fmt: skip
    weight = formulas.weight(tokens, steps, averaged=RULES.averaged)
    discount = formulas.discount(RULES.staleness, staleness)
    return Admitted(manifest, 1, UpdateCredit(steps, tokens, weight), staleness, discount, 1.0, 0.0)


def version_of(view, updates):
    """The view after a round of (what a learner has, how it is admitted)."""
    arrays = FragmentArrays.from_view(SETTINGS, LAYOUT, STATE, view)
    for values, one in updates:
        encoded = encode("float32", view - values, BLOCK)
        payload = payload_of(arrays.grid, "float32", (encoded,))
        arrays.merge(payload, one)
    made = arrays.close_round([one for _, one in updates], 1.0)
    return arrays, made


def test_a_version_is_the_mean_of_what_learners_have_by_tokens():
    rng = np.random.default_rng(0)
    view, one, other = rng.uniform(0.5, 2, size=(3, SIZE)).astype(np.float32)
    # Steps do not count: a learner of many small ones has seen as much.
    arrays, made = version_of(
        view, [(one, admitted("a", 3000, 10)), (other, admitted("b", 1000, 1000))]
    )
    # Weights are rounded to bfloat16, as all are.
    np.testing.assert_allclose(arrays.view, 0.75 * one + 0.25 * other, rtol=2**-8)
    assert (made.learning_rate, made.momentum) == (1.0, 0.0)
    np.testing.assert_array_equal(arrays.view, arrays.theta)
    assert list(arrays.state) == []


def test_an_update_on_an_older_version_moves_nothing():
    """The update would leave the convex hull: a variance of 0.3 would become one of -0.5."""
    view = np.full(SIZE, 0.3, np.float32)
    stale = view - (1.0 - 0.2)
    arrays, _ = version_of(view, [(stale, admitted("a", 1000, 10, staleness=1))])
    np.testing.assert_allclose(arrays.view, view, atol=1e-5)


def test_parameters_keep_the_runs_settings():
    assert settings_of(SETTINGS, LAYOUT, 0) is SETTINGS
    own = settings_of(SETTINGS, LAYOUT, STATE)
    assert (own.sync.codec, own.sync.adopt, own.outer.optimizer) == ("float32", "overwrite", "sgd")
    assert (RULES.codec, RULES.averaged) == ("float32", True)


@pytest.mark.parametrize("averaged", [True, False])
def test_the_oracle_weighs_as_the_machine_does(averaged):
    assert numbers.weight(100, 7, averaged=averaged) == pytest.approx(
        formulas.weight(100, 7, averaged=averaged)
    )
