"""Measures how far learners agree: cosines between their updates of a round.

There are two methods. `mean_cosine` uses records alone: radial-directional averaging (RDA) adds
directions, so the length of the sum, which follows from the recorded factors, tells how far the
directions agree. `compare_round` reads the updates' shards, while the store has them, and compares
each two updates of a round; `shard_figures` does so for a bounded sample of rounds.
"""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.grid import make_grid
from diloco.aggregator.owner.download_and_verify import cut_alike, read_parts
from diloco.common.process.config import SyncSection, sync_of
from diloco.common.protocol import wire
from diloco.common.protocol.codecs import decode_numpy, encoded_bytes
from diloco.common.protocol.errors import ObjectMissingError, ObjectRangeError, WireError
from diloco.common.protocol.layout import Fragment, Layout
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import RunContext
from diloco.run.comparison import OTHERS
from diloco.run.learner_history import FADED
from diloco.run.shard_outliers import APART
from diloco.run.state import ShardFigures

Matrix = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float64]

# The most updates of one round that are compared, and the most memory for it.
INPUTS = 12
MEMORY_BYTES = 256 << 20
FLOAT_BYTES = 4


def mean_cosine(record: wire.Record, radial_S: npt.NDArray[np.bool_]) -> float | None:
    """Computes the mean cosine between the inputs of a round from the record alone.

    In a segment (the elements that are merged with one factor), an input is an outer gradient v; it
    has the direction u = v / |v| and the share a (weight times discount). A is the sum of a u over
    the inputs. The mean cosine over pairs of inputs, weighted by their shares, is
    (|A|^2 - sum a^2) / ((sum a)^2 - sum a^2). The recorded coefficients a / |v| give the norms |v|,
    the recorded factors give |A|; both to about 1 %.

    Args:
        record: the record of a round.
        radial_S: which segments of the fragment are merged by RDA, bool [segments].

    Returns:
        The mean over the segments merged by RDA, weighted by their squared norms; None with fewer
        than two inputs, or if there is no such segment.
    """
    if len(record.inputs) < 2:
        return None
    # All weights are in the unit of the last input's.
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


class ComparedRound:
    """The updates of one round compared with each other; `add` takes one range of elements a call.

    Args:
        fragment: the fragment of the round.
        updates: the number of updates.

    Attributes:
        tensors: name and ranges of each tensor, as `tensor_ranges` returns them.
        products: inner products of each two updates, float64 [updates, updates].
        squares: squared norms of each update in each tensor, float64 [updates, tensors].
        lone: for each update, the number of elements that are far larger than the element at the
            same index in every other update, int64 [updates].
        factor: for each update, its largest such element divided by the other updates' usual size
            of an element in that tensor, float64 [updates]; `tensor`: index of that tensor.
    """

    def __init__(self, fragment: Fragment, updates: int) -> None:
        self.tensors = tensor_ranges(fragment)
        self.products = np.zeros((updates, updates))
        self.squares = np.zeros((updates, len(self.tensors)))
        self.lone = np.zeros(updates, np.int64)
        self.factor = np.zeros(updates)
        self.tensor = np.zeros(updates, np.int64)
        self._along, self._parameters = np.zeros(updates), 0.0

    @property
    def to_zero(self) -> Vector | None:
        """The cosine of each update to the parameters, float64 [updates].

        An update with cosine 1 shrinks the parameters straight to zero, as weight decay does. None:
        the parameters were not read.
        """
        if not self._parameters > 0:
            return None
        lengths = np.sqrt(np.diag(self.products) * self._parameters)
        return np.asarray(self._along / np.maximum(lengths, np.finfo(float).tiny))

    @property
    def cosines(self) -> Matrix:
        """The cosine between each two whole updates, float64 [updates, updates]."""
        norms = np.sqrt(np.diag(self.products))
        least = np.finfo(float).tiny
        return np.asarray(self.products / np.maximum(np.outer(norms, norms), least))

    def add(self, values_UxN: Matrix, start: int, parameters_N: Vector | None = None) -> None:
        """Adds a range of elements to all figures.

        Args:
            values_UxN: the elements of each update, [updates, elements].
            start: index of the range's first element in the fragment.
            parameters_N: the parameters of that range, [elements]; None if they were not read.
        """
        self.products += values_UxN @ values_UxN.T
        if parameters_N is not None:
            self._along += values_UxN @ parameters_N
            self._parameters += float(parameters_N @ parameters_N)
        stop = start + values_UxN.shape[1]
        for index, (_, ranges) in enumerate(self.tensors):
            for first, last in ranges:
                begin, end = max(first, start) - start, min(last, stop) - start
                if begin < end:
                    self._add_part(index, np.abs(values_UxN[:, begin:end]))

    def _add_part(self, tensor: int, sizes_UxN: Matrix) -> None:
        squares = np.square(sizes_UxN).sum(axis=1)
        self.squares[:, tensor] += squares
        if len(squares) < 3:
            return
        usual = np.sqrt(squares / sizes_UxN.shape[1])
        second, top = np.partition(sizes_UxN, -2, axis=0)[-2:]
        whose = sizes_UxN.argmax(axis=0)
        others = np.asarray([np.median(np.delete(usual, one)) for one in range(len(usual))])
        factors = top / np.maximum(others[whose], np.finfo(float).tiny)
        for place in np.flatnonzero((top > LONE_TIMES * second) & (factors > LONE_SIZES)):
            one = whose[place]
            if _expected(sizes_UxN, int(one), float(top[place])) > RARE:
                continue
            self.lone[one] += 1
            if factors[place] > self.factor[one]:
                self.factor[one], self.tensor[one] = factors[place], tensor


