"""Lists a decoder's tensors: names and shapes in this project and in Hugging Face checkpoints."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from diloco.learner.tensors.utilization import flops_per_token
from diloco.models.decoders.config import DecoderConfig
from diloco.models.decoders.families import FAMILY_FILES
from diloco.models.decoders.groups import Group, attended, groups_of

if TYPE_CHECKING:
    from diloco.models.decoders.vision import Tower

LAYERS = "layers/"  # prefix of the names of layers' tensors
TOWER = "tower/"  # prefix of the names of the vision tower's tensors
# The bounds of a product of the vision tower, in the order in which they are used.
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
BIAS = "_bias"  # what follows a matrix's name in the name of its bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor of a decoder: a leaf of the parameters, which may stack several checkpoint tensors.

    Attributes:
        name: name of the leaf.
        checkpoint_name: name of the tensor in checkpoints; the first `{}` in it stands for the
            number of a stacked layer, and a second `{}` for the number of a stacked expert.
        shape: shape of the leaf.
        transposed: whether checkpoints have the last two axes in the other order.
        axes: the kinds of the leaf's axes, for partitions. The axis "both" counts two matrices,
            which checkpoints have one after the other on their output axis.
        layers: numbers of the stacked layers in checkpoints.
    """

    name: str
    checkpoint_name: str
    shape: tuple[int, ...]
    transposed: bool
    axes: tuple[str, ...]
    layers: tuple[int, ...] = ()

    @property
    def stacked(self) -> int:
        """The number of leading axes that stack checkpoint tensors: layers, and experts."""
        return self.checkpoint_name.count("{}")

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """The shape of each checkpoint tensor that this leaf stacks."""
        shape = self._turned_shape
        if "both" not in self.axes:
            return shape
        place = self.axes.index("both") - self.stacked
        return (*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])

    @property
    def _turned_shape(self) -> tuple[int, ...]:
        shape = self.shape[self.stacked :]
        return (*shape[:-2], *shape[:-3:-1]) if self.transposed else shape

    def from_checkpoint(self, values: np.ndarray) -> np.ndarray:
        """Returns a checkpoint tensor as the part of this leaf for one layer (and expert)."""
        values = values.reshape(self._turned_shape)
        return np.swapaxes(values, -1, -2) if self.transposed else values

    def to_checkpoint(self, values: np.ndarray) -> np.ndarray:
        """Returns the part of this leaf for one layer (and expert) as a checkpoint tensor."""
        there = np.swapaxes(values, -1, -2) if self.transposed else values
        return there.reshape(self.checkpoint_shape)

    def checkpoint_names(self) -> tuple[str, ...]:
        """Returns the names of the checkpoint tensors that this leaf stacks, in order."""
        counted = map(range, self.shape[1 : self.stacked])
        places = itertools.product(*([self.layers] if self.stacked else []), *counted)
        return tuple(self.checkpoint_name.format(*place) for place in places)


def table(config: DecoderConfig) -> dict[str, TensorEntry]:
    """Returns all tensors of a decoder, by `TensorEntry.name`."""
    D, V = config.width, config.vocab
    entries = [
        _whole("embed", "model.embed_tokens.weight", (V, D), ("vocab", "width")),
        _whole("norm", "model.norm.weight", (D,), ("width",)),
        *_fed(config),
    ]
    for group in groups_of(config).values():
        entries += _layer(group)
    if not config.tied:
        entries.append(_whole("head", "lm_head.weight", (V, D), ("vocab", "width")))
    if config.tower is not None:
        entries += _tower(config.tower, D)
    return {entry.name: entry for entry in entries}


