"""A decoder's `config.json`, written as its family's files say it."""

from typing import Any

from diloco.models.decoders.config import FULL, SLIDING, DecoderConfig, Unlike
from diloco.models.decoders.families import FAMILY_FILES


def config_document(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The content of a decoder's `config.json`, with both spellings of rotary positions."""
    files = FAMILY_FILES[config.family]
    said = _said(config)
    document: dict[str, Any] = {
        "architectures": [files.architecture],
        "model_type": config.family,
        "dtype": dtype,
        "attention_dropout": 0.0,
        **dict(config.tokens),
        **{key: said[key] for key in sorted((files.known - files.must_be.keys()) & said.keys())},
    }
    if config.positions:
        document["max_position_embeddings"] = config.positions
    return document


def _said(config: DecoderConfig) -> dict[str, Any]:
    """Every key that some family has, as this decoder's file would say it."""
    said: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": config.activation,
        "hidden_activation": config.activation,
        "attention_bias": "o" in config.biased,
        "mlp_bias": "up" in config.biased,
        "use_sliding_window": any(config.sliding),
        "sliding_window": config.window,
        "layer_types": [SLIDING if slides else FULL for slides in config.sliding],
        "query_pre_attn_scalar": _scalar(config.query_scale),
        "final_logit_softcapping": config.logit_cap,
        "attn_logit_softcapping": config.score_cap,
        **config.rope.document(),
    }
    files = FAMILY_FILES[config.family]
    if "rope_local_base_freq" in files.defaults:
        said["rope_local_base_freq"] = config.local_rope.theta
        parameters = {FULL: config.rope.parameters(), SLIDING: config.local_rope.parameters()}
        said["rope_parameters"] = parameters
    if config.unlike is not None:
        said |= _said_of_unlike(config, config.unlike)
    if config.experts is not None and files.experts is not None:
        said[files.experts.chosen] = config.experts.chosen
        said["norm_topk_prob"] = config.experts.normed
        said["router_aux_loss_coef"] = config.experts.balance
        said[files.experts.count] = config.experts.count
        said[files.experts.width] = config.experts.width
    return said


def _said_of_unlike(config: DecoderConfig, unlike: Unlike) -> dict[str, Any]:
    heads, width = unlike.full_kv_heads, unlike.full_head_width
    full, near = config.rope.parameters(), config.local_rope.parameters()
    own: dict[str, Any] = {}
    if unlike.full_keys_are_values:
        own["num_global_key_value_heads"] = heads
    elif heads != config.kv_heads:
        wide = {"head_dim": width, "num_key_value_heads": heads}
        layers = [layer for layer, slides in enumerate(config.sliding) if not slides]
        own["per_layer_config"] = {str(layer): wide for layer in layers}
    return {
        **own,
        "rope_parameters": {FULL: full, SLIDING: near},
        "global_head_dim": width,
        "attention_k_eq_v": unlike.full_keys_are_values,
        "num_kv_shared_layers": unlike.shared,
        "use_double_wide_mlp": unlike.shared_mlp_width != config.mlp_width,
        "hidden_size_per_layer_input": config.fed_width,
        "vocab_size_per_layer_input": config.fed_vocab or config.vocab,
        "enable_moe_block": config.experts is not None,
    }


def _scalar(scale: float) -> float | int:
    """`query_pre_attn_scalar` of a scale; whole where it is."""
    scalar = scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar
