"""Tokens become shards: NumPy files of one axis, the same bytes whatever NumPy writes them."""

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from diloco.common.store import ObjectStore
from diloco.common.token_manifest import Counted, Dtype, Side, TokenShard, shard_name

# The format's version 1.0, padded by us: NumPy's own padding is not of the format.
HEADER_BYTES = 128
_PREFIX = b"\x93NUMPY\x01\x00"


class ShardWriter:
    """The shards of one side of one piece, in a buffer of one shard.

    Args:
        store: that they are put into.
        side: train or held out.
        piece: its number.
        dtype: of tokens.
        capacity: tokens in a shard, at most.
    """

    def __init__(
        self, store: ObjectStore, side: Side, piece: int, dtype: Dtype, capacity: int
    ) -> None:
        self._store, self._side, self._piece = store, side, piece
        self._dtype = np.dtype(dtype).newbyteorder("<")
        # Memory is taken as it is filled.
        self._buffer = np.empty(HEADER_BYTES + capacity * self._dtype.itemsize, np.uint8)
        self._tokens = self._buffer[HEADER_BYTES:].view(self._dtype)
        self._filled = self._documents = 0
        self.shards: list[TokenShard] = []

    def add(self, document: npt.NDArray[np.uint32]) -> Counted:
        """Add a document; one that does not fit into what is left of a shard begins the next."""
        if self._filled and self._filled + len(document) > len(self._tokens):
            self.flush()
        self._documents += 1
        left = document
        while len(left):
            part = left[: len(self._tokens) - self._filled]
            self._tokens[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if len(left := left[len(part) :]):
                self.flush()
        return Counted(documents=1, tokens=len(document))

    def flush(self) -> None:
        """Store what has been added."""
        if not self._filled:
            return
        name = shard_name(self._side, self._piece, len(self.shards))
        tokens = self._tokens[: self._filled]
        self._buffer[:HEADER_BYTES] = np.frombuffer(header(self._dtype, len(tokens)), np.uint8)
        data = self._buffer.data[: HEADER_BYTES + tokens.nbytes]
        self._store.put(name, data)
        self.shards.append(
            TokenShard(
                name=name,
                side=self._side,
                size_bytes=len(data),
                documents=self._documents,
                tokens=len(tokens),
                largest=int(tokens.max()),
                sha256=hashlib.sha256(data).hexdigest(),
            )
        )
        self._filled = self._documents = 0


def header(dtype: np.dtype[np.unsignedinteger], count: int) -> bytes:
    """What stands before `count` tokens."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    length = HEADER_BYTES - len(_PREFIX) - 2
    return _PREFIX + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"
