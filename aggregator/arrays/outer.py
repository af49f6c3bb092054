"""The outer step: pure functions of arrays, the same bits everywhere.

Shapes: N elements of a fragment's vector, S segments.

`close_round` computes the outer gradient from a round's sum (`merge.py`), moves the master
parameters by an outer optimizer, and moves the view to them by a quantized delta. Each block gets
all of these operations while it is in cache (`codec_kernels.py`), with float32 constants and one
rounding per operation, so that dividing the blocks among threads changes no bit.

Sources: DiLoCo (arXiv 2311.08105) for the outer Nesterov; Async Local-SGD (2401.09135) for
Delayed Nesterov; Decoupled DiLoCo (2604.21428).
"""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.aggregator.arrays.codec_kernels import Lanes, Vector, encode, lanes
from diloco.aggregator.arrays.grid import Grid, PieceRun, share_out
from diloco.aggregator.arrays.merge import Accumulator, as_bits
from diloco.aggregator.arrays.prefetch import NEAR, fetch_row
from diloco.aggregator.kernel_cache import compiled
from diloco.common.protocol.codecs import (
    Codec,
    Encoded,
    aligned_empty,
    aligned_zeros,
    code_count,
    code_dtype,
    scale_count,
)

State = dict[str, npt.NDArray[Any]]
OuterName = Literal["sgd", "momentum", "nesterov", "delayed_nesterov"]
# Blocks that are encoded together: computing a block's scale is a chain of dependent steps, during
# which the processor works on the next block.
TILE: Final = np.uint64(8)
Constants = tuple[np.float32, np.float32, np.float32, np.float32]
SGD, MOMENTUM, NESTEROV, DELAYED_NESTEROV, DELAYED_NESTEROV_NTH = range(5)


class Step(NamedTuple):
    """One step of an outer optimizer.

    Attributes:
        rule: `SGD`, `MOMENTUM` and so on.
        constants: learning rate, momentum, 1 / delay, and the factor of the carried momentum;
            rounded to float32 once, so that every machine has the same.
    """

    rule: int
    constants: Constants


class MergedGradient(NamedTuple):
    """A round's sum and the factors of its merged gradient; unused arrays are empty.

    Attributes:
        total_Bxb: the sum; not changed.
        factors_S: the factors of the sum.
        kept_S: the share of the center that is added (centered clipping).
        center_Bxb: the previous merged gradient, which this one overwrites (centered clipping).
    """

    total_Bxb: Vector  # noqa: N815 - shapes live in names of arrays
    factors_S: Vector  # noqa: N815 - as above
    kept_S: Vector  # noqa: N815 - as above
    center_Bxb: Vector  # noqa: N815 - as above


class Moved(NamedTuple):
    """The arrays that an outer step changes; arrays that the step's rule does not use are empty."""

    theta_Bxb: Vector  # noqa: N815 - shapes live in names of arrays
    momentum_Bxb: Vector  # noqa: N815 - as above
    delayed_Bxb: Vector  # noqa: N815 - as above
    view_Bxb: Vector  # noqa: N815 - as above


class OuterOptimizer(NamedTuple):
    """An outer optimizer as a pair of functions; the caller holds the state.

    Attributes:
        init: makes the first state of a fragment of N elements: named arrays, always in the same
            order.
        begin: given the state, the learning rate and the momentum, makes the `Step` that
            `close_round` then takes; counts that step in the state.
    """

    init: Callable[[int], State]
    begin: Callable[[State, float, float], Step]


