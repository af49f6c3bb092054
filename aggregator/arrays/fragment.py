"""One fragment's arrays: view, master parameters, outer-optimizer state, the open round's sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import ml_dtypes
import msgpack
import numpy as np

from diloco.aggregator.arrays import centering, merge, outer
from diloco.aggregator.arrays import grid as grids
from diloco.aggregator.arrays.arithmetic import PRODUCTION, Arithmetic
from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.aggregator.arrays.grid import Grid, share_out
from diloco.aggregator.arrays.merge import Contribution, Norms
from diloco.aggregator.arrays.outer import OuterOptimizer, State
from diloco.aggregator.core.updates import Admitted
from diloco.common.process.config import RunSettings, averaged_settings, settings_of
from diloco.common.protocol import shards, wire
from diloco.common.protocol.codecs import Codec, Encoded, aligned_empty, aligned_zeros
from diloco.common.protocol.errors import IntegrityError, ObjectMissingError, WireError
from diloco.common.protocol.layout import Layout
from diloco.common.protocol.shards import Buffers


class Payload(NamedTuple):
    """A verified update: the scales and codes of its shards, and its norms.

    Attributes:
        parts: scales and codes, one part for each of the grid's ranges, in order.
        norms_S: L2 norm of each segment, float64 [S].
        norm: L2 norm of the whole update.
    """

    parts: tuple[Encoded, ...]
    norms_S: np.ndarray  # noqa: N815 - shapes live in names of arrays
    norm: float


class ClosedRound(NamedTuple):
    """The result of closing a round: fields of `wire.Record`; `delta` is the object's bytes."""

    inputs: tuple[wire.Input, ...]
    factors: bytes
    kept: bytes
    radii: bytes
    learning_rate: float
    momentum: float
    delta: bytes
    view_digest: str
    outer_digest: str


# The most elements of a fragment: msgpack limits an array of the outer state to 2^32 bytes.
MOST_ELEMENTS: Final = (1 << 30) - 1
# The bytes of a vector from which on a thread of its own is worth its start.
THREADED_BYTES: Final = 1 << 20


class _Merged(NamedTuple):
    admitted: Admitted
    contribution: Contribution
    coefficients: bytes
    distances: Norms | None = None


