"""Reads a decoder's tensors from a Hugging Face folder slice by slice; writes such folders.

Values are read when they are needed: a `Rows` has the shape of a tensor, and reads rows of its
first axis. The headers of all files are checked first, so that a missing file or a wrong shape is
found before anything is done. A folder is written under a temporary name and renamed at the end, so
that a folder with its final name is complete.
"""

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diloco.common.protocol.errors import ConfigError
from diloco.models.decoders.config import CONFIG, DecoderConfig, config_document, read_document
from diloco.models.decoders.families import FAMILY_FILES
from diloco.models.decoders.groups import groups_of
from diloco.models.decoders.image_text import ALONE, OTHERS, VISION, WITHIN, whole_document
from diloco.models.decoders.tensor_names_and_shapes import BOUNDS, TOWER, TensorEntry, table

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FILE_BYTES = 4 << 30  # the approximate size of a file
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
# Files about tokens, images, chats and generation, which are copied.
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
READ = {"F32", "BF16", "F16"}  # the dtypes that are read, by their names in safetensors
# Beginnings of the dtypes in which quantized checkpoints have numbers; no model has integers of 64
# bits for that.
QUANTIZED = ("F8_", "F6_", "F4", "I8", "U8", "I16", "U16", "I32", "U32")
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
ROWS = 4096  # rows of a tensor that are compared at a time
# The module of a layer's experts in checkpoints that transformers itself saves.
FUSED = "mlp"


class Place(NamedTuple):
    """The place of a checkpoint tensor: a tensor of a file, or a part of one.

    Attributes:
        path: the file.
        tensor: name of a tensor in the file.
        shape: shape of the part.
        dtype: dtype in the file, by its name in safetensors.
        part: indices that take the part from the file's tensor; (): the whole tensor.
    """

    path: Path
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    part: tuple[int | slice, ...] = ()


