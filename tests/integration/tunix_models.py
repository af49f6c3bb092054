"""Tiny models of google-tunix, and the loss of the next token, for the task of flax.nnx."""

import jax.numpy as jnp
import optax
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

VOCAB, LENGTH = 16, 12
TINY = {"embed_dim": 16, "hidden_dim": 24, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
ROPE = {"vocab_size": VOCAB, "rope_theta": 10_000, "norm_eps": 1e-5}


def llama(rngs):
    return llama3.Llama3(llama3.ModelConfig(num_layers=2, **TINY, **ROPE), rngs=rngs)


def mixture(rngs):
    """Qwen 3 with experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    return qwen3.Qwen3(qwen3.ModelConfig(num_layers=2, **TINY, **ROPE, **experts), rngs=rngs)


def gemma(rngs):
    """Gemma 3: of its six layers, five have a sliding window."""
    config = gemma3.ModelConfig(
        num_layers=6, num_embed=VOCAB, sliding_window_size=4, param_dtype=jnp.float32, **TINY
    )
    return gemma3.Gemma3(config, rngs=rngs)


def logits_of(model, tokens_BxL):
    """As tunix calls its models: with positions, a mask, and no cache."""
    length = tokens_BxL.shape[1]
    positions_BxL = jnp.broadcast_to(jnp.arange(length), tokens_BxL.shape)
    mask_LxL = jnp.tril(jnp.ones((length, length), bool))
    logits_BxLxV, _ = model(tokens_BxL, positions_BxL, None, mask_LxL[None])
    return logits_BxLxV


def loss(model, windows_BxL1):
    logits_BxLxV = logits_of(model, windows_BxL1[:, :-1])
    losses_BxL = optax.softmax_cross_entropy_with_integer_labels(logits_BxLxV, windows_BxL1[:, 1:])
    return losses_BxL.mean()
