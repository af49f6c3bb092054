"""Merging of updates and the outer step: pure functions of arrays, the same bits everywhere.

Shapes: N elements of a fragment's vector, H = N / 2, B = N / block blocks, S segments.

A round in this order: of each update its `segment_norms`, its `coefficients` and
`Accumulator.add`; at the end `factors` and `close_round`. To merge again what a record says, only
`add` and `close_round` are called, with the recorded coefficients and factors: no norm is
computed twice.

Why the bits are the same on every machine:
  - a coefficient is a bfloat16, so code x scale x coefficient is exact in float32, and it does
    not matter whether a compiler fuses the product with the sum (a float32 update, whose product
    is rounded, forms it in a kernel of its own);
  - inputs are added in the order of the record;
  - the outer step is NumPy arithmetic with float32 constants, one rounding per operation. It is
    elementwise, so cutting it in chunks for cache and threads changes nothing.

Sources: Decoupled DiLoCo (arXiv 2604.21428), App. D.2 (radial-directional averaging, RDA); DiLoCo
(2311.08105) for the outer Nesterov; Async Local-SGD (2401.09135) for Delayed Nesterov.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from common.layout import Fragment
from common.quantize import (
    GREATEST_CODE,
    Codec,
    Encoded,
    aligned_zeros,
    code_count,
    code_dtype,
    decode,
    decode_numpy,
    encode,
    fold,
    reduce_to_lanes,
    scale_count,
)
from common.shards import shard_ranges

Vector = npt.NDArray[np.float32]
Norms = npt.NDArray[np.float64]
State = dict[str, npt.NDArray[Any]]
OuterName = Literal["sgd", "momentum", "nesterov", "delayed_nesterov"]
Merge = Literal["rda", "average"]

LEAST_COEFFICIENT: Final = 2.0**-60
GREATEST_COEFFICIENT: Final = 2.0**60
# Directions whose weighted sum is this much shorter than the sum of their lengths cancel.
CANCELLING: Final = 1e-6
# Squares of scales 2^-64 to 2^40 times this, and a block's sum of them, are normal float32s.
_UNIT: Final = np.float32(256)
# Elements that one thread works on at a time, so that an operation finds them in its cache.
CHUNK: Final = 1 << 16
# Elements of each half that are quantized at a time.
SLAB: Final = 1 << 19
WORKERS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How a fragment's vector divides into shards, blocks and segments.

    Attributes:
        size: N.
        block: elements that share a scale.
        ranges: [start, stop) of each shard of an update.
        lengths: blocks of each segment, int64 [S].
        radial: whether a segment is merged by RDA, bool [S].
    """

    size: int
    block: int
    ranges: tuple[tuple[int, int], ...]
    lengths: npt.NDArray[np.int64]
    radial: npt.NDArray[np.bool_]

    def per_block(self, values_S: npt.NDArray[Any]) -> Vector:
        """Each segment's value for each of its blocks, float32 [B]."""
        return np.repeat(values_S.astype(np.float32), self.lengths)


def make_grid(fragment: Fragment, block: int, shard_elements: int, merge: Merge = "rda") -> Grid:
    """The grid of a fragment.

    Args:
        fragment: of the layout.
        block: the layout's.
        shard_elements: the run's `sync.shard_elements`.
        merge: "average" averages every segment, whatever the layout says.
    """
    rules = fragment.segment_rules()
    segment_of_block_B = fragment.segment_of_block(block)
    return Grid(
        size=fragment.size,
        block=block,
        ranges=tuple(shard_ranges(fragment.size, block, shard_elements)),
        lengths=np.bincount(segment_of_block_B, minlength=len(rules)).astype(np.int64),
        radial=np.asarray([merge == "rda" and rule == "rda" for rule in rules]),
    )


# --- The merge rule


class Contribution(NamedTuple):
    """What the merge must know of one update, besides its codes.

    Attributes:
        norms: `segment_norms` of the codes as they came, float64 [S].
        weight: w > 0, tokens^2 / steps.
        discount: S in (0, 1], for staleness.
        clip: c in (0, 1], by which the update is shortened.
    """

    norms: Norms
    weight: float
    discount: float = 1.0
    clip: float = 1.0


