"""A decoder's tensors: their names and shapes here, and in a folder of Hugging Face."""

import dataclasses
import itertools

from diloco.models.decoders.config import DecoderConfig
from diloco.models.decoders.families import FAMILY_FILES

LAYERS = "layers/"
BIAS = "_bias"  # behind the name of a matrix


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor.

    Attributes:
        name: here, as leaves of the parameters are named.
        checkpoint_name: there; with `{}` for the layer's number where they are stacked here, and
            another for the expert's.
        shape: here.
        transposed: whether the last two axes are the other way round there.
        axes: the kinds of the axes, for partition specifications.
    """

    name: str
    checkpoint_name: str
    shape: tuple[int, ...]
    transposed: bool
    axes: tuple[str, ...]

    @property
    def stacked(self) -> int:
        """The number of leading axes that count tensors of the checkpoint: layers, and experts."""
        return self.checkpoint_name.count("{}")

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """The shape of one tensor of the checkpoint."""
        shape = self.shape[self.stacked :]
        return shape[::-1] if self.transposed else shape

    def checkpoint_names(self) -> tuple[str, ...]:
        """Names of the checkpoint's tensors that are one tensor here, in their order."""
        places = itertools.product(*map(range, self.shape[: self.stacked]))
        return tuple(self.checkpoint_name.format(*place) for place in places)


def table(config: DecoderConfig) -> dict[str, TensorEntry]:
    """All tensors of a decoder, by their names here."""
    D, V = config.width, config.vocab
    queries, keys = config.heads * config.head_width, config.kv_heads * config.head_width
    entries = [
        _whole("embed", "model.embed_tokens.weight", (V, D), ("vocab", "width")),
        _whole("norm", "model.norm.weight", (D,), ("width",)),
        _matrix(config, "q", "self_attn.q_proj", (D, queries), ("width", "heads")),
        _matrix(config, "k", "self_attn.k_proj", (D, keys), ("width", "heads")),
        _matrix(config, "v", "self_attn.v_proj", (D, keys), ("width", "heads")),
        _matrix(config, "o", "self_attn.o_proj", (queries, D), ("heads", "width")),
        *_mlp(config),
        *(_vector(config, name, source) for name, source in _norms(config)),
    ]
    biased = {LAYERS + name for name in config.biased}
    entries += [_bias(entry) for entry in entries if entry.name in biased]
    if not config.tied:
        entries.append(_whole("head", "lm_head.weight", (V, D), ("vocab", "width")))
    return {entry.name: entry for entry in entries}


def _mlp(config: DecoderConfig) -> list[TensorEntry]:
    files, experts = FAMILY_FILES[config.family].experts, config.experts
    D, F = config.width, config.mlp_width
    if files is None or experts is None:
        return [
            _matrix(config, "gate", "mlp.gate_proj", (D, F), ("width", "mlp")),
            _matrix(config, "up", "mlp.up_proj", (D, F), ("width", "mlp")),
            _matrix(config, "down", "mlp.down_proj", (F, D), ("mlp", "width")),
        ]
    E, F = experts.count, experts.width
    gate, up, down = (f"{files.module}.experts.{{}}.{matrix}" for matrix in files.matrices)
    inward, outward = ("experts", "width", "mlp"), ("experts", "mlp", "width")
    return [
        _matrix(config, "router", f"{files.module}.gate", (D, E), ("width", "experts")),
        _matrix(config, "expert_gate", gate, (E, D, F), inward),
        _matrix(config, "expert_up", up, (E, D, F), inward),
        _matrix(config, "expert_down", down, (E, F, D), outward),
    ]


def _norms(config: DecoderConfig) -> list[tuple[str, str]]:
    # What is called post_attention_layernorm follows attention where halves end in norms; elsewhere
    # it precedes the MLP.
    norms = [("attn_norm", "input_layernorm")]
    if config.post_norms:
        norms += [
            ("attn_post_norm", "post_attention_layernorm"),
            ("mlp_norm", "pre_feedforward_layernorm"),
            ("mlp_post_norm", "post_feedforward_layernorm"),
        ]
    else:
        norms += [("mlp_norm", "post_attention_layernorm")]
    if config.head_norms:
        norms += [("q_norm", "self_attn.q_norm"), ("k_norm", "self_attn.k_norm")]
    return norms


def _whole(name: str, source: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> TensorEntry:
    return TensorEntry(name=name, checkpoint_name=source, shape=shape, transposed=False, axes=axes)


def _matrix(
    config: DecoderConfig,
    name: str,
    source: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> TensorEntry:
    return TensorEntry(
        name=LAYERS + name,
        checkpoint_name=f"model.layers.{{}}.{source}.weight",
        shape=(config.layers, *shape),
        transposed=True,
        axes=("layers", *axes),
    )


def _bias(matrix: TensorEntry) -> TensorEntry:
    return TensorEntry(
        name=matrix.name + BIAS,
        checkpoint_name=matrix.checkpoint_name.removesuffix("weight") + "bias",
        shape=(matrix.shape[0], matrix.shape[-1]),
        transposed=False,
        axes=("layers", matrix.axes[-1]),
    )


def _vector(config: DecoderConfig, name: str, source: str) -> TensorEntry:
    of_head = name in ("q_norm", "k_norm")
    return TensorEntry(
        name=LAYERS + name,
        checkpoint_name=f"model.layers.{{}}.{source}.weight",
        shape=(config.layers, config.head_width if of_head else config.width),
        transposed=False,
        axes=("layers", "head" if of_head else "width"),
    )
