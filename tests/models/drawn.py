"""Shapes drawn from transformers' configuration classes, before our own table of families was.

Of each shape the family is drawn, then each key of its configuration class that a user would set:
with a chance of a third it is off its default. Nothing is drawn again because it is refused: what
our decoder does not compute it has to refuse by name.
"""

import random
from typing import Any

SEED, COUNT, CHANCE = "ceebfe2e", 24, 1 / 3
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
_SCALED = {"original_max_position_embeddings": 64, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": _SCALED,
    "yarn-all": _SCALED | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2},
    "llama3": _SCALED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
# What each is refused for. The last is no decoder of transformers either: no window is asked for.
REFUSED = {
    "drawn-09-gemma2": "use_bidirectional_attention",
    "drawn-17-qwen3": "layer_types",
}
COMMON: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 4),
    "head_dim": (8, 24),
    "rms_norm_eps": (1e-5, 1e-3),
    "tie_word_embeddings": (True, False),
    "rope_theta": (5_000.0, 500_000.0),
    "rope_scaling": tuple(ROPES),
}
_WINDOW: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (True,),
    "sliding_window": (7, 40),
    "max_window_layers": (0, 2),
    "layer_types": (["full_attention", "sliding_attention", "full_attention"],),
}
_EXPERTS: dict[str, tuple[Any, ...]] = {
    "num_experts_per_tok": (1, 3),
    "router_aux_loss_coef": (0.0, 0.1),
    "output_router_logits": (True,),
}
_GATE = {"hidden_act": ACTIVATIONS}
_GEMMA: dict[str, tuple[Any, ...]] = {
    "query_pre_attn_scalar": (8, 24),
    "sliding_window": (7, 40),
    "hidden_activation": ACTIVATIONS,
    "attention_bias": (True,),
    "final_logit_softcapping": (None, 5.0),
    "attn_logit_softcapping": (None, 5.0),
    "use_bidirectional_attention": (True,),
    "layer_types": (["full_attention", "sliding_attention", "full_attention"],),
}
FAMILIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": _GATE | {"attention_bias": (True,), "mlp_bias": (True,), "pretraining_tp": (2,)},
    "qwen2": _GATE | _WINDOW,
    "qwen3": _GATE | _WINDOW | {"attention_bias": (True,)},
    "mistral": _GATE | {"sliding_window": (None, 7, 40)},
    "gemma": _GATE | {"attention_bias": (True,), "use_bidirectional_attention": (True,)},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"rope_local_base_freq": (2_000.0,)},
    "qwen3_moe": _GATE
    | _EXPERTS
    | {
        "attention_bias": (True,),
        "use_sliding_window": (True,),
        "sliding_window": (7, 40),
        "norm_topk_prob": (True,),
        "moe_intermediate_size": (24,),
        "decoder_sparse_step": (2,),
        "mlp_only_layers": ([0],),
    },
    "mixtral": _GATE | _EXPERTS | {"sliding_window": (7, 40), "router_jitter_noise": (0.1,)},
}
_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_TINY_EXPERTS = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "mixtral": {"num_local_experts": 6},
}


def drawn() -> dict[str, dict[str, Any]]:
    """`config.json` documents by name."""
    rng = random.Random(SEED)
    found = {}
    for number in range(COUNT):
        family = rng.choice(tuple(FAMILIES))
        shape = {"model_type": family} | _TINY | _TINY_EXPERTS.get(family, {})
        for key, values in (COMMON | FAMILIES[family]).items():
            if rng.random() < CHANCE:
                shape[key] = rng.choice(values)
        if name := shape.get("rope_scaling"):
            shape["rope_scaling"] = ROPES[name] | {"rope_type": name.removesuffix("-all")}
        found[f"drawn-{number:02}-{family}"] = shape
    return found
