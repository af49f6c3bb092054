"""Centered clipping: no update moves a merge by more than its radius from the previous merge.

    merged = v + sum of w c (e - v) / sum of w,   c = min(1, kappa r / |e - v|)^2

in each segment, where v is the merged gradient of the previous round, e an update times its
discount and clip, and r the lower median of the learners' |e - v| in the last round that had at
least three learners. An update within kappa r of v counts in full; one at x kappa r, x > 1, counts
like one at kappa r / x, so that an outlier has the less effect, the farther it lies. kappa is the
setting `outer.clip_radius`. v and r are known before the round, so updates are added one by one as
in any other merge. v (the *center*) and r are stored with the outer optimizer's state.

Before the first round with three learners, r is unknown. Such a round adds the directions e / |e|,
and multiplies the sum by the round's own median length, which is known when the round ends:

    merged = r sum of w e / |e| / sum of w

Shapes: N elements of a fragment's vector, S segments.

Source: Karimireddy, He and Jaggi 2021 (arXiv 2012.10333), Algorithm 2, one iteration about the last
aggregate. There the radius is constant and c is not squared; here the radius follows the learners.
"""

from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.aggregator.arrays.grid import Grid
from diloco.aggregator.arrays.merge import CHUNK, Contribution, Norms, share_of
from diloco.common.protocol.codecs import (
    Codec,
    Encoded,
    code_count,
    decode_numpy,
    scale_count,
)

# With this many learners, no single one can move the median beyond all others' values.
LEAST_LEARNERS = 3


def distances(
    grid: Grid,
    codec: Codec,
    shards: Sequence[Encoded],
    update: Contribution,
    center_N: Vector,
    radius_S: Vector,
) -> Norms:
    """Returns |e - v| of each segment: the L2 distance of an update from the center, float64 [S].

    Where no radius is known, returns |e|.

    Args:
        grid: the fragment's grid.
        codec: the update's codec.
        shards: the update's scales and codes, one for each of the grid's ranges.
        update: the update's discount and clip; e is the update times both.
        center_N: v, float32 [N].
        radius_S: r, float32 [S]; 0: unknown.
    """
    known_S = (radius_S > 0).astype(np.float32)
    known_B = grid.per_block(known_S)
    ends_S = np.cumsum(grid.lengths) * grid.block
    squares_S = np.zeros(len(ends_S))
    counts = np.float32(update.discount * update.clip)
    for start, values in _decoded(grid, codec, shards):
        here = slice(start // grid.block, (start + values.size) // grid.block)
        center = center_N[start : start + values.size].reshape(-1, grid.block)
        away = values * counts - (center * known_B[here, None]).reshape(-1)
        done = 0
        while done < away.size:
            segment = int(np.searchsorted(ends_S, start + done, side="right"))
            stop = min(away.size, int(ends_S[segment]) - start)
            # Not by BLAS, whose last bits depend on its threads and on the processor.
            squares_S[segment] += float(np.square(away[done:stop], dtype=np.float64).sum())
            done = stop
    return np.sqrt(squares_S)


def _decoded(grid: Grid, codec: Codec, shards: Sequence[Encoded]) -> Iterator[tuple[int, Vector]]:
    """Yields an update in parts that fit into cache: (index of first element, float32 values)."""
    step = max(grid.block, CHUNK // grid.block * grid.block)
    for (first, last), (scales, codes) in zip(grid.ranges, shards, strict=True):
        for start in range(0, last - first, step):
            stop = min(start + step, last - first)
            low, high = (scale_count(codec, at, grid.block) for at in (start, stop))
            some = slice(code_count(codec, start), code_count(codec, stop))
            part = Encoded(np.asarray(scales)[low:high], np.asarray(codes)[some])
            yield first + start, decode_numpy(codec, part, grid.block)


def pulls(distances_S: Norms, radius_S: Vector, times: float) -> Norms:
    """Returns the factor c of each segment, float64 [S]; `times` is kappa.

    Where no radius is known, the factor is 1 / |e|, or 0 if |e| = 0.
    """
    most_S = times * radius_S.astype(np.float64)
    within_S = (radius_S > 0) & (distances_S <= most_S)
    away_S = np.where(distances_S > 0, distances_S, np.inf)
    beyond_S = np.where(radius_S > 0, np.square(most_S / away_S), 1.0 / away_S)
    return np.where(within_S, 1.0, beyond_S)


def middle(found: Mapping[str, Norms]) -> Norms:
    """Returns the lower median of `found`, the distances of each learner by name; float64 [S]."""
    ordered = np.sort(np.stack(list(found.values())), axis=0)
    lower_S: Norms = ordered[(len(ordered) - 1) // 2]
    return lower_S


def scaled(factors_S: Vector, radius_S: Vector, found: Mapping[str, Norms]) -> Vector:
    """Returns the factors of the sum, float32 [S]; where r is unknown, times the median length."""
    return np.where(radius_S > 0, factors_S, factors_S * middle(found)).astype(np.float32)


def center_share(updates: Sequence[Contribution], radius_S: Vector) -> Vector:
    """Returns the share of v in the merge, float32 [S]: 1 - sum of w c / sum of w.

    0 where all updates count in full, and where r is unknown.
    """
    unit = updates[-1].unit
    weights = [share_of(update.weight, unit) for update in updates]
    counted_S = np.zeros(radius_S.shape)
    for update, weight in zip(updates, weights, strict=True):
        counted = np.asarray(weight * update.pull)
        counted_S += counted.astype(ml_dtypes.bfloat16).astype(np.float64)
    whole = sum(float(ml_dtypes.bfloat16(weight)) for weight in weights)
    share_S = np.maximum(0.0, (whole - counted_S) / whole)
    return np.where(radius_S > 0, share_S, 0.0).astype(np.float32)


def radius_after(radius_S: Vector, found: Mapping[str, Norms]) -> Vector:
    """Returns r for the next round, float32 [S]: the median of this round's distances `found`.

    With fewer than `LEAST_LEARNERS` learners r does not change.
    """
    if len(found) < LEAST_LEARNERS:
        return radius_S.copy()
    return middle(found).astype(np.float32)
