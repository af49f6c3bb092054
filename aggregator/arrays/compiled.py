"""How kernels are compiled (`sums.py`, `steps.py`), and why their bits are the same everywhere.

Each operation on floats is rounded by itself, in the order in which it stands there: Numba neither
fuses nor reorders them unless it is told to ("fastmath"), on any processor, and leaves denormal
numbers as they are. So the bits are those of NumPy's operations, one after the other
(docs/adr/0053-compiled-loops.md).

A kernel works on pieces [first, last) of a vector, which threads share; no piece crosses a segment
or a shard (`Grid.pieces`), and what is summed over a piece is summed within it. It holds no
interpreter lock.

Why the loops look as they do, which makes the difference between vectors and single elements:
  - how many elements a loop has is the length of a tuple (`lanes`), and so known when compiled;
  - a loop writes to few arrays, since the compiler must see that they do not overlap;
  - numbers of blocks are unsigned, which need no care for negative ones.

What was compiled is kept on disk, and made again when a file of this folder changes.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from diloco.aggregator.kernel_cache import KeptKernel


def lanes(count: int) -> tuple[int, ...]:
    """A tuple whose length tells the compiler how many elements a loop has."""
    return (0,) * count


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel, compiled at its first call with arrays of some types, and kept on disk."""
    kernel: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")(function)
    # Where neither this package's folder nor the user's cache can be written, it is not kept.
    with contextlib.suppress(RuntimeError):
        # As "cache=True" does.
        kernel._cache = KeptKernel(function)  # type: ignore  # noqa: SLF001, PGH003
    return kernel


@compiled
def wide(bits: Any) -> Any:
    """A bfloat16, given by its bits, as float32."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def _fetch(_typing: Any, array: Any, offset: Any) -> Any:
    """Have the processor read what stands some bytes from an array's begin, and not wait for it.

    A loop that does much with each byte looks too little ahead by itself. Beyond the end it does
    nothing.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        place = builder.gep(builder.bitcast(data, byte), [arguments[1]])
        prefetch = builder.module.declare_intrinsic(
            "llvm.prefetch", (byte,), ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        read, keep, not_code = (ir.Constant(number, value) for value in (0, 3, 1))
        builder.call(prefetch, [place, read, keep, not_code])
        return context.get_dummy_value()

    return types.void(array, offset), generate


fetch: Any = intrinsic(_fetch)
