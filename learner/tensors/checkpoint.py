"""A learner's checkpoints: the state of the inner optimizer, and the learner's counters.

On disk a checkpoint is a folder that orbax writes. In the object store, and on the disks of a
learner of several hosts, a checkpoint is a safetensors file, which is safe to read from untrusted
sources. Both forms have the same contents: `Facts`, which specify the arrays, and one array for
each leaf of the state, named by the leaf's number in JAX's order. With several hosts, a *part* is
the checkpoint of one host: it has one array for each piece of a leaf on that host's devices.

The tree's structure is never read from a checkpoint: a checkpoint that does not fit the tree of the
task's optimizer is refused.
"""

import contextlib
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import ValidationError

from diloco.common.protocol import names, shards
from diloco.common.protocol.errors import CheckpointError, NoSnapshotError
from diloco.common.protocol.wire import Count, Digest, Name, NestedRecord
from diloco.common.storage.store import DirectoryStore, ObjectStore
from diloco.common.storage.store.protocol import TEMP
from diloco.learner.core.carry import Unsent

# The most bytes of an object besides its arrays: of the header for each leaf, and of `Facts`.
_LEAF_BYTES = 4096
_FACTS_BYTES = 1 << 16

Arrays = dict[str, np.ndarray]


class LeafSpec(NestedRecord):
    """The path in the tree, the shape and dtype of one leaf, and the digest of its bytes."""

    path: str
    shape: tuple[Count, ...]
    dtype: str
    digest: Digest


class Facts(NestedRecord):
    """A checkpoint's metadata: everything but the arrays.

    A learner that resumes continues the counts `local_step` and `tokens`.

    Attributes:
        run: the run's name.
        learner: the learner's name.
        layout: the digest of the run's layout.
        epoch: the number of the run's tape when the checkpoint was made.
        incarnation: the stream sequence of the join of the process that made the checkpoint.
        local_step: the learner's inner steps.
        tokens: the tokens that the learner has trained.
        position: the learner's data position in batches, for people: data resumes by the tape.
        global_step: the run's clock, for people: the clock resumes by the tape.
        leaves: the specification of each array, in order.
        unsent: of a snapshot, what it states of each fragment's unsent work. Its arrays are a pair:
            the state, and the values of that work.
        loss: of a snapshot, the mean training loss of the steps of that work.
        holds: the modules that the learner held; empty: all.
    """

    run: Name
    learner: Name
    layout: Digest
    epoch: Count
    incarnation: Count
    local_step: Count
    tokens: Count
    position: Count
    global_step: Count
    leaves: tuple[LeafSpec, ...]
    unsent: tuple[Unsent, ...] = ()
    loss: float | None = None
    holds: tuple[Name, ...] = ()


class HostCheckpoint(NamedTuple):
    """A checkpoint in the host's memory; `arrays` has the arrays by number, as text."""

    facts: Facts
    arrays: Arrays


# state -> a copy of its arrays on the devices, since the inner step donates the state's arrays. A
# jitted program copies for certain, and needs one dispatch for all leaves.
copied = jax.jit(lambda state: jax.tree.map(jnp.copy, state))


def on_host(state: Any) -> Arrays:
    """Returns a state's leaves as NumPy arrays, by number; waits for the devices.

    On CPU the arrays share the memory of the leaves. PRNG keys are returned as their key data.
    """
    arrays = {}
    for index, leaf in enumerate(jax.tree.leaves(state)):
        arrays[_key(index)] = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return arrays


def local_part(state: Any) -> dict[str, jax.Array]:
    """Returns the pieces of a state's leaves on this host's devices, each piece once.

    Keys are the leaf's path and the piece's index ranges, as text.
    """
    part: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        bits = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for shard in bits.addressable_shards:
            part.setdefault(_piece(path, shard.index, bits.shape), shard.data)
    return part