def segment_norms(grid: Grid, codec: Codec, shards: Sequence[Encoded]) -> Norms:
    """L2 norm of each segment of an update, float64 [S].

    Sums of squared integer codes are exact in each block; all else has float32's precision.
    """
    if codec in GREATEST_CODE:
        return _code_norms(grid, codec, shards)
    spans = (
        (start + offset, np.asarray(encoded.codes[offset : offset + CHUNK]).astype(np.float32))
        for (start, stop), encoded in zip(grid.ranges, shards, strict=True)
        for offset in range(0, stop - start, CHUNK)
    )
    return _vector_norms(grid, spans)


def coefficients(grid: Grid, update: Contribution) -> npt.NDArray[Any]:
    """What each code x scale of an update is multiplied by; bfloat16 [S], to be recorded.

    w S c for a plain average and w S / |v| for RDA, which adds directions: a clip changes none,
    and enters by the magnitudes in `factors`. A zero segment has no direction: 0.
    """
    share = update.weight * update.discount
    nonzero_S = np.where(update.norms > 0, update.norms, np.inf)
    wanted_S = np.where(grid.radial, share / nonzero_S, share * update.clip)
    clamped_S = np.clip(wanted_S, LEAST_COEFFICIENT, GREATEST_COEFFICIENT)
    return np.where(wanted_S > 0, clamped_S, 0.0).astype(ml_dtypes.bfloat16)


def factors(grid: Grid, accumulator: "Accumulator", updates: Sequence[Contribution]) -> Vector:
    """What the accumulated sum is multiplied by to give the merged outer gradient.

    float32 [S], to be recorded. With A the accumulated sum of a segment:

        average   1 / sum w, each w rounded as in its coefficient: shares sum to one
        RDA       (sum w S c |v| / sum w) / |A|,   0 if the directions cancel

    The denominators hold w without its discount, so that a stale update that is alone in its
    round is discounted all the same (DESIGN.md, "A round and its merge").
    """
    average = 1 / sum(float(ml_dtypes.bfloat16(update.weight)) for update in updates)
    if not grid.radial.any():
        return np.full(len(grid.radial), average, np.float32)
    weight = sum(update.weight for update in updates)
    magnitude_S = np.zeros(len(grid.radial))
    reach_S = np.zeros(len(grid.radial))
    for update in updates:
        share = update.weight * update.discount
        magnitude_S += share * update.clip / weight * update.norms
        reach_S += share * (update.norms > 0)
    length_S = _vector_norms(grid, accumulator.spans())
    cancels_S = length_S <= CANCELLING * reach_S
    turned_S = np.where(cancels_S, 0.0, magnitude_S / np.where(cancels_S, 1.0, length_S))
    return np.where(grid.radial, turned_S, average).astype(np.float32)


def participation(learning_rate: float, momentum: float, share: float) -> tuple[float, float]:
    """Learning rate and momentum of a round that holds `share` of the fleet's weight.

    It takes that share of an outer step: the rate times f, the momentum to the power of f.
    """
    return learning_rate * share, momentum**share


def _code_norms(grid: Grid, codec: Codec, shards: Sequence[Encoded]) -> Norms:
    starts_S = np.cumsum(grid.lengths) - grid.lengths
    squares = []
    for scales_B, codes in shards:
        rows = _square_lanes(codes, codec=codec, block=grid.block)
        squares.append(np.asarray(_block_squares(rows, scales_B, codec=codec)))
    whole_B = squares[0] if len(squares) == 1 else np.concatenate(squares)
    return np.sqrt(np.add.reduceat(whole_B, starts_S, dtype=np.float64)) / _UNIT


@partial(jax.jit, static_argnames=("codec", "block"))
def _square_lanes(codes: jax.Array, *, codec: Codec, block: int) -> jax.Array:
    """Sums of squared codes; of both planes of int4 in one integer: int32 [blocks, lanes]."""
    if codec == "int8":
        return reduce_to_lanes(jnp.square(codes.astype(jnp.int32)), jax.lax.add, block)
    low_H, high_H = (plane.astype(jnp.int32) - 8 for plane in (codes & 15, codes >> 4))
    # A block of at most 512 squares of codes -7..7 adds up to less than 2^15.
    return reduce_to_lanes(jnp.square(low_H) + (jnp.square(high_H) << 16), jax.lax.add, block)


