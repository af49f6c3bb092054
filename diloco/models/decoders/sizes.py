"""Published sizes of decoders, as contents of `config.json` without keys that have defaults."""

from typing import Any

from diloco.models.decoders.config import DecoderConfig, parse_config


def _llama(width: int, mlp: int, layers: int, heads: int, factor: float, tied: bool) -> Any:
    return {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131_072,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _qwen3(width: int, mlp: int, layers: int, heads: int, tied: bool) -> Any:
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960,
        "eos_token_id": 151_645,
        "rope_theta": 1_000_000.0,
    }


def _gemma3(width: int, mlp: int, layers: int, heads: int, kv_heads: int, **other: Any) -> Any:
    return {
        "model_type": "gemma3_text",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **other,
    }


def _gemma4(
    width: int, mlp: int, layers: int, heads: int, kv_heads: int, period: int, **other: Any
) -> Any:
    """Returns a size of Gemma 4, in which one layer of each `period` has no sliding window."""
    every = ["sliding_attention"] * (period - 1) + ["full_attention"]
    return {
        "model_type": "gemma4_text",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "layer_types": every * (layers // period),
        "final_logit_softcapping": 30.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **other,
    }


def _plain(
    family: str,
    vocab: int,
    width: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    **other: Any,
) -> Any:
    return {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **other,
    }


_QWEN2 = {"rope_theta": 1_000_000.0, "max_position_embeddings": 32_768, "eos_token_id": 151_643}
_MIXTRAL = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32_768, "eos_token_id": 2}
_EARLIER_GEMMA = {"max_position_embeddings": 8192, "bos_token_id": 2, "eos_token_id": 1}
_LARGER_GEMMA = {
    "sliding_window": 1024,
    "max_position_embeddings": 131_072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_SMALLER_GEMMA4 = {"max_position_embeddings": 131_072, "sliding_window": 512}
_LARGER_GEMMA4 = {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 32.0, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 32.0, tied=True),
    "llama-3.1-8b": _llama(4096, 14_336, 32, 32, 8.0, tied=False),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, tied=False),
    "qwen2.5-0.5b": _plain(
        "qwen2", 151_936, 896, 4864, 24, 14, 2, tie_word_embeddings=True, **_QWEN2
    ),
    "qwen2.5-7b": _plain("qwen2", 152_064, 3584, 18_944, 28, 28, 4, **_QWEN2),
    "qwen3-30b-a3b": _qwen3(2048, 6144, 48, 32, tied=False)
    | {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "mistral-7b": _plain("mistral", 32_000, 4096, 14_336, 32, 32, 8, rms_norm_eps=1e-5),
    "mixtral-8x7b": _plain("mixtral", 32_000, 4096, 14_336, 32, 32, 8, **_MIXTRAL)
    | {"router_aux_loss_coef": 0.02},
    "gemma-2-2b": _plain("gemma2", 256_000, 2304, 9216, 26, 8, 4, **_EARLIER_GEMMA),
    "gemma-2-9b": _plain("gemma2", 256_000, 3584, 14_336, 42, 16, 8, **_EARLIER_GEMMA),
    "gemma-3-1b": _gemma3(
        1152,
        6912,
        26,
        4,
        1,
        vocab_size=262_144,
        sliding_window=512,
        max_position_embeddings=32_768,
    ),
    "gemma-3-4b": _gemma3(2560, 10_240, 34, 8, 4, **_LARGER_GEMMA),
    "gemma-3-12b": _gemma3(3840, 15_360, 48, 16, 8, **_LARGER_GEMMA),
    "gemma-4-e2b": _gemma4(
        1536,
        6144,
        35,
        8,
        1,
        5,
        **_SMALLER_GEMMA4,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "gemma-4-e4b": _gemma4(2560, 10_240, 42, 8, 2, 6, **_SMALLER_GEMMA4, num_kv_shared_layers=18),
    "gemma-4-31b": _gemma4(
        5376, 21_504, 60, 32, 16, 6, **_LARGER_GEMMA4, num_global_key_value_heads=4
    ),
    "gemma-4-26b-a4b": _gemma4(
        2816, 2112, 30, 16, 8, 6, **_LARGER_GEMMA4, num_global_key_value_heads=2
    )
    | {
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
    },
}


def size_named(name: str) -> DecoderConfig:
    """Returns the configuration of a published size, by its name in `SIZES`."""
    return parse_config(SIZES[name], source=name)
