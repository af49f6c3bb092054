"""A block's elements as one vector of the compiler's own, not left to its choice.

Whether LLVM makes vectors of a loop over single elements, and how wide ones, differs from one
processor to the next. What is written as vectors is vectors on each, in as many of its registers
as they take; each operation gives the bits that it gives of single elements (`compiled.py`).

Shapes: B blocks of 2h elements. A vector holds two runs of w elements, one of each half of a
block, since a byte of int4 holds one of each: [B, 2h] elements, [B, h] bytes of int4, [B, 2h] codes
of others. `half` and `width` are as many `lanes` as h and w are.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

# Elements of each half that one vector holds: with a block of 64 all, in four of the widest
# registers.
WIDTH: Final = 32

# Blocks that are measured at a time, and what a half must be a multiple of for that.
GROUP: Final = 16
STRIDE: Final = 32

_SHORT, _INDEX = ir.IntType(16), ir.IntType(32)
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()


class VectorType(types.Type):
    """Some elements of a float type."""

    def __init__(self, element: ir.Type, count: int) -> None:
        self.of = ir.VectorType(element, count)
        super().__init__(name=f"vector({self.of})")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType) -> None:
        super().__init__(manager, kind, kind.of)  # type: ignore[no-untyped-call]


# --- What kernels call


def _zeros(_typing: Any, width: Any) -> Any:
    """Float32 zeros, 2w."""
    kind = VectorType(_FLOAT, 2 * width.count)
    return kind(width), lambda *_: _all(kind.of, 0.0)


def _no_squares(_typing: Any, width: Any) -> Any:
    """Float64 zeros, 2w, that squares are to be added to."""
    kind = VectorType(_DOUBLE, 2 * width.count)
    return kind(width), lambda *_: _all(kind.of, 0.0)


def _load(_typing: Any, rows: Any, block: Any, at: Any, half: Any, width: Any) -> Any:
    """Float32 elements `at` of each half of a block, and those behind."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, block, at, *_ = arguments
        array = signature.args[0], rows
        return _runs(context, builder, array, block, at, half.count, width.count)

    return VectorType(_FLOAT, 2 * width.count)(rows, block, at, half, width), generate


