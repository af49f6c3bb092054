"""Whether learners pull the same way: cosines between their updates of a round.

Two ways. From records alone: radial-directional averaging adds directions, so the length of the
sum, which the recorded factors give back, says how far they agree; no object is read. From shards,
while they are in the store: whole updates, pair by pair, of a bounded sample of rounds.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.grid import make_grid
from diloco.aggregator.owner.fetcher import cut_alike, read_parts
from diloco.common.process.config import SyncSection, sync_of
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ObjectMissingError, WireError
from diloco.common.protocol.layout import Layout
from diloco.common.protocol.quantization import decode_numpy, encoded_bytes
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import RunContext

Matrix = npt.NDArray[np.float64]

# Updates of one round that are compared with each other: at most so many, in so much memory.
INPUTS = 12
MEMORY_BYTES = 256 << 20


def mean_cosine(record: wire.Record, radial_S: npt.NDArray[np.bool_]) -> float | None:
    """Mean cosine between the inputs of a round, from the record alone.

    With a = w S the share of an input and A the accumulated sum of unit vectors a u, it is, of a
    segment, (|A|^2 - sum a^2) / ((sum a)^2 - sum a^2): the mean over pairs, weighted by shares.
    Recorded coefficients a / |v| give the norms |v|, recorded factors |A|; both to about 1 %.

    Args:
        record: of a round.
        radial_S: which segments of the fragment are merged by RDA, bool [S].

    Returns:
        The mean over those segments, weighted by their squared norms; None with fewer than two
        inputs, or where averaging was plain.
    """
    if len(record.inputs) < 2:
        return None
    # All in the unit that the sum had at the end.
    unit = record.inputs[-1].weight_unit
    weight_I = np.asarray([math.ldexp(taken.weight, -unit) for taken in record.inputs])
    share_I = weight_I * [taken.discount for taken in record.inputs]
    raised_I = np.exp2([taken.weight_unit - unit for taken in record.inputs])
    clip_I = np.asarray([taken.clip for taken in record.inputs])
    coefficient_IxS = np.stack(
        [np.frombuffer(taken.coefficients, ml_dtypes.bfloat16) for taken in record.inputs]
    ).astype(np.float64)
    factor_S = np.frombuffer(record.factors, np.float32).astype(np.float64)
    held_S = radial_S & (coefficient_IxS > 0).all(axis=0) & (factor_S > 0)
    if not held_S.any():
        return None
    norm_IxS = share_I[:, None] / (raised_I[:, None] * coefficient_IxS[:, held_S])
    magnitude_S = (share_I * clip_I / weight_I.sum()) @ norm_IxS
    length_S = magnitude_S / factor_S[held_S]
    squares = float(np.square(share_I).sum())
    cosine_S = (np.square(length_S) - squares) / (share_I.sum() ** 2 - squares)
    mean = np.average(np.clip(cosine_S, -1, 1), weights=np.square(norm_IxS).mean(axis=0))
    return float(mean)


def pair_cosines(
    layout: Layout, sync: SyncSection, store: ObjectStore, record: wire.Record
) -> Matrix | None:
    """Cosines between whole updates of a round, float64 [inputs, inputs], of the first `INPUTS`.

    Fewer where shards are large. None if they are not in the store any more. Blocks.

    Raises:
        StoreUnavailableError: the store is away.
    """
    fragment = layout.fragments[record.fragment]
    grid = make_grid(fragment, layout.block, sync.shard_elements)
    codec = sync_of(sync, fragment).codec
    each_bytes = 4 * max(stop - start for start, stop in grid.ranges)
    if not all(cut_alike(item.shards, grid) for item in record.inputs):
        each_bytes += encoded_bytes(codec, grid.size, grid.block)
    taken = record.inputs[: min(max(MEMORY_BYTES // each_bytes, 2), INPUTS)]
    products = np.zeros((len(taken), len(taken)))
    updates = [read_parts(store, item.codec, item.shards, grid) for item in taken]
    try:
        for parts in zip(*updates, strict=True):
            values = np.stack([decode_numpy(codec, part, grid.block) for part in parts])
            products += values @ values.T
    except (ObjectMissingError, WireError):
        return None
    norms = np.sqrt(np.diag(products))
    return np.asarray(products / np.maximum(np.outer(norms, norms), np.finfo(float).tiny))


class Pairs:
    """Sums of cosines between learners, over the rounds that they shared.

    Args:
        learners: names, in the order of the matrix.
    """

    def __init__(self, learners: Sequence[str]) -> None:
        self._index = {name: position for position, name in enumerate(learners)}
        self._sums = np.zeros((len(learners), len(learners)))
        self._counts = np.zeros((len(learners), len(learners)), np.int64)
        self.rounds = 0
        self._points: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, record: wire.Record, cosines: Matrix) -> None:
        """Count a round's."""
        rows = [self._index[taken.learner] for taken in record.inputs[: len(cosines)]]
        self._sums[np.ix_(rows, rows)] += cosines
        self._counts[np.ix_(rows, rows)] += 1
        self.rounds += 1
        for row, taken in zip(range(len(cosines)), record.inputs, strict=False):
            others = np.delete(cosines[row], row)
            if others.size:
                self._points[taken.learner].append((record.closed_at_s, float(others.mean())))

    def over_time(self, learner: str) -> list[tuple[float, float]]:
        """(time, mean cosine to the others) of each round that a learner took part in."""
        return sorted(self._points[learner])

    def mean(self) -> Matrix:
        """Mean cosine between each two learners, NaN where they shared no round."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self._sums / np.where(self._counts, self._counts, np.nan))


# Bytes of shards that are read for it.
ROUND_BYTES = 64 << 20
# Of fewer rounds nothing is said.
FEWEST = 4


def cosines_of(context: RunContext, rounds: Iterable[wire.Record]) -> dict[str, float]:
    """Mean cosine of each learner's updates to the others', over these rounds. Blocks.

    Rounds whose shards are gone do not count, and of a learner of less than `FEWEST` there is none.

    Raises:
        StoreUnavailableError: the store is away.
    """
    found: dict[str, list[float]] = defaultdict(list)
    left = ROUND_BYTES
    for record in rounds:
        left -= sum(shard.size_bytes for taken in record.inputs for shard in taken.shards)
        if left < 0:
            break
        matrix = pair_cosines(context.layout, context.settings.sync, context.store, record)
        if matrix is None:
            continue
        for row, taken in zip(range(len(matrix)), record.inputs, strict=False):
            found[taken.learner].append(float(np.delete(matrix[row], row).mean()))
    return {name: fmean(cosines) for name, cosines in found.items() if len(cosines) >= FEWEST}
