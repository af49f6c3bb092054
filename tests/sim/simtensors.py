"""Substitutes of tensors in the simulation.

From every update the checkers can read which steps of its learner the update covers, and so find
steps that were merged twice or never. There are three kinds of substitutes:

- *light* tensors (`Light`): vectors of a few elements whose values are a digest of all merged
  updates, in order. They replace the arithmetic below `FragmentArrays`, and `Replica`; production
  code still decides which updates are merged, when, in which order, and again after a crash. Any
  other order, input, coefficient or factor gives another digest.
- *numbers* (`Numbers`): small vectors of any values, with the production arithmetic and any codec
  and optimizer; an update's manifest states the steps that it covers.
- *ledgers* (`Ledger`): dense vectors with the production arithmetic, whose element (learner,
  position) counts how often the step on that batch was sent.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import xxhash

from diloco.aggregator.arrays.arithmetic import PRODUCTION, Arithmetic
from diloco.aggregator.arrays.grid import Grid
from diloco.aggregator.arrays.merge import Contribution
from diloco.common.process.config import SyncSection, sync_of
from diloco.common.protocol import shards, slices, wire
from diloco.common.protocol.codecs import Encoded, decode_numpy
from diloco.common.protocol.layout import Layout
from diloco.common.storage.store import ObjectStore
from diloco.learner.core.carry import Carried
from diloco.learner.tensors.send_and_adopt import Delta, PendingView, Replica

TOKENS = 100
# The first values of each block of a light update: learner + 1, start, stop.
_LIGHT_CODES = struct.Struct("<3f")
NO_SCALES = np.zeros(0, ml_dtypes.bfloat16)


class Covers(NamedTuple):
    """The steps of one learner, as data positions [start, stop), that an update covers."""

    learner: int
    start: int
    stop: int


def faded(fading: float, unsent: int) -> int:
    """Returns how many of the unsent steps count as dropped at a blend; at least one stays."""
    return min(math.ceil(fading * unsent), unsent - 1) if unsent else 0


def _read_parts(store: ObjectStore, entries: Sequence[wire.Shard], block: int) -> list[Encoded]:
    return [
        shards.unpack(
            store.get(entry.name),
            codec="float32",
            count=block * slices.check(entry.slices, 1 << 62),
            block=block,
        )
        for entry in entries
    ]


# --- Light tensors: digests


class LightReplica:
    """Replaces `diloco.learner.tensors.send_and_adopt.Replica`: keeps only which steps each update covers.

    A fragment's next update covers the steps [start, position). Once the update in flight has a
    verdict, `start` is the position at which that update ended. A version that overwrites theta
    sets `start` to the present position; one that is blended drops the first steps (`faded`).
    """

    def __init__(
        self, learner: int, settings: SyncSection, layout: Layout, views: Sequence[np.ndarray]
    ) -> None:
        self._learner = learner
        adopt = [sync_of(settings, fragment).adopt for fragment in layout.fragments]
        self._overwritten = [each == "overwrite" for each in adopt]
        self._fading = 1 - settings.blend
        self._block = layout.block
        self._blocks = [np.arange(fragment.size // layout.block) for fragment in layout.fragments]
        self.views = list(views)
        self.position = 0
        self._starts = [0] * len(views)
        self._in_flight: dict[int, int] = {}

    def begin(self, position: int) -> None:
        """Begin a life at this position: earlier steps were sent by earlier lives, or are lost."""
        self.position = position
        self._starts = [position] * len(self.views)

    def unsent(self) -> tuple[list[int], dict[int, int]]:
        return list(self._starts), dict(self._in_flight)

    def carry(self, values: tuple[list[int], dict[int, int]], found: Sequence[Carried]) -> None:
        """Go on with a snapshot of the life before; `begin` has set the snapshot's position."""
        starts, in_flight = values
        for fragment, one in enumerate(found):
            if not one.dropped:
                sent = 0 if one.again else in_flight.get(fragment, 0)
                self._starts[fragment] = max(starts[fragment], sent)

    def owned(self, fragment: int) -> np.ndarray:
        return self._blocks[fragment]

    local_blocks = owned

    def collect(self, _fragment: int, codes: Encoded) -> Encoded:
        return codes

    def place(self, fragment: int, rows: Encoded) -> Delta:
        return Delta(rows.codes.reshape(self.views[fragment].shape))

    def place_view(self, _fragment: int, view: np.ndarray) -> PendingView:
        return PendingView(view)

    def send(self, fragment: int) -> Encoded:
        self._in_flight[fragment] = self.position
        codes = np.zeros((len(self._blocks[fragment]), self._block), np.float32)
        codes[:, :3] = self._learner + 1, self._starts[fragment], self.position
        codes[:, 3] = self._blocks[fragment]
        return Encoded(NO_SCALES, codes)

    def adopt(
        self,
        fragment: int,
        payload: Delta | PendingView | None,
        *,
        resolved: bool,
        blended: bool = False,
    ) -> None:
        if isinstance(payload, Delta):
            self.views[fragment] = self.views[fragment] + payload.codes
        elif payload is not None:
            self.views[fragment] = payload.values
        if resolved:
            self._starts[fragment] = max(self._starts[fragment], self._in_flight.pop(fragment))
        if blended:
            unsent = self.position - self._starts[fragment]
            self._starts[fragment] += faded(self._fading, unsent)
        if payload is not None and self._overwritten[fragment]:
            self._starts[fragment] = self.position

    def roll_back(self, fragment: int, view: PendingView) -> None:
        self.views[fragment] = view.values
        self._in_flight.pop(fragment, None)
        self._starts[fragment] = self.position


