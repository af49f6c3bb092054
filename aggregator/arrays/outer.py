"""The outer step: pure functions of arrays, the same bits everywhere.

Shapes: N elements of a fragment's vector, B = N / block blocks.

`close_round` takes what a round has summed (`merge.py`), forms the outer gradient as it goes,
moves the master parameters by an outer optimizer, and the view after them by a quantized delta.
It is NumPy arithmetic with float32 constants, one rounding per operation, and elementwise, so
that cutting it in chunks for cache and threads changes no bit.

Sources: DiLoCo (arXiv 2311.08105) for the outer Nesterov; Async Local-SGD (2401.09135) for
Delayed Nesterov; Decoupled DiLoCo (2604.21428).
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.grid import Grid
from diloco.aggregator.arrays.merge import CHUNK, Accumulator, Vector
from diloco.common.codec import (
    Codec,
    Encoded,
    aligned_zeros,
    code_count,
    code_dtype,
    decode_numpy,
    scale_count,
)
from diloco.common.quantize import decode_blocks, encode_blocks

State = dict[str, npt.NDArray[Any]]
OuterName = Literal["sgd", "momentum", "nesterov", "delayed_nesterov"]

# Elements that are quantized at a time.
SLAB: Final = 1 << 20


class Gradient(NamedTuple):
    """A merged outer gradient that is formed as it is read: span x factor.

    Attributes:
        spans: first element and float32 values of contiguous parts that cover the vector; their
            lengths are multiples of `block`.
        factors: float32 [B], or None for ones.
        block: elements that share a factor.
        center: the merged gradient before, float32 [N], of which `kept` (float32 [B]) is added;
            this one takes its place.
    """

    spans: tuple[tuple[int, Vector], ...]
    factors: Vector | None = None
    block: int = 1
    center: Vector | None = None
    kept: Vector | None = None


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
        threads: int = 1,
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
        theta_N: Vector,
        gradient: Gradient,
        state: State,
        *,
        learning_rate: float,
        momentum: float,
        threads: int = 1,
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
        work = partial(_step, rule, constants, theta_N, gradient, vectors)
        _share_out(work, _chunks(gradient), threads)

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


def _share_out(work: Callable[[Sequence[Any]], None], items: Sequence[Any], threads: int) -> None:
    """Have `work` done on all items by some threads, in parts of neighbours."""
    if len(items) == 1:
        work(items)
        return
    # Several parts for each thread, so that one that is held up does not hold up the end.
    parts = min(len(items), 4 * threads)
    edges = [len(items) * part // parts for part in range(parts + 1)]
    with ThreadPoolExecutor(threads) as pool:
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
        _centered(g, here, gradient, spare)
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


def _centered(g: Vector, here: slice, gradient: Gradient, spare: Vector) -> None:
    """Add what stays of the merge before, and put the new one in its place."""
    if gradient.center is None:
        return
    assert gradient.kept is not None
    center, block = gradient.center[here], gradient.block
    kept_B = gradient.kept[here.start // block : here.stop // block]
    np.multiply(center.reshape(-1, block), kept_B[:, None], out=spare.reshape(-1, block))
    g += spare
    center[:] = g


def participation(learning_rate: float, momentum: float, share: float) -> tuple[float, float]:
    """Learning rate and momentum of a round that holds `share` of the fleet's weight.

    It takes that share of an outer step: the rate times f, the momentum to the power of f.
    """
    return learning_rate * share, momentum**share


# --- The end of a round


def close_round(
    grid: Grid,
    accumulator: Accumulator,
    factors_S: Vector,
    kept_S: Vector | None = None,
    *,
    theta_N: Vector,
    view_N: Vector,
    state: State,
    optimizer: OuterOptimizer,
    learning_rate: float,
    momentum: float,
    delta_codec: Codec,
    threads: int = 1,
) -> Encoded:
    """Take the outer step and move the view after it.

    Args:
        grid: the fragment's.
        accumulator: of the round; left as it is.
        factors_S: of `factors` or of the record.
        kept_S: what stays of the merge before, which is `state["center"]`; None: nothing is kept.
        theta_N: master parameters, float32; changed in place.
        view_N: parameters as learners see them, float32; changed in place.
        state: of `optimizer`; changed in place.
        optimizer: of `make_outer`.
        learning_rate: of this round.
        momentum: of this round.
        delta_codec: of the version delta.
        threads: that share the work; their number changes no bit.

    Returns:
        The version delta: what learners add to their view, one shard over the whole vector. What
        its quantization lost is still in theta - view, and goes out with later versions.
    """
    gradient = Gradient(tuple(accumulator.spans()), grid.per_block(factors_S), grid.block)
    if kept_S is not None:
        gradient = gradient._replace(center=state["center"], kept=grid.per_block(kept_S))
    optimizer.update(
        theta_N, gradient, state, learning_rate=learning_rate, momentum=momentum, threads=threads
    )
    return advance_view(theta_N, view_N, delta_codec, grid.block, threads)


def advance_view(
    theta_N: Vector, view_N: Vector, codec: Codec, block: int, threads: int = 1
) -> Encoded:
    """Quantize theta - view and add what that gives to the view, in place.

    It is done in slabs, which stay in cache and need one compiled shape.
    """
    delta = Encoded(
        np.empty(scale_count(codec, view_N.size, block), ml_dtypes.bfloat16),
        np.empty(code_count(codec, view_N.size), code_dtype(codec)),
    )
    slab = min(SLAB, view_N.size)
    work = partial(_advance_slabs, theta_N, view_N, delta, codec, block, slab)
    _share_out(work, range(0, view_N.size, slab), threads)
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
    difference = aligned_zeros(slab)
    for start in starts:
        here = slice(start, min(start + slab, view_N.size))
        length = here.stop - start
        np.subtract(theta_N[here], view_N[here], out=difference[:length])
        difference[length:] = 0
        (encoded,) = encode_blocks(codec, (difference.reshape(-1, block),))
        step = np.asarray(decode_blocks(codec, encoded, block))
        view_N[here] += step.reshape(-1)[:length]
        for whole, part in zip(_part(codec, delta, here, block), encoded, strict=True):
            whole[:] = np.asarray(part).reshape(-1)[: whole.size]


def apply_delta(codec: Codec, view_N: Vector, delta: Encoded, block: int, threads: int = 1) -> None:
    """Add a version delta to a view in place, bit for bit as learners do (`learner/delta.py`)."""
    work = partial(_apply_slabs, view_N, delta, codec, block)
    _share_out(work, range(0, view_N.size, CHUNK), threads)


def _apply_slabs(
    view_N: Vector, delta: Encoded, codec: Codec, block: int, starts: Sequence[int]
) -> None:
    for start in starts:
        here = slice(start, min(start + CHUNK, view_N.size))
        view_N[here] += decode_numpy(codec, _part(codec, delta, here, block), block)


def _part(codec: Codec, delta: Encoded, here: slice, block: int) -> Encoded:
    """Views of what a delta holds of some blocks."""
    scales = slice(scale_count(codec, here.start, block), scale_count(codec, here.stop, block))
    codes = slice(code_count(codec, here.start), code_count(codec, here.stop))
    return Encoded(np.asarray(delta.scales)[scales], np.asarray(delta.codes)[codes])
