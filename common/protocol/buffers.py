"""Bytes that stand in several places, so that an object can be stored without a copy of them."""

from collections.abc import Iterator
from typing import TypeAlias

PIECE_BYTES = 1 << 20


class Buffers:
    """Some runs of bytes, one behind the other. They must stay as they are while this is used.

    Iterating gives them in pieces of at most `PIECE_BYTES`; `bytes` gives a copy of all.

    Args:
        runs: contiguous, of any format.
    """

    def __init__(self, *runs: bytes | memoryview) -> None:
        self._runs = tuple(memoryview(run).cast("B") for run in runs)

    def __len__(self) -> int:
        return sum(run.nbytes for run in self._runs)

    def __iter__(self) -> Iterator[memoryview]:
        for run in self._runs:
            for start in range(0, run.nbytes, PIECE_BYTES):
                yield run[start : start + PIECE_BYTES]

    def __bytes__(self) -> bytes:
        return b"".join(self._runs)

    def __eq__(self, other: object) -> bool:
        """Whether `bytes` or others hold the same bytes; compared piece by piece."""
        if not isinstance(other, bytes | memoryview | Buffers):
            return NotImplemented
        view, at = memoryview(bytes(other) if isinstance(other, Buffers) else other).cast("B"), 0
        if len(self) != view.nbytes:
            return False
        for piece in self:
            if view[at : at + piece.nbytes] != piece:
                return False
            at += piece.nbytes
        return True

    __hash__ = None  # type: ignore[assignment]

    def behind(self, start: int) -> "Buffers":
        """The buffers from byte `start` on, without a copy."""
        left = []
        for run in self._runs:
            left.append(run[start:])
            start = max(0, start - run.nbytes)
        return Buffers(*left)


Data: TypeAlias = bytes | memoryview | Buffers


def parts_of(data: Data) -> Buffers:
    """Bytes or buffers as `Buffers`, without a copy."""
    return data if isinstance(data, Buffers) else Buffers(data)
