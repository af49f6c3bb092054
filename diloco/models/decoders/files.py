"""Reads and writes a task's parameters as folders that other libraries load.

Without adapters, the folder is a checkpoint of transformers. With adapters, it is an adapter of
`peft`; or a checkpoint of the base model with the adapters merged in.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.learner.task import Params
from diloco.learner.tensors import tree
from diloco.models.decoders import checkpoint
from diloco.models.decoders.checkpoint import DTYPES, Rows, carry, staged
from diloco.models.decoders.config import (
    CONFIG,
    DecoderConfig,
    different_fields,
    read_config,
    read_document,
)
from diloco.models.decoders.experts import DOWN, GATE_UP, OUT, UP
from diloco.models.decoders.image_text import ALONE, WITHIN
from diloco.models.decoders.lora import (
    FROZEN,
    TRAINED,
    AdaptedMatrix,
    Lora,
    base_dtypes,
    experts_of,
    kind_of,
    matrices_of,
    targets_of,
)
from diloco.models.decoders.peft_config import ADAPTER_CONFIG, check_adapter_config
from diloco.models.decoders.tensor_names_and_shapes import TensorEntry, table
from diloco.models.decoders.upcycling import LayersOf, read_upcycled
from diloco.models.decoders.vision import with_tower

ADAPTER = "adapter_model.safetensors"
_PEFT_NAMES = {DOWN: "lora_A", UP: "lora_B"}


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Reads and writes a decoder's parameters as checkpoints; the `Files` of a task.

    Attributes:
        config: the decoder's configuration.
        source: the folder that the task names; None: it names none.
        fresh: whether the first parameters are random although `source` has tensors.
    """

    config: DecoderConfig
    source: Path | None
    fresh: bool

    @property
    def first(self) -> Path | None:
        """The folder with the run's first parameters; None: they are random.

        Raises:
            ConfigError: the folder lacks tensors of an image-and-text checkpoint that exports copy.
            TaskError: the folder has no tensors.
        """
        if self.source is None or self.fresh:
            return None
        source = require_weights(self.source)
        if self.config.image_text is not None:
            checkpoint.others_of(source, self.config)
        return source

    def read(self, folder: Path) -> Mapping[str, Any]:
        """Returns the tensors of a checkpoint's folder, by name; reads no values yet.

        If the decoder has experts and the checkpoint is dense, the experts are made from the
        checkpoint (`upcycling`). The folder may lack a `config.json`.

        Raises:
            ConfigError: a file is missing or damaged, or does not fit the configuration; or the
                folder's `config.json` describes another function.
        """
        if (folder / CONFIG).exists():
            there = read_config(folder)
            if self.config.experts is not None and there.experts is None:
                return read_upcycled(folder, there, self.config)
            self._check_alike(folder, there)
        return checkpoint.read_checkpoint(folder, self.config)

    def _check_alike(self, folder: Path, there: DecoderConfig) -> None:
        """Checks that the decoder of a folder computes the same function as the task's.

        Args:
            folder: the folder.
            there: the configuration in the folder.

        Raises:
            ConfigError: it computes another function.
        """
        besides = {"family"}
        if there.image_text is None or self.config.image_text is None:
            # A text model of its own may be the beginning of an image-and-text checkpoint's.
            besides |= {"image_text", "tower"}
        elif self.config.tower is not None:
            there = with_tower(there, read_document(folder), repr(str(folder)))
        if different := different_fields(there, self.config, besides):
            raise ConfigError(
                f"{str(folder / CONFIG)!r} describes another function than the config.json of the"
                f" task's model; different: {', '.join(different)}",
                hint="name this folder by the task's option model, or give one of the same model",
            )

    def write(self, folder: Path, leaves: Mapping[str, Any], dtype: str) -> None:
        """Writes a checkpoint to a new folder.

        Args:
            folder: a new or empty folder.
            leaves: the decoder's tensors, by name.
            dtype: the dtype of the written tensors, by its name in `DTYPES`.

        Raises:
            ConfigError: the folder cannot be written; nothing is left of it.
        """
        checkpoint.write_checkpoint(folder, self.config, leaves, dtype=dtype, beside=self.source)