@partial(jax.jit, static_argnames="codec")
def _block_squares(rows: jax.Array, scales_B: jax.Array, *, codec: Codec) -> jax.Array:
    """Sum of squares of each block times `_UNIT` squared, float32 [B]."""
    sums = fold(rows, jax.lax.add)
    if codec == "int4":
        sums = jnp.stack([sums & 0xFFFF, sums >> 16]).reshape(-1)
    return sums.astype(jnp.float32) * jnp.square(scales_B.astype(jnp.float32) * _UNIT)


def _vector_norms(grid: Grid, spans: Iterable[tuple[int, Vector]]) -> Norms:
    """L2 norm of each segment of a float32 vector that is given in parts."""
    ends_S = np.cumsum(grid.lengths) * grid.block
    squares_S = np.zeros(len(ends_S))
    for start, values in spans:
        done = 0
        while done < values.size:
            segment = int(np.searchsorted(ends_S, start + done, side="right"))
            stop = min(done + CHUNK, values.size, int(ends_S[segment]) - start)
            squares_S[segment] += _square(values[done:stop])
            done = stop
    return np.sqrt(squares_S)


def _square(values: Vector) -> float:
    """Sum of squares; in float64 where float32 would leave its range."""
    total = float(np.dot(values, values))
    if not 1e-20 < total < 1e30:
        exact = values.astype(np.float64)
        total = float(np.dot(exact, exact))
    return total


# --- The sum


class Accumulator:
    """Sum of coefficient x update over the inputs of a round, added as they arrive.

    It is held as the two halves of each shard's range, as the planes of int4 are, in buffers that
    each addition donates and gets back: nothing is allocated after the first, and the memory is
    that of one float32 vector whatever the number of inputs.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._halves = [
            (jnp.zeros((stop - start) // 2), jnp.zeros((stop - start) // 2))
            for start, stop in grid.ranges
        ]
        self.inputs = 0

    def add(
        self, codec: Codec, shards: Sequence[Encoded], coefficients_S: npt.NDArray[Any]
    ) -> None:
        """Add an update, all of whose shards have been verified.

        Args:
            codec: of the update.
            shards: one for each of the grid's ranges, in order.
            coefficients_S: of `coefficients` or of the record, bfloat16 [S].
        """
        block = self._grid.block
        coefficient_B = self._grid.per_block(coefficients_S)
        parts = zip(self._grid.ranges, shards, strict=True)
        for index, ((start, stop), (scales, codes)) in enumerate(parts):
            middle = (start + stop) // 2
            low_B = coefficient_B[start // block : middle // block]
            high_B = coefficient_B[middle // block : stop // block]
            if codec == "float32":
                addends = _products(codes, coefficient_B[start // block : stop // block])
            self._halves[index] = _add(
                *self._halves[index],
                self.inputs > 0,
                scales,
                addends if codec == "float32" else codes,
                low_B,
                high_B,
                codec=codec,
                block=block,
            )
        # Not before the codes have been read may the caller let go of the update, or fetch more.
        jax.block_until_ready(self._halves)
        self.inputs += 1

    def reset(self) -> None:
        """Empty the sum for another round; the buffers are kept."""
        self.inputs = 0

    def spans(self) -> Iterator[tuple[int, Vector]]:
        """The sum in contiguous parts: first element and read-only float32 values of each."""
        for (start, stop), (low_H, high_H) in zip(self._grid.ranges, self._halves, strict=True):
            yield start, np.asarray(low_H)
            yield (start + stop) // 2, np.asarray(high_H)


@partial(jax.jit, static_argnames=("codec", "block"), donate_argnames=("low_H", "high_H"))
def _add(
    low_H: jax.Array,
    high_H: jax.Array,
    keep: jax.Array,
    scales_B: jax.Array,
    codes: jax.Array,
    coefficient_low: jax.Array,
    coefficient_high: jax.Array,
    *,
    codec: Codec,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """Both halves of a range plus an input's; in place of them unless `keep`."""
    half, blocks = low_H.shape[0], low_H.shape[0] // block
    if codec == "int4":
        parts = ((codes & 15).astype(jnp.int32) - 8, (codes >> 4).astype(jnp.int32) - 8)
    else:
        parts = (codes[:half], codes[half:])

    def plus(
        sum_H: jax.Array, codes_H: jax.Array, rows: slice, coefficient: jax.Array
    ) -> jax.Array:
        kept_H = jnp.where(keep, sum_H, np.float32(0))
        if codec == "float32":
            return kept_H + codes_H
        if codec in GREATEST_CODE:
            coefficient = scales_B[rows].astype(jnp.float32) * coefficient
        values_Bxb = codes_H.astype(jnp.float32).reshape(-1, block) * coefficient[:, None]
        return kept_H + values_Bxb.reshape(-1)

    return (
        plus(low_H, parts[0], slice(0, blocks), coefficient_low),
        plus(high_H, parts[1], slice(blocks, 2 * blocks), coefficient_high),
    )


