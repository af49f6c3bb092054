"""The tiny decoders that are held against transformers: config.json documents by name.

Each family has plain files of both spellings, and every key that is honoured once off its default.
"""

from typing import Any

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "head_dim": 16,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "max_position_embeddings": 512,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 40}
GEMMA2 = {
    **{
        key: value
        for key, value in GEMMA3.items()
        if key not in ("rope_local_base_freq", "sliding_window_pattern")
    },
    "model_type": "gemma2",
    "rope_theta": 10000.0,
}
GEMMA = {
    **{
        key: value
        for key, value in GEMMA2.items()
        if key not in ("query_pre_attn_scalar", "sliding_window")
    },
    "model_type": "gemma",
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "output_router_logits": True,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "rope_theta": 1000000.0,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.02,
    "output_router_logits": True,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "sliding_window": 32,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, dict[str, Any]] = {
    "llama-3": LLAMA,
    "llama-3.1": LLAMA | {"rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama-parameters": {
        **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
        "rope_parameters": LLAMA3 | {"rope_theta": 10000.0, "factor": 32.0},
        "head_dim": 24,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-2,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "llama-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen3": QWEN3,
    "qwen3-tied": QWEN3
    | {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    "qwen3-window": QWEN3
    | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen3-layers": {
        **{key: value for key, value in QWEN3.items() if key != "rope_theta"},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "hidden_act": "gelu_pytorch_tanh",
    },
    "gemma3": GEMMA3,
    "gemma3-4b": GEMMA3
    | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "query_pre_attn_scalar": 24,
        "num_key_value_heads": 2,
        "final_logit_softcapping": 4.0,
    },
    "gemma3-parameters": {
        **{key: value for key, value in GEMMA3.items() if "rope" not in key},
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 200000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
        },
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 1
        + ["full_attention"],
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-2,
        "hidden_activation": "silu",
        "head_dim": 24,
    },
    "llama-biased": LLAMA
    | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "rope_scaling": YARN},
    "qwen2": QWEN2,
    "qwen2-window": QWEN2
    | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1, "head_dim": 16},
    "mistral": MISTRAL,
    "mistral-whole": MISTRAL
    | {
        "sliding_window": None,
        "hidden_act": "relu",
        "rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    },
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma2-uncapped": GEMMA2
    | {
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 24,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "gemma4-31b": GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4-e2b": GEMMA4
    | {
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "rms_norm_eps": 1e-3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 100,
    },
    "gemma4-e4b": GEMMA4
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 96,
        "per_layer_config": {
            str(layer): {"head_dim": 32, "num_key_value_heads": 4} for layer in (1, 3, 4, 5)
        },
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 200000.0},
            "sliding_attention": {
                "rope_type": "proportional",
                "rope_theta": 3000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-2,
        "hidden_activation": "silu",
        "final_logit_softcapping": None,
        "use_bidirectional_attention": "vision",
    },
    "gemma4-26b": GEMMA4
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] + ["full_attention"] * 3,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-normed": QWEN3_MOE
    | {
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "router_aux_loss_coef": 0.1,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 40,
    },
    "mixtral": MIXTRAL,
    "mixtral-window": MIXTRAL
    | {"sliding_window": 40, "tie_word_embeddings": True, "num_experts_per_tok": 1, "head_dim": 16},
}

# Image-and-text checkpoints, whose exports take tensors from the folder that they were read from.
GEMMA4_WHOLE = {
    "model_type": "gemma4",
    "text_config": GEMMA4
    | {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 96,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 16,
        "standardize": True,
        "use_clipped_linears": True,
    },
    "audio_config": {
        "model_type": "gemma4_audio",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "output_proj_dims": 20,
        "subsampling_conv_channels": [4, 2],
    },
    "image_token_id": 90,
    "video_token_id": 91,
    "audio_token_id": 92,
    "boi_token_id": 93,
    "eoi_token_id": 94,
    "boa_token_id": 95,
    "eoa_token_index": 89,
}
# The largest published mixture: its depth, pattern of layers, experts and heads in small widths.
GEMMA4_26B = GEMMA4_WHOLE | {
    "text_config": GEMMA4
    | {
        "num_hidden_layers": 30,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "head_dim": 4,
        "global_head_dim": 8,
        "hidden_size": 16,
        "intermediate_size": 24,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 8,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": GEMMA4_WHOLE["vision_config"] | {"num_hidden_layers": 27},
    "audio_config": None,
}
WHOLE: dict[str, dict[str, Any]] = {"gemma4-whole": GEMMA4_WHOLE, "gemma4-26b-a4b": GEMMA4_26B}
