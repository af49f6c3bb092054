"""A learner's checkpoints: the state of its inner optimizer, and the counters beside it.

On disk a checkpoint is a folder that orbax writes; in the object store, and on each disk of a
learner of several hosts, it is one safetensors file, which is safe to read from untrusted sources.
All hold the same: one array for each leaf of the state (of a host, for each piece of a leaf), named
by its number in JAX's order, and `Facts`, which specify those arrays.
Names in the data define no structure: a checkpoint that does not fit the tree of the task's own
optimizer is refused.
"""

import contextlib
import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import ValidationError

from diloco.common.protocol import names, shards
from diloco.common.protocol.errors import CheckpointError
from diloco.common.protocol.wire import Count, Digest, Name, NestedRecord
from diloco.common.storage.store import DirectoryStore, ObjectStore

# How much larger than its arrays the object may be: the header, per leaf and in all.
_LEAF_BYTES = 4096
_FACTS_BYTES = 1 << 16

Arrays = dict[str, np.ndarray]


class LeafSpec(NestedRecord):
    """Path, shape and dtype that one leaf of the state must have; `digest` is that of its bytes."""

    path: str
    shape: tuple[Count, ...]
    dtype: str
    digest: Digest


class Facts(NestedRecord):
    """A checkpoint's metadata: everything but the arrays.

    `incarnation` and `epoch` name the life that made it; a new life continues `local_step` and
    `tokens`. `position` and `global_step` are for people: the tape and its records determine where
    data and clock resume.
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


class HostCheckpoint(NamedTuple):
    """One checkpoint in the host's memory."""

    facts: Facts
    arrays: Arrays


# The state as new arrays on the device: the inner step donates the old ones. A copy inside a
# program is a real one, and there is one dispatch for all leaves.
copied = jax.jit(lambda state: jax.tree.map(jnp.copy, state))


def on_host(state: Any) -> Arrays:
    """Returns a state's leaves by number; waits for the device. On CPU nothing is copied."""
    arrays = {}
    for index, leaf in enumerate(jax.tree.leaves(state)):
        arrays[_key(index)] = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    return arrays


def local_part(state: Any) -> dict[str, jax.Array]:
    """Returns the pieces of a state on this host's devices, each once, by leaf and position."""
    part: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        bits = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for shard in bits.addressable_shards:
            part.setdefault(_piece(path, shard.index, bits.shape), shard.data)
    return part