def require_weights(source: Path) -> Path:
    """Returns `source`, the folder that a task names, after checking that it has tensors.

    Raises:
        TaskError: the folder has no tensors.
    """
    if not checkpoint.has_weights(source):
        raise TaskError(
            f"model={str(source)!r} has a configuration, but no safetensors files",
            hint="copy them there, name another folder by --from, or set fresh=true for random"
            " parameters",
        )
    return source


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Reads and writes adapters in `peft`'s format; the `Files` of a task with adapters.

    Attributes:
        config: configuration of the decoder, the base of the adapters.
        lora: the adapters' hyperparameters.
        source: the base's folder; None: the base has random parameters.
        name: the base's name in the task, by which `peft` finds the base.
    """

    config: DecoderConfig
    lora: Lora
    source: Path | None
    name: str

    @property
    def first(self) -> Path | None:
        """None: the first adapters come from `Task.init`, not from a folder.

        Raises:
            ConfigError: a file of the base is missing or damaged, or does not fit the
                configuration.
        """
        if self.source is not None:
            checkpoint.read_checkpoint(self.source, self.config)
        return None

    def read(self, folder: Path) -> Mapping[str, Any]:
        """Returns the adapters in a folder of `peft`, float32, by the names of the task's leaves.

        Raises:
            ConfigError: a file is missing or damaged, or has adapters of other matrices or with
                other hyperparameters.
        """
        check_adapter_config(folder, self.lora)
        path = folder / ADAPTER
        wanted = {
            leaf: (name, layer)
            for name, entry, half in self._halves()
            for layer, leaf in enumerate(self._names(entry, half))
        }
        try:
            with safe_open(path, framework="numpy") as opened:
                if different := sorted(set(opened.keys()) ^ set(wanted)):
                    raise ConfigError(
                        f"{str(path)!r} holds other adapters than the task's; missing or unknown:"
                        f" {', '.join(different[:4])}",
                        hint="give the task the rank and the targets that they were trained with",
                    )
                for _, entry, half in self._halves():
                    for leaf in self._names(entry, half):
                        self._check_tensor(leaf, opened.get_slice(leaf), entry, half)
                found = {leaf: opened.get_tensor(leaf) for leaf in wanted}
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{str(path)!r} cannot be read: {error}",
                hint="--from takes an adapter's folder here; the base is the option model's",
            ) from error
        leaves: dict[str, list[np.ndarray]] = {}
        for leaf, (name, _) in wanted.items():
            leaves.setdefault(name, []).append(found[leaf].astype(np.float32))
        return {
            name: np.stack([_from_peft(entry, half, values) for values in leaves[name]])
            for name, entry, half in self._halves()
        }

    def _check_tensor(self, leaf: str, there: Any, entry: TensorEntry, half: str) -> None:
        """Checks the shape and dtype of a tensor of `peft`'s file.

        Args:
            leaf: the tensor's name in the file.
            there: the tensor, as a slice of safetensors.
            entry: the adapted matrix.
            half: `DOWN` for A, `UP` for B.

        Raises:
            ConfigError: the shape or dtype is another than that of the task's adapters.
        """
        found, dtype = list(there.get_shape()), there.get_dtype()
        if found != (wanted := _shape_in_peft(entry, half, self.lora.rank)):
            raise ConfigError(
                f"{ADAPTER} has {leaf} of shape {found}, but rank {self.lora.rank} and the base"
                f" make it {wanted}",
                hint=f"{ADAPTER} and {ADAPTER_CONFIG} are of different adapters, or the base is of"
                " another shape: copy both from one place",
            )
        if dtype not in checkpoint.READ:
            raise ConfigError(
                f"{ADAPTER} has {leaf} as {dtype}; float32, bfloat16 and float16 are read",
                hint="quantized adapters are not trained: give the one that they were made from",
            )

    def write(self, folder: Path, leaves: Mapping[str, Any], dtype: str) -> None:
        """Writes the adapters without their base.

        Args:
            folder: a new or empty folder.
            leaves: trained leaves, by name.
            dtype: the dtype of the written tensors, by its name in `DTYPES`.

        Raises:
            ConfigError: the base has no folder; or `folder` cannot be written, and nothing is left
                of it.
        """
        if self.source is None:
            raise ConfigError(
                f"an adapter is loaded beside the folder of its base, but model={self.name!r} is a"
                " published size with random parameters",
                hint="merge the adapter into it: --merge",
            )
        tensors = {}
        for name, entry, half in self._halves():
            for layer, leaf in enumerate(self._names(entry, half)):
                values = _to_peft(entry, np.asarray(leaves[name][layer]), half)
                tensors[leaf] = np.ascontiguousarray(values.astype(DTYPES[dtype]))
        with staged(folder) as partial:
            save_file(tensors, partial / ADAPTER, metadata={"format": "pt"})
            carry(self.source, partial)
            (partial / ADAPTER_CONFIG).write_text(json.dumps(self._document(), indent=2) + "\n")

    def write_merged(self, folder: Path, leaves: Mapping[str, Any], dtype: str) -> None:
        """Writes a checkpoint of the base into which the adapters are merged.

        Args:
            folder: a new or empty folder.
            leaves: trained and frozen leaves, by name.
            dtype: the dtype of the checkpoint's tensors, by its name in `DTYPES`.

        Raises:
            ConfigError: the folder cannot be written; nothing is left of it.
        """
        whole = {name: leaves[FROZEN + name] for name in table(self.config)}
        for entry in targets_of(self.config, self.lora):
            down, up = (leaves[f"{TRAINED}{entry.name}/{half}"] for half in (DOWN, UP))
            parts = {entry.name: up}
            if kind_of(entry) == GATE_UP:
                gate_up = np.split(up, 2, -1)
                if entry.name in whole:
                    # The decoder has gate and up in one tensor, along an axis of their own.
                    down, parts = down[:, :, None], {entry.name: np.stack(gate_up, axis=2)}
                else:
                    place = entry.name.removesuffix(GATE_UP)
                    names = (f"{place}expert_gate", f"{place}expert_up")
                    parts = dict(zip(names, gate_up, strict=True))
            for name, part in parts.items():
                whole[name] = AdaptedMatrix(whole[name], down, part, self.lora.scale)
        checkpoint.write_checkpoint(folder, self.config, whole, dtype=dtype, beside=self.source)

    def _halves(self) -> list[tuple[str, TensorEntry, str]]:
        """Returns (leaf's name, matrix that it adapts, `DOWN` for A or `UP` for B) of each leaf."""
        return [
            (f"{TRAINED}{entry.name}/{half}", entry, half)
            for entry in targets_of(self.config, self.lora)
            for half in (DOWN, UP)
        ]

    def _names(self, entry: TensorEntry, half: str) -> list[str]:
        """Returns the names, in `peft`'s files, of A or B of a matrix in each layer of its group.

        Args:
            entry: the matrix.
            half: `DOWN` for A, `UP` for B.
        """
        name = entry.checkpoint_name.removesuffix(".weight")
        if self.config.image_text is not None:
            name = WITHIN + name.removeprefix(ALONE)
        if _of_experts(entry):
            # In peft, the adapter of a module's second parameter wraps the adapter of the first.
            inner = kind_of(entry) == GATE_UP and OUT in self.lora.targets
            name = name.rpartition(".")[0] + (".base_layer" if inner else "")
        end = f"{_PEFT_NAMES[half]}.weight"
        return [f"base_model.model.{name.format(n)}.{end}" for n in entry.layers]

    def _document(self) -> dict[str, Any]:
        def chosen(known: Mapping[str, list[TensorEntry]]) -> dict[str, TensorEntry]:
            firsts = {module: entries[0] for module, entries in known.items()}
            return {m: one for m, one in firsts.items() if kind_of(one) in self.lora.targets}

        modules, parameters = chosen(matrices_of(self.config)), chosen(experts_of(self.config))
        targets: list[str] | str = list(modules)
        if self.config.image_text is not None and modules:
            # Towers have modules of the same names, which peft cannot adapt.
            targets = rf"{re.escape(WITHIN)}layers\.\d+\.(.*\.)?({'|'.join(modules)})"
        document = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.name,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        if parameters:
            # Names within a layer, as the name of the layers' module differs between checkpoints.
            within = [one.checkpoint_name.partition("{}.")[2] for one in parameters.values()]
            document["target_parameters"] = within
        return document


def _of_experts(entry: TensorEntry) -> bool:
    return "experts" in entry.axes


def _shape_in_peft(entry: TensorEntry, half: str, rank: int) -> list[int]:
    """Returns the shape of A or B of one layer in `peft`'s format (`_to_peft`)."""
    _, *experts, inputs, outputs = entry.shape
    ranks = rank * math.prod(experts)
    return [ranks, inputs] if half == DOWN else [outputs, ranks]


def _to_peft(entry: TensorEntry, values: np.ndarray, half: str) -> np.ndarray:
    """Converts A or B of one layer to `peft`'s format: A [R, I], B [O, R].

    For experts, the format is A [E x R, I], ordered by expert, and B [O, R x E], ordered by rank.
    """
    if not _of_experts(entry):
        return values.T
    if half == DOWN:
        return values.swapaxes(1, 2).reshape(-1, values.shape[1])
    return values.transpose(2, 1, 0).reshape(values.shape[2], -1)


def _from_peft(entry: TensorEntry, half: str, values: np.ndarray) -> np.ndarray:
    """Converts A or B of one layer from `peft`'s format: the inverse of `_to_peft`."""
    if not _of_experts(entry):
        return values.T
    experts = entry.shape[1]
    if half == DOWN:
        return values.reshape(experts, -1, values.shape[1]).swapaxes(1, 2)
    return values.reshape(values.shape[0], -1, experts).transpose(2, 1, 0)


class LazyFrozenLeaf:
    """A frozen leaf of a checkpoint, as an array whose values are read when it is indexed.

    Args:
        rows: the tensor of the checkpoint, which reads rows in float32.
        dtype: the dtype of the values that indexing returns.

    Attributes:
        shape: shape of the whole leaf.
        dtype: the dtype of the values that indexing returns.
    """

    def __init__(self, rows: Rows | LayersOf, dtype: np.dtype) -> None:
        self._rows, self.dtype, self.shape = rows, dtype, rows.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, int):
            row: np.ndarray = self[index : index + 1][0]
            return row
        first, *rest = index if isinstance(index, tuple) else (index,)
        start, stop, _ = first.indices(self.shape[0])
        found = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        # Row by row, so that only one layer of a stacked matrix is in float32 at a time.
        step = 1 if len(self.shape) > 2 else max(1, stop - start)
        for place in range(start, stop, step):
            found[place - start : place - start + step] = self._rows[place : place + step]
        part: np.ndarray = found[(slice(None), *rest)]
        return part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        whole = self[:]
        return whole if dtype is None else whole.astype(dtype, copy=False)


def read_base(source: Path, config: DecoderConfig, dtype: str) -> Params:
    """Returns the tensors of a base checkpoint as a tree of frozen leaves; reads no values yet.

    Args:
        source: the checkpoint's folder.
        config: the decoder's configuration.
        dtype: the dtype in memory of all leaves but norms and gains of experts (`base_dtypes`).

    Raises:
        ConfigError: a file is missing or damaged, or does not fit the configuration.
        TaskError: the folder has no tensors.
    """
    rows = checkpoint.read_checkpoint(require_weights(source), config)
    held = base_dtypes(config, dtype)
    return tree.nested({name: LazyFrozenLeaf(rows[name], each) for name, each in held.items()})
