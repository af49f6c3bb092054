"""Fragments: every element in one place, balanced, aligned, and the same for all who compute it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.common.protocol.errors import ConfigError, IntegrityError
from diloco.common.protocol.layout import (
    OVERSIZE,
    Fragment,
    Layout,
    Rhythm,
    Tensor,
    TensorHint,
    layout_bytes,
    make_layout,
    next_step,
    offset_steps,
    parse_layout,
)

shapes = st.lists(st.integers(1, 12), min_size=0, max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "float16", "int32", "bool"])
models = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=12).map(
    lambda leaves: [
        Tensor(name=f"t{i}", shape=shape, dtype=dtype) for i, (shape, dtype) in enumerate(leaves)
    ]
)
hints = st.dictionaries(
    st.integers(0, 11).map(lambda i: f"t{i}"),
    st.builds(
        TensorHint,
        merge=st.sampled_from(["rda", "average"]),
        norm_axes=st.integers(0, 3),
        alone=st.booleans(),
    ),
    max_size=3,
)
in_modules = st.lists(
    st.tuples(st.sampled_from(["trunk", "a", "b"]), st.sampled_from(["trained", "averaged"])),
    min_size=12,
    max_size=12,
).map(
    lambda drawn: {
        f"t{i}": TensorHint(module=module, kind=kind) for i, (module, kind) in enumerate(drawn)
    }
)
blocks = st.sampled_from([16, 32, 64])


def laid_out(model, count, block, given_hints) -> Layout | None:
    """The layout, or None where nothing is trained, or state leaves no fragment to it."""
    try:
        return make_layout(
            model,
            fragments=count,
            block=block,
            hint=lambda name, _: given_hints.get(name, TensorHint()),
        )
    except ConfigError:
        return None


def elements(fragment: Fragment) -> list[tuple[str, int, int]]:
    """(tensor, its element, place in the vector) of all that a fragment holds."""
    found = []
    for piece in fragment.pieces:
        row = math.prod(piece.shape[1:]) if piece.shape else 1
        assert piece.groups * piece.group_size == math.prod(piece.shape)
        for group, place in itertools.product(range(piece.groups), range(piece.group_size)):
            element = piece.start * row + group * piece.group_size + place
            found.append((piece.tensor, element, piece.offset + group * piece.group_stride + place))
    return found


@settings(max_examples=150)
@given(models, st.integers(1, 6), blocks, hints)
def test_every_element_of_every_floating_tensor_has_one_place(model, count, block, given_hints):
    layout = laid_out(model, count, block, given_hints)
    if layout is None:
        return
    homes = [place for fragment in layout.fragments for place in elements(fragment)]
    expected = {
        (tensor.name, element)
        for tensor in model
        if tensor.dtype.startswith(("float", "bfloat"))
        for element in range(tensor.size)
    }
    assert len(homes) == len(expected), "no element twice"
    assert {(name, element) for name, element, _ in homes} == expected
    for fragment in layout.fragments:
        places = [place for _, _, place in elements(fragment)]
        assert len(set(places)) == len(places) == fragment.elements > 0
        assert max(places) < fragment.size


@settings(max_examples=150)
@given(models, st.integers(1, 6), blocks, hints)
def test_segments_share_no_block(model, count, block, given_hints):
    layout = laid_out(model, count, block, given_hints)
    if layout is None:
        return
    for fragment in layout.fragments:
        assert fragment.size == sum(piece.stride for piece in fragment.pieces)
        segments = fragment.segment_of_block(block)
        assert segments.shape == (fragment.size // block,)
        starts = fragment.segment_blocks(block)
        assert starts.dtype == np.int64
        assert (np.diff(starts) > 0).all()
        assert starts[0] == 0
        assert len(starts) == len(fragment.segment_rules())
        expected = 0
        for piece in fragment.pieces:
            assert piece.offset % block == piece.group_stride % block == 0
            assert piece.group_size <= piece.group_stride < piece.group_size + block
            for group in range(piece.groups):
                first = (piece.offset + group * piece.group_stride) // block
                own = segments[first : first + piece.group_stride // block]
                assert (own == expected).all()
                expected += 1


def test_a_segment_is_a_layer_where_the_task_says_so():
    stacked = [Tensor(name="layers", shape=(3, 4, 10), dtype="float32")]
    layout = make_layout(
        stacked, fragments=1, block=16, hint=lambda *_: TensorHint(merge="average", norm_axes=1)
    )
    (piece,) = layout.fragments[0].pieces
    assert (piece.groups, piece.group_size, piece.group_stride) == (3, 40, 48)
    assert layout.fragments[0].segment_rules() == ("average",) * 3
    assert layout.fragments[0].size == 3 * 48


@settings(max_examples=150)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=7), st.integers(2, 3))
def test_the_largest_fragment_is_within_four_thirds_of_the_optimum(sizes, count):
    """App. C. Vectors of one row cannot be split: what is assigned are whole tensors."""
    if len(sizes) < count:
        return
    model = [Tensor(name=f"t{i}", shape=(1, size), dtype="float32") for i, size in enumerate(sizes)]
    layout = make_layout(model, fragments=count, block=16)
    largest = max(fragment.elements for fragment in layout.fragments)
    optimum = min(
        max(
            sum(size for size, bin_ in zip(sizes, choice, strict=True) if bin_ == b)
            for b in range(count)
        )
        for choice in itertools.product(range(count), repeat=len(sizes))
    )
    assert largest <= 4 / 3 * optimum


@pytest.mark.parametrize(("rows", "parts"), [(262_208, 3), (128_256, 5), (151_936, 2)])
def test_parts_of_long_tensors_are_cut_by_a_mesh_that_cuts_the_tensor(rows, parts):
    embed = Tensor(name="embed", shape=(rows, 2), dtype="float32")
    layout = make_layout([embed], fragments=parts, block=64)
    pieces = [piece for fragment in layout.fragments for piece in fragment.pieces]
    lengths = [piece.stop - piece.start for piece in pieces]
    assert sum(lengths) == rows
    assert {length % 64 for length in lengths} == {0}
    assert max(lengths) - min(lengths) <= rows / parts / 64


@given(st.integers(1, 4095), st.integers(1, 12))
def test_parts_of_other_tensors_are_as_even_as_rows_allow(rows, parts):
    layout = laid_out([Tensor(name="t", shape=(rows, 3), dtype="float32")], parts, 16, {})
    if layout is not None:
        starts = sorted(one.start for fragment in layout.fragments for one in fragment.pieces)
        assert starts == [rows * part // len(starts) for part in range(len(starts))]


@settings(max_examples=150)
@given(models, st.integers(2, 6))
@example([Tensor(name="a", shape=(2,), dtype="float32"), Tensor(name="b", shape=(1, 3), dtype="float32")], 4)  # fmt: skip
def test_what_is_much_larger_than_the_mean_is_split_by_rows(model, count):
    layout = laid_out(model, count, 16, {})
    if layout is None:
        return
    floating = {tensor.name: tensor for tensor in layout.tensors}
    # There are fewer fragments than asked for where the tensors fill no more.
    mean = sum(tensor.size for tensor in floating.values()) / len(layout.fragments)
    cuts = sorted(
        (piece.tensor, piece.start, piece.stop) for f in layout.fragments for piece in f.pieces
    )
    for name, tensor in floating.items():
        own = [(start, stop) for tensor_name, start, stop in cuts if tensor_name == name]
        rows = tensor.shape[0] if tensor.shape else 1
        if tensor.size > OVERSIZE * mean and rows > 1:
            assert len(own) == min(rows, math.ceil(tensor.size / mean))
            lengths = [stop - start for start, stop in own]
            assert max(lengths) - min(lengths) <= 1
        else:
            assert own == [(0, rows)]


def test_one_large_tensor_still_gives_balanced_fragments():
    model = [
        Tensor(name="embedding", shape=(1000, 64), dtype="float32"),
        *(Tensor(name=f"layer{i}", shape=(64, 64), dtype="float32") for i in range(6)),
    ]
    sizes = [fragment.elements for fragment in make_layout(model, fragments=8, block=64).fragments]
    assert max(sizes) <= OVERSIZE * sum(sizes) / 8


def lone(name: str, _shape: tuple[int, ...]) -> TensorHint:
    return TensorHint(alone=name.startswith("lone"), merge="average")


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_lone_tensor_shares_its_fragments_with_no_other(count):
    model = [
        Tensor(name="lone", shape=(512, 8), dtype="float32"),
        *(Tensor(name=f"layer{i}", shape=(16, 16), dtype="float32") for i in range(12)),
    ]
    layout = make_layout(model, fragments=count, block=16, hint=lone)
    for fragment in layout.fragments:
        assert len({piece.tensor.startswith("lone") for piece in fragment.pieces}) == 1
    assert any(fragment.pieces[0].tensor == "lone" for fragment in layout.fragments)


def test_a_single_fragment_holds_even_what_is_lone():
    model = [Tensor(name=name, shape=(4,), dtype="float32") for name in ("lone", "b")]
    (fragment,) = make_layout(model, fragments=1, block=16, hint=lone).fragments
    assert [piece.tensor for piece in fragment.pieces] == ["lone", "b"]


def test_scalars_ints_and_bools_survive():
    model = [
        Tensor(name="scale", shape=(), dtype="float32"),
        Tensor(name="step", shape=(), dtype="int32"),
        Tensor(name="mask", shape=(3,), dtype="bool"),
        Tensor(name="w", shape=(5,), dtype="bfloat16"),
    ]
    layout = make_layout(model, fragments=2, block=16)
    assert layout.constants == (model[1], model[2])
    assert layout.tensors == (model[0], model[3])
    pieces = {piece.tensor: piece for f in layout.fragments for piece in f.pieces}
    assert (pieces["scale"].shape, pieces["scale"].start, pieces["scale"].stop) == ((), 0, 1)


# Modules


@settings(max_examples=150)
@given(models, st.integers(1, 9), blocks, in_modules)
def test_a_fragment_has_tensors_of_one_module(model, count, block, given_hints):
    layout = laid_out(model, count, block, given_hints)
    if layout is None:
        return
    for fragment in layout.fragments:
        inside = {given_hints[piece.tensor].module for piece in fragment.pieces}
        assert inside == {fragment.module}
        kinds = {given_hints[piece.tensor].kind for piece in fragment.pieces}
        assert len(kinds) == 1, "averaged state shares no fragment with parameters"
    homes = [place[:2] for fragment in layout.fragments for place in elements(fragment)]
    assert len(homes) == len(set(homes)) == sum(tensor.size for tensor in layout.tensors)
    assert len(layout.fragments) <= count
    assert {*layout.modules} == {given_hints[tensor.name].module for tensor in layout.tensors}
    assert parse_layout(layout_bytes(layout), layout.digest) == layout


def hinted(**modules):
    return lambda name, _shape: TensorHint(module=modules.get(name, ""))


def test_modules_have_fragments_by_their_size_spread_over_all_indices():
    model = [Tensor(name=name, shape=(rows, 8), dtype="float32") for name, rows in
             [("trunk", 512), ("a", 128), ("b", 128)]]  # fmt: skip
    layout = make_layout(
        model, fragments=6, block=16, hint=hinted(trunk="trunk", a="expert-a", b="expert-b")
    )
    order = [fragment.module for fragment in layout.fragments]
    assert order == ["trunk", "trunk", "trunk", "trunk", "expert-a", "expert-b"]
    two = make_layout(model, fragments=6, block=16, hint=hinted(trunk="t", a="t", b="b"))
    assert [fragment.module for fragment in two.fragments].count("t") == 5
    assert layout.modules == ("trunk", "expert-a", "expert-b")
    assert [fragment.index for fragment in layout.fragments] == [*range(6)]


def test_two_tasks_that_disagree_about_modules_have_other_digests():
    digests = {
        make_layout(BASE, fragments=2, block=16, hint=hint).digest
        for hint in (hinted(), hinted(a="x", b="y"), hinted(a="y", b="x"), hinted(a="x", b="x"))
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("modules", "fragments", "named"),
    [
        ({"a": "x"}, 2, "the tensor 'b' is in no module, and others are in 'x'"),
        ({"a": "X y", "b": "y"}, 2, "a module is called 'X y'"),
        ({"a": 1, "b": "y"}, 2, "a module is called 1"),
        ({"a": "x", "b": "y"}, 1, "each of 2 modules needs a fragment of its own"),
    ],
)
def test_modules_without_a_layout(modules, fragments, named):
    with pytest.raises(ConfigError, match=named):
        make_layout(BASE, fragments=fragments, block=16, hint=hinted(**modules))


def test_a_leaf_in_a_module_that_nobody_could_hold_has_no_layout():
    def hint(name, _shape):
        return TensorHint(module="y", kind="frozen") if name == "b" else TensorHint(module="x")

    with pytest.raises(ConfigError, match="'b', which is not synchronized, is in the module 'y'"):
        make_layout(BASE, fragments=1, block=16, hint=hint)


# The digest

BASE = [
    Tensor(name="a", shape=(8, 4), dtype="float32"),
    Tensor(name="b", shape=(6,), dtype="float32"),
    Tensor(name="n", shape=(), dtype="int32"),
]


def test_the_digest_is_the_same_for_ever():
    """The digest is in every message of every run: a change here is a change of protocol."""
    assert make_layout(BASE, fragments=2, block=16).digest == DIGEST


DIGEST = "9983741835d6c44e8e0e28211cf83947"


@pytest.mark.parametrize(
    "changed",
    [
        {"model": [Tensor(name="A", shape=(8, 4), dtype="float32"), *BASE[1:]]},
        {"model": [Tensor(name="a", shape=(4, 8), dtype="float32"), *BASE[1:]]},
        {"model": [Tensor(name="a", shape=(8, 4), dtype="bfloat16"), *BASE[1:]]},
        {"model": BASE[:2]},
        {"model": [*BASE[:2], Tensor(name="n", shape=(), dtype="int64")]},
        {"model": [BASE[1], BASE[0], BASE[2]]},
        {"fragments": 1},
        {"block": 32},
        {"hint": lambda name, _: TensorHint(merge="average" if name == "a" else "rda")},
        {"hint": lambda name, _: TensorHint(norm_axes=int(name == "a"))},
    ],
)
def test_whatever_matters_changes_the_digest(changed):
    asked = {"model": BASE, "fragments": 2, "block": 16} | changed
    model = asked.pop("model")
    assert make_layout(model, **asked).digest != make_layout(BASE, fragments=2, block=16).digest


@settings(max_examples=60)
@given(models, st.integers(1, 5), blocks, hints)
def test_what_is_stored_is_read_back(model, count, block, given_hints):
    layout = laid_out(model, count, block, given_hints)
    if layout is not None:
        assert parse_layout(layout_bytes(layout), layout.digest) == layout


def test_a_layout_object_that_is_another_is_refused():
    layout = make_layout(BASE, fragments=2, block=16)
    data = bytearray(layout_bytes(layout))
    data[10] ^= 1
    with pytest.raises(IntegrityError, match=layout.digest):
        parse_layout(bytes(data), layout.digest)


# What fills few fragments, or none


def test_a_tensor_of_three_rows_fills_three_fragments():
    layout = make_layout([Tensor(name="a", shape=(3, 4), dtype="float32")], fragments=20, block=16)
    assert [fragment.elements for fragment in layout.fragments] == [4, 4, 4]


@settings(max_examples=200)
@given(models, st.integers(1, 40), hints)
def test_more_fragments_than_the_tensors_fill_are_as_many_as_they_fill(model, count, given_hints):
    fewer = laid_out(model, count, 16, given_hints)
    if fewer is None:
        return
    assert 1 <= len(fewer.fragments) <= count
    assert all(fragment.elements for fragment in fewer.fragments)
    assert laid_out(model, len(fewer.fragments), 16, given_hints) == fewer


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ([Tensor(name="n", shape=(2,), dtype="int32")], "no floating-point parameter"),
        ([], "no floating-point parameter"),
        ([BASE[0], BASE[0]], "twice: a"),
        ([BASE[0], Tensor(name="empty", shape=(0, 3), dtype="float32")], "empty"),
    ],
)
def test_models_without_a_layout(model, named):
    with pytest.raises(ConfigError, match=named):
        make_layout(model, fragments=1, block=16)


# The run's clock

schedules = st.integers(1, 64).flatmap(
    lambda interval: st.tuples(st.just(interval), st.integers(1, interval))
)


@given(schedules)
def test_offsets_are_distinct_and_spread_over_the_interval(schedule):
    interval, count = schedule
    offsets = [offset_steps(fragment, count, interval) for fragment in range(count)]
    assert len(set(offsets)) == count
    assert offsets == sorted(offsets)
    assert offsets[0] >= 1
    assert offsets[-1] == interval
    gaps = np.diff([0, *offsets])
    assert max(gaps) - min(gaps) <= 1, "traffic is flat"


@given(schedules, st.integers(1, 50), st.data())
def test_the_clock_goes_from_the_offset_on_in_intervals(schedule, versions, data):
    interval, count = schedule
    fragment = data.draw(st.integers(0, count - 1))
    step = 0
    for version in range(1, versions + 1):
        step = next_step(Rhythm(fragment, count, interval), step)
        assert step == interval * (version - 1) + offset_steps(fragment, count, interval)


def clocks(rhythm, until):
    """The run's clock at each version of a fragment up to `until`."""
    step = 0
    while step <= until:
        step = next_step(rhythm, step)
        yield step