def make_outer(name: OuterName, *, delay: int = 1, delay_fraction: float = 0.0) -> OuterOptimizer:
    """Returns an outer optimizer by name.

        sgd               theta -= lr g
        momentum          m = mu m + g;  theta -= lr m
        nesterov          m = mu m + g;  theta -= lr (g + mu m)
        delayed_nesterov  D += g; at every N-th arrival m = mu m + D / N, D = 0;
                          theta -= lr (a mu m + g / N), a = 1 - c N + c at an N-th, else c

    Args:
        name: one of the four names above.
        delay: N, the number of arrivals between two updates of the momentum.
        delay_fraction: c, the share of the momentum that the other arrivals apply.
    """

    def init(size: int) -> State:
        state: State = {slot: aligned_zeros(size) for slot in _SLOTS[name]}
        if name == "delayed_nesterov":
            state["arrivals"] = np.zeros(1, np.int64)
        return state

    def begin(state: State, learning_rate: float, momentum: float) -> Step:
        rate, carried = np.float32(learning_rate), np.float32(momentum)
        if name != "delayed_nesterov":
            return Step(_RULES[name], (rate, carried, np.float32(1), np.float32(0)))
        state["arrivals"] += 1
        nth = int(state["arrivals"][0]) % delay == 0
        applied = 1 - delay_fraction * delay + delay_fraction if nth else delay_fraction
        rule = DELAYED_NESTEROV_NTH if nth else DELAYED_NESTEROV
        return Step(rule, (rate, carried, np.float32(1 / delay), np.float32(applied * momentum)))

    return OuterOptimizer(init, begin)


_SLOTS: Final[dict[OuterName, tuple[str, ...]]] = {
    "sgd": (),
    "momentum": ("momentum",),
    "nesterov": ("momentum",),
    "delayed_nesterov": ("momentum", "delayed"),
}
_RULES: Final[dict[OuterName, int]] = {
    "sgd": SGD,
    "momentum": MOMENTUM,
    "nesterov": NESTEROV,
    "delayed_nesterov": DELAYED_NESTEROV,
}