class _LightSum:
    """Replaces `merge.Accumulator`: a digest of the inputs, in their order."""

    def __init__(self, grid: Grid, _threads: int) -> None:
        self.grid = grid
        self.reset()

    def reset(self) -> None:
        self.inputs = 0
        self.digest = b""

    def add(
        self, _codec: str, parts: Sequence[Encoded], coefficients_S: np.ndarray, unit: int
    ) -> None:
        codes = b"".join(part.codes.data for part in parts)
        given = coefficients_S.tobytes() + struct.pack("<h", unit)
        self.digest = xxhash.xxh3_128_digest(self.digest + codes + given)
        self.inputs += 1


def _light_norms(grid: Grid, _codec: str, parts: Sequence[Encoded], _threads: int) -> np.ndarray:
    """Returns an update's norm, the number of its steps; checks that each block is in its place."""
    codes_Bxb = np.concatenate([part.codes for part in parts]).reshape(-1, grid.block)
    if not (codes_Bxb[:, 3] == np.arange(len(codes_Bxb))).all():
        raise AssertionError(f"blocks are not in their places: {codes_Bxb[:, 3]}")
    _, start, stop = codes_Bxb[0, :3]
    return np.asarray([stop - start], np.float64)


def _light_coefficients(_grid: Grid, update: Contribution) -> np.ndarray:
    share = math.ldexp(update.weight, -update.unit) * update.discount * update.clip
    return np.asarray([share], ml_dtypes.bfloat16)


def _light_factors(_grid: Grid, _sum: _LightSum, updates: Sequence[Contribution]) -> np.ndarray:
    unit = updates[-1].unit
    total = sum(math.ldexp(update.weight, -unit) for update in updates)
    return np.asarray([1 / total], np.float32)


def _light_close_round(
    grid: Grid,
    total: _LightSum,
    factors_S: np.ndarray,
    _kept_S: np.ndarray | None,
    *,
    theta_N: np.ndarray,
    view_N: np.ndarray,
    learning_rate: float,
    momentum: float,
    **_: Any,
) -> Encoded:
    """Makes the new parameters, a digest of the old, the inputs and the factors; returns the delta."""
    rates = struct.pack("<dd", learning_rate, momentum)
    digest = xxhash.xxh3_128_digest(theta_N.tobytes() + total.digest + factors_S.tobytes() + rates)
    theta_N[:] = np.resize(np.frombuffer(digest, np.uint8), grid.size)
    delta_N = theta_N - view_N
    view_N[:] = theta_N
    return Encoded(NO_SCALES, delta_N)


LIGHT = Arithmetic(
    _LightSum,
    _light_norms,
    coefficients=_light_coefficients,
    factors=_light_factors,
    close_round=_light_close_round,
)


