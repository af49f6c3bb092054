"""Recomputes the arrays of a version from objects, in plain NumPy.

Shapes, as suffixes of names: N elements of a fragment's vector, B blocks, S segments.

The recorded inputs, coefficients, factors and step sizes must give both digests, bit for bit. Each
recorded number must be what the rules give, as far as its own rounding allows. In a segment, w is
an input's weight, d its staleness discount, c its clip factor and |v| the norm of its values:

- unit: 2^k, the first weight's power of two; a weight of 2^32 units or more begins a new unit;
- coefficient: u d c for an average, u d / |v| for RDA, with u = w / 2^k, rounded to bfloat16;
- factor: 2^k / sum w for an average; (sum w d c |v| / sum w) / |sum| for RDA; k is the last unit's;
- centered clipping: an average's coefficient is multiplied by the factor of `centering.py`, and a
  share of the previous merge is added;
- the sum: code x (scale x coefficient), exact in float32, added in the order of the record; values
  below 2^-100 count as 0, and the sum so far is divided where the unit rises;
- the outer step in float32, each operation rounded once;
- the delta: master parameters less the old view, quantized; the error stays in the master.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np
import numpy.typing as npt

from diloco.common.process.config import RunSettings, settings_of
from diloco.common.protocol import shards, slices, wire
from diloco.common.protocol.codecs import (
    GREATEST_CODE,
    INT2_LEAST,
    INT2_MEANS,
    LEAST_SCALE,
    Codec,
    Encoded,
    decode_numpy,
)
from diloco.common.protocol.errors import IntegrityError, ObjectMissingError, WireError
from diloco.common.protocol.layout import Layout
from diloco.judge.oracle.centering import Centered
from diloco.judge.oracle.finding import Violation

Vector = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Bounds of coefficients, and of the terms of the sum (docs/adr/0029-units-of-weight.md).
LEAST, LEAST_ADDED, GREATEST_STEP = 2.0**-126, 2.0**-100, 2.0**100
HEADROOM = 32
CANCELS = 1e-6
BFLOAT16 = 2.0**-8
# Relative errors of norms of float32 sums, and of factors that follow from them.
NORM_ERROR = 1e-4


class BlockGrid(NamedTuple):
    """The division of a fragment's vector into blocks and segments.

    Attributes:
        size: number of elements.
        block: elements of a block.
        segment_B: int64 [B], the segment of each block.
        radial_S: bool [S], True for a segment that is merged by RDA.
        centered: True if the fragment is merged by centered clipping.
    """

    size: int
    block: int
    segment_B: npt.NDArray[np.int64]  # noqa: N815 - shapes live in names of arrays
    radial_S: npt.NDArray[np.bool_]  # noqa: N815 - likewise
    centered: bool = False

    def blocks(self, values_S: npt.NDArray[Any]) -> Vector:
        """Returns the value of each block's segment, float32 [B], given those of segments, [S]."""
        return values_S.astype(np.float32)[self.segment_B]


@dataclass
class Arrays:
    """A fragment's view, its master parameters `theta`, and its outer optimizer's state by name."""

    view: Vector
    theta: Vector
    state: dict[str, npt.NDArray[Any]]

    def digests(self) -> tuple[str, str]:
        """Returns a record's digests: of the view, and of parameters and optimizer state."""
        each = [shards.digest(array) for array in (self.theta, *self.state.values())]
        return shards.digest(self.view), shards.digest("".join(each).encode())


class Numbers(NamedTuple):
    """The arithmetic on elements, as functions that a simulation may replace.

    Attributes:
        norms: (grid, codec, update) -> the norm of each segment of the update, float64 [S].
        add: (grid, codec, sum, update, coefficients, k, rise) -> the sum with the update added. The
            sum is None for the first; k is the update's unit, `rise` k less that of the one before.
        lengths: (grid, sum) -> the norm of each segment, float64 [S]; None if none is needed.
        step: (grid, settings, arrays, sum, factors, record): takes the outer step, which changes
            `arrays` in place.
        counted: weight in units -> the value that the average's denominator adds for it.
    """

    norms: Callable[[BlockGrid, Codec, Encoded], Doubles]
    add: Callable[[BlockGrid, Codec, Any, Encoded, npt.NDArray[Any], int, int], Any]
    lengths: Callable[[BlockGrid, Any], Doubles | None]
    step: Callable[[BlockGrid, RunSettings, Arrays, Any, Vector, wire.Record], None]
    counted: Callable[[float], float]