@dataclass
class FragmentArrays:
    """The arrays of one fragment. Methods block the thread, and must be called one at a time.

    The results of `view_object` and `outer_object` share the arrays' memory. They stay valid while
    `merge` adds updates, until the next version is made.

    Attributes:
        settings: the run's settings.
        grid: the division of the fragment's vector.
        view: parameters as learners see them, float32 [N].
        theta: master parameters, float32 [N].
        state: state of the outer optimizer.
        arithmetic: the numeric functions.
        threads: the number of threads that make a version; it changes no bit.
    """

    settings: RunSettings
    grid: Grid
    view: Vector
    theta: Vector
    state: State
    arithmetic: Arithmetic = PRODUCTION
    threads: int = 1

    def __post_init__(self) -> None:
        self._optimizer = _optimizer(self.own_settings)
        self._sum: merge.Accumulator | None = None
        self._merged: list[_Merged] = []

    @property
    def own_settings(self) -> RunSettings:
        """The run's settings as they apply to this fragment."""
        return averaged_settings(self.settings) if self.grid.averaged else self.settings

    @classmethod
    def from_view(
        cls,
        settings: RunSettings,
        layout: Layout,
        fragment: int,
        view: Vector,
        threads: int = 1,
    ) -> "FragmentArrays":
        """Returns the arrays of version 0: `view` and master parameters are copies of the argument.

        The state of the outer optimizer is the initial one.
        """
        grid = make_grid(settings, layout, fragment)
        state = _fresh_state(settings_of(settings, layout, fragment), grid)
        return cls(settings, grid, _aligned(view), _aligned(view), state, threads=threads)

    @classmethod
    def from_objects(
        cls,
        settings: RunSettings,
        layout: Layout,
        fragment: int,
        *,
        view: bytes,
        outer_state: bytes,
        arithmetic: Arithmetic = PRODUCTION,
        threads: int = 1,
    ) -> "FragmentArrays":
        """Returns the arrays whose bytes `view_object` and `outer_object` returned.

        Raises:
            IntegrityError: the objects are not arrays of this fragment.
        """
        grid = make_grid(settings, layout, fragment)
        slots = _fresh_state(settings_of(settings, layout, fragment), grid)
        wanted = {"theta": np.zeros(0, np.float32), **slots}
        try:
            stored = msgpack.unpackb(outer_state, max_bin_len=len(outer_state))
            arrays = {
                name: _aligned(np.frombuffer(stored[name], like.dtype))
                for name, like in wanted.items()
            }
            view_N = _aligned(np.frombuffer(view, np.float32))
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise IntegrityError(f"fragment {fragment}: unreadable outer state: {error}") from error
        theta = arrays.pop("theta")
        if view_N.size != grid.size or theta.size != grid.size:
            raise IntegrityError(
                f"fragment {fragment}: stored view and parameters have {view_N.size} and "
                f"{theta.size} elements, the layout {grid.size}"
            )
        return cls(settings, grid, view_N, theta, arrays, arithmetic, threads)

    def view_object(self) -> Buffers:
        """Returns the view as an object, without a copy: raw little-endian float32."""
        return Buffers(self.view.data)

    def outer_object(self) -> Buffers:
        """Returns master parameters and optimizer state as an object, without a copy: msgpack."""
        arrays = {"theta": self.theta, **self.state}
        runs: list[bytes | memoryview] = [msgpack.Packer().pack_map_header(len(arrays))]
        for name, array in arrays.items():
            runs += [msgpack.packb(name) + _binary_header(array.nbytes), array.data]
        return Buffers(*runs)

    def outer_digest(self) -> str:
        """Returns xxh3-128 over the digests of master parameters and outer-optimizer state."""
        return self.digests()[1]

    def digests(self) -> tuple[str, str]:
        """Returns (digest of the view, digest of the outer state)."""
        vectors = (self.view, self.theta, *self.state.values())
        # A thread for each vector, as all take equally long; a short one costs less than a thread.
        alone = self.threads == 1 or self.view.nbytes < THREADED_BYTES
        view, *each = share_out(shards.digest, vectors, 1 if alone else len(vectors))
        return view, shards.digest("".join(each).encode())

    def discard(self) -> None:
        """Drops the round's merged updates; the next `merge` begins an empty sum."""
        self._merged = []

    def merge(self, payload: Payload, admitted: Admitted) -> None:
        """Adds a verified update to the round's sum; a round's first update resets the sum."""
        if not self._merged:
            self._begin_sum()
        assert self._sum is not None
        before = self._merged[-1].contribution.unit if self._merged else None
        unit = merge.unit_after(before, admitted.weight)
        contribution = Contribution(
            payload.norms_S, admitted.weight, admitted.discount, admitted.clip, unit
        )
        distances_S = None
        if self.grid.centered:
            distances_S = self._distances(payload, contribution)
            radius_S, times = self.state["radius"], self.own_settings.outer.clip_radius
            pull_S = centering.pulls(distances_S, radius_S, times)
            contribution = contribution._replace(pull=pull_S)
        coefficients_S = self.arithmetic.coefficients(self.grid, contribution)
        self._sum.add(self.own_settings.sync.codec, payload.parts, coefficients_S, unit)
        self._merged.append(_Merged(admitted, contribution, coefficients_S.tobytes(), distances_S))

    def _distances(self, payload: Payload, contribution: Contribution) -> Norms:
        return self.arithmetic.distances(
            self.grid,
            self.own_settings.sync.codec,
            payload.parts,
            contribution,
            self.state["center"],
            self.state["radius"],
        )

    def close_round(self, admitted: Sequence[Admitted], share: float) -> ClosedRound:
        """Takes the outer step over the merged updates, and moves the view.

        Args:
            admitted: the updates that the machine considers merged, in order.
            share: the size of the outer step, as `rounds.step_share` returns it; 1: a full step.
        """
        assert self._sum is not None
        assert [merged.admitted for merged in self._merged] == list(admitted)
        contributions = [merged.contribution for merged in self._merged]
        factors_S = self.arithmetic.factors(self.grid, self._sum, contributions)
        factors_S, kept_S, radius_S = self._about_the_center(factors_S, contributions)
        learning_rate, momentum = step_size(self.own_settings, share)
        delta = self._step(factors_S, kept_S, radius_S, learning_rate, momentum)
        view_digest, outer_digest = self.digests()
        merged, self._merged = self._merged, []
        return ClosedRound(
            inputs=tuple(
                make_input(each.admitted, each.coefficients, each.contribution.unit)
                for each in merged
            ),
            factors=factors_S.tobytes(),
            kept=b"" if kept_S is None else kept_S.tobytes(),
            radii=b"" if radius_S is None else radius_S.tobytes(),
            learning_rate=learning_rate,
            momentum=momentum,
            delta=shards.pack_delta(self.own_settings.sync.delta_codec, delta, self.grid.block),
            view_digest=view_digest,
            outer_digest=outer_digest,
        )

    def _about_the_center(
        self, factors_S: Vector, contributions: Sequence[Contribution]
    ) -> tuple[Vector, Vector | None, Vector | None]:
        """Returns (factors, share of the center, next round's radius), float32 [S] each.

        Without centered clipping the second and the third are None.
        """
        if not self.grid.centered:
            return factors_S, None, None
        # One distance for each learner: of two updates in the round the later one's.
        found = {
            one.admitted.manifest.learner: one.distances
            for one in self._merged
            if one.distances is not None
        }
        radius_S = self.state["radius"]
        return (
            centering.scaled(factors_S, radius_S, found),
            centering.center_share(contributions, radius_S),
            centering.radius_after(radius_S, found),
        )

    def merge_again(
        self, record: wire.Record, read: Callable[[wire.Input], tuple[Encoded, ...]]
    ) -> Encoded:
        """Recomputes a recorded version from its record's inputs; returns the version's delta.

        Args:
            record: the version's record.
            read: returns an input's verified parts, like `download_and_verify.read_input`.

        Raises:
            IntegrityError: an input is gone or damaged, the record does not fit this fragment's
                segments or merge rule, or the result has other digests.
        """
        self.begin_again(record)
        for taken in record.inputs:
            try:
                parts = read(taken)
            except (ObjectMissingError, WireError) as error:
                raise unmergeable(record, error.message) from error
            self.add_again(taken, parts)
        return self.end_again(record)

    def begin_again(self, record: wire.Record) -> None:
        """Begins to recompute a recorded version.

        Raises:
            IntegrityError: the record's arrays, codec or units of weight do not fit this fragment.
        """
        self._check_fits(record)
        self._begin_sum()

    def add_again(self, taken: wire.Input, parts: tuple[Encoded, ...]) -> None:
        """Adds one input of the recorded version; call it for each input, in the record's order."""
        assert self._sum is not None
        coefficients_S = np.frombuffer(taken.coefficients, ml_dtypes.bfloat16)
        self._sum.add(self.own_settings.sync.codec, parts, coefficients_S, taken.weight_unit)

    def end_again(self, record: wire.Record) -> Encoded:
        """Takes the recorded outer step over all added inputs; returns the version's delta.

        Raises:
            IntegrityError: the result has other digests.
        """
        factors_S = np.frombuffer(record.factors, np.float32)
        kept_S = np.frombuffer(record.kept, np.float32) if record.kept else None
        radius_S = np.frombuffer(record.radii, np.float32) if record.radii else None
        delta = self._step(factors_S, kept_S, radius_S, record.learning_rate, record.momentum)
        found = self.digests()
        if found != (record.view_digest, record.outer_digest):
            raise unmergeable(
                record,
                f"digests of view and outer state are {found}, the record says "
                f"{(record.view_digest, record.outer_digest)}",
            )
        return delta

    def _check_fits(self, record: wire.Record) -> None:
        """Checks that a record's arrays, codec and units of weight fit this fragment.

        Raises:
            IntegrityError: they do not.
        """
        segments = len(self.grid.lengths)
        wanted = [(len(taken.coefficients), 2 * segments) for taken in record.inputs]
        wanted += [(len(record.factors), 4 * segments)]
        centered = 4 * segments if self.grid.centered else 0
        wanted += [(len(record.kept), centered), (len(record.radii), centered)]
        for found, expected in wanted:
            if found != expected:
                why = f"the numbers of its segments have {found} bytes, not {expected}"
                raise unmergeable(record, why)
        codec, unit = self.own_settings.sync.codec, None
        for taken in record.inputs:
            if taken.codec != codec:
                raise unmergeable(record, f"codec {taken.codec!r}, the run's is {codec!r}")
            unit = merge.unit_after(unit, taken.weight)
            if taken.weight_unit != unit:
                why = f"unit {taken.weight_unit} of weight {taken.weight:g}, not {unit}"
                raise unmergeable(record, why)

    def _begin_sum(self) -> None:
        """Makes the sum empty; its buffers are reused from round to round."""
        if self._sum is None:
            self._sum = self.arithmetic.accumulator(self.grid, self.threads)
        self._sum.reset()

    def _step(
        self,
        factors_S: Vector,
        kept_S: Vector | None,
        radius_S: Vector | None,
        learning_rate: float,
        momentum: float,
    ) -> Encoded:
        assert self._sum is not None
        if radius_S is not None:
            self.state["radius"] = radius_S
        return self.arithmetic.close_round(
            self.grid,
            self._sum,
            factors_S,
            kept_S,
            theta_N=self.theta,
            view_N=self.view,
            state=self.state,
            optimizer=self._optimizer,
            learning_rate=learning_rate,
            momentum=momentum,
            delta_codec=self.own_settings.sync.delta_codec,
            threads=self.threads,
        )


