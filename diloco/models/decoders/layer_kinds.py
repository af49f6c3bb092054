"""Hyperparameters of experts, and of decoders whose layers differ."""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.models.decoders.config import DecoderConfig

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of each layer, of which a router chooses some for each token.

    Attributes:
        count: the number of experts, E.
        chosen: the number of experts that each token uses, C.
        width: the width of an expert, F.
        normed: whether the weights of a token's experts are divided by their sum.
        balance: factor of the load-balancing loss in the training loss; 0: it is not added.
        beside: whether the layer also has an MLP, whose output is added to that of the experts.
    """

    count: int
    chosen: int
    width: int
    normed: bool
    balance: float
    beside: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerDifferences:
    """The differences between a decoder's layers (Gemma 4).

    Layers are of two kinds: sliding layers have a sliding window, full layers have none.

    Attributes:
        full_head_width: width of a head, K, of full layers.
        full_kv_heads: heads of keys and values, G, of full layers.
        full_keys_are_values: whether full layers use their keys, before norm and rotation, as
            values.
        shared: the number of layers at the end that compute no keys and values; each uses those of
            the last earlier layer of its kind.
        shared_mlp_width: width of the MLP, F, of these `shared` layers.
    """

    full_head_width: int
    full_kv_heads: int
    full_keys_are_values: bool
    shared: int
    shared_mlp_width: int


def said_of_differences(
    config: "DecoderConfig", layer_differences: LayerDifferences
) -> dict[str, Any]:
    """Returns the entries of `config.json` that describe how a decoder's layers differ."""
    heads, width = layer_differences.full_kv_heads, layer_differences.full_head_width
    full, near = config.rope.parameters(), config.local_rope.parameters()
    own: dict[str, Any] = {}
    if layer_differences.full_keys_are_values:
        own["num_global_key_value_heads"] = heads
    elif heads != config.kv_heads:
        wide = {"head_dim": width, "num_key_value_heads": heads}
        layers = [layer for layer, slides in enumerate(config.sliding) if not slides]
        own["per_layer_config"] = {str(layer): wide for layer in layers}
    return {
        **own,
        "rope_parameters": {FULL: full, SLIDING: near},
        "global_head_dim": width,
        "attention_k_eq_v": layer_differences.full_keys_are_values,
        "num_kv_shared_layers": layer_differences.shared,
        "use_double_wide_mlp": layer_differences.shared_mlp_width != config.mlp_width,
        "hidden_size_per_layer_input": config.fed_width,
        "vocab_size_per_layer_input": config.fed_vocab or config.vocab,
        "enable_moe_block": config.experts is not None,
    }