class Remaker:
    """Recomputes the versions of a run, one after the other.

    Args:
        layout: the run's layout.
        get: returns the bytes of an object.
        numbers: the arithmetic; None: on real tensors.

    Attributes:
        remade: number of recomputed versions.
        skipped: number of versions that could not be recomputed, as objects are missing.
    """

    def __init__(
        self, layout: Layout, get: Callable[[str], bytes], numbers: "Numbers | None" = None
    ) -> None:
        self.remade = 0
        self.skipped = 0
        self._layout = layout
        self._get = get
        self._numbers = numbers or PLAIN
        self._arrays: dict[int, Arrays] = {}
        self._grids: dict[tuple[int, str], BlockGrid] = {}

    def judge(
        self, settings: RunSettings, base: wire.Record | None, record: wire.Record, seq: int
    ) -> list[Violation]:
        """Recomputes a fragment's next version; returns the violations.

        Args:
            settings: the run's settings in force.
            base: the record before; None for the first.
            record: the record to judge; a record of verdicts alone has no violations.
            seq: its stream sequence.
        """
        if record.what == "verdict":
            return []
        about = f"fragment {record.fragment} version {record.version}"
        try:
            found = list(self._judge(settings, base, record))
        except ObjectMissingError:
            # The object may have been collected; other checks tell whether it may be missing.
            self._arrays.pop(record.fragment, None)
            self.skipped += 1
            return []
        except (WireError, IntegrityError) as error:
            self._arrays.pop(record.fragment, None)
            return [Violation("input", seq, about, "", "objects as announced", error.message)]
        return [Violation(rule, seq, about, *rest) for rule, *rest in found]

    def _judge(
        self, settings: RunSettings, base: wire.Record | None, record: wire.Record
    ) -> Iterator[tuple[str, str, Any, Any]]:
        settings = settings_of(settings, self._layout, record.fragment)
        grid = self._grid(settings, record.fragment)
        arrays = self._arrays.get(record.fragment)
        if base is None or record.what != "version" or arrays is None:
            if record.outer_version != record.version:
                self.skipped += 1
                return
            arrays = self._load(record)
        elif not record.inputs or record.delta is None:
            yield "arrays", "inputs", "what the version is made of", record.inputs
            return
        else:
            yield from self._remake(settings, grid, arrays, record)
        self._arrays[record.fragment] = arrays
        self.remade += 1
        digests = (record.view_digest, record.outer_digest)
        if arrays.digests() != digests:
            yield "arrays", "view_digest, outer_digest", arrays.digests(), digests
            del self._arrays[record.fragment]

    def _grid(self, settings: RunSettings, fragment: int) -> BlockGrid:
        key = fragment, settings.merge
        if key not in self._grids:
            self._grids[key] = make_grid(settings, self._layout, fragment)
        return self._grids[key]

    def _load(self, record: wire.Record) -> Arrays:
        """Returns view and outer state from the objects that a record names."""
        view = np.frombuffer(self._get(record.snapshot.name), np.float32).copy()
        stored = msgpack.unpackb(self._get(record.outer.name), max_bin_len=1 << 62)
        theta = np.frombuffer(stored.pop("theta"), np.float32).copy()
        state = {
            name: np.frombuffer(data, np.int64 if name == "arrivals" else np.float32).copy()
            for name, data in stored.items()
        }
        return Arrays(view, theta, state)

    def _remake(
        self, settings: RunSettings, grid: BlockGrid, arrays: Arrays, record: wire.Record
    ) -> Iterator[tuple[str, str, Any, Any]]:
        numbers, total = self._numbers, None
        norms = []
        yield from _units(record)
        unit = record.inputs[0].weight_unit
        centered = _centered(grid, settings, arrays)
        for taken in record.inputs:
            codec: Codec = settings.sync.codec
            update = read_update(self._get, grid, codec, taken.shards)
            norms.append(numbers.norms(grid, codec, update))
            coefficients_S = np.frombuffer(taken.coefficients, ml_dtypes.bfloat16)
            yield from _norm(taken, norms[-1])
            pull_S = np.ones(len(grid.radial_S))
            if centered is not None:
                pull_S = centered.pull(taken, decode_numpy(codec, update, grid.block))
            yield from _coefficients(grid, taken, norms[-1], pull_S, coefficients_S)
            rise, unit = taken.weight_unit - unit, taken.weight_unit
            total = numbers.add(grid, codec, total, update, coefficients_S, unit, rise)
        factors_S = np.frombuffer(record.factors, np.float32)
        lengths_S = numbers.lengths(grid, total)
        counted = [numbers.counted(math.ldexp(each.weight, -unit)) for each in record.inputs]
        average = np.full(len(grid.radial_S), 1 / sum(counted))
        if centered is not None:
            average = centered.factors(1 / sum(counted))
        yield from _factors(grid, record, norms, lengths_S, average, factors_S)
        if centered is not None:
            yield from centered.judge(record)
        numbers.step(grid, settings, arrays, total, factors_S, record)
        yield from self._move_view(settings, arrays, record)

    def _move_view(
        self, settings: RunSettings, arrays: Arrays, record: wire.Record
    ) -> Iterator[tuple[str, str, Any, Any]]:
        """Adds the stored delta to the view, after a check that it is theta - view, quantized."""
        assert record.delta is not None
        codec: Codec = settings.sync.delta_codec
        block, size = settings.sync.block, arrays.view.size
        data = self._get(record.delta.name)
        delta = shards.unpack_delta(data, codec=codec, count=size, block=block)
        values = decode_numpy(codec, delta, block)
        wanted = arrays.theta - arrays.view
        lost = np.abs(wanted - values)
        allowed = _error(codec, wanted, block)
        if (lost > allowed).any():
            worst = int(np.argmax(lost - allowed))
            yield "delta", f"element {worst}", float(wanted[worst]), float(values[worst])
        arrays.view += values