def _binary_header(size: int) -> bytes:
    """Returns msgpack's header for `size` bytes; its packer cannot write one without the bytes."""
    sizes = ((0xC4, 1), (0xC5, 2), (0xC6, 4))
    marker, length = next(each for each in sizes if size < 1 << 8 * each[1])
    return bytes([marker]) + size.to_bytes(length, "big")


def make_grid(settings: RunSettings, layout: Layout, fragment: int) -> Grid:
    """Returns the division of a fragment's vector under a run's settings."""
    return grids.make_grid(
        layout.fragments[fragment],
        layout.block,
        settings.sync.shard_elements,
        settings.merge,
    )


def payload_of(
    grid: Grid,
    codec: Codec,
    parts: tuple[Encoded, ...],
    arithmetic: Arithmetic = PRODUCTION,
    threads: int = 1,
) -> Payload:
    """Returns a verified update with its measured norms.

    Args:
        grid: the fragment's grid.
        codec: the update's codec.
        parts: one for each of the grid's ranges, in order.
        arithmetic: the functions that compute the norms.
        threads: the number of threads that share the work.
    """
    norms_S = arithmetic.segment_norms(grid, codec, parts, threads)
    return Payload(parts, norms_S, float(np.sqrt(np.square(norms_S).sum())))


def _aligned(values: np.ndarray) -> np.ndarray:
    """Returns a copy aligned to cache lines, so that a processor's widest loads touch only one."""
    copy = aligned_empty(values.size, values.dtype)
    copy[:] = values
    return copy