def buffers_of(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the names of the tensors that are buffers in transformers, and never trained."""
    ends = ("/scale", *(f"_{bound}" for bound in BOUNDS), "/std_bias", "/std_scale")
    return tuple(name for name in table(config) if name.endswith(ends))


def _tower(tower: "Tower", D: int) -> list[TensorEntry]:
    """Returns the tensors of the vision tower, and the matrix from its output to embeddings."""
    E, module = tower.blocks.width, "model.vision_tower."
    patches = f"{module}patch_embedder."
    place = ("one", "one", "width")
    entries = [
        _turned("embed", f"{patches}input_proj.weight", (tower.patch_width, E)),
        _whole("positions", f"{patches}position_embedding_table", (2, tower.places, E), place),
        _turned("projection", "model.embed_vision.embedding_projection.weight", (E, D)),
    ]
    if tower.standardized:
        names = ("std_bias", "std_scale")
        entries += [_whole(name, module + name, (E,), ("width",)) for name in names]
    for entry in _layer(groups_of(tower.blocks)[""]):
        source = entry.checkpoint_name.replace("model.", f"{module}encoder.")
        matrix = source.removesuffix("proj.weight")
        if matrix == source:
            entries.append(dataclasses.replace(entry, checkpoint_name=source))
            continue
        entries.append(dataclasses.replace(entry, checkpoint_name=f"{matrix}proj.linear.weight"))
        for bound in BOUNDS if tower.clipped else ():
            entries.append(
                dataclasses.replace(
                    entry,
                    name=f"{entry.name}_{bound}",
                    checkpoint_name=f"{matrix}proj.{bound}",
                    shape=entry.shape[:1],
                    transposed=False,
                    axes=("layers",),
                )
            )
    return [dataclasses.replace(entry, name=TOWER + entry.name) for entry in entries]


def multiplied(config: DecoderConfig, counts: Callable[[str], bool] = lambda _name: True) -> int:
    """Returns the number of matrix parameters that a token is multiplied with, head included.

    The vision tower's parameters are not counted, as its patches are not tokens.

    Args:
        config: the decoder's configuration.
        counts: returns True for the name of a tensor that is counted.
    """
    head = "embed" if config.tied else "head"
    return sum(
        _used(config, entry)
        for name, entry in table(config).items()
        if counts(name) and (entry.transposed or name == head) and not name.startswith(TOWER)
    )


def active(config: DecoderConfig) -> int:
    """Returns the number of parameters used for one token: of experts, only the chosen ones."""
    return sum(_used(config, entry) for entry in table(config).values())


def _used(config: DecoderConfig, entry: TensorEntry) -> int:
    size = math.prod(entry.shape)
    if config.experts is None or not entry.name.rpartition("/")[2].startswith("expert_"):
        return size
    return size * config.experts.chosen // config.experts.count


def operations(config: DecoderConfig, length: int) -> float:
    """Returns floating-point operations to train on one token, in rows of `length` tokens."""
    return flops_per_token(multiplied(config), attended(config, length))


def _layer(group: Group) -> list[TensorEntry]:
    config = group.config
    D = config.width
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    matrices = [_matrix(group, "q", "self_attn.q_proj", (D, queries), ("width", "heads"))]
    if not config.takes_keys:
        matrices.append(_matrix(group, "k", "self_attn.k_proj", (D, keys), ("width", "heads")))
    if not (config.takes_keys or config.keys_are_values):
        matrices.append(_matrix(group, "v", "self_attn.v_proj", (D, keys), ("width", "heads")))
    matrices += [
        _matrix(group, "o", "self_attn.o_proj", (queries, D), ("heads", "width")),
        *_mlp(group),
    ]
    biased = [_bias(entry) for entry in matrices if entry.name.rpartition("/")[2] in config.biased]
    vectors = [_vector(group, name, source) for name, source in _norms(config)]
    return [*matrices, *vectors, *_beside(group), *biased]


def _fed(config: DecoderConfig) -> list[TensorEntry]:
    """Returns the tensors from which per-layer embeddings are computed."""
    if not config.fed_width:
        return []
    D, P = config.width, config.fed_width
    every = config.layers * P
    table_name, projection = "embed_tokens_per_layer", "per_layer_model_projection"
    axes = ("vocab", "width")
    return [
        _whole("fed_embed", f"model.{table_name}.weight", (config.fed_vocab, every), axes),
        _turned("fed_matrix", f"model.{projection}.weight", (D, every)),
        _whole("fed_norm", "model.per_layer_projection_norm.weight", (P,), ("head",)),
    ]


def _beside(group: Group) -> list[TensorEntry]:
    """Returns the tensors of a group's layers for per-layer embeddings and the outputs' scale."""
    D, P = group.config.width, group.config.fed_width
    found = []
    if P:
        found += [
            _matrix(group, "fed_gate", "per_layer_input_gate", (D, P), ("width", "heads")),
            _matrix(group, "fed_up", "per_layer_projection", (P, D), ("heads", "width")),
            _vector(group, "fed_post_norm", "post_per_layer_input_norm"),
        ]
    if group.config.scaled_layers:
        found.append(stacked(group, "scale", "layer_scalar", (1,), ("one",)))
    return found


def _mlp(group: Group) -> list[TensorEntry]:
    config = group.config
    files, experts = FAMILY_FILES[config.family].experts, config.experts
    D, F = config.width, config.mlp_width
    dense = [
        _matrix(group, "gate", "mlp.gate_proj", (D, F), ("width", "mlp")),
        _matrix(group, "up", "mlp.up_proj", (D, F), ("width", "mlp")),
        _matrix(group, "down", "mlp.down_proj", (F, D), ("mlp", "width")),
    ]
    if files is None or experts is None:
        return dense
    E, F = experts.count, experts.width
    inward, outward = ("experts", "width", "mlp"), ("experts", "mlp", "width")
    if files.matrices is None:
        both = ("experts", "both", "width", "mlp")
        return [
            *dense,
            _matrix(group, "router", "router.proj", (D, E), ("width", "experts")),
            stacked(group, "router_scale", "router.scale", (D,), ("width",)),
            stacked(group, "router_gain", "router.per_expert_scale", (E,), ("experts",)),
            _experts(group, "expert_gate_up", "gate_up_proj", (E, 2, D, F), both),
            _experts(group, "expert_down", "down_proj", (E, F, D), outward),
        ]
    gate, up, down = (f"{files.module}.experts.{{}}.{matrix}" for matrix in files.matrices)
    return [
        _matrix(group, "router", f"{files.module}.gate", (D, E), ("width", "experts")),
        _matrix(group, "expert_gate", gate, (E, D, F), inward),
        _matrix(group, "expert_up", up, (E, D, F), inward),
        _matrix(group, "expert_down", down, (E, F, D), outward),
    ]


def _norms(config: DecoderConfig) -> list[tuple[str, str]]:
    # With post_norms, post_attention_layernorm follows attention; otherwise it precedes the MLP.
    norms = [("attn_norm", "input_layernorm")]
    if config.post_norms:
        norms += [
            ("attn_post_norm", "post_attention_layernorm"),
            ("mlp_norm", "pre_feedforward_layernorm"),
            ("mlp_post_norm", "post_feedforward_layernorm"),
        ]
    else:
        norms += [("mlp_norm", "post_attention_layernorm")]
    if config.experts is not None and config.experts.beside:
        norms += [
            ("dense_post_norm", "post_feedforward_layernorm_1"),
            ("experts_norm", "pre_feedforward_layernorm_2"),
            ("experts_post_norm", "post_feedforward_layernorm_2"),
        ]
    if config.head_norms:
        norms.append(("q_norm", "self_attn.q_norm"))
    if config.head_norms and not config.takes_keys:
        norms.append(("k_norm", "self_attn.k_norm"))
    return norms


def _whole(name: str, source: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> TensorEntry:
    return TensorEntry(name=name, checkpoint_name=source, shape=shape, transposed=False, axes=axes)


def _turned(name: str, source: str, shape: tuple[int, ...]) -> TensorEntry:
    entry = _whole(name, source, shape, ("width", "heads"))
    return dataclasses.replace(entry, transposed=True)


def stacked(
    group: Group, name: str, source: str, shape: tuple[int, ...], axes: tuple[str, ...]
) -> TensorEntry:
    """Returns the entry of a tensor that each layer of a group has, stacked along a first axis.

    Args:
        group: the layers.
        name: the tensor's name within a layer.
        source: the tensor's name within a layer of a checkpoint.
        shape: the tensor's shape in one layer.
        axes: the kinds of the tensor's axes in one layer.
    """
    return TensorEntry(
        name=f"{LAYERS}{group.name}/{name}" if group.name else LAYERS + name,
        checkpoint_name=f"model.layers.{{}}.{source}",
        shape=(len(group.numbers), *shape),
        transposed=False,
        axes=("layers", *axes),
        layers=group.numbers,
    )


def _matrix(
    group: Group, name: str, source: str, shape: tuple[int, ...], axes: tuple[str, ...]
) -> TensorEntry:
    return dataclasses.replace(
        stacked(group, name, f"{source}.weight", shape, axes), transposed=True
    )


def _experts(
    group: Group, name: str, source: str, shape: tuple[int, ...], axes: tuple[str, ...]
) -> TensorEntry:
    """Returns the entry of a tensor that has all experts of a layer also in checkpoints."""
    entry = stacked(group, name, f"experts.{source}", shape, axes)
    return dataclasses.replace(entry, transposed=True)


def _bias(matrix: TensorEntry) -> TensorEntry:
    return dataclasses.replace(
        matrix,
        name=matrix.name + BIAS,
        checkpoint_name=matrix.checkpoint_name.removesuffix("weight") + "bias",
        shape=(matrix.shape[0], matrix.shape[-1]),
        transposed=False,
        axes=("layers", matrix.axes[-1]),
    )


def _vector(group: Group, name: str, source: str) -> TensorEntry:
    of_head = name in ("q_norm", "k_norm")
    width = group.config.head_width if of_head else group.config.width
    axes = ("head",) if of_head else ("width",)
    return stacked(group, name, f"{source}.weight", (width,), axes)
