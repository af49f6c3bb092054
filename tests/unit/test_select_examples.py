"""A grain dataset as a task's data: shares without overlap, and the same batch at each position."""

from collections import Counter
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

grain = pytest.importorskip("grain")

from diloco import load_task  # noqa: E402
from diloco.common.protocol.errors import TaskError  # noqa: E402
from diloco.common.storage.data_share_allocation import Holding, Sizes  # noqa: E402
from diloco.learner.select_examples import DRAWN_HERE, GrainData  # noqa: E402


class Examples:
    """Number i is i, and a row of it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"index": np.int64(index), "x": np.full(3, index, np.float32)}


def reading(size: int, **options: object) -> GrainData:
    return GrainData(grain.MapDataset.source(Examples(size)), **{"seed": 7, **options})


def drawn(source: GrainData, learner: str, position: int, count: int) -> list[list[int]]:
    batches = source.batches(learner, position)
    return [next(batches)["index"].tolist() for _ in range(count)]


@settings(max_examples=40)
@given(size=st.integers(4, 400), batch=st.integers(1, 8), shares=st.integers(1, 6), data=st.data())
def test_shares_of_an_epoch_do_not_overlap(
    size: int, batch: int, shares: int, data: st.DataObject
) -> None:
    names = [f"l{index}" for index in range(shares)]
    if size // shares < batch:
        with pytest.raises(TaskError, match="less than one batch"):
            reading(size, batch=batch, shares=names)
        return
    source = reading(size, batch=batch, shares=names)
    each = source.batches_per_epoch
    epoch = data.draw(st.integers(0, 5))
    seen = Counter(
        place
        for name in names
        for number in range(each)
        for place in source.indices(name, epoch * each + number)
    )
    assert set(seen.values()) == {1}
    assert all(place // size == epoch for place in seen)
    assert len(seen) == shares * each * batch > size - shares * batch - shares


def test_an_epoch_is_a_permutation_and_the_next_another() -> None:
    source = reading(24, batch=4, shares=["a", "b"])
    epochs = [
        [
            index
            for name in ("a", "b")
            for batch in drawn(source, name, 3 * epoch, 3)
            for index in batch
        ]
        for epoch in (0, 1)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0] != epochs[1]


def test_resumes_by_position_alone() -> None:
    source = reading(50, batch=4, shares=["a", "b"])
    whole = drawn(source, "b", 0, 20)
    for position in (1, DRAWN_HERE, 7, 13):
        assert drawn(source, "b", position, 20 - position) == whole[position:]


def test_learners_without_shares_have_orders_of_their_own() -> None:
    source = reading(50, batch=4)
    assert drawn(source, "a", 0, 12) != drawn(source, "b", 0, 12)
    read = [index for batch in drawn(source, "a", 0, 12) for index in batch]
    assert len(set(read)) == len(read) == 48


def test_hosts_read_their_rows_of_the_same_batch() -> None:
    source = reading(50, batch=6, shares=["a", "b"])
    halves = [source.rows("a", 2, *rows) for rows in ((0, 2), (2, 6))]
    for whole in drawn(source, "a", 2, 5):
        parts = [next(half) for half in halves]
        assert [index for part in parts for index in part["index"]] == whole
        assert parts[1]["x"].shape == (4, 3)


def test_workers_read_the_same() -> None:
    source = reading(60, batch=4, shares=["a"])
    workers = reading(60, batch=4, shares=["a"], workers=2, ahead=2)
    assert drawn(workers, "a", 3, 9) == drawn(source, "a", 3, 9)


class GivenHoldings:
    """Holds what it is told, and then ends."""

    epoch = 0

    def __init__(self, *holdings: Holding) -> None:
        self.holdings = holdings

    def at(self, position: int) -> Holding | None:
        return next((one for one in self.holdings if one.position >= position), None)


def test_shares_that_are_claimed_divide_an_epoch_whoever_reads_them() -> None:
    source = reading(52, batch=4, shares=3)
    assert source.shared is source
    assert source.sizes == Sizes(3, 4)

    def read(*holdings: Holding, **rows: int) -> list[list[int]]:
        got = source.claimed(GivenHoldings(*holdings), holdings[0].position, **rows)
        return [batch["index"].tolist() for batch in got]

    # One reads a share and begins another, which somebody else ends.
    mine = read(Holding(1, 0, 10), Holding(0, 2, 14))
    others = read(Holding(2, 0, 0), Holding(0, 0, 4))[:6]
    assert len(mine) == 6
    seen = [index for batch in mine + others for index in batch]
    assert len(set(seen)) == len(seen) == 48
    lone = drawn(source, "anybody", 0, 12)
    assert sorted(index for batch in lone for index in batch) == sorted(seen)
    assert drawn(source, "anybody", 5, 3) == lone[5:8]
    assert [batch[1:3] for batch in lone[4:8]] == read(Holding(1, 0, 0), start=1, stop=3)
    assert read(Holding(3, 0, 0)) != read(Holding(0, 0, 0))  # the next epoch is another order


def test_who_has_no_share_is_told() -> None:
    with pytest.raises(TaskError, match="c has no share of the data: they belong to a, b"):
        next(reading(50, batch=4, shares=["a", "b"]).batches("c", 0))
    with pytest.raises(TaskError, match="name each learner once"):
        reading(50, batch=4, shares=["a", "a"])


def test_an_index_without_an_example_is_refused() -> None:
    filtered = grain.MapDataset.source(Examples(20)).filter(lambda example: example["index"] > 4)
    with pytest.raises(TaskError, match="one gave None"):
        drawn(GrainData(filtered, batch=4, seed=1), "a", 0, 5)


@pytest.mark.long
def test_the_example_learns_own_files(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 300
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(text)
    task = load_task(
        "examples.own_files:build", steps=40, seed=1,
        options={"folder": str(tmp_path), "shares": ["a", "b"]},
    )  # fmt: skip
    params = task.init(jax.random.key(0))
    state, batches = task.optimizer.init(params), task.batches("b", 0)
    before = task.evaluate(params)
    gradient, key = jax.jit(jax.grad(task.loss, has_aux=True)), jax.random.key(1)
    for _ in range(40):
        gradients, _metrics = gradient(params, next(batches), key)
        updates, state = task.optimizer.update(gradients, state)
        params = optax.apply_updates(params, updates)
    assert task.evaluate(params) < before / 2