def local_shapes(like: Any, shardings: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the pieces that `local_part` returns for such shapes and shardings."""
    part: dict[str, jax.ShapeDtypeStruct] = {}
    for path, bits, sharding in _stored_leaves(like, shardings):
        local = sharding.shard_shape(bits.shape)
        for index in sharding.addressable_devices_indices_map(bits.shape).values():
            part[_piece(path, index, bits.shape)] = jax.ShapeDtypeStruct(local, bits.dtype)
    return part


def of_local_part(like: Any, shardings: Any, part: Arrays) -> Any:
    """Returns the state on the devices of all hosts, built from this host's `part`."""
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
    """Returns path, shape and sharding of each leaf as it is stored."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(like)[0]]
    bits = [shape for _, shape in _shapes(like)]
    return list(zip(paths, bits, jax.tree.leaves(shardings), strict=True))


def _piece(path: Any, index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    box = ",".join(f"{start}:{stop}" for start, stop, _ in spans)
    return f"{jax.tree_util.keystr(path)}[{box}]"


def describe(like: Any, arrays: Arrays) -> tuple[LeafSpec, ...]:
    """Returns the specification of each leaf of a state.

    Raises:
        CheckpointError: a leaf is not finite.
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
    """Returns the optimizer's state from a checkpoint, on the device.

    Args:
        like: shapes of the state, as `jax.eval_shape` of the optimizer's `init` gives them.
        checkpoint: one whose facts suit `like` (`check_facts`).

    Raises:
        CheckpointError: an array does not match its facts.
    """
    leaves = [
        _on_device(path, array, wanted)
        for (path, _), array, wanted in zip(
            _shapes(like), _checked(like, checkpoint), jax.tree.leaves(like), strict=True
        )
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def part_of(like: dict[str, jax.ShapeDtypeStruct], checkpoint: HostCheckpoint) -> Arrays:
    """Returns one host's part of a state from a checkpoint; `like` as `local_shapes` returns it.

    Raises:
        CheckpointError: as `rebuild`.
    """
    part: Arrays = jax.tree.unflatten(jax.tree.structure(like), _checked(like, checkpoint))
    return part


def _checked(like: Any, checkpoint: HostCheckpoint) -> list[np.ndarray]:
    """Returns the checkpoint's arrays, after comparing them with its facts and with `like`."""
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
    """Refuses a checkpoint of another run, model, optimizer or learner before its arrays are read.

    Raises:
        CheckpointError: names the difference.
    """
    for what, found, expected in (
        ("run", facts.run, run),
        ("layout", facts.layout, layout),
        ("learner", facts.learner, learner),
    ):
        if found != expected:
            raise CheckpointError(f"{what} {found}, not {expected}")
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
    """A learner's checkpoints on this machine's disk, numbered 1, 2, 3 ... as they were made.

    Args:
        path: the folder; made with the first checkpoint.
        keep: how many of the newest checkpoints are kept.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path.absolute()
        self._keep = keep
        self._manager: Any = None

    def numbers(self) -> list[int]:
        """Returns the checkpoints' numbers in the folder, newest first; one may be unfinished."""
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
        """Returns the arrays of checkpoint `number`.

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
        """Reads one array by itself: orbax logs an error for each of several, if one is damaged."""
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
        """Writes the next checkpoint, whole or not at all; returns its number.

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
    """One host's parts of the checkpoints of a learner of several hosts, with `Folder`'s methods.

    orbax would synchronize the hosts by collectives amid those of training, and would write the
    part of process 0 alone.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self._path = path
        self._keep = keep

    def numbers(self) -> list[int]:
        """Returns the numbers of this host's parts, newest first, as `Folder.numbers` does."""
        found = [path.stem for path in self._path.glob("*.safetensors")]
        return sorted((int(stem) for stem in found if stem.isdecimal()), reverse=True)

    def facts(self, number: int) -> Facts:
        """Returns the metadata of checkpoint `number`, as `Folder.facts` does."""
        return self._read(number).facts

    def arrays(self, number: int, facts: Facts) -> Arrays:
        """Returns the arrays of checkpoint `number`, as `Folder.arrays` does."""
        del facts
        return self._read(number).arrays

    def write(self, checkpoint: HostCheckpoint) -> int:
        """Writes the next checkpoint and returns its number, as `Folder.write` does.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        with _refused():
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


# Where a learner, or one host of several, keeps its checkpoints.
CheckpointFolder = Folder | PartFolder


# --- In the object store


class CheckpointObject(NamedTuple):
    """A checkpoint in the object store: the parts of its name, and `size_bytes` as listed."""

    name: str
    learner: str
    local_step: int
    digest: str
    size_bytes: int


def stored(
    store: ObjectStore, run: str, learner: str | None = None, part: str = ""
) -> list[CheckpointObject]:
    """Returns the checkpoints of `learner`, or of all learners, most steps first.

    With `part`, returns that host's parts alone.

    Raises:
        StoreError: as `ObjectStore.list`.
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


def pack(checkpoint: HostCheckpoint) -> bytes:
    """Returns the bytes of a checkpoint's object."""
    from safetensors.numpy import save

    arrays = {key: np.require(array, requirements="C") for key, array in checkpoint.arrays.items()}
    return save(arrays, metadata={"facts": checkpoint.facts.model_dump_json()})


def unpack(data: bytes) -> HostCheckpoint:
    """Unpacks a checkpoint from an object's bytes, which are untrusted; checks nothing.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with _refused():
        from safetensors import deserialize

        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        facts = _parse(header["__metadata__"]["facts"])
        arrays = {}
        for index, leaf in enumerate(facts.leaves):
            tensor = tensors[_key(index)]
            raw = np.frombuffer(tensor["data"], np.dtype(leaf.dtype))
            arrays[_key(index)] = raw.reshape(tensor["shape"])
        return HostCheckpoint(facts, arrays)


def largest_object(like: Any) -> int:
    """Returns an upper bound on the bytes of a checkpoint of such a state."""
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
    """Returns path, shape and dtype of each leaf as it is stored; a random key as its bits."""
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
    """Turns any exception over a damaged checkpoint or a full disk into a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:300]
        raise CheckpointError(f"{type(error).__name__}: {first}") from error
