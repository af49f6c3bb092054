"""Tokens become shards: NumPy files of one axis, the same bytes whatever NumPy writes them."""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from diloco.common.storage.store import ObjectStore
from diloco.models.data.manifest import Dtype, Side, TokenShard, shard_name

# The format's version 1.0, padded by us: NumPy's own padding is not of the format.
HEADER_BYTES = 128
_PREFIX = b"\x93NUMPY\x01\x00"


def store_shard(
    store: ObjectStore,
    side: Side,
    piece: int,
    dtype: Dtype,
    documents: Sequence[npt.NDArray[np.uint32]],
) -> TokenShard:
    """Store the tokens of a piece's documents of one side, one after the other."""
    tokens = np.concatenate(documents, dtype=np.dtype(dtype).newbyteorder("<"), casting="unsafe")
    data = header(tokens.dtype, len(tokens)) + tokens.tobytes()
    store.put(shard_name(side, piece), data)
    return TokenShard(
        name=shard_name(side, piece),
        side=side,
        size_bytes=len(data),
        documents=len(documents),
        tokens=len(tokens),
        largest=int(tokens.max()),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def header(dtype: np.dtype[np.unsignedinteger], count: int) -> bytes:
    """The header of a file of `count` tokens."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    length = HEADER_BYTES - len(_PREFIX) - 2
    return _PREFIX + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"
