"""Assigns each tensor to a fragment, and to an offset in the fragment's vector.

A layout is a pure function of the tensors' names, shapes and dtypes, the number of fragments P,
the block size and the task's hints. Two programs that compute it agree bit for bit. Every message
carries the layout's digest, so that programs with different layouts notice.

A fragment is one float32 vector: the concatenation of *segments*. A segment is the unit over
which a norm is taken (a tensor, or one layer of a layer-stacked tensor); it is padded with zeros
to a whole number of quantization blocks, so that no two segments share a block.

Balanced tensor fragmentation: Decoupled DiLoCo (arXiv 2604.21428), App. C.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np
import xxhash

from diloco.common.protocol.errors import ConfigError, IntegrityError, TaskError
from diloco.common.protocol.names import NAME
from diloco.common.protocol.wire import MOST_HELD_MODULES

# A tensor larger than this many mean fragments is split along its first axis. The greedy
# assignment is within 4/3 of the optimum for what remains (Graham's bound; paper, App. C).
OVERSIZE = 1.25

# Parts of a split tensor with at least LONG_PART rows begin at multiples of a power of two, and
# consist of at least PARTS_OF_A_PART such multiples.
LONG_PART = 4096
PARTS_OF_A_PART = 64

FLOATING = ("float64", "float32", "float16", "bfloat16")

Kind = Literal["trained", "frozen", "local", "averaged", "private"]
# The merge rule of pieces of averaged state, which share no fragment with parameters.
STATE = "state"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHint:
    """The facts about a tensor that a task knows beyond its shape.

    Attributes:
        merge: "rda" (radial-directional averaging) or "average"; embeddings want "average"
            (paper, Table 8).
        norm_axes: number of leading axes that stack independent matrices (layers, experts); each
            index of these axes has a norm and a direction of its own.
        alone: True if the tensor shares its fragments with no other tensor.
        kind: "trained" and "averaged" tensors are synchronized; "frozen" ones never change;
            each learner changes its own copy of "local" ones, and trains its own copy of "private"
            ones, such as an embedding or a head of its own. "averaged" is state that no optimizer
            updates, such as batch statistics: learners adopt its token-weighted mean over the
            fleet. Only floating tensors can be trained, private or averaged.
        module: the part of the model that the tensor belongs to, as `names.NAME`. Either all
            synchronized tensors name one, or none: "" means that the model is one module.
    """

    merge: Literal["rda", "average"] = "rda"
    norm_axes: int = 0
    alone: bool = False
    kind: Kind = "trained"
    module: str = ""


Hint = Callable[[str, tuple[int, ...]], TensorHint]


def default_hint(name: str, shape: tuple[int, ...]) -> TensorHint:
    """Returns the default hint: a trained tensor, merged by "rda" with one norm."""
    del name, shape
    return TensorHint()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """The name, shape and dtype (NumPy's name) of one leaf of the parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The rows `start:stop` of a tensor's first axis, at `offset` in a fragment's vector.

    A piece is `groups` segments of `group_size` elements, each padded to `group_stride` elements.
    A scalar tensor counts as one row.

    Attributes:
        tensor: the tensor's name.
        shape: the shape of these rows.
        merge: the merge rule: "rda", "average", or "state" for averaged state.
        offset: index of the piece's first element in the vector.
    """

    tensor: str
    start: int
    stop: int
    shape: tuple[int, ...]
    merge: str
    groups: int
    group_size: int
    group_stride: int
    offset: int

    @property
    def stride(self) -> int:
        """The number of elements that the piece takes in the vector, padding included."""
        return self.groups * self.group_stride


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """A part of the model that is synchronized as one float32 vector: its pieces, in order.

    Attributes:
        size: length of the vector in elements, padding included; a multiple of the block size.
        elements: number of parameters; `size` less the padding.
        module: the module of its tensors (`TensorHint.module`); "": the model is one module.
    """

    index: int
    pieces: tuple[Piece, ...]
    size: int
    elements: int
    module: str = ""

    @property
    def averaged(self) -> bool:
        """True if the fragment holds averaged state (`TensorHint.kind`) and no parameters."""
        return any(piece.merge == STATE for piece in self.pieces)

    def segment_blocks(self, block: int) -> np.ndarray:
        """Returns the index of each segment's first block, ascending; int64 [segments]."""
        starts = [
            (piece.offset + group * piece.group_stride) // block
            for piece in self.pieces
            for group in range(piece.groups)
        ]
        return np.asarray(starts, np.int64)

    def segment_of_block(self, block: int) -> np.ndarray:
        """Returns the index of the segment that holds each block, int64 [blocks]."""
        starts = self.segment_blocks(block)
        lengths = np.diff(np.append(starts, self.size // block))
        return np.repeat(np.arange(len(starts)), lengths)

    def segment_rules(self) -> tuple[str, ...]:
        """Returns the merge rule (`Piece.merge`) of each segment, in the order of the vector."""
        return tuple(piece.merge for piece in self.pieces for _ in range(piece.groups))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The fragments of a model, and the tensors that they hold.

    Attributes:
        tensors: the synchronized tensors, in the task's order.
        constants: all other leaves; every learner begins with the values that the run stores.
        block: number of elements that share one quantization scale.
        digest: xxh3-128 of the other attributes, as hex.
    """

    tensors: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    fragments: tuple[Fragment, ...]
    block: int
    digest: str

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of the fragments, each once, in order of their first fragments."""
        return tuple(dict.fromkeys(fragment.module for fragment in self.fragments))

    def held(self, holds: Collection[str]) -> tuple[Fragment, ...]:
        """Returns the fragments of the modules `holds`, in order; all fragments if it is empty."""
        return tuple(one for one in self.fragments if not holds or one.module in holds)

    def in_order(self, said: Collection[str], who: str) -> tuple[str, ...]:
        """Returns names of modules in the layout's order; () if they are all of its modules.

        Args:
            said: the names, in any order.
            who: whoever gives the names to a learner, as the beginning of an error's sentence.

        Raises:
            TaskError: there is no name, one that no tensor is in, or more than a join can name.
        """
        unknown = [name for name in said if name not in self.modules]
        if unknown or not said:
            known = ", ".join(repr(name) for name in self.modules if name) or "none"
            raise TaskError(
                f"{who} "
                + (f"the module {unknown[0]!r:.80}" if unknown else "no module")
                + f"; the modules of the run's tensors are: {known}",
                hint="name modules that the run's hint gives to tensors by TensorHint.module",
            )
        held = tuple(name for name in self.modules if name in said)
        if len(held) == len(self.modules):
            return ()
        if len(held) > MOST_HELD_MODULES:
            raise TaskError(
                f"{who} {len(held)} of {len(self.modules)} modules"
                f", and a join can name {MOST_HELD_MODULES}",
                hint="make fewer and larger modules, or let the learner hold all",
            )
        return held


@dataclass(frozen=True, slots=True)
class _Cut:
    """Rows of a tensor that stay together, not yet placed in a fragment."""

    tensor: Tensor
    hint: TensorHint
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stop - self.start, *self.tensor.shape[1:]) if self.tensor.shape else ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def make_layout(
    tensors: Iterable[Tensor], *, fragments: int, block: int, hint: Hint = default_hint
) -> Layout:
    """Divides `tensors` into `fragments` fragments of about equal size, or as many as they fill.

    A fragment has tensors of one module. A module has at least one fragment, and more according to
    its size. Fragments of a module are spread over all indices, and so over the steps at which
    fragments are sent.

    Args:
        tensors: every leaf of the parameters, in an order that all parties share.
        fragments: P, at least 1; averaged state takes one of them for each module that has any.
        block: number of elements that share one quantization scale.
        hint: returns the task's `TensorHint` for a tensor's name and shape.

    Raises:
        ConfigError: no tensor can be trained, two have one name, one is empty, P is too small,
            some tensors name a module and others do not, or a module has no synchronized tensor.
    """
    leaves = tuple(tensors)
    _check(leaves)
    kinds = {t.name: kind_of(t, hint) for t in leaves}
    if not any(kind == "trained" for kind in kinds.values()):
        raise ConfigError(
            "the model has no floating-point parameter to train",
            hint="let the task's init, or what is given to `create`, have at least one float array",
        )
    synced = tuple(t for t in leaves if kinds[t.name] in ("trained", "averaged"))
    constants = tuple(t for t in leaves if kinds[t.name] not in ("trained", "averaged"))
    modules = _modules(synced, hint)
    _check_homes(constants, modules, hint)
    state = {
        module: tuple(t for t in members if kinds[t.name] == "averaged")
        for module, members in modules.items()
    }
    trained = {
        module: tuple(t for t in members if kinds[t.name] == "trained")
        for module, members in modules.items()
    }
    counts = _counts(trained, state, fragments)
    bins: list[tuple[float, list[_Cut]]] = []
    for module, count in counts.items():
        own = _assign(trained[module], count, hint) if trained[module] else []
        # Averaged state takes one fragment: it is small, and merged by other rules than parameters.
        if state[module]:
            own.append([_whole(t, hint) for t in state[module]])
        bins += [((at + 1) / len(own), cuts) for at, cuts in enumerate(own)]
    bins.sort(key=lambda one: one[0])
    placed = tuple(_place(index, cuts, block) for index, (_, cuts) in enumerate(bins))
    layout = Layout(
        tensors=synced,
        constants=constants,
        fragments=placed,
        block=block,
        digest="",
    )
    return replace(layout, digest=xxhash.xxh3_128_hexdigest(layout_bytes(layout)))


def kind_of(tensor: Tensor, hint: Hint) -> Kind:
    """Returns a leaf's kind: as hinted; if the leaf is not floating, "local" or else "frozen"."""
    kind = hint(tensor.name, tensor.shape).kind
    if tensor.dtype in FLOATING:
        return kind
    return "local" if kind == "local" else "frozen"


def _modules(synced: tuple[Tensor, ...], hint: Hint) -> dict[str, tuple[Tensor, ...]]:
    """Returns the tensors of each module, by its name, in order of the modules' first tensors.

    Raises:
        ConfigError: a tensor is in no module and others are, or a name is invalid.
    """
    found: dict[str, tuple[Tensor, ...]] = {}
    for tensor in synced:
        module = hint(tensor.name, tensor.shape).module
        found[module] = (*found.get(module, ()), tensor)
    if "" in found and len(found) > 1:
        raise ConfigError(
            f"the tensor {found[''][0].name!r} is in no module, and others are in "
            f"{', '.join(repr(name) for name in found if name)}",
            hint="let the task's hint give each tensor a TensorHint.module, or none",
        )
    for module in found:
        if not isinstance(module, str) or (module and NAME.fullmatch(module) is None):
            raise ConfigError(
                f"a module is called {module!r:.80}",
                hint="use lower-case letters, digits and -, at most 40, a letter or digit first",
            )
    return found


def _check_homes(constants: tuple[Tensor, ...], modules: Iterable[str], hint: Hint) -> None:
    """Checks that leaves that are not synchronized are in modules of leaves that are, or in none.

    Raises:
        ConfigError: a leaf is in another module, which no learner of some modules could hold.
    """
    for leaf in constants:
        module = hint(leaf.name, leaf.shape).module
        if module and module not in modules:
            known = ", ".join(repr(name) for name in modules if name) or "none"
            raise ConfigError(
                f"the leaf {leaf.name!r}, which is not synchronized, is in the module "
                f"{module!r:.80}, and no synchronized tensor is; modules of these are: {known}",
                hint="let the task's hint give it one of these modules, or none: then each learner"
                " has it",
            )


def _counts(
    trained: dict[str, tuple[Tensor, ...]], state: dict[str, tuple[Tensor, ...]], fragments: int
) -> dict[str, int]:
    """Returns the number of fragments for each module's trained tensors; 0 if it has none.

    Raises:
        ConfigError: there are too few fragments for each module, and each module's averaged state.
    """
    needed = sum(bool(some) for some in (*trained.values(), *state.values()))
    if fragments < needed:
        what = "averaged state needs a fragment of its own"
        if len(trained) > 1:
            what = (
                f"each of {len(trained)} modules needs a fragment of its own, and another one for"
                " averaged state"
            )
        raise ConfigError(
            f"sync.fragments is {fragments}, but {what}",
            hint=f"set sync.fragments to at least {needed}",
        )
    counts = {module: int(bool(some)) for module, some in trained.items()}
    sizes = {module: sum(t.size for t in some) for module, some in trained.items()}
    # The next fragment goes to the module whose fragments are the largest.
    for _ in range(fragments - needed):
        counts[max(sizes, key=lambda module: sizes[module] / max(1, counts[module]))] += 1
    return counts


def _whole(tensor: Tensor, hint: Hint) -> _Cut:
    rows = tensor.shape[0] if tensor.shape else 1
    return _Cut(tensor, hint(tensor.name, tensor.shape), 0, rows)


def _assign(tensors: tuple[Tensor, ...], fragments: int, hint: Hint) -> list[list[_Cut]]:
    """Assigns `tensors` to at most `fragments` fragments: as many as the tensors can fill."""
    return next(
        _assign_cuts(cuts, count)
        for count in range(fragments, 0, -1)
        if _fillable(cuts := _cuts(tensors, count, hint), count) == count
    )


def layout_bytes(layout: Layout) -> bytes:
    """Returns the layout without its digest as msgpack, from which the digest is computed."""
    fields = asdict(layout)
    del fields["digest"]
    for fragment in fields["fragments"]:
        # A layout of one module has the bytes, and so the digest, that it had without modules.
        if not fragment["module"]:
            del fragment["module"]
    packed: bytes = msgpack.packb(fields)
    return packed


def parse_layout(data: bytes, digest: str) -> Layout:
    """Returns the layout that `layout_bytes` wrote as `data`.

    Raises:
        IntegrityError: `data` has another digest than `digest`, or holds no layout.
    """
    found = xxhash.xxh3_128_hexdigest(data)
    if found != digest:
        raise IntegrityError(f"layout object: digest {found}, the run's is {digest}")
    try:
        return _parse(msgpack.unpackb(data, use_list=False), digest)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise IntegrityError(f"layout object: {type(error).__name__}: {error}"[:300]) from error


def _parse(fields: Any, digest: str) -> Layout:
    return Layout(
        tensors=tuple(Tensor(**t) for t in fields["tensors"]),
        constants=tuple(Tensor(**t) for t in fields["constants"]),
        fragments=tuple(
            Fragment(
                index=f["index"],
                pieces=tuple(Piece(**p) for p in f["pieces"]),
                size=f["size"],
                elements=f["elements"],
                module=f.get("module", ""),
            )
            for f in fields["fragments"]
        ),
        block=fields["block"],
        digest=digest,
    )


def _check(leaves: tuple[Tensor, ...]) -> None:
    names = [t.name for t in leaves]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"parameter names must differ; these occur twice: {', '.join(twice)}")
    empty = [t.name for t in leaves if t.size == 0]
    if empty:
        raise ConfigError(
            f"parameters without elements cannot be synchronized: {', '.join(empty)}",
            hint="remove them from the parameters",
        )


def _cuts(tensors: tuple[Tensor, ...], fragments: int, hint: Hint) -> list[_Cut]:
    """Returns the tensors whole, except that those much larger than a mean fragment are split."""
    mean = sum(t.size for t in tensors) / fragments
    cuts = []
    for tensor in tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        parts = 1
        if tensor.size > OVERSIZE * mean:
            parts = min(rows, math.ceil(tensor.size / mean))
        edges = _edges(rows, parts)
        tensor_hint = hint(tensor.name, tensor.shape)
        cuts += [
            _Cut(tensor, tensor_hint, start, stop) for start, stop in itertools.pairwise(edges)
        ]
    return cuts


def _edges(rows: int, parts: int) -> list[int]:
    """Returns the `parts + 1` row numbers at which parts of about equal size begin and end.

    Long parts begin at multiples of a power of two, so that a mesh axis of that size divides each
    part if it divides the tensor; sizes of parts differ by at most 1/PARTS_OF_A_PART.
    """
    even = [rows * part // parts for part in range(parts + 1)]
    if rows < LONG_PART * parts:
        return even
    grain = 1 << (rows // parts // PARTS_OF_A_PART).bit_length() - 1
    return [0, *(round(edge / grain) * grain for edge in even[1:-1]), rows]


def _fillable(cuts: list[_Cut], fragments: int) -> int:
    """Returns how many fragments, at most `fragments`, the tensors can fill."""
    own = _own_fragments(cuts, fragments)
    shared = len(cuts) if fragments == 1 else sum(not cut.hint.alone for cut in cuts)
    return own + min(shared, fragments - own)


def _own_fragments(cuts: list[_Cut], fragments: int) -> int:
    """Returns the number of fragments for parts hinted `alone`; one is left for other parts."""
    lone = sum(cut.hint.alone for cut in cuts)
    return 0 if fragments == 1 else min(lone, fragments - (1 if lone < len(cuts) else 0))


def _assign_cuts(cuts: list[_Cut], fragments: int) -> list[list[_Cut]]:
    """Assigns the largest part first, to the smallest fragment; `alone` parts share none."""
    own = _own_fragments(cuts, fragments)
    alone = [cut for cut in cuts if cut.hint.alone and own]
    shared = [cut for cut in cuts if not (cut.hint.alone and own)]
    lone_bins: list[list[_Cut]] = [[] for _ in range(own)]
    shared_bins: list[list[_Cut]] = [[] for _ in range(fragments - own)]
    _fill(lone_bins, alone)
    _fill(shared_bins, shared)
    order = {id(cut): position for position, cut in enumerate(cuts)}
    return [sorted(content, key=lambda cut: order[id(cut)]) for content in lone_bins + shared_bins]


def _fill(bins: list[list[_Cut]], cuts: list[_Cut]) -> None:
    sizes = [0] * len(bins)
    for cut in sorted(cuts, key=lambda c: (-c.size, c.tensor.name, c.start)):
        smallest = sizes.index(min(sizes))
        bins[smallest].append(cut)
        sizes[smallest] += cut.size


def _place(index: int, cuts: list[_Cut], block: int) -> Fragment:
    pieces = []
    offset = 0
    for cut in cuts:
        axes = min(cut.hint.norm_axes, len(cut.shape))
        groups = math.prod(cut.shape[:axes])
        group_size = cut.size // groups
        piece = Piece(
            tensor=cut.tensor.name,
            start=cut.start,
            stop=cut.stop,
            shape=cut.shape,
            merge=STATE if cut.hint.kind == "averaged" else cut.hint.merge,
            groups=groups,
            group_size=group_size,
            group_stride=_round_up(group_size, block),
            offset=offset,
        )
        pieces.append(piece)
        offset += piece.stride
    return Fragment(
        index=index,
        pieces=tuple(pieces),
        size=offset,
        elements=sum(cut.size for cut in cuts),
        module=cuts[0].hint.module,
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def offset_steps(fragment: int, fragments: int, interval_steps: int) -> int:
    """Returns the step, in 1..H, after which learners first send `fragment` (paper §3: t_p).

    The fragments are spread evenly over the interval of H = `interval_steps` steps; if there are
    more fragments than steps, the numbers of fragments sent at two steps differ by at most one.
    """
    place = (fragment + 1) * interval_steps
    return place // fragments if fragments <= interval_steps else -(-place // fragments)


class Rhythm(NamedTuple):
    """The interval at which learners send a fragment: every `interval_steps` (H) inner steps.

    In a run's first `warmup_steps` the interval is `warmup_interval_steps`: parameters change fast
    early on, so a long interval between updates would cost the most at that time.

    Attributes:
        fragment: the fragment's index.
        fragments: number of fragments of the run, P.
    """

    fragment: int
    fragments: int
    interval_steps: int
    warmup_steps: int = 0
    warmup_interval_steps: int = 0


def next_step(rhythm: Rhythm, step: int) -> int:
    """Returns the global step of the version that follows the version at global step `step`.

    Version 0 is at step 0; while H does not change, version v is at H x (v - 1) + offset, where
    offset is `offset_steps`. The first version after the warm-up is at `warmup_steps` + offset, so
    that the fragments are spread over an interval of H steps again.
    """
    fragment, fragments, interval, warmup, short = rhythm
    if step < warmup:
        following = step + short if step else offset_steps(fragment, fragments, short)
        spread = warmup + offset_steps(fragment, fragments, interval)
        return following if following < warmup else spread
    return step + interval if step else offset_steps(fragment, fragments, interval)
