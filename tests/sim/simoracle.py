"""The oracle in a simulated run: it reads every message, and a violation ends the simulation.

The oracle's rules are in `diloco/judge/oracle`; the simulator's own rules in `siminvariants.py`.
"""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from diloco.common.protocol import wire
from diloco.common.protocol.codecs import Codec, Encoded
from diloco.common.protocol.layout import Layout
from diloco.common.storage.bus import Message
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.tape import read_message, read_positions
from diloco.judge.oracle import Oracle, Remaker, Violation
from diloco.judge.oracle.remake import Arrays, BlockGrid, Numbers


def _norms(grid: BlockGrid, _codec: Codec, update: Encoded) -> np.ndarray:
    """Returns a light update's norm: the number of steps that it covers (`simtensors.py`)."""
    _, start, stop = update.codes.reshape(-1, grid.block)[0, :3]
    return np.asarray([stop - start], np.float64)


def _add(
    _grid: BlockGrid,
    _codec: Codec,
    total: bytes | None,
    update: Encoded,
    found_S: np.ndarray,
    unit: int,
    _rise: int,
) -> bytes:
    given = found_S.tobytes() + struct.pack("<h", unit)
    return xxhash.xxh3_128_digest((total or b"") + update.codes.tobytes() + given)


def _step(
    grid: BlockGrid,
    _settings: Any,
    arrays: Arrays,
    total: bytes,
    factors_S: np.ndarray,
    record: Any,
) -> None:
    """Makes light parameters: a digest of the old ones, the inputs, the factors and the rates."""
    rates = struct.pack("<dd", record.learning_rate, record.momentum)
    digest = xxhash.xxh3_128_digest(arrays.theta.tobytes() + total + factors_S.tobytes() + rates)
    arrays.theta = np.resize(np.frombuffer(digest, np.uint8), grid.size).astype(np.float32)


# Kinds of faults under which an owner may be late for its own timers.
SLOWING = (
    "delay", "pause", "partition", "store_slow", "store_refused", "store_lost_answer",
    "lost_request", "lost_answer", "late_request", "duplicate", "clock_step",
)  # fmt: skip
LATE_S = 1.0

LIGHT = Numbers(_norms, _add, lambda _grid, _total: None, _step, float)


class OracleOfTapes:
    """An oracle for each tape of a run.

    Args:
        layout: the run's layout.
        light: whether the world's tensors are light (`simtensors.Light`).
    """

    def __init__(self, layout: Layout, *, light: bool) -> None:
        self._layout = layout
        self._numbers = LIGHT if light else None
        self.oracle: Oracle | None = None

    def take(
        self, message: Message, store: ObjectStore, injected: Mapping[str, int]
    ) -> list[Violation]:
        """Reads the tape's next message; returns the rules that it breaks, given the faults so far."""
        item = read_message(message, store, self._layout)
        body = getattr(item, "body", None)
        if isinstance(body, wire.Specification):
            remaker = Remaker(self._layout, store.get, self._numbers)
            positions = read_positions(store, body)
            self.oracle = Oracle(body, self._layout, remaker=remaker, positions=positions)
        if self.oracle is None:
            return []
        slowed = any(injected.get(kind) for kind in SLOWING)
        for chain in self.oracle.chains:
            chain.late_s = None if slowed else LATE_S
        return self.oracle.take(item)
