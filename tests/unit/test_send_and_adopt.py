"""A learner's tensors: what an update carries once the one before it was answered."""

import numpy as np
import pytest

from diloco.common.process.config import SyncSection
from diloco.common.protocol import shards
from diloco.common.protocol.codecs import decode_numpy
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.learner.tensors.send_and_adopt import Replica

SIZE = 32
TENSORS = [Tensor(name=name, shape=(SIZE,), dtype="float32") for name in ("state", "w")]
# The fragment of each.
TRAINED, AVERAGED = 0, 1


def hint(name, _shape):
    return TensorHint(kind="averaged" if name == "state" else "trained")


def replica_of(adopt, **section):
    layout = make_layout(TENSORS, fragments=2, block=16, hint=hint)
    assert [fragment.averaged for fragment in layout.fragments] == [False, True]
    section = {"codec": "float32", "block": 16, "fragments": 2} | section
    settings = SyncSection(adopt=adopt, **section)
    zeros = np.zeros(SIZE, np.float32)
    return Replica(settings, layout, {"state": zeros, "w": zeros}, [zeros, zeros])


def move(replica, by):
    """Train: the parameters go down, so that what is sent is above zero."""
    replica.trained = {name: leaf - by for name, leaf in replica.trained.items()}


def sent(replica, fragment=TRAINED):
    codes = replica.collect(fragment, replica.send(fragment)).codes
    (value,) = set(codes.reshape(-1).tolist())
    return value


def trained(replica):
    (value,) = set(np.asarray(replica.trained["w"]).tolist())
    return value


def version(replica, values):
    return replica.place_view(TRAINED, np.full(SIZE, values, np.float32))


@pytest.mark.parametrize("adopt", ["rebase", "overwrite"])
def test_what_a_verdict_rejects_is_not_sent_again(adopt):
    replica = replica_of(adopt)
    move(replica, 1.0)
    assert sent(replica) == 1.0
    move(replica, 0.25)
    replica.adopt(TRAINED, None, resolved=True)
    assert sent(replica) == 0.25


def test_a_blend_keeps_a_share_of_what_was_trained_behind_the_update():
    replica = replica_of("blend", blend=0.25)
    move(replica, 1.0)
    assert sent(replica) == 1.0
    move(replica, 8.0)
    # A version without the update: everything is kept.
    replica.adopt(TRAINED, version(replica, -0.5), resolved=False)
    assert trained(replica) == pytest.approx(-9.5)
    move(replica, 8.0)
    replica.adopt(TRAINED, version(replica, -2.0), resolved=True, blended=True)
    assert trained(replica) == pytest.approx(-2.0 - 16.0 / 4)
    assert sent(replica) == pytest.approx(4.0)


@pytest.mark.parametrize("codec", ["int4", "int8", "bfloat16"])
@pytest.mark.parametrize("anchor", ["device", "host"])
def test_a_blend_loses_nothing_of_what_quantization_left_unsent(codec, anchor):
    """theta = V' - r + a (theta - theta at the send), where r = V - q - theta at the send."""
    rng = np.random.default_rng(0)
    replica = replica_of("blend", codec=codec, anchor=anchor)
    replica.trained = {name: rng.normal(size=SIZE).astype("f") for name in replica.trained}
    codes = replica.collect(TRAINED, replica.send(TRAINED))
    q = decode_numpy(codec, codes, 16).reshape(-1)
    at_send = np.asarray(replica.trained["w"], np.float64)
    residual = 0.0 - q - at_send
    assert np.abs(residual).max() > 0
    since = rng.normal(size=SIZE)
    move(replica, -since.astype("f"))
    view = rng.normal(size=SIZE).astype("f")
    payload = replica.place_view(TRAINED, view)
    replica.adopt(TRAINED, payload, resolved=True, blended=True)
    expected = view - residual + 0.7 * since
    np.testing.assert_allclose(np.asarray(replica.trained["w"]), expected, rtol=0, atol=1e-5)


def test_what_was_rejected_is_blended_with_nothing():
    replica = replica_of("blend")
    move(replica, 1.0)
    sent(replica)
    move(replica, 2.0)
    replica.adopt(TRAINED, version(replica, -0.5), resolved=True)
    assert trained(replica) == pytest.approx(-2.5)


def test_nor_is_it_taken_from_what_has_overwritten_it():
    """A version came between the update and its verdict: nothing of it is left to take away."""
    replica = replica_of("overwrite")
    move(replica, 1.0)
    sent(replica)
    replica.adopt(TRAINED, version(replica, 5.0), resolved=False)
    move(replica, 0.25)
    replica.adopt(TRAINED, None, resolved=True)
    assert sent(replica) == 0.25


def test_averaged_state_is_sent_as_it_is_by_then():
    replica = replica_of("rebase")
    move(replica, 1.0)
    sent(replica, AVERAGED)
    move(replica, 0.25)
    replica.adopt(AVERAGED, None, resolved=True)
    assert sent(replica, AVERAGED) == 1.25


def test_a_rollback_forgets_what_is_in_flight():
    replica = replica_of("overwrite")
    move(replica, 1.0)
    sent(replica)
    replica.roll_back(TRAINED, version(replica, 5.0))
    move(replica, 0.25)
    # Its rejection comes, and is void to the core: nothing is asked of the tensors.
    replica.adopt(TRAINED, None, resolved=False)
    assert sent(replica) == 0.25


@pytest.mark.parametrize("anchor", ["device", "host"])
def test_the_digest_is_of_the_view_as_it_lay_when_it_was_asked_for(anchor):
    replica = replica_of("rebase", anchor=anchor)
    digest = replica.digest(TRAINED)
    replica.adopt(TRAINED, version(replica, 2.0), resolved=False)
    assert digest() == shards.digest(np.zeros(SIZE, np.float32))
    assert replica.digest(TRAINED)() == shards.digest(np.full(SIZE, 2.0, np.float32))