def _optimizer(settings: RunSettings) -> OuterOptimizer:
    section = settings.outer
    return outer.make_outer(
        section.optimizer, delay=section.delay_rounds, delay_fraction=section.delay_fraction
    )


def _fresh_state(settings: RunSettings, grid: Grid) -> State:
    """Returns the initial state of the outer optimizer, and of centered clipping if it is used."""
    state = _optimizer(settings).init(grid.size)
    if grid.centered:
        state["center"] = aligned_zeros(grid.size)
        state["radius"] = np.zeros(len(grid.lengths), np.float32)
    return state


def step_size(settings: RunSettings, share: float) -> tuple[float, float]:
    """Returns (learning rate, momentum) of a round that takes `share` of an outer step."""
    section = settings.outer
    if share < 1:
        return outer.participation(section.learning_rate, section.momentum, share)
    return section.learning_rate * share, section.momentum


def make_input(admitted: Admitted, coefficients: bytes, unit: int) -> wire.Input:
    """Returns the entry of a record for a merged update, with its coefficients and their unit."""
    manifest = admitted.manifest
    return wire.Input(
        learner=manifest.learner,
        incarnation=manifest.incarnation,
        seq=manifest.seq,
        stream_seq=admitted.stream_seq,
        codec=manifest.codec,
        shards=manifest.shards,
        weight=admitted.weight,
        staleness=admitted.staleness,
        discount=admitted.discount,
        clip=admitted.clip,
        norm=admitted.norm,
        tokens=manifest.tokens,
        steps=manifest.steps,
        loss=manifest.loss,
        final=manifest.final,
        coefficients=coefficients,
        weight_unit=unit,
        steps_credited=admitted.credit.steps,
        tokens_credited=admitted.credit.tokens,
        announced_at_s=admitted.stored_at_s,
    )


def unmergeable(record: wire.Record, what: str) -> IntegrityError:
    """Returns the error for a version that cannot be recomputed from its record and its inputs.

    Args:
        record: the version's record.
        what: why it cannot be recomputed, for people.
    """
    return IntegrityError(
        f"fragment {record.fragment} version {record.version} cannot be recomputed: {what}",
        hint="runbooks/digest-mismatch.md",
    )