def _expected(sizes_UxN: Matrix, one: int, size: float) -> float:
    """Returns how many elements of this size or more update `one` should have.

    The expectation assumes that sizes are distributed as in the other updates: the number of
    elements above a size falls off as a power of the size, and Hill's estimator gives the exponent
    from the other updates' largest elements. To allow for updates of different lengths, elements of
    equal rank are compared. With few elements, or mostly zeros, returns infinity: nothing is known.

    Args:
        sizes_UxN: absolute values of the elements of all updates in a range of one tensor.
        one: index of the update.
        size: absolute value of an element.
    """
    others = np.delete(sizes_UxN, one, axis=0)
    count = TAIL * len(others)
    if others.size < 4 * count:
        return math.inf
    largest = np.sort(np.partition(others, -count, axis=None)[-count:])
    least, ranked = largest[0], largest[-(LONE_MOST + 1) * len(others)]
    own = np.partition(sizes_UxN[one], -LONE_MOST - 1)[-LONE_MOST - 1] or ranked
    if not least > 0:
        return math.inf
    beyond = size * ranked / own / least
    falls = max(float(np.log(largest / least).mean()), np.finfo(float).eps)
    return TAIL * math.exp(-math.log(beyond) / falls) if beyond > 1 else TAIL


def tensor_ranges(fragment: Fragment) -> list[tuple[str, list[tuple[int, int]]]]:
    """Returns (tensor's name, ranges) for each tensor of a fragment, in order of the fragment.

    A range is (start, stop) in the fragment's vector of elements, with the padding.
    """
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for piece in fragment.pieces:
        found[piece.tensor].append((piece.offset, piece.offset + piece.groups * piece.group_stride))
    return list(found.items())