class Rows:
    """A tensor of a decoder; slicing its first axis reads these rows from the checkpoint.

    Reading a number that is infinite or not a number raises a ConfigError.

    Args:
        entry: the tensor.
        places: places of the checkpoint tensors that it stacks, in the order of
            `entry.checkpoint_names()`.

    Attributes:
        shape: shape of the whole tensor.
        dtype: float32, to which rows are converted.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, entry: TensorEntry, places: tuple[Place, ...]) -> None:
        self._entry, self._places = entry, places
        self.shape = entry.shape

    def __getitem__(self, rows: slice) -> np.ndarray:
        entry = self._entry
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1, rows
        if not entry.stacked:
            place = self._places[0]
            part = (slice(None), rows) if entry.transposed else rows
            values = _read(place, safe_open(place.path, "numpy"), part)
            return values.T if entry.transposed else values
        of_layer = len(self._places) // self.shape[0]
        wanted = self._places[start * of_layer : stop * of_layer]
        opened = {path: safe_open(path, "numpy") for path in {place.path for place in wanted}}
        found = np.empty((len(wanted), *self.shape[entry.stacked :]), np.float32)
        for number, place in enumerate(wanted):
            found[number] = entry.from_checkpoint(_read(place, opened[place.path]))
        return found.reshape(stop - start, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        whole = self[: self.shape[0]]
        return whole if dtype is None else whole.astype(dtype, copy=False)


def _read(place: Place, opened: Any, rows: Any = slice(None)) -> np.ndarray:
    if not place.shape:
        values: np.ndarray = opened.get_tensor(place.tensor)
    else:
        values = opened.get_slice(place.tensor)[place.part or rows]
    values = values.astype(np.float32)
    # A bound that bounds nothing is infinite.
    wrong = np.isnan(values) if place.tensor.endswith(BOUNDS) else ~np.isfinite(values)
    if wrong.any():
        raise ConfigError(
            f"{str(place.path)!r}: {place.tensor} has {np.count_nonzero(wrong):,} number(s) among"
            f" {values.size:,} that are infinite or not a number, such as {values[wrong][0]}",
            hint="copy the file from the checkpoint again; if it is the same there, the model was"
            " saved after its training had failed: give an earlier one",
        )
    return values


def read_checkpoint(folder: Path, config: DecoderConfig) -> dict[str, Rows]:
    """Returns the tensors of a folder, by their names in `tensor_names_and_shapes`.

    Values are read later, except those of a tied head, which is compared with the embeddings.

    Args:
        folder: a folder with *.safetensors files, and their index if there are several.
        config: the decoder's configuration, which the tensors must fit.

    Raises:
        ConfigError: a file is missing or damaged, or does not fit the configuration.
    """
    entries = table(config)
    textual = _textual(_places(folder), config)
    _check_not_quantized(textual)
    if config.tied:
        _check_tied(textual)
    places = _one_by_one(_needed(textual, config), config)
    wanted = {name for entry in entries.values() for name in entry.checkpoint_names()}
    if missing := sorted(wanted - set(places)):
        raise ConfigError(
            f"{str(folder)!r} lacks {len(missing)} tensor(s) that its config.json asks for: "
            f"{', '.join(missing[:4])}",
            hint="copy the whole checkpoint, with every file that its index names",
        )
    if unknown := sorted(set(places) - wanted):
        raise ConfigError(
            f"{str(folder)!r} has {len(unknown)} tensor(s) that its config.json does not ask for: "
            f"{', '.join(unknown[:4])}",
            hint="they would be left out: give a checkpoint without adapters and quantization",
        )
    found = {}
    for name, entry in entries.items():
        found[name] = Rows(entry, tuple(places[tensor] for tensor in entry.checkpoint_names()))
        for tensor in entry.checkpoint_names():
            _check(places[tensor], tensor, entry.checkpoint_shape)
    return found


def has_weights(folder: Path) -> bool:
    """Returns True if a folder has files of tensors, or an index of such files."""
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def _places(folder: Path) -> dict[str, Place]:
    """Returns the place of each tensor of a folder, by the tensor's name in its files.

    Raises:
        ConfigError: a file is missing or damaged, or the index does not fit the files.
    """
    index = folder / INDEX
    if index.exists() and (folder / SINGLE).is_file():
        raise ConfigError(
            f"{str(folder)!r} has both {SINGLE} and {INDEX}",
            hint="transformers reads the first, others the second: remove the one that is not the"
            " checkpoint's",
        )
    if not index.exists():
        if not (folder / SINGLE).is_file():
            raise ConfigError(
                f"{str(folder)!r} has neither {SINGLE} nor {INDEX}",
                hint="give a folder with safetensors files; older .bin files are to be converted"
                " first",
            )
        return _header(folder / SINGLE)
    try:
        named = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{str(index)!r} cannot be read: {error}", hint="copy it from the checkpoint again"
        ) from error
    if missing := sorted({f for f in named.values() if not (folder / f).is_file()}):
        raise ConfigError(
            f"{str(folder)!r} lacks {', '.join(missing)}, which its index names",
            hint="copy the missing file(s) into the folder",
        )
    found: dict[str, Place] = {}
    for path in sorted({folder / file for file in named.values()}):
        found = _joined(found, _header(path))
    for name, file in named.items():
        if name not in found or found[name].path != folder / file:
            raise ConfigError(
                f"{str(folder / file)!r} has no tensor {name!r}, though the index says so",
                hint="copy the file and the index from the checkpoint again",
            )
    return found


def _header(path: Path) -> dict[str, Place]:
    """Returns the place of each tensor of one file, by the tensor's name.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Place(path, name, tuple(there.get_shape()), there.get_dtype())
                for name, there in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}",
            hint="it is damaged or cut short: copy it from the checkpoint again",
        ) from error


def _joined(one: dict[str, Place], other: dict[str, Place]) -> dict[str, Place]:
    """Returns the union of two mappings.

    Raises:
        ConfigError: both have a tensor of one name.
    """
    if twice := sorted(one.keys() & other.keys()):
        name = twice[0]
        raise ConfigError(
            f"the tensor {name!r} is there twice: as {one[name].tensor!r} of"
            f" {str(one[name].path)!r}, and as {other[name].tensor!r} of"
            f" {str(other[name].path)!r}",
            hint="leave the files of one checkpoint alone in the folder",
        )
    return {**one, **other}


def _textual(places: dict[str, Place], config: DecoderConfig) -> dict[str, Place]:
    """Returns the tensors of the decoder's parameters, by names as in a checkpoint of text alone.

    Drops tensors that exports of an image-and-text checkpoint only copy, and the tables of rotary
    frequencies that old checkpoints have.
    """
    found = {name: one for name, one in places.items() if not name.endswith("rotary_emb.inv_freq")}
    if config.image_text is None:
        return found
    within = {name for name in found if name.startswith(WITHIN)}
    alone = found.keys() - within
    return _joined(
        {name: found[name] for name in alone if not name.startswith(_carried(config))},
        {ALONE + name.removeprefix(WITHIN): found[name] for name in within},
    )


def _carried(config: DecoderConfig) -> tuple[str, ...]:
    """Returns prefixes of the tensors that are not parameters, but are copied to exports."""
    return tuple(each for each in OTHERS if config.tower is None or each not in VISION)


