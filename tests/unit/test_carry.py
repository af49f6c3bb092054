"""A life that goes on with what the life before had not sent: its core and its tensors."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.process.config import SyncSection
from diloco.common.protocol.codecs import decode_numpy
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.learner.core import sync
from diloco.learner.core.carry import Carried, Unsent, carried, carry, snapshot
from diloco.learner.core.events import Published, Ready, Send, Start, Stepped, sync_rules
from diloco.learner.core.sync import NO_WORK, Work
from diloco.learner.tensors.send_and_adopt import Replica

FRAGMENTS, TOKENS = 3, 10
STARTS = (Start(4, "4", 9, 24),) * FRAGMENTS
step = st.tuples(st.just("step"), st.just(0))
announce = st.tuples(st.just("announce"), st.integers(0, FRAGMENTS - 1))
answer = st.tuples(st.just("answer"), st.integers(0, FRAGMENTS - 1))

NOT_ENDED = [False] * FRAGMENTS


class Life:
    """Plays events on the core; by fragment, the steps in the updates that are announced."""

    def __init__(self, found=()):
        self.rules = sync_rules(SyncSection(interval_steps=4, fragments=FRAGMENTS, min_steps=1))
        self.state = carry(self.rules, sync.begin(self.rules, STARTS), found)
        self.sent: dict[tuple[int, int], int] = {}
        self.announced = [0] * FRAGMENTS
        self.covered = [0] * FRAGMENTS
        self.record_seq = 9

    def play(self, event):
        what, fragment = event
        flying = self.state.fragments[fragment].in_flight
        if what == "step":
            self.state, effects = sync.step(self.rules, self.state, Stepped(1.0, TOKENS))
            for one in effects:
                if isinstance(one, Send):
                    self.sent[one.fragment, one.seq] = one.steps
        elif what == "announce" and flying is not None and not flying.announced_at_s:
            self.announced[fragment] = flying.seq
            self.covered[fragment] += self.sent[fragment, flying.seq]
            self.state, _ = sync.step(self.rules, self.state, Published(1.0, fragment, flying.seq))
        elif what == "answer" and flying is not None and flying.announced_at_s:
            self.record_seq += 1
            before = self.state.fragments[fragment].version
            ready = Ready(fragment, self.record_seq, before + 1, "v", 30, flying.seq)
            self.state, _ = sync.step(self.rules, self.state, ready)


@given(
    st.lists(st.one_of(step, step, announce, answer), max_size=60),
    st.lists(st.one_of(announce, answer), max_size=6),
)
def test_of_each_fragment_all_steps_until_the_snapshot_are_announced_or_carried(before, after):
    """What was sent until the snapshot may be announced behind it, or never."""
    life = Life()
    for event in before:
        life.play(event)
    stated, done = snapshot(life.state), life.state.done.steps
    for event in after:
        life.play(event)
    found = carried(life.rules, stated, life.announced, STARTS, NOT_ENDED)
    assert found is not None
    for one, covered in zip(found, life.covered, strict=True):
        assert one.work == Work(done - covered, TOKENS * (done - covered))
    # All of it is in the next life's first updates.
    other = Life(found)
    for _ in range(8):
        other.play(("step", 0))
    for fragment, one in enumerate(found):
        assert other.sent[fragment, 1] >= one.work.steps + 1


def test_an_update_that_a_rollback_has_undone_is_not_carried():
    """It was being uploaded when the rollback came."""
    life = Life()
    while life.state.fragments[0].in_flight is None:
        life.play(("step", 0))
    undone = Ready(0, 99, 5, "v", 30, 0, rolled_back=True)
    life.state, _ = sync.step(life.rules, life.state, undone)
    life.play(("step", 0))
    assert life.state.fragments[0].in_flight is not None
    assert snapshot(life.state)[0] == Unsent(5, 1, NO_WORK)


@given(st.integers(1, 40))
def test_a_snapshot_that_does_not_know_an_announced_update_is_not_gone_on_with(steps):
    life = Life()
    stated = snapshot(life.state)
    for _ in range(steps):
        life.play(("step", 0))
        for fragment in range(FRAGMENTS):
            life.play(("announce", fragment))
    found = carried(life.rules, stated, life.announced, STARTS, NOT_ENDED)
    assert (found is None) == any(life.announced)


@pytest.mark.parametrize(
    ("changes", "start", "dropped"),
    [
        ({}, Start(9, "9", 20, 54), False),
        ({}, Start(9, "9", 20, 54, floor=9), True),
        ({}, Start(9, "9", 20, 54, floor=4), False),
        ({"overwrite": True}, STARTS[0], True),
        ({"averaged": (0,)}, STARTS[0], True),
    ],
)
def test_what_was_rolled_back_or_is_overwritten_is_dropped(changes, start, dropped):
    rules = replace(Life().rules, **changes)
    unsent = [Unsent(4, 0, Work(3, 30))] * 2
    found = carried(rules, unsent, [0, 0], [start, STARTS[1]], [False] * 2)
    if rules.overwrite:
        assert found is None, "data would be skipped for the sake of nothing"
    else:
        one = Carried(NO_WORK, dropped=True) if dropped else Carried(Work(3, 30))
        assert found == (one, Carried(Work(3, 30)))


def test_with_blended_versions_nothing_is_carried():
    rules = replace(Life().rules, blend=0.5)
    assert carried(rules, [Unsent(4, 0, Work(3, 30))], [0], STARTS[:1], [False]) is None


def test_what_a_leaving_life_sends_after_its_last_step_is_not_carried():
    """It goes on to send while it waits, and then the time for that is over."""
    rules, unsent = Life().rules, [Unsent(4, 3, Work(3, 30)), Unsent(4, 3, Work(5, 50))]
    found = carried(rules, unsent, [4, 3], STARTS[:2], [True, False])
    assert found == (Carried(NO_WORK, dropped=True), Carried(Work(5, 50)))
    assert carried(rules, unsent, [4, 3], STARTS[:2], [False, False]) is None


# --- Tensors

SIZE = 48
TENSORS = [Tensor(name=name, shape=(SIZE,), dtype="float32") for name in ("state", "w")]


def hint(name, _shape):
    return TensorHint(kind="averaged" if name == "state" else "trained")


def replica_of(codec, dtype="float32", views=None):
    tensors = [Tensor(name=one.name, shape=one.shape, dtype=dtype) for one in TENSORS]
    # Of three fragments, two share the leaf w.
    layout = make_layout(tensors, fragments=3, block=16, hint=hint)
    settings = SyncSection(codec=codec, block=16, fragments=3)
    like = {"state": jnp.zeros(SIZE, dtype), "w": jnp.zeros(SIZE, dtype)}
    rng = np.random.default_rng(1)
    views = views or [rng.normal(size=each.size).astype("f") for each in layout.fragments]
    return Replica(settings, layout, like, views), views, layout


def values(replica):
    return {name: np.asarray(leaf, np.float64) for name, leaf in replica.trained.items()}


def train(replica, seed):
    rng = np.random.default_rng(seed)
    replica.trained = {
        name: (leaf + rng.normal(size=SIZE).astype("f") / 8).astype(leaf.dtype)
        for name, leaf in replica.trained.items()
    }


@pytest.mark.parametrize("codec", ["float32", "int4"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_next_life_is_ahead_of_its_views_by_what_was_not_sent(codec, again, dtype):
    replica, views, layout = replica_of(codec, dtype)
    train(replica, 2)
    flying = 0
    codes = replica.collect(flying, replica.send(flying))
    q = decode_numpy(codec, codes, 16).reshape(-1)
    train(replica, 3)
    kept, before = replica.unsent(), values(replica)
    # It only looks.
    assert all(np.array_equal(before[name], one) for name, one in values(replica).items())

    moved = [view + 0.5 for view in views]
    other, _, _ = replica_of(codec, dtype, moved)
    averaged = next(each.index for each in layout.fragments if each.averaged)
    found = [Carried(Work(2, 20))] * 3
    found[averaged] = Carried(NO_WORK, dropped=True)
    found[flying] = Carried(Work(2, 20), again=again)
    other.carry(kept, found)

    went = values(other)
    np.testing.assert_allclose(went["state"], moved[averaged], atol=1e-2 * (dtype == "bfloat16"))
    for each in layout.fragments:
        if each.averaged:
            continue
        (piece,) = each.pieces
        rows = slice(piece.start, piece.stop)
        expected = before["w"][rows] + 0.5
        if each.index == flying and not again:
            expected = expected + q[: piece.stop - piece.start]
        np.testing.assert_allclose(
            went["w"][rows], expected, atol=1e-6 if dtype == "float32" else 0.04
        )