@jax.jit
def _products(values_N: jax.Array, coefficient_B: jax.Array) -> jax.Array:
    """Rounded products, in a kernel without additions; float32 [N]."""
    rows = values_N.reshape(coefficient_B.shape[0], -1)
    return (rows * coefficient_B[:, None]).reshape(-1)


# --- Outer optimizers


class Gradient(NamedTuple):
    """A merged outer gradient that is formed as it is read: span x factor.

    Attributes:
        spans: first element and float32 values of contiguous parts that cover the vector; their
            lengths are multiples of `block`.
        factors: float32 [B], or None for ones.
        block: elements that share a factor.
    """

    spans: tuple[tuple[int, Vector], ...]
    factors: Vector | None = None
    block: int = 1


class Update(Protocol):
    """One outer step, in place; gradients are of descent: theta moves against them."""

    def __call__(
        self,
        theta_N: Vector,
        gradient: Gradient,
        state: State,
        *,
        learning_rate: float,
        momentum: float,
    ) -> None:
        """Change `theta_N` (float32 [N]) and `state`, which `init` made."""


class OuterOptimizer(NamedTuple):
    """An outer optimizer as a pair of functions; the caller holds the state.

    Attributes:
        init: N -> state: named arrays, in an order that is always the same.
        update: one step.
    """

    init: Callable[[int], State]
    update: Update


class _Constants(NamedTuple):
    """Scalars of one step, rounded to float32 once so that every machine has the same.

    Attributes:
        nth: whether Delayed Nesterov refreshes its momentum at this step.
        inverse_delay: 1 / N.
        carried: what multiplies the momentum in Delayed Nesterov's step.
    """

    learning_rate: np.float32
    momentum: np.float32
    nth: bool = True
    inverse_delay: np.float32 = np.float32(1)
    carried: np.float32 = np.float32(0)


# theta, gradient (scratch: it may be overwritten), slots, more scratch; all float32 [chunk].
_Rule = Callable[[_Constants, Vector, Vector, dict[str, Vector], Vector], None]


def make_outer(name: OuterName, *, delay: int = 1, delay_fraction: float = 0.0) -> OuterOptimizer:
    """An outer optimizer by name.

        sgd               theta -= lr g
        momentum          m = mu m + g;  theta -= lr m
        nesterov          m = mu m + g;  theta -= lr (g + mu m)
        delayed_nesterov  D += g; at every N-th arrival m = mu m + D / N, D = 0;
                          theta -= lr (a mu m + g / N), a = 1 - c N + c at an N-th, else c

    Args:
        name: one of the above.
        delay: N, arrivals between two refreshments of the momentum.
        delay_fraction: c, the share of the momentum applied at every other arrival.
    """
    slots, rule = _RULES[name]

    def init(size: int) -> State:
        state: State = {slot: np.zeros(size, np.float32) for slot in slots}
        if name == "delayed_nesterov":
            state["arrivals"] = np.zeros(1, np.int64)
        return state

    def update(
        theta_N: Vector, gradient: Gradient, state: State, *, learning_rate: float, momentum: float
    ) -> None:
        constants = _Constants(np.float32(learning_rate), np.float32(momentum))
        if name == "delayed_nesterov":
            state["arrivals"] += 1
            nth = int(state["arrivals"][0]) % delay == 0
            applied = 1 - delay_fraction * delay + delay_fraction if nth else delay_fraction
            constants = constants._replace(
                nth=nth,
                inverse_delay=np.float32(1 / delay),
                carried=np.float32(applied * momentum),
            )
        vectors = {slot: state[slot] for slot in slots}
        _share_out(partial(_step, rule, constants, theta_N, gradient, vectors), _chunks(gradient))

    return OuterOptimizer(init, update)