def _check_tied(places: dict[str, Place]) -> None:
    """Refuses a head that differs from the embeddings, where the configuration ties the two.

    transformers would compute with that head. If the files have both tensors, both are read.

    Raises:
        ConfigError: the two differ.
    """
    head, embeddings = places.get(HEAD), places.get(EMBEDDINGS)
    if head is None or embeddings is None:
        return
    opened = [(place, safe_open(place.path, "numpy")) for place in (head, embeddings)]

    def equal(start: int) -> bool:
        rows = slice(start, min(start + ROWS, head.shape[0]))
        one, other = (_read(place, file, rows) for place, file in opened)
        return np.array_equal(one, other)

    if head.shape != embeddings.shape or not all(map(equal, range(0, head.shape[0], ROWS))):
        raise ConfigError(
            f"{str(head.path)!r}: {HEAD} differs from {EMBEDDINGS}, but config.json has"
            " tie_word_embeddings true",
            hint="set tie_word_embeddings to false, or remove the head if it is not the model's",
        )


def _needed(places: dict[str, Place], config: DecoderConfig) -> dict[str, Place]:
    """Returns the tensors without redundant ones.

    Redundant are a tied head, and the keys and values of layers that use those of another layer.
    """
    left_out = {HEAD} if config.tied else set()
    for group in groups_of(config).values():
        for number in group.numbers if group.config.takes_keys else ():
            layer = f"model.layers.{number}.self_attn."
            left_out |= {f"{layer}{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}
    return {name: place for name, place in places.items() if name not in left_out}


def _one_by_one(places: dict[str, Place], config: DecoderConfig) -> dict[str, Place]:
    """Splits each tensor that has all experts of a layer into places of one matrix of one expert.

    Checkpoints that transformers itself saves have gate and up of all experts in one tensor.

    Raises:
        ConfigError: such a tensor does not fit the configuration.
    """
    files, experts = FAMILY_FILES[config.family].experts, config.experts
    if files is None or experts is None or files.matrices is None:
        return places
    gate, up, down = files.matrices
    D, F = config.width, experts.width
    parts = {
        "gate_up_proj": ((2 * F, D), {gate: slice(0, F), up: slice(F, 2 * F)}),
        "down_proj": ((D, F), {down: slice(0, D)}),
    }
    found: dict[str, Place] = {}
    for name, place in places.items():
        layer, _, tensor = name.rpartition(f".{FUSED}.experts.")
        if tensor not in parts:
            own = name.replace(f".{FUSED}.gate.", f".{files.module}.gate.")
            found = _joined(found, {own: place})
            continue
        shape, matrices = parts[tensor]
        _check(place, name, (experts.count, *shape))
        single = {
            f"{layer}.{files.module}.experts.{number}.{matrix}.weight": place._replace(
                shape=(part.stop - part.start, shape[1]), part=(number, part)
            )
            for number in range(experts.count)
            for matrix, part in matrices.items()
        }
        found = _joined(found, single)
    return found


def _check_not_quantized(places: Mapping[str, Place]) -> None:
    for name, place in places.items():
        if place.dtype.startswith(QUANTIZED):
            raise ConfigError(
                f"{str(place.path)!r}: {name} is {place.dtype}, as in quantized checkpoints;"
                " float32, bfloat16 and float16 are read",
                hint="quantized checkpoints are not trained: give the one that it was made from",
            )


def _check(place: Place, name: str, shape: tuple[int, ...]) -> None:
    if place.shape != shape:
        raise ConfigError(
            f"{str(place.path)!r}: {name} is of shape {list(place.shape)}, but config.json makes"
            f" it {list(shape)}",
            hint="config.json and the tensors are of different models: copy both from one place",
        )
    if place.dtype not in READ:
        raise ConfigError(
            f"{str(place.path)!r}: {name} is {place.dtype}; float32, bfloat16 and float16 are read",
            hint="save it in one of these dtypes",
        )


# --- Writing


def write_checkpoint(
    folder: Path,
    config: DecoderConfig,
    arrays: Mapping[str, Any],
    *,
    dtype: str = "float32",
    beside: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a checkpoint folder that transformers loads.

    Args:
        folder: a new or empty folder.
        config: the decoder's configuration.
        arrays: the decoder's tensors, by their names in `tensor_names_and_shapes`.
        dtype: a name in `DTYPES`, the dtype in which these tensors are written.
        beside: a folder whose tokenizer files are copied; if it is an image-and-text checkpoint,
            its tensors that are not parameters are copied too, in their own dtypes. None: nothing
            is copied.
        file_bytes: approximate size of a file, in bytes.

    Raises:
        ConfigError: the folder cannot be written; nothing is left of it.
    """
    with staged(folder) as partial:
        tensors = checkpoint_tensors(config, arrays, DTYPES[dtype])
        document = config_document(config, dtype)
        if config.image_text is not None:
            whole = _whole(beside)
            document = whole_document(read_document(whole), dtype)
            tensors = itertools.chain(tensors, _as_they_are(others_of(whole, config)))
        _write_tensors(partial, tensors, file_bytes)
        carry(beside, partial)
        (partial / CONFIG).write_text(json.dumps(document, indent=2) + "\n")


def _whole(folder: Path | None) -> Path:
    if folder is None or not has_weights(folder):
        raise ConfigError(
            f"the tensors of images and sounds are copied from {str(folder)!r}, which has none",
            hint="copy the checkpoint's safetensors files to the folder that the task's option"
            " model names",
        )
    return folder


def others_of(folder: Path, config: DecoderConfig) -> dict[str, Place]:
    """Returns the places of an image-and-text checkpoint's tensors that are not parameters.

    Args:
        folder: the checkpoint's folder.
        config: the configuration of its text model.

    Raises:
        ConfigError: a file is missing or damaged; or a tower that the checkpoint's config.json has
            lacks tensors.
    """
    carried = _carried(config)
    places = {name: one for name, one in _places(folder).items() if name.startswith(carried)}
    for module in config.image_text.modules if config.image_text is not None else ():
        if not any(name.startswith(module) for name in places):
            raise ConfigError(
                f"{str(folder)!r} lacks all tensors of {module}*, which its config.json asks for",
                hint="copy the whole checkpoint, with every file that its index names",
            )
    return places


def _as_they_are(places: dict[str, Place]) -> Iterator[tuple[str, np.ndarray]]:
    paths = {one.path for one in places.values()}
    opened: dict[Path, Any] = {path: safe_open(path, "numpy") for path in paths}
    for name, place in places.items():
        yield name, opened[place.path].get_tensor(place.tensor)


class staged:  # noqa: N801 - a context manager, used as a function
    """Gives a temporary folder to write to, and renames it to `folder` at the block's end.

    If the block raises, the temporary folder is removed.

    Args:
        folder: the target, a new or empty folder.

    Raises:
        ConfigError: the folder cannot be written, as on a full disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._partial = folder.with_name(f".{folder.name}.partial")

    def __enter__(self) -> Path:
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise self._failed(error) from error
        return self._partial

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._partial.replace(self._folder)
        except OSError as failure:
            error = failure
        if error is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"cannot write {str(self._folder)!r}: {error}",
            hint="nothing is left there; name a new folder where there is room and you may write",
        )


def carry(source: Path | None, folder: Path) -> None:
    """Copies the files of `CARRIED` that `source` has into `folder`; nothing if it is None."""
    for name in CARRIED:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def checkpoint_tensors(
    config: DecoderConfig, arrays: Mapping[str, Any], dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of each checkpoint tensor of a decoder's parameters.

    Args:
        config: the decoder's configuration.
        arrays: the decoder's tensors, by their names in `tensor_names_and_shapes`.
        dtype: the dtype of the yielded arrays.
    """
    within = ALONE if config.image_text is None else WITHIN
    for name, entry in table(config).items():
        layers = range(entry.shape[0]) if entry.stacked else (None,)
        tensors = iter(entry.checkpoint_names())
        for layer in layers:
            values = np.asarray(arrays[name] if layer is None else arrays[name][layer])
            for each in values.reshape(-1, *entry.shape[entry.stacked :]):
                there = entry.to_checkpoint(each).astype(dtype)
                called = next(tensors)
                if called.startswith(ALONE) and not name.startswith(TOWER):
                    called = within + called.removeprefix(ALONE)
                yield called, np.asarray(there, order="C")


def _write_tensors(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], file_bytes: int
) -> None:
    files: list[dict[str, int]] = []
    for group in _groups(tensors, file_bytes):
        save_file(group, _numbered(folder, len(files)), metadata={"format": "pt"})
        files.append({name: values.nbytes for name, values in group.items()})
    if len(files) == 1:
        _numbered(folder, 0).replace(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        final = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        _numbered(folder, number).replace(folder / final)
        weight_map |= dict.fromkeys(names, final)
    size = sum(sum(names.values()) for names in files)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _numbered(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05}.safetensors"


def _groups(
    tensors: Iterator[tuple[str, np.ndarray]], file_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    group: dict[str, np.ndarray] = {}
    held = 0
    for name, values in tensors:
        if group and held + values.nbytes > file_bytes:
            yield group
            group, held = {}, 0
        group[name] = values
        held += values.nbytes
    yield group