def local_shapes(like: Any, shardings: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the pieces that `local_part` returns, by the same keys.

    Args:
        like: a tree of the state's shapes.
        shardings: a tree of the leaves' shardings.
    """
    part: dict[str, jax.ShapeDtypeStruct] = {}
    for path, bits, sharding in _stored_leaves(like, shardings):
        local = sharding.shard_shape(bits.shape)
        for index in sharding.addressable_devices_indices_map(bits.shape).values():
            part[_piece(path, index, bits.shape)] = jax.ShapeDtypeStruct(local, bits.dtype)
    return part


def of_local_part(like: Any, shardings: Any, part: Arrays) -> Any:
    """Returns the state on the devices of all hosts; each host passes its own part.

    Args:
        like: a tree of the state's shapes.
        shardings: a tree of the leaves' shardings.
        part: this host's pieces, by the keys of `local_part`.
    """
    leaves = []
    for (path, bits, sharding), leaf in zip(
        _stored_leaves(like, shardings), jax.tree.leaves(like), strict=True
    ):

        def piece(index: Any, path: Any = path, bits: Any = bits) -> np.ndarray:
            return part[_piece(path, index, bits.shape)]

        array = jax.make_array_from_callback(bits.shape, sharding, piece)
        leaves.append(jax.random.wrap_key_data(array) if _is_key(leaf) else array)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _stored_leaves(like: Any, shardings: Any) -> list[tuple[Any, jax.ShapeDtypeStruct, Any]]:
    """Returns (path, shape, sharding) of each leaf; a PRNG key has the shape of its key data."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(like)[0]]
    bits = [shape for _, shape in _shapes(like)]
    return list(zip(paths, bits, jax.tree.leaves(shardings), strict=True))


def _piece(path: Any, index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    box = ",".join(f"{start}:{stop}" for start, stop, _ in spans)
    return f"{jax.tree_util.keystr(path)}[{box}]"


def describe(like: Any, arrays: Arrays) -> tuple[LeafSpec, ...]:
    """Returns the specification of each leaf of a state.

    Args:
        like: the state, or its shapes.
        arrays: the leaves in the host's memory, as `on_host` returns them.

    Raises:
        CheckpointError: a leaf has a value that is infinite or NaN.
    """
    leaves = []
    for (path, _), array in zip(_shapes(like), arrays.values(), strict=True):
        _check_finite(path, array)
        leaves.append(
            LeafSpec(
                path=path, shape=array.shape, dtype=array.dtype.name, digest=shards.digest(array)
            )
        )
    return tuple(leaves)


def rebuild(like: Any, checkpoint: HostCheckpoint) -> Any:
    """Returns the optimizer's state from a checkpoint, on the default device.

    Args:
        like: shapes of the state, as `jax.eval_shape` of the optimizer's `init` gives them.
        checkpoint: a checkpoint whose facts have passed `check_facts` with `like`.

    Raises:
        CheckpointError: an array is missing, differs from its facts, or is not finite.
    """
    leaves = [
        _on_device(path, array, wanted)
        for (path, _), array, wanted in zip(
            _shapes(like), _checked(like, checkpoint), jax.tree.leaves(like), strict=True
        )
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def rebuild_some(like: Any, checkpoint: HostCheckpoint) -> Any:
    """Returns a state with the leaves that a checkpoint has, and for other leaves their shapes.

    A learner that held other modules had other leaves. Arguments and errors as of `rebuild`.
    """
    wanted = [_words(path, shape.shape, shape.dtype.name) for path, shape in _shapes(like)]
    there = _those(checkpoint, lambda leaf: _words(leaf.path, leaf.shape, leaf.dtype) in wanted)
    known = {_words(leaf.path, leaf.shape, leaf.dtype) for leaf in there.facts.leaves}
    leaves, structure = jax.tree.flatten(like)
    places = [place for place, words in enumerate(wanted) if words in known]
    found = rebuild([leaves[place] for place in places], there)
    for place, leaf in zip(places, found, strict=True):
        leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def below(checkpoint: HostCheckpoint, path: str) -> HostCheckpoint:
    """Returns the leaves of a checkpoint whose paths begin with `path`; nothing is checked."""
    return _those(checkpoint, lambda leaf: leaf.path.startswith(path))


def _those(checkpoint: HostCheckpoint, wanted: Callable[[LeafSpec], bool]) -> HostCheckpoint:
    facts = checkpoint.facts
    chosen = [
        (leaf, checkpoint.arrays[_key(index)])
        for index, leaf in enumerate(facts.leaves)
        if wanted(leaf)
    ]
    return HostCheckpoint(
        facts.model_copy(update={"leaves": tuple(leaf for leaf, _ in chosen)}),
        {_key(index): array for index, (_, array) in enumerate(chosen)},
    )


def state_in(checkpoint: HostCheckpoint) -> HostCheckpoint:
    """Returns a checkpoint without the unsent work that a snapshot has; nothing is checked."""
    if not checkpoint.facts.unsent:
        return checkpoint
    facts = checkpoint.facts.model_copy(update={"unsent": (), "loss": None})
    return _half(checkpoint._replace(facts=facts), 0)


def unsent_in(checkpoint: HostCheckpoint) -> HostCheckpoint:
    """Returns the unsent work that a snapshot has, without the state; nothing else is checked.

    Raises:
        NoSnapshotError: the checkpoint is no snapshot.
    """
    if not checkpoint.facts.unsent:
        raise NoSnapshotError("it is not a snapshot of unsent work")
    # Copied, as they are little, and views would keep the whole file in memory.
    half = _half(checkpoint, 1)
    return half._replace(arrays={key: array.copy() for key, array in half.arrays.items()})


def _half(checkpoint: HostCheckpoint, index: int) -> HostCheckpoint:
    prefix = f"[{index}]"
    half = below(checkpoint, prefix)
    leaves = tuple(
        leaf.model_copy(update={"path": leaf.path.removeprefix(prefix)})
        for leaf in half.facts.leaves
    )
    return HostCheckpoint(half.facts.model_copy(update={"leaves": leaves}), half.arrays)


def part_of(like: dict[str, jax.ShapeDtypeStruct], checkpoint: HostCheckpoint) -> Arrays:
    """Returns one host's part of a state from a checkpoint, by the keys of `local_part`.

    Args:
        like: the result of `local_shapes`.
        checkpoint: a checkpoint whose facts have passed `check_facts` with `like`.

    Raises:
        CheckpointError: an array is missing, differs from its facts, or is not finite.
    """
    part: Arrays = jax.tree.unflatten(jax.tree.structure(like), _checked(like, checkpoint))
    return part


def _checked(like: Any, checkpoint: HostCheckpoint) -> list[np.ndarray]:
    """Returns the checkpoint's arrays in order.

    Raises:
        CheckpointError: an array is missing, differs from its facts or `like`, or is not finite.
    """
    arrays = []
    shapes = zip(_shapes(like), checkpoint.facts.leaves, strict=True)
    for index, ((path, shape), said) in enumerate(shapes):
        array = checkpoint.arrays.get(_key(index))
        if array is None or array.shape != shape.shape or array.dtype != shape.dtype:
            found = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise CheckpointError(f"{path} is {found}, not {shape.dtype}{list(shape.shape)}")
        if shards.digest(array) != said.digest:
            raise CheckpointError(f"{path} has digest {shards.digest(array)}, not {said.digest}")
        _check_finite(path, array)
        arrays.append(array)
    return arrays


def check_facts(facts: Facts, like: Any, *, run: str, layout: str, learner: str) -> None:
    """Checks that a checkpoint is of this run, layout, learner and optimizer, by its facts alone.

    Args:
        facts: the checkpoint's metadata.
        like: shapes of the state that the checkpoint must have; None: of any state.
        run: the run's name.
        layout: the digest of the run's layout.
        learner: the learner's name.

    Raises:
        CheckpointError: names the first difference.
    """
    for what, found, expected in (
        ("run", facts.run, run),
        ("layout", facts.layout, layout),
        ("learner", facts.learner, learner),
    ):
        if found != expected:
            raise CheckpointError(f"{what} {found}, not {expected}")
    if like is None:
        return
    described = [_words(leaf.path, leaf.shape, leaf.dtype) for leaf in facts.leaves]
    wanted = [
        _words(path, shape.shape, np.dtype(shape.dtype).name) for path, shape in _shapes(like)
    ]
    for one, other in zip(described, wanted, strict=False):
        if one != other:
            raise CheckpointError(f"leaf {one}, not {other}")
    if len(described) != len(wanted):
        raise CheckpointError(f"{len(described)} leaves, not {len(wanted)}")


def _words(path: str, shape: tuple[int, ...], dtype: str) -> str:
    return f"{path} {dtype}{list(shape)}"


# --- On disk


class Folder:
    """The checkpoints of a learner of one host on this machine's disk, numbered 1, 2, 3 ...

    Args:
        path: the folder, which is made with the first checkpoint.
        keep: the number of newest checkpoints to keep; older ones are deleted.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path.absolute()
        self._keep = keep
        self._manager: Any = None

    def numbers(self) -> list[int]:
        """Returns the numbers of the checkpoints in the folder, newest first.

        A checkpoint among them may be unfinished, so that it cannot be read.
        """
        if not self._path.is_dir():
            return []
        names_there = [path.name for path in self._path.iterdir()]
        return sorted((int(name) for name in names_there if name.isdecimal()), reverse=True)

    def facts(self, number: int) -> Facts:
        """Returns the metadata of checkpoint `number`.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        with _refused():
            from orbax import checkpoint as ocp

            args = ocp.args.Composite(facts=ocp.args.JsonRestore())
            return _parse(json.dumps(self._opened().restore(number, args=args)["facts"]))

    def arrays(self, number: int, facts: Facts) -> Arrays:
        """Returns the arrays of checkpoint `number`; `facts` must be those of that checkpoint.

        Raises:
            CheckpointError: the arrays cannot be read.
        """
        return {
            _key(index): self._array(number, _key(index))
            if 0 not in leaf.shape
            else np.empty(leaf.shape, leaf.dtype)
            for index, leaf in enumerate(facts.leaves)
        }

    def _array(self, number: int, key: str) -> np.ndarray:
        """Reads a single array, since orbax would log errors for all arrays if one is damaged."""
        with _refused():
            from orbax import checkpoint as ocp

            state = ocp.args.PyTreeRestore(
                item={key: 0},
                restore_args={key: ocp.RestoreArgs(restore_type=np.ndarray)},
                partial_restore=True,
            )
            found = self._opened().restore(number, args=ocp.args.Composite(state=state))
            return np.asarray(found["state"][key])

    def write(self, checkpoint: HostCheckpoint) -> int:
        """Writes a checkpoint, whole or not at all, and returns its number.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        with _refused():
            from orbax import checkpoint as ocp

            # orbax cannot store an array without elements.
            stored = {key: array for key, array in checkpoint.arrays.items() if array.size}
            parts = {"facts": ocp.args.JsonSave(checkpoint.facts.model_dump(mode="json"))}
            if stored:
                parts["state"] = ocp.args.PyTreeSave(stored)
            number = max(self.numbers(), default=0) + 1
            self._opened().save(number, args=ocp.args.Composite(**parts))
            return number

    def _opened(self) -> Any:
        if self._manager is None:
            from orbax import checkpoint as ocp

            # We raise and log failures; orbax's cleaning up after a killed save need not be logged.
            logging.getLogger("absl").setLevel(logging.CRITICAL)
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, create=True, enable_async_checkpointing=False
            )
            self._manager = ocp.CheckpointManager(self._path, options=options)
        return self._manager


class PartFolder:
    """One host's parts of the checkpoints of a learner of several hosts, one file for each part.

    The methods are those of `Folder`. orbax is not used here: it would synchronize the hosts by
    collectives amid those of training, and would write the part of process 0 only.

    Args:
        path: the folder of this host's parts, which is made with the first one.
        keep: the number of newest parts to keep; older ones are deleted.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path
        self._keep = keep
        self._cleared = False

    def numbers(self) -> list[int]:
        """Returns the numbers of this host's parts, newest first, as `Folder.numbers` does."""
        found = [path.stem for path in self._path.glob("*.safetensors")]
        return sorted((int(stem) for stem in found if stem.isdecimal()), reverse=True)

    def facts(self, number: int) -> Facts:
        """Returns the metadata of this host's part of checkpoint `number`.

        Raises:
            CheckpointError: the part cannot be read.
        """
        return self._read(number).facts

    def arrays(self, number: int, facts: Facts) -> Arrays:
        """Returns the arrays of this host's part of checkpoint `number`; ignores `facts`.

        Raises:
            CheckpointError: the part cannot be read.
        """
        del facts
        return self._read(number).arrays

    def write(self, checkpoint: HostCheckpoint) -> int:
        """Writes this host's part of a checkpoint, whole or not at all, and returns its number.

        Raises:
            CheckpointError: the part could not be written.
        """
        with _refused():
            if not self._cleared:  # A process that was killed may have left half a part.
                shutil.rmtree(self._path / TEMP, ignore_errors=True)
                self._cleared = True
            there = self.numbers()
            number = max(there, default=0) + 1
            store = DirectoryStore(self._path)
            store.put(_file(number), pack(checkpoint))
            for old in [number, *there][self._keep :]:
                store.delete(_file(old))
            return number

    def _read(self, number: int) -> HostCheckpoint:
        with _refused():
            data = (self._path / _file(number)).read_bytes()
        return unpack(data)


def _file(number: int) -> str:
    return f"{number}.safetensors"


# The folder of checkpoints of a learner of one host, or of one host of several.
CheckpointFolder = Folder | PartFolder


# --- In the object store


class CheckpointObject(NamedTuple):
    """A checkpoint in the object store, or one host's part of a checkpoint.

    Attributes:
        name: the object's name; `learner`, `local_step` and `digest` are read from it.
        learner: the name of the learner that made the checkpoint.
        local_step: the learner's inner steps.
        digest: the digest of the object's bytes.
        size_bytes: the object's size, as the store lists it.
    """

    name: str
    learner: str
    local_step: int
    digest: str
    size_bytes: int


def stored(
    store: ObjectStore, run: str, learner: str | None = None, part: str = ""
) -> list[CheckpointObject]:
    """Lists checkpoints in the object store, those with most steps first.

    Args:
        store: the run's object store.
        run: the run's name.
        learner: the learner's name; None: all learners.
        part: the name of a host's part (`names.checkpoint_part`), to list only that host's parts;
            "": list checkpoints of learners of one host.

    Raises:
        StoreError: the store cannot be read.
    """
    if learner is None:
        prefix, any_learner = names.learners_prefix(run), names.NAME.pattern
    else:
        prefix, any_learner = names.learner_checkpoints(run, learner) + part, learner
    name = re.compile(
        f"{names.learners_prefix(run)}({any_learner})/checkpoint/{part}([0-9]{{12}})-([0-9a-f]{{32}})"
    )
    found = [
        CheckpointObject(info.name, match[1], int(match[2]), match[3], info.size_bytes)
        for info in store.list(prefix)
        if (match := name.fullmatch(info.name))
    ]
    return sorted(found, key=lambda one: one.local_step, reverse=True)


def pack(checkpoint: HostCheckpoint) -> shards.Buffers:
    """Returns a checkpoint as the bytes of a safetensors file; the arrays are not copied.

    The library would copy all arrays, here and in `unpack`, and hold Python's lock meanwhile: 0.7 s
    for each GiB, in which a training process does nothing and seems to hang.
    """
    # Without the loss that only snapshots have, so that a release before it reads the others.
    facts = checkpoint.facts.model_dump_json(exclude_none=True)
    header: dict[str, Any] = {"__metadata__": {"facts": facts}}
    runs, stop = [], 0
    for key, array in checkpoint.arrays.items():
        start, stop = stop, stop + array.nbytes
        header[key] = {
            "dtype": _dtype_name(array.dtype),
            "shape": array.shape,
            "data_offsets": (start, stop),
        }
        runs.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return shards.Buffers(len(text).to_bytes(8, "little"), text, *runs)


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns the name that safetensors has for a dtype."""
    names_of = {"bool": "BOOL", "bfloat16": "BF16"}
    names_of |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
    return names_of.get(dtype.name, f"{dtype.kind.upper()}{8 * dtype.itemsize}")


def unpack(data: bytes) -> HostCheckpoint:
    """Returns the checkpoint in the bytes of a safetensors file, which may be untrusted.

    Neither facts nor arrays are checked; the arrays are read-only views of the bytes.

    Raises:
        CheckpointError: the bytes are not a checkpoint.
    """
    with _refused():
        start = 8 + int.from_bytes(data[:8], "little")
        tensors = json.loads(data[8:start])
        facts = _parse(tensors["__metadata__"]["facts"])
        values, arrays = memoryview(data)[start:], {}
        for index, leaf in enumerate(facts.leaves):
            tensor = tensors[_key(index)]
            raw = np.frombuffer(values[slice(*tensor["data_offsets"])], np.dtype(leaf.dtype))
            arrays[_key(index)] = raw.reshape(tensor["shape"])
        return HostCheckpoint(facts, arrays)


def largest_object(like: Any) -> int:
    """Returns an upper bound on the bytes of `pack` for a state with the shapes `like`."""
    shapes = _shapes(like)
    size_bytes: int = sum(
        math.prod(shape.shape) * np.dtype(shape.dtype).itemsize for _, shape in shapes
    )
    return size_bytes + len(shapes) * _LEAF_BYTES + _FACTS_BYTES


# --- Leaves


def _key(index: int) -> str:
    return f"{index:05d}"


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _shapes(like: Any) -> list[tuple[str, jax.ShapeDtypeStruct]]:
    """Returns (path, shape and dtype) of each leaf, as the leaf is stored; keys as key data."""
    leaves = jax.tree_util.tree_flatten_with_path(like)[0]
    return [(jax.tree_util.keystr(path), _stored_shape(leaf)) for path, leaf in leaves]


def _stored_shape(leaf: Any) -> Any:
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _on_device(path: str, array: np.ndarray, wanted: Any) -> jax.Array:
    leaf = jnp.array(array)
    if not _is_key(wanted):
        return leaf
    key: jax.Array | None = None
    with contextlib.suppress(TypeError):  # bits that make no key of JAX's default
        key = jax.random.wrap_key_data(leaf)
    if key is None or key.dtype != wanted.dtype:
        raise CheckpointError(f"{path} is a random key of {wanted.dtype}, not of JAX's default")
    return key


def _check_finite(path: str, array: np.ndarray) -> None:
    if jnp.issubdtype(array.dtype, jnp.inexact) and not np.isfinite(array).all():
        raise CheckpointError(f"{path} is not finite")


def _parse(text: str) -> Facts:
    try:
        return Facts.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"its facts are wrong: {key}: {first['msg']}") from error


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Turns each exception of the block, as of a full disk, into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:300]
        raise CheckpointError(f"{type(error).__name__}: {first}") from error