def compare_round(
    layout: Layout,
    sync: SyncSection,
    store: ObjectStore,
    record: wire.Record,
    *,
    parameters: bool = False,
) -> ComparedRound | None:
    """Compares the first `INPUTS` updates of a round, or fewer if shards are large; blocks.

    Args:
        layout: the run's layout.
        sync: the run's settings of synchronization.
        store: the run's store.
        record: the record that merged the updates.
        parameters: whether to compare the updates also with the parameters: the stored view from
            which the round's version can be rebuilt. It may be some versions old, which hardly
            changes its direction.

    Returns:
        The comparison; None if shards are missing or damaged.

    Raises:
        StoreUnavailableError: the store is unreachable.
    """
    fragment = layout.fragments[record.fragment]
    grid = make_grid(fragment, layout.block, sync.shard_elements)
    codec = sync_of(sync, fragment).codec
    each_bytes = 4 * max(stop - start for start, stop in grid.ranges)
    if not all(cut_alike(item.shards, grid) for item in record.inputs):
        each_bytes += encoded_bytes(codec, grid.size, grid.block)
    taken = record.inputs[: min(max(MEMORY_BYTES // each_bytes, 2), INPUTS)]
    found = ComparedRound(fragment, len(taken))
    updates = [read_parts(store, item.codec, item.shards, grid) for item in taken]
    try:
        for (start, stop), parts in zip(grid.ranges, zip(*updates, strict=True), strict=True):
            view_N = _view(store, record, start, stop) if parameters else None
            values = [decode_numpy(codec, part, grid.block) for part in parts]
            found.add(np.stack(values), start, view_N)
    except (ObjectMissingError, WireError):
        return None
    return found


def _view(store: ObjectStore, record: wire.Record, start: int, stop: int) -> Vector | None:
    with contextlib.suppress(ObjectMissingError, ObjectRangeError):
        data = store.get_range(record.snapshot.name, FLOAT_BYTES * start, FLOAT_BYTES * stop)
        return np.frombuffer(data, np.float32).astype(np.float64)
    return None


class Pairs:
    """Mean cosines between learners, over the rounds in which both had an update.

    Args:
        learners: all learners' names, in the order of the rows of the matrix that `mean` returns.

    Attributes:
        rounds: the number of rounds added.
    """

    def __init__(self, learners: Sequence[str]) -> None:
        self._index = {name: position for position, name in enumerate(learners)}
        self._sums = np.zeros((len(learners), len(learners)))
        self._counts = np.zeros((len(learners), len(learners)), np.int64)
        self.rounds = 0
        self._points: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, record: wire.Record, cosines: Matrix) -> None:
        """Adds a round.

        Args:
            record: the round's record.
            cosines: cosines between the first inputs of the record, [inputs, inputs].
        """
        rows = [self._index[taken.learner] for taken in record.inputs[: len(cosines)]]
        self._sums[np.ix_(rows, rows)] += cosines
        self._counts[np.ix_(rows, rows)] += 1
        self.rounds += 1
        for row, taken in zip(range(len(cosines)), record.inputs, strict=False):
            others = np.delete(cosines[row], row)
            if others.size:
                self._points[taken.learner].append((record.closed_at_s, float(others.mean())))

    def over_time(self, learner: str) -> list[tuple[float, float]]:
        """Returns (time, mean cosine to the others) for each round with an update of a learner.

        The time is when the round closed, in seconds since the epoch.
        """
        return sorted(self._points[learner])

    def mean(self) -> Matrix:
        """Returns the mean cosine between each two learners, float64 [learners, learners].

        It is NaN for two learners that had no update in the same round.
        """
        with np.errstate(invalid="ignore"):
            return np.asarray(self._sums / np.where(self._counts, self._counts, np.nan))


# The most bytes of shards that are read.
ROUND_BYTES = 64 << 20
# The fewest rounds for figures, and the number of newest cosines in their mean.
FEWEST, NEWEST = 4, 8
# An element is lone if it is this many times as large as the others' at its place, and as the
# others' usual element of its tensor. A flipped bit makes a lone element; whole rows are data.
LONE_TIMES, LONE_SIZES, LONE_MOST = 4.0, 10.0, 4
# It is lone only if fewer than this number are expected from the fall-off of the others' largest
# elements: with rare inputs, Adam's steps are large in single elements of honest updates too.
RARE, TAIL = 1e-3, 16
# Share of the others' norm in a tensor below which an update is close to zero there.
STILL = 0.01


class _Compared:
    """Figures of one learner over several rounds, the newest first."""

    def __init__(self) -> None:
        self._cosines: list[tuple[float, float]] = []
        self.squares: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.factors: list[tuple[float, str]] = []
        self.to_zero: list[float] = []

    def add(self, round_: ComparedRound, cosines: Matrix, row: int) -> None:
        length = math.sqrt(round_.products[row, row])
        self._cosines.append((length, float(np.delete(cosines[row], row).mean())))
        for index, (tensor, _) in enumerate(round_.tensors):
            others = np.median(np.delete(round_.squares[:, index], row))
            self.squares[tensor].append((float(round_.squares[row, index]), float(others)))
        if 0 < round_.lone[row] <= LONE_MOST:
            name = round_.tensors[round_.tensor[row]][0]
            self.factors.append((float(round_.factor[row]), name))
        if (to_zero := round_.to_zero) is not None:
            self.to_zero.append(float(to_zero[row]))

    @property
    def cosines(self) -> list[float]:
        """For each round, the mean cosine of the learner's update to the others'.

        Updates of almost no length, as at the end of a learning-rate schedule, are left out.
        """
        longest = max(length for length, _ in self._cosines)
        return [cosine for length, cosine in self._cosines if length > FADED * longest]

    def figures(self) -> ShardFigures:
        # Rounds in which the others' norms have faded tell nothing, nor do few rounds.
        told = {tensor: _not_faded(squares) for tensor, squares in self.squares.items()}
        told = {tensor: rounds for tensor, rounds in told.items() if len(rounds) >= FEWEST}
        # The median, since in some rounds another update may be far larger than all.
        still = [
            tensor
            for tensor, squares in told.items()
            if median(own - STILL**2 * others for own, others in squares) < 0
        ]
        norms = {
            tensor: _agreed([0.5 * math.log(own / others) for own, others in squares])
            for tensor, squares in told.items()
            # A tensor that only this learner's data uses is not compared.
            if tensor not in still and all(own > 0 and others > 0 for own, others in squares)
        }
        factor, tensor = max(self.factors, default=(0.0, ""))
        return ShardFigures(
            # Only the newest cosines: an earlier fault may have been repaired since.
            fmean(self.cosines[:NEWEST]), len(self._cosines),
            tuple(still) if len(still) < len(self.squares) else (),
            norms, len(self.factors), factor, tensor,
            median(self.to_zero) if self.to_zero else None,
        )  # fmt: skip


def _not_faded(squares: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the pairs (learner's, others') of squared norms whose second is not almost zero."""
    longest = max(others for _, others in squares)
    return [(own, others) for own, others in squares if others >= FADED**2 * longest]


def _agreed(values: Sequence[float]) -> float:
    """Returns the lower quartile if that is positive, the upper if that is negative, else 0."""
    ordered, few = sorted(values), len(values) // 4
    return max(ordered[few], 0.0) + min(ordered[-1 - few], 0.0)


def _one_strays(cosines: Matrix) -> bool:
    """Returns whether one update's mean cosine to the others is far below the median of all."""
    to_others = [float(np.delete(row, place).mean()) for place, row in enumerate(cosines)]
    return len(to_others) > OTHERS and min(to_others) < APART * median(to_others)


def shard_figures(
    context: RunContext, rounds: Sequence[wire.Record], within_s: float = math.inf
) -> dict[str, ShardFigures]:
    """Compares each learner's updates with the others', by the shards of some rounds; blocks.

    Reads the newest rounds first, `ROUND_BYTES` of shards at most. Once a learner's updates point
    elsewhere than the others', the parameters of the next `NEWEST` rounds are read too. Rounds
    whose shards are missing do not count.

    Args:
        context: the run's context.
        rounds: records of rounds, the oldest first.
        within_s: seconds after which no further round is read.

    Returns:
        The figures by learner's name, without learners of fewer than `FEWEST` rounds.

    Raises:
        StoreUnavailableError: the store is unreachable.
    """
    found: dict[str, _Compared] = defaultdict(_Compared)
    left, began_s = ROUND_BYTES, time.monotonic()
    strays, views = False, NEWEST
    layout, sync, store = context.layout, context.settings.sync, context.store
    for record in reversed(rounds):
        beside = strays and views > 0
        left -= sum(shard.size_bytes for taken in record.inputs for shard in taken.shards)
        left -= FLOAT_BYTES * layout.fragments[record.fragment].size if beside else 0
        if left < 0 or time.monotonic() - began_s > within_s:
            break
        compared = compare_round(layout, sync, store, record, parameters=beside)
        if compared is None:
            continue
        cosines = compared.cosines
        strays, views = strays or _one_strays(cosines), views - beside
        for row, taken in zip(range(len(cosines)), record.inputs, strict=False):
            found[taken.learner].add(compared, cosines, row)
    return {name: one.figures() for name, one in found.items() if len(one.cosines) >= FEWEST}