def test_in_the_warm_up_fragments_are_due_more_often_and_after_it_they_are_spread_again():
    rhythms = [Rhythm(fragment, 4, 24, 48, 8) for fragment in range(4)]
    early = [[step for step in clocks(rhythm, 200) if step < 48] for rhythm in rhythms]
    assert early[:2] == [[2, 10, 18, 26, 34, 42], [4, 12, 20, 28, 36, 44]]
    assert early[3] == [8, 16, 24, 32, 40]
    later = [[step for step in clocks(rhythm, 130) if step >= 48] for rhythm in rhythms]
    assert [steps[:3] for steps in later] == [
        [48 + 6, 48 + 30, 48 + 54],
        [48 + 12, 48 + 36, 48 + 60],
        [48 + 18, 48 + 42, 48 + 66],
        [48 + 24, 48 + 48, 48 + 72],
    ]


@given(schedules, st.integers(1, 64), st.integers(0, 300), st.data())
def test_with_any_warm_up_the_clock_goes_on_and_no_interval_is_longer_than_both(
    schedule, short, warmup, data
):
    interval, count = schedule
    rhythm = Rhythm(data.draw(st.integers(0, count - 1)), count, interval, warmup, short)
    gaps = np.diff([0, *clocks(rhythm, 400)])
    assert (gaps >= 1).all()
    assert (gaps <= interval + short).all()