def _sgd(k: _Constants, theta: Vector, g: Vector, slots: dict[str, Vector], spare: Vector) -> None:
    del slots, spare
    g *= k.learning_rate
    theta -= g


def _momentum(
    k: _Constants, theta: Vector, g: Vector, slots: dict[str, Vector], spare: Vector
) -> None:
    del spare
    m = slots["momentum"]
    m *= k.momentum
    m += g
    np.multiply(m, k.learning_rate, out=g)
    theta -= g


def _nesterov(
    k: _Constants, theta: Vector, g: Vector, slots: dict[str, Vector], spare: Vector
) -> None:
    m = slots["momentum"]
    m *= k.momentum
    m += g
    np.multiply(m, k.momentum, out=spare)
    g += spare
    g *= k.learning_rate
    theta -= g


def _delayed_nesterov(
    k: _Constants, theta: Vector, g: Vector, slots: dict[str, Vector], spare: Vector
) -> None:
    m, delayed = slots["momentum"], slots["delayed"]
    delayed += g
    if k.nth:
        m *= k.momentum
        np.multiply(delayed, k.inverse_delay, out=spare)
        m += spare
        delayed[:] = 0
    np.multiply(m, k.carried, out=spare)
    g *= k.inverse_delay
    g += spare
    g *= k.learning_rate
    theta -= g


_RULES: Final[dict[OuterName, tuple[tuple[str, ...], _Rule]]] = {
    "sgd": ((), _sgd),
    "momentum": (("momentum",), _momentum),
    "nesterov": (("momentum",), _nesterov),
    "delayed_nesterov": (("momentum", "delayed"), _delayed_nesterov),
}


def _chunks(gradient: Gradient) -> list[tuple[int, Vector]]:
    return [
        (start + offset, values[offset : offset + CHUNK])
        for start, values in gradient.spans
        for offset in range(0, values.size, CHUNK)
    ]


def _share_out(work: Callable[[Sequence[Any]], None], items: Sequence[Any]) -> None:
    """Have `work` done on all items by a few threads, in parts of neighbours."""
    # Several parts for each thread, so that one that is held up does not hold up the end.
    parts = min(len(items), 4 * WORKERS)
    edges = [len(items) * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, (items[a:b] for a, b in itertools.pairwise(edges))))


def _step(
    rule: _Rule,
    constants: _Constants,
    theta_N: Vector,
    gradient: Gradient,
    slots: dict[str, Vector],
    chunks: Sequence[tuple[int, Vector]],
) -> None:
    """One outer step of some chunks: each vector is read from memory once."""
    scratch = np.empty((2, CHUNK), np.float32)
    for start, values in chunks:
        here = slice(start, start + values.size)
        g, spare = scratch[:, : values.size]
        _scaled(values, start, gradient, out=g)
        rule(constants, theta_N[here], g, {name: slot[here] for name, slot in slots.items()}, spare)