def make_grid(settings: RunSettings, layout: Layout, fragment: int) -> BlockGrid:
    """Returns a fragment's blocks and segments, and how these settings merge each segment."""
    part, block = layout.fragments[fragment], layout.block
    radial = [settings.merge == "rda" and rule == "rda" for rule in part.segment_rules()]
    # Averaged state is weighted by tokens alone: no update of it is shortened.
    centered = settings.run.trust == "others" and not part.averaged
    return BlockGrid(part.size, block, part.segment_of_block(block), np.asarray(radial), centered)


def read_update(
    get: Callable[[str], bytes], grid: BlockGrid, codec: Codec, entries: Sequence[wire.Shard]
) -> Encoded:
    """Reads an update's blocks, in the fragment's order, and compares objects with their manifest.

    Raises:
        ObjectMissingError, IntegrityError, WireError: an object is missing, or not the manifest's.
    """
    blocks = grid.size // grid.block
    parts, places = [], []
    for entry in entries:
        data = get(entry.name)
        if (len(data), shards.crc32c(data)) != (entry.size_bytes, entry.crc32c):
            raise IntegrityError(f"object {entry.name!r} is not what its manifest says")
        places.append(slices.expand(entry.slices, blocks))
        count = len(places[-1]) * grid.block
        parts.append(shards.unpack(data, codec=codec, count=count, block=grid.block))
    if len(parts) == 1 and len(places[0]) == blocks:
        return parts[0]  # Blocks of a shard ascend.
    order = np.argsort(np.concatenate(places))
    codes = np.concatenate([np.asarray(part.codes) for part in parts])
    scales = np.concatenate([np.asarray(part.scales) for part in parts])
    rows = codes.reshape(blocks, -1)[order]
    return Encoded(scales[order] if scales.size else scales, rows.reshape(-1))


# A record's numbers, compared with the rules


def _norm(taken: wire.Input, norms_S: Doubles) -> Iterator[tuple[str, str, Any, Any]]:
    """Checks that an input's recorded norm is the norm of its decoded codes."""
    norm = math.sqrt(float(np.square(norms_S).sum()))
    if not math.isclose(norm, taken.norm, rel_tol=NORM_ERROR):
        yield "weight", f"norm of {taken.learner}", norm, taken.norm


def _units(record: wire.Record) -> Iterator[tuple[str, str, Any, Any]]:
    """Checks the units of weight, each of which follows from the weights up to it."""
    found = [taken.weight_unit for taken in record.inputs]
    wanted: list[int] = []
    for taken in record.inputs:
        own = math.frexp(taken.weight)[1] - 1
        wanted.append(own if not wanted or own - wanted[-1] >= HEADROOM else wanted[-1])
    if found != wanted:
        yield "coefficients", "units of weight", wanted, found


