"""A learner of a tiny Gemma 4 under transformers' Trainer: what `test_trainers.py` starts.

python -m gemma4_trainer CONFIG LEARNER FOLDER
"""

import sys

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from examples import trainers


def model() -> Gemma4ForCausalLM:
    """Layers of both kinds, of which the last two share keys and values; per-layer embeddings."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6}
    inputs = {"vocab_size_per_layer_input": trainers.TOKENS, "hidden_size_per_layer_input": 8}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            vocab_size=trainers.TOKENS,
            hidden_size=32,
            intermediate_size=64,
            global_head_dim=32,
            num_kv_shared_layers=2,
            sliding_window=8,
            max_position_embeddings=trainers.LENGTH,
            **heads,
            **layers,
            **inputs,
            **ends,
        )
    )


if __name__ == "__main__":
    config, learner, folder = sys.argv[1:]
    trainers.of_transformers(config, learner, folder, model())