def _scaled(values: Vector, start: int, gradient: Gradient, *, out: Vector) -> None:
    """Values times their blocks' factors."""
    if gradient.factors is None:
        out[:] = values
        return
    block = gradient.block
    factors_B = gradient.factors[start // block : (start + values.size) // block]
    if (factors_B == factors_B[0]).all():
        np.multiply(values, factors_B[0], out=out)
    else:
        rows = values.reshape(-1, block)
        np.multiply(rows, factors_B[:, None], out=out.reshape(rows.shape))


# --- The end of a round


def close_round(
    grid: Grid,
    accumulator: Accumulator,
    factors_S: Vector,
    *,
    theta_N: Vector,
    view_N: Vector,
    state: State,
    optimizer: OuterOptimizer,
    learning_rate: float,
    momentum: float,
    delta_codec: Codec,
) -> Encoded:
    """Take the outer step and move the view after it.

    Args:
        grid: the fragment's.
        accumulator: of the round; left as it is.
        factors_S: of `factors` or of the record.
        theta_N: master parameters, float32; changed in place.
        view_N: parameters as learners see them, float32; changed in place.
        state: of `optimizer`; changed in place.
        optimizer: of `make_outer`.
        learning_rate: of this round.
        momentum: of this round.
        delta_codec: of the version delta.

    Returns:
        The version delta: what learners add to their view, one shard over the whole vector. What
        its quantization lost is still in theta - view, and goes out with later versions.
    """
    gradient = Gradient(tuple(accumulator.spans()), grid.per_block(factors_S), grid.block)
    optimizer.update(theta_N, gradient, state, learning_rate=learning_rate, momentum=momentum)
    return advance_view(theta_N, view_N, delta_codec, grid.block)


def advance_view(theta_N: Vector, view_N: Vector, codec: Codec, block: int) -> Encoded:
    """Quantize theta - view and add what that gives to the view, in place.

    It is done in slabs of the two halves, which stay in cache and need one compiled shape.
    """
    half = view_N.size // 2
    delta = Encoded(
        np.empty(scale_count(codec, view_N.size, block), ml_dtypes.bfloat16),
        np.empty(code_count(codec, view_N.size), code_dtype(codec)),
    )
    slab = min(SLAB, half)
    work = partial(_advance_slabs, theta_N, view_N, delta, codec, block, slab)
    _share_out(work, range(0, half, slab))
    return delta


def _advance_slabs(
    theta_N: Vector,
    view_N: Vector,
    delta: Encoded,
    codec: Codec,
    block: int,
    slab: int,
    starts: Sequence[int],
) -> None:
    half = view_N.size // 2
    theta_2xH, view_2xH = theta_N.reshape(2, half), view_N.reshape(2, half)
    difference_2xs = aligned_zeros(2 * slab).reshape(2, slab)
    for start in starts:
        length = min(slab, half - start)
        here = slice(start, start + length)
        np.subtract(theta_2xH[:, here], view_2xH[:, here], out=difference_2xs[:, :length])
        difference_2xs[:, length:] = 0
        encoded = encode(codec, difference_2xs.reshape(-1), block)
        step_2xs = np.asarray(decode(codec, encoded, block)).reshape(2, slab)
        view_2xH[:, here] += step_2xs[:, :length]
        for whole, part in zip(_part(delta, here, half, block), encoded, strict=True):
            whole[:] = np.asarray(part).reshape(len(whole), -1)[:, : whole.shape[1]]


def apply_delta(codec: Codec, view_N: Vector, delta: Encoded, block: int) -> None:
    """Add a version delta to a view in place, bit for bit as learners do (`learner/delta.py`)."""
    work = partial(_apply_slabs, view_N, delta, codec, block)
    _share_out(work, range(0, view_N.size // 2, CHUNK))


def _apply_slabs(
    view_N: Vector, delta: Encoded, codec: Codec, block: int, starts: Sequence[int]
) -> None:
    half = view_N.size // 2
    view_2xH = view_N.reshape(2, half)
    for start in starts:
        here = slice(start, min(start + CHUNK, half))
        part = Encoded(*(planes.reshape(-1) for planes in _part(delta, here, half, block)))
        view_2xH[:, here] += decode_numpy(codec, part, block).reshape(2, -1)


def _part(delta: Encoded, here: slice, half: int, block: int) -> Encoded:
    """Views of what a delta holds of the same elements of both halves.

    Scales [2, part of the blocks]; codes [1, part of the half] for int4 and [2, ...] for others.
    """
    blocks = slice(here.start // block, here.stop // block)
    scales, codes = np.asarray(delta.scales), np.asarray(delta.codes)
    return Encoded(scales.reshape(2, -1)[:, blocks], codes.reshape(-1, half)[:, here])