def _centered(grid: BlockGrid, settings: RunSettings, arrays: Arrays) -> Centered | None:
    if not grid.centered:
        return None
    state = arrays.state
    return Centered(
        state["center"], state["radius"], settings.outer.clip_radius, partial(_lengths_of, grid)
    )


def _coefficients(
    grid: BlockGrid,
    taken: wire.Input,
    norms_S: Doubles,
    pull_S: Doubles,
    found_S: npt.NDArray[Any],
) -> Iterator[tuple[str, str, Any, Any]]:
    share = math.ldexp(taken.weight, -taken.weight_unit) * taken.discount
    there_S = np.where(norms_S > 0, norms_S, np.inf)
    wanted_S = np.where(grid.radial_S, share / there_S, share * taken.clip * pull_S)
    wanted_S = np.where(wanted_S >= LEAST, wanted_S, 0.0)
    # A norm in float32 may round to the neighbouring bfloat16.
    rough_S = grid.radial_S | (pull_S != 1)
    error_S = np.where(rough_S, NORM_ERROR, 1e-12) * wanted_S
    low_S, high_S = ((wanted_S + s * error_S).astype(ml_dtypes.bfloat16) for s in (-1, 1))
    found = found_S.astype(np.float64)
    wrong_S = (found < low_S.astype(np.float64)) | (found > high_S.astype(np.float64))
    if wrong_S.shape != wanted_S.shape or wrong_S.any():
        yield "coefficients", taken.learner, wanted_S.tolist()[:8], found.tolist()[:8]


def _factors(
    grid: BlockGrid,
    record: wire.Record,
    norms: Sequence[Doubles],
    lengths_S: Doubles | None,
    average_S: Doubles,
    found_S: Vector,
) -> Iterator[tuple[str, str, Any, Any]]:
    unit = record.inputs[-1].weight_unit
    weights = [math.ldexp(taken.weight, -unit) for taken in record.inputs]
    wanted_S = average_S
    if lengths_S is not None:
        magnitude_S, reach_S = np.zeros_like(average_S), np.zeros_like(average_S)
        for taken, weight, norms_S in zip(record.inputs, weights, norms, strict=True):
            share = weight * taken.discount
            magnitude_S += share * taken.clip * norms_S / sum(weights)
            reach_S += share * (norms_S > 0)
        cancels_S = lengths_S <= CANCELS * reach_S
        turned_S = np.where(cancels_S, 0.0, magnitude_S / np.where(cancels_S, 1.0, lengths_S))
        wanted_S = np.where(grid.radial_S, turned_S, wanted_S)
    if found_S.shape != wanted_S.shape or not np.allclose(
        found_S, wanted_S, rtol=NORM_ERROR, atol=0
    ):
        yield "factors", "factors", wanted_S.tolist()[:8], found_S.tolist()[:8]


def _error(codec: Codec, values: Vector, block: int) -> Vector:
    """Returns, for each value, the greatest error that quantization with `codec` may give it."""
    magnitudes = np.abs(values)
    if codec == "int2":  # Values beyond 1.5 scales are cut.
        rows_Bxb = magnitudes.reshape(-1, block)
        means_B = INT2_MEANS * rows_Bxb.mean(axis=1, dtype=np.float64)
        scale_B = np.maximum(np.maximum(means_B, INT2_LEAST * rows_Bxb.max(axis=1)), LEAST_SCALE)
        half_B, less_B = 0.505 * scale_B * (1 + BFLOAT16), scale_B * (1 - 2 * BFLOAT16)
        errors_Bxb: Vector = np.maximum(half_B[:, None], rows_Bxb - less_B[:, None])
        return errors_Bxb.reshape(-1)
    if codec in GREATEST_CODE:
        greatest_B = magnitudes.reshape(-1, block).max(axis=1)
        scale_B = np.maximum(greatest_B / GREATEST_CODE[codec] * (1 + BFLOAT16), LEAST_SCALE)
        return np.repeat((scale_B * 0.505).astype(np.float32), block)
    relative = 0.0 if codec == "float32" else BFLOAT16
    # A block below the least scale is sent as zeros.
    return np.where(magnitudes < LEAST_SCALE, magnitudes, magnitudes * relative).astype(np.float32)


# The arithmetic of real tensors