def _store(_typing: Any, rows: Any, block: Any, at: Any, half: Any, vector: Any) -> Any:
    """Put them where `load` finds them."""
    width = vector.of.count // 2

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, block, at, _, vector = arguments
        for run in range(2):
            here = _cut(builder, vector, run * width, width)
            start = builder.add(at, ir.Constant(at.type, run * half.count))
            place = _place(context, builder, (signature.args[0], rows), block, start)
            builder.store(here, builder.bitcast(place, here.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(rows, block, at, half, vector), generate


def _add_codes(
    _typing: Any, vector: Any, codes: Any, block: Any, at: Any, half: Any, step: Any, least: Any
) -> Any:
    """Add step x code of each element of the block, and say what the sum is.

    Products with whole numbers are exact, so it does not matter whether a machine rounds them
    before the sum. Others are rounded, and zero if below `least`.
    """
    width = vector.of.count // 2
    whole = codes.dtype in (types.uint8, types.int8)
    flags = ("contract",) if whole else ()

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, codes, block, at, _, step, least = arguments
        array = signature.args[1], codes
        if codes_kind == types.uint8:
            values = _int4(builder, _run(context, builder, array, block, at, width))
        else:
            values = _runs(context, builder, array, block, at, half.count, width)
        values = _AS_FLOATS[codes_kind](builder, values)
        product = builder.fmul(values, _spread(builder, step, 2 * width), flags=flags)
        if not whole:
            product = _normal(builder, product, _spread(builder, least, 2 * width))
        return builder.fadd(vector, product, flags=flags)

    codes_kind = codes.dtype
    return vector(vector, codes, block, at, half, step, least), generate


def _add_squares(_typing: Any, squares: Any, vector: Any) -> Any:
    """Add the square of each element, and say what the sums are."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        squares, vector = arguments
        wide = builder.fpext(vector, squares.type)
        # A square of a float32 is exact in float64.
        exact = ("contract",)
        return builder.fadd(squares, builder.fmul(wide, wide, flags=exact), flags=exact)

    return squares(squares, vector), generate


def _put(_typing: Any, squares: Any, values: Any) -> Any:
    """Put all of them into an array, float64 [2w]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        squares, values = arguments
        data = context.make_array(signature.args[1])(context, builder, values).data
        builder.store(squares, builder.bitcast(data, squares.type.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(squares, values), generate


def _measure(_typing: Any, codes: Any, scales: Any, block: Any, half: Any, squares: Any) -> Any:
    """Sums of squares of `GROUP` blocks of int4, from one block on, into float64 [GROUP].

    Each is exact: scale^2 times a whole number.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes, scales, block, _, squares = arguments
        words = _words(context, builder, (signature.args[0], codes), block, half.count)
        whole = builder.uitofp(_sums(builder, words), ir.VectorType(_DOUBLE, GROUP))
        bits = context.make_array(signature.args[1])(context, builder, scales).data
        bits = builder.gep(bits, [block])
        bits = builder.bitcast(bits, ir.VectorType(_SHORT, GROUP).as_pointer())
        scale = _from_bfloat16(builder, builder.load(bits, align=2))
        scale = builder.fpext(scale, whole.type)
        found = builder.fmul(whole, builder.fmul(scale, scale))
        data = context.make_array(signature.args[4])(context, builder, squares).data
        builder.store(found, builder.bitcast(data, found.type.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(codes, scales, block, half, squares), generate


zeros: Any = intrinsic(_zeros)
no_squares: Any = intrinsic(_no_squares)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
add_codes: Any = intrinsic(_add_codes)
add_squares: Any = intrinsic(_add_squares)
put: Any = intrinsic(_put)
measure: Any = intrinsic(_measure)


# --- Of what they are made


def _all(kind: ir.VectorType, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _spread(builder: Any, value: Any, count: int) -> Any:
    """A vector of one value."""
    kind = ir.VectorType(value.type, count)
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(_INDEX, 0))
    return builder.shuffle_vector(first, nothing, _all(ir.VectorType(_INDEX, count), 0))


def _cut(builder: Any, vector: Any, start: int, count: int) -> Any:
    """Some elements of a vector."""
    order = ir.Constant(ir.VectorType(_INDEX, count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, vector, order)


def _joined(builder: Any, low: Any, high: Any) -> Any:
    """One vector behind another."""
    count = 2 * low.type.count
    order = ir.Constant(ir.VectorType(_INDEX, count), list(range(count)))
    return builder.shuffle_vector(low, high, order)


def _place(context: Any, builder: Any, array: tuple[Any, Any], block: Any, at: Any) -> Any:
    """Where an element of a block stands; of an array its type and what it is."""
    kind, value = array
    made = context.make_array(kind)(context, builder, value)
    length = builder.extract_value(made.shape, 1)
    return builder.gep(made.data, [builder.add(builder.mul(block, length), at)])


def _run(
    context: Any, builder: Any, array: tuple[Any, Any], block: Any, at: Any, count: int
) -> Any:
    """Elements that stand next to each other."""
    place = _place(context, builder, array, block, at)
    kind = ir.VectorType(place.type.pointee, count)
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=1)


def _runs(
    context: Any, builder: Any, array: tuple[Any, Any], block: Any, at: Any, half: int, width: int
) -> Any:
    """As many elements of each half."""
    behind = builder.add(at, ir.Constant(at.type, half))
    low, high = (_run(context, builder, array, block, start, width) for start in (at, behind))
    return _joined(builder, low, high)


def _int4(builder: Any, pairs: Any) -> Any:
    """Signed bytes: those that stand low, and those that stand high."""
    low = builder.and_(pairs, _all(pairs.type, 15))
    high = builder.lshr(pairs, _all(pairs.type, 4))
    both = _joined(builder, low, high)
    return builder.sub(both, _all(both.type, 8))


def _words(context: Any, builder: Any, array: tuple[Any, Any], block: Any, half: int) -> list[Any]:
    """Of each of `GROUP` blocks of int4 sums of squares, 16 of 16 bits.

    A word has four codes, and so at most 4 x 8^2; a block of 512 has 128 words.
    """
    place = _place(context, builder, array, block, ir.Constant(block.type, 0))
    found: list[Any] = []
    for start in range(0, GROUP * half, 2 * STRIDE):
        here = builder.gep(place, [ir.Constant(_INDEX, start)])
        kind = ir.VectorType(_SHORT, STRIDE)
        word = builder.load(builder.bitcast(here, kind.as_pointer()), align=1)
        total = None
        for shift in (0, 4, 8, 12):
            code = builder.lshr(word, _all(kind, shift))
            code = builder.sub(builder.and_(code, _all(kind, 15)), _all(kind, 8))
            square = builder.mul(code, code)
            total = builder.add(total, square) if total else square
        low, high = _cut(builder, total, 0, GROUP), _cut(builder, total, GROUP, GROUP)
        if half == STRIDE:
            found += [low, high]
            continue
        both = builder.add(low, high)
        if start % half:
            both = builder.add(found.pop(), both)
        found.append(both)
    return found


def _sums(builder: Any, words: Sequence[Any]) -> Any:
    """The sum of each of 16 vectors of 16: two are made one until one is left."""
    low, high = words[: GROUP // 2], words[GROUP // 2 :]
    while len(low) > 1:
        middle = len(low) // 2
        low, high = (
            [
                _added(builder, one, other)
                for one, other in zip(part[:middle], part[middle:], strict=True)
            ]
            for part in (low, high)
        )
    first = [*range(8), *range(16, 24)]
    return _folded(builder, low[0], high[0], first, [8 + index for index in first])


def _added(builder: Any, one: Any, other: Any) -> Any:
    """Sums of each two of a vector's elements, those of one and of the other in turns.

    In runs of eight, which no processor needs long to interleave.
    """
    first = [16 * of + 8 * run + at for run in range(2) for at in range(4) for of in range(2)]
    return _folded(builder, one, other, first, [4 + index for index in first])


def _folded(builder: Any, one: Any, other: Any, *orders: list[int]) -> Any:
    """The sum of two choices of two vectors' elements."""
    low, high = (
        builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(_INDEX, GROUP), order))
        for order in orders
    )
    return builder.add(low, high)


def _from_whole(builder: Any, values: Any) -> Any:
    return builder.sitofp(values, ir.VectorType(_FLOAT, values.type.count))


def _from_bfloat16(builder: Any, bits: Any) -> Any:
    wide = builder.zext(bits, ir.VectorType(_INDEX, bits.type.count))
    shifted = builder.shl(wide, _all(wide.type, 16))
    return builder.bitcast(shifted, ir.VectorType(_FLOAT, bits.type.count))


def _normal(builder: Any, product: Any, least: Any) -> Any:
    """The product, or zero for what is too small; a NaN stays."""
    kind = product.type
    name = f"llvm.fabs.v{kind.count}f32"
    magnitude = builder.module.declare_intrinsic(name, (), ir.FunctionType(kind, [kind]))
    small = builder.fcmp_ordered("<", builder.call(magnitude, [product]), least)
    return builder.select(small, _all(kind, 0.0), product)


_AS_FLOATS: Final[dict[Any, Callable[[Any, Any], Any]]] = {
    types.uint8: _from_whole,
    types.int8: _from_whole,
    types.uint16: _from_bfloat16,
    types.float32: lambda _builder, values: values,
}
