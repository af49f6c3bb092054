"""Centered clipping (`run.trust`), from the rules: bounds the effect of an update on the merge.

    merged = v + sum of w c (e - v) / sum of w,   c = min(1, clip_radius r / |e - v|)^2

is computed for each segment (`diloco.common.protocol.layout`) of a fragment by itself. The sums are
over the round's updates. w: an update's weight; e: its values times its discount and clip; v: the
previous round's merged outer gradient; |x|: the Euclidean norm of the segment's elements. r, the
radius: the lower median of |e - v| over learners, in the last earlier round that merged updates of
three learners or more. Until there was such a round v = 0 and merged = r sum of w e / |e| / sum of
w, where r is the lower median of |e| in the round itself.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.common.protocol import wire

Doubles = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float32]
# Tolerances: the relative error of norms computed in float32, and the absolute error of `kept`,
# which is computed from weights in bfloat16.
ERROR, SHARE_ERROR = 1e-4, 2.0**-8
LEARNERS = 3


class Centered:
    """A round of a fragment that is merged by centered clipping.

    N is the number of the fragment's elements, S that of its segments; the module defines v, r and
    c.

    Args:
        center: v, float32 [N].
        radius: r, float32 [S]; 0: no round had updates of three learners yet.
        times: `outer.clip_radius`.
        lengths: vector [N] -> the Euclidean norm of each of its segments, [S].
    """

    def __init__(
        self,
        center: Vector,
        radius: Vector,
        times: float,
        lengths: Callable[[Doubles], Doubles],
    ) -> None:
        self._known_S = radius > 0
        self._center, self._radius, self._times = center, radius, times
        self._lengths = lengths
        self._pulls: list[Doubles] = []
        self._newest: dict[str, Doubles] = {}

    def pull(self, taken: wire.Input, values: Vector) -> Doubles:
        """Returns c of an input, float64 [S]; where r is 0, 1 / |e| instead.

        Args:
            taken: the input.
            values: its decoded values, float32 [N].
        """
        counted = values * np.float64(taken.discount * taken.clip)
        away_S = np.where(
            self._known_S, self._lengths(counted - self._center), self._lengths(counted)
        )
        self._newest[taken.learner] = away_S
        there_S = np.where(away_S > 0, away_S, np.inf)
        radii_S = self._times * self._radius.astype(np.float64) / there_S
        pull_S = np.where(self._known_S, np.minimum(1.0, radii_S) ** 2, 1 / there_S)
        self._pulls.append(pull_S)
        return pull_S

    def factors(self, average: float) -> Doubles:
        """Returns the factors of the sum of w c e, float64 [S]; `pull` has seen all inputs before.

        Args:
            average: 1 / sum of w.
        """
        return np.where(self._known_S, average, average * self._median())

    def _median(self) -> Doubles:
        ordered = np.sort(np.stack(list(self._newest.values())), axis=0)
        middle: Doubles = ordered[(len(ordered) - 1) // 2]
        return middle

    def judge(self, record: wire.Record) -> Iterator[tuple[str, str, Any, Any]]:
        """Compares the record's `kept` and `radii` with the rules.

        Yields:
            (rule, field, expected, found) for each that differs, with the first eight values.
        """
        unit = record.inputs[-1].weight_unit
        weights = [math.ldexp(taken.weight, -unit) for taken in record.inputs]
        whole = sum(float(ml_dtypes.bfloat16(weight)) for weight in weights)
        counted_S = sum(w * pull for w, pull in zip(weights, self._pulls, strict=True))
        kept_S = np.where(self._known_S, np.maximum(0.0, 1 - counted_S / whole), 0.0)
        radius_S = self._radius.astype(np.float64)
        if len(self._newest) >= LEARNERS:
            radius_S = self._median()
        for name, found, wanted_S, error, share in (
            ("kept", record.kept, kept_S, 0.0, SHARE_ERROR),
            ("radii", record.radii, radius_S, ERROR, 0.0),
        ):
            found_S = np.frombuffer(found, np.float32)
            if found_S.shape != wanted_S.shape or not np.allclose(
                found_S, wanted_S, rtol=error, atol=share
            ):
                yield "factors", name, wanted_S.tolist()[:8], found_S.tolist()[:8]