def participation(learning_rate: float, momentum: float, share: float) -> tuple[float, float]:
    """Returns (learning rate, momentum) of a round that merged the share f of the fleet's weight.

    The round takes the share f of an outer step: learning rate x f, momentum^f.
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
    """Takes the outer step, and moves the view to the new master parameters, quantized.

    Args:
        grid: the fragment's grid.
        accumulator: the round's sum; not changed.
        factors_S: from `factors` or from the record.
        kept_S: the share of the previous merge, `state["center"]`, that is added; None: none.
        theta_N: master parameters, float32; changed in place.
        view_N: parameters as learners see them, float32; changed in place.
        state: the optimizer's state; changed in place.
        optimizer: from `make_outer`.
        learning_rate: this round's.
        momentum: this round's.
        delta_codec: codec of the version's delta.
        threads: the number of threads that share the work; it changes no bit.

    Returns:
        The version's delta, which learners add to their view: one shard over the whole vector. The
        quantization error stays in theta - view, and later versions send it.
    """
    step = optimizer.begin(state, learning_rate, momentum)
    delta = Encoded(
        np.empty(scale_count(delta_codec, grid.size, grid.block), ml_dtypes.bfloat16),
        aligned_empty(code_count(delta_codec, grid.size), code_dtype(delta_codec)),
    )
    nothing_N = np.empty(0, np.float32)

    def rows(values_N: Vector) -> Vector:
        return values_N.reshape(-1, grid.block)

    merged = MergedGradient(
        rows(accumulator.total()),
        factors_S.astype(np.float32),
        nothing_N if kept_S is None else np.array(kept_S),
        rows(state.get("center", nothing_N)),
    )
    moved = Moved(
        rows(theta_N),
        rows(state.get("momentum", nothing_N)),
        rows(state.get("delayed", nothing_N)),
        rows(view_N),
    )
    codes = as_bits(delta.codes).reshape(-1, code_count(delta_codec, grid.block))
    bits = Encoded(as_bits(delta.scales), codes)

    def advance(run: PieceRun) -> None:
        advance_blocks(run, lanes(grid.block), step, merged, moved, bits)

    share_out(advance, grid.runs(threads), threads)
    return delta


# --- The kernel (codec_kernels.py says why it looks so)


@compiled
def advance_blocks(  # noqa: C901 - divided it would be slower
    run: PieceRun, elements: Lanes, step: Step, merged: MergedGradient, moved: Moved, delta: Encoded
) -> None:
    """Takes the outer step, encodes theta - view as a delta, and adds the decoded delta to view."""
    theta_Bxb, momentum_Bxb, delayed_Bxb, view_Bxb = moved
    rule, constants = step
    total_Bxb, factors_S, kept_S, center_Bxb = merged
    scales, codes = delta
    g_b = np.empty(len(elements), np.float32)
    behind_Kxb = np.empty((TILE, len(elements)), np.float32)
    for piece in range(len(run.segment_P)):
        segment = run.segment_P[piece]
        factor = factors_S[segment]
        start, end = np.uint64(run.edges_P1[piece]), np.uint64(run.edges_P1[piece + 1])
        while start < end:
            count = min(TILE, end - start)
            for k in range(count):
                b = start + k
                fetch_row(total_Bxb, b + NEAR)
                fetch_row(theta_Bxb, b + NEAR)
                fetch_row(momentum_Bxb, b + NEAR)
                fetch_row(view_Bxb, b + NEAR)
                for j in range(len(elements)):
                    g_b[j] = total_Bxb[b, j] * factor
                if kept_S.size:
                    _recenter(elements, kept_S[segment], g_b, center_Bxb[b])
                if rule == SGD:
                    for j in range(len(elements)):
                        g_b[j] = g_b[j] * constants[0]
                elif rule == MOMENTUM:
                    _momentum(elements, constants, g_b, momentum_Bxb, b)
                elif rule == NESTEROV:
                    _nesterov(elements, constants, g_b, momentum_Bxb, b)
                else:
                    _delayed(elements, rule, constants, g_b, momentum_Bxb[b], delayed_Bxb[b])
                for j in range(len(elements)):
                    theta = theta_Bxb[b, j] - g_b[j]
                    theta_Bxb[b, j] = theta
                    behind_Kxb[k, j] = theta - view_Bxb[b, j]
            encode(elements, scales, codes, start, count, behind_Kxb)
            for k in range(count):
                for j in range(len(elements)):
                    view_Bxb[start + k, j] += behind_Kxb[k, j]
            start += count


@compiled
def _recenter(elements: Lanes, kept: Any, g_b: Vector, center_b: Vector) -> None:
    """Adds `kept` x the previous merge, `center_b`, to `g_b`; stores the sum in both."""
    for j in range(len(elements)):
        merged = g_b[j] + center_b[j] * kept
        g_b[j] = merged
        center_b[j] = merged


# --- The outer optimizers


@compiled
def _momentum(elements: Lanes, k: Constants, g_b: Vector, momentum_Bxb: Vector, b: Any) -> None:
    for j in range(len(elements)):
        m = momentum_Bxb[b, j] * k[1] + g_b[j]
        momentum_Bxb[b, j] = m
        g_b[j] = m * k[0]


@compiled
def _nesterov(elements: Lanes, k: Constants, g_b: Vector, momentum_Bxb: Vector, b: Any) -> None:
    for j in range(len(elements)):
        m = momentum_Bxb[b, j] * k[1] + g_b[j]
        momentum_Bxb[b, j] = m
        g_b[j] = (g_b[j] + m * k[1]) * k[0]


@compiled
def _delayed(
    elements: Lanes, rule: int, k: Constants, g_b: Vector, m_b: Vector, delayed_b: Vector
) -> None:
    rate, momentum, share, carried = k
    for j in range(len(elements)):
        delayed_b[j] += g_b[j]
    if rule == DELAYED_NESTEROV_NTH:
        for j in range(len(elements)):
            m_b[j] = m_b[j] * momentum + delayed_b[j] * share
            delayed_b[j] = 0
    for j in range(len(elements)):
        g_b[j] = (g_b[j] * share + m_b[j] * carried) * rate