class Light:
    """The world's tensors are light: digests of the merged updates."""

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.arithmetic = LIGHT

    def replica(
        self, learner: int, settings: SyncSection, layout: Layout, views: Sequence[np.ndarray]
    ) -> LightReplica:
        return LightReplica(learner, settings, layout, views)

    def train(self, replica: LightReplica, _learner: int, position: int) -> None:
        """Take one step on the batch at `position`."""
        replica.position = position + 1

    def begin(self, replica: LightReplica, position: int) -> None:
        replica.begin(position)

    def view(self, replica: LightReplica, fragment: int) -> np.ndarray:
        return replica.views[fragment]

    def covers(self, store: ObjectStore, manifest: wire.Manifest, _block: int) -> Covers:
        """Returns the steps that an update covers.

        Raises:
            ValueError: the update's shards state different steps.
        """
        found = {
            _LIGHT_CODES.unpack_from(store.get(entry.name), shards.HEADER.size)
            for entry in manifest.shards
        }
        if len(found) != 1:
            raise ValueError(f"shards of one update cover {found}")
        learner, start, stop = found.pop()
        return Covers(int(learner) - 1, int(start), int(stop))


# --- Dense ledgers


def view_of(replica: Replica, fragment: int) -> np.ndarray:
    """Returns a replica's view of a fragment, float32 [N]."""
    return np.concatenate([np.asarray(piece).reshape(-1) for piece in replica._view(fragment)])


class Ledger:
    """The world's tensors are dense ledgers, with the production arithmetic in all processes."""

    LEARNERS = 16

    def __init__(self, rows: int) -> None:
        self.elements = rows
        self.arithmetic = PRODUCTION

    @property
    def _each(self) -> int:
        return self.elements // self.LEARNERS

    def replica(
        self, _learner: int, settings: Any, layout: Layout, views: Sequence[np.ndarray]
    ) -> Replica:
        like = {tensor.name: jnp.zeros(tensor.shape) for tensor in layout.tensors}
        return Replica(settings, layout, like, views)

    def train(self, replica: Replica, learner: int, position: int) -> None:
        """Take one step: subtract one from the element of (learner, position)."""
        assert position < self._each
        element = learner * self._each + position
        replica.trained = {
            name: leaf.at[element].add(-1.0) for name, leaf in replica.trained.items()
        }

    def begin(self, replica: Replica, position: int) -> None:
        """Nothing to do."""

    def view(self, replica: Replica, fragment: int) -> np.ndarray:
        return view_of(replica, fragment)

    def covers(self, store: ObjectStore, manifest: wire.Manifest, block: int) -> Covers:
        """Returns the steps that an update covers.

        Raises:
            ValueError: the update does not count each of consecutive steps once.
        """
        parts = _read_parts(store, manifest.shards, block)
        rows = np.concatenate([decode_numpy("float32", part, block) for part in parts])
        places = [slices.expand(entry.slices, 1 << 62) for entry in manifest.shards]
        ledger = np.empty_like(rows)
        ledger.reshape(-1, block)[np.concatenate(places)] = rows.reshape(-1, block)
        counts = np.rint(ledger)
        np.testing.assert_allclose(ledger, counts, atol=1e-2)  # sums of thirds are not exact
        (steps,) = np.nonzero(counts)
        start, stop = int(steps[0]), int(steps[-1]) + 1
        if not (counts[start:stop] == 1).all():
            raise ValueError(f"counts of elements {start} to {stop} are not all one")
        learner = start // self._each
        return Covers(learner, start - learner * self._each, stop - learner * self._each)


# --- Numbers


class Numbers:
    """The world's tensors are small vectors of any numbers, with the production arithmetic."""

    STEPS = 64

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.arithmetic = PRODUCTION
        moves = np.random.default_rng(0).normal(0.0, 0.01, (self.STEPS, elements))
        self._moves = moves.astype(np.float32)

    def replica(
        self, _learner: int, settings: Any, layout: Layout, views: Sequence[np.ndarray]
    ) -> Replica:
        like = {tensor.name: jnp.zeros(tensor.shape) for tensor in layout.tensors}
        return Replica(settings, layout, like, views)

    def train(self, replica: Replica, learner: int, position: int) -> None:
        """Take one step: add a fixed random vector, and pull the parameters towards zero."""
        move = self._moves[(17 * learner + position) % self.STEPS]
        replica.trained = {name: 0.99 * leaf + move for name, leaf in replica.trained.items()}

    def begin(self, replica: Replica, position: int) -> None:
        """Nothing to do."""

    def view(self, replica: Replica, fragment: int) -> np.ndarray:
        return view_of(replica, fragment)

    def covers(self, _store: ObjectStore, manifest: wire.Manifest, _block: int) -> Covers:
        """Returns the steps that an update covers, as its manifest states."""
        learner = int(manifest.learner.rsplit("-", 1)[1])
        return Covers(learner, manifest.position - manifest.steps, manifest.position)
