"""The one operation of the kernels that a plain loop cannot express: a prefetch.

A processor that waits for memory does nothing else. Many processors prefetch by themselves; some do
not, or too little for a loop that computes much with each byte: on such a machine the norms of an
update took four times as long. A prefetch requests data some blocks ahead, and does not wait. A
prefetch changes no value, so it can change no bit; beyond an array's end it does nothing.

Numba has no function for a prefetch. This file makes one from LLVM's `llvm.prefetch`, whose last
three arguments mean: for reading, into every cache, data.
The decision: docs/adr/0073-kernels-that-are-read.md.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from diloco.aggregator.kernel_cache import compiled

# How many blocks ahead to prefetch: FAR in loops with little work per block, NEAR in others.
FAR: Final = np.uint64(64)
NEAR: Final = np.uint64(16)
# The bytes of a cache line.
_LINE: Final = np.uint64(64)

_BYTE: Final = ir.IntType(8).as_pointer()
_NUMBER: Final = ir.IntType(32)
_PREFETCH: Final = ir.FunctionType(ir.VoidType(), [_BYTE, _NUMBER, _NUMBER, _NUMBER])


def _fetch(_typing: Any, rows: Any, row: Any, column: Any) -> Any:
    """Generates the code that prefetches the cache line of `rows[row, column]`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, arguments[0])
        place = cgutils.get_item_pointer(context, builder, kind, array, list(arguments[1:]))  # type: ignore[no-untyped-call]
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (_BYTE,), _PREFETCH)
        read, keep, data = (ir.Constant(_NUMBER, value) for value in (0, 3, 1))
        builder.call(prefetch, [builder.bitcast(place, _BYTE), read, keep, data])
        return context.get_dummy_value()

    return types.void(rows, row, column), generate


fetch: Any = intrinsic(_fetch)


@compiled
def fetch_row(rows: Any, row: Any) -> None:
    """Prefetches all cache lines of `rows[row]`."""
    for j in range(np.uint64(0), np.uint64(rows.shape[1]), _LINE // np.uint64(rows.itemsize)):
        fetch(rows, row, j)