def _norms(grid: BlockGrid, codec: Codec, update: Encoded) -> Doubles:
    values = decode_numpy(codec, update, grid.block).astype(np.float64)
    return _lengths_of(grid, values)


def _lengths_of(grid: BlockGrid, values: Doubles) -> Doubles:
    squares_B = np.square(values.reshape(-1, grid.block)).sum(axis=1)
    return np.sqrt(np.bincount(grid.segment_B, squares_B, minlength=len(grid.radial_S)))


def _add(
    grid: BlockGrid,
    codec: Codec,
    total: Vector | None,
    update: Encoded,
    found_S: npt.NDArray[Any],
    _unit: int,
    rise: int,
) -> Vector:
    given_B = grid.blocks(found_S)
    if codec in GREATEST_CODE:
        ones = Encoded(np.ones_like(update.scales), update.codes)
        values = decode_numpy(codec, ones, grid.block).reshape(-1, grid.block)
        step_B = _normal(update.scales.astype(np.float32) * given_B)
        step_B = np.minimum(step_B, np.float32(GREATEST_STEP))
        addend = (values * step_B[:, None]).reshape(-1)
    else:
        values = decode_numpy(codec, update, grid.block).reshape(-1, grid.block)
        addend = _normal(values * given_B[:, None]).reshape(-1)
    if total is None:
        return addend + np.float32(0)
    # In float64 each power of two of a legal rise exists, and the product is exact.
    lowered = _normal((total * np.float64(2.0) ** -rise).astype(np.float32)) if rise else total
    return lowered + addend


def _normal(values: Vector) -> Vector:
    return np.where(np.abs(values) < np.float32(LEAST_ADDED), np.float32(0), values)


def _lengths(grid: BlockGrid, total: Vector) -> Doubles | None:
    return _lengths_of(grid, total.astype(np.float64)) if grid.radial_S.any() else None


def _step(
    grid: BlockGrid,
    settings: RunSettings,
    arrays: Arrays,
    total: Vector,
    factors_S: Vector,
    record: wire.Record,
) -> None:
    """Takes the outer step: the outer optimizer's step against the merged outer gradient."""
    g = (total.reshape(-1, grid.block) * grid.blocks(factors_S)[:, None]).reshape(-1)
    if grid.centered:
        g = _about_the_center(grid, arrays, g, record)
    rate, mu = np.float32(record.learning_rate), np.float32(record.momentum)
    outer, state = settings.outer, arrays.state
    if outer.optimizer in ("momentum", "nesterov"):
        m = state["momentum"] * mu + g
        state["momentum"] = m
        g = m if outer.optimizer == "momentum" else g + m * mu
    elif outer.optimizer == "delayed_nesterov":
        g = _delayed(settings, state, g, record.momentum)
    arrays.theta -= g * rate


def _about_the_center(grid: BlockGrid, arrays: Arrays, g: Vector, record: wire.Record) -> Vector:
    """Adds `kept` of the center to the merge and returns it; it becomes the next round's center."""
    kept_S = np.frombuffer(record.kept, np.float32)
    center = arrays.state["center"].reshape(-1, grid.block)
    g = g + (center * grid.blocks(kept_S)[:, None]).reshape(-1)
    arrays.state["center"] = g
    arrays.state["radius"] = np.frombuffer(record.radii, np.float32)
    return g


def _delayed(
    settings: RunSettings, state: dict[str, npt.NDArray[Any]], g: Vector, momentum: float
) -> Vector:
    """Returns the step of delayed Nesterov: momentum changes each `outer.delay_rounds` rounds."""
    delay, fraction = settings.outer.delay_rounds, settings.outer.delay_fraction
    inverse = np.float32(1 / delay)
    state["arrivals"] = state["arrivals"] + 1
    state["delayed"] = state["delayed"] + g
    applied = fraction
    if int(state["arrivals"][0]) % delay == 0:
        applied = 1 - fraction * delay + fraction
        state["momentum"] = state["momentum"] * np.float32(momentum) + state["delayed"] * inverse
        state["delayed"] = np.zeros_like(g)
    carried: Vector = state["momentum"] * np.float32(applied * momentum)
    return g * inverse + carried


def _rounded(weight: float) -> float:
    """Rounds a weight to bfloat16, as its coefficient is rounded, so that the shares sum to one."""
    return float(ml_dtypes.bfloat16(weight))


PLAIN = Numbers(_norms, _add, _lengths, _step, _rounded)
