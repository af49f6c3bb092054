"""Cross entropy over a large vocabulary, a part of it after the other.

The logits of a whole vocabulary are the largest array of a step (2 GB for one row of 2,048 tokens
over 262,144 of them), and the head, gathered whole, the next. Neither is made: a part of the head's
rows is gathered at a time, its logits are reduced, and computed again in the backward pass. A
token's loss is the same but for rounding.

Shapes: as in `model`; T cuts of the head's rows on the mesh, P parts, R rows of a part in each cut.
"""

import functools
import math

import jax
import jax.numpy as jnp

from diloco.learner.causal_lm.attention import ROWS
from diloco.learner.causal_lm.config import DecoderConfig
from diloco.learner.causal_lm.model import Compute, capped
from diloco.learner.mesh import constrain, parts_along

# A smaller vocabulary is one part. Published ones have a divisor that leaves a little less.
MOST_ROWS = 40_000


def token_losses(
    config: DecoderConfig,
    head_VxD: jax.Array,
    hidden_BxLxD: jax.Array,
    targets_BxL: jax.Array,
    *,
    compute: Compute,
    most_rows: int = MOST_ROWS,
) -> jax.Array:
    """Cross entropy of each target, in nats, float32 [B, L].

    Args:
        config: the decoder.
        head_VxD: whose products with the hidden states are logits.
        hidden_BxLxD: what the last block gives, normed.
        targets_BxL: int [B, L].
        compute: how.
        most_rows: rows of the head that are looked at together, on each device.
    """
    vocab, width = head_VxD.shape
    cuts = parts_along("tensor")
    cuts = 1 if vocab % cuts else cuts
    whole = vocab // cuts
    parts = math.ceil(whole / most_rows)
    rows = whole // parts
    reduce = functools.partial(_reduce, config, hidden_BxLxD, targets_BxL, compute, whole)
    head_TxWxD = head_VxD.reshape(cuts, whole, width)
    if parts == 1:
        return _losses(*reduce(head_TxWxD, 0))
    # One part is in memory at a time, forward and backward.
    again = jax.checkpoint(reduce, prevent_cse=False)
    head_TxPxRxD = head_TxWxD[:, : parts * rows].reshape(cuts, parts, rows, width)
    each = (jnp.moveaxis(head_TxPxRxD, 1, 0), rows * jnp.arange(parts))
    found = jax.tree.map(lambda one: one[:, 0], jax.lax.map(lambda part: again(*part), each))
    if rest := whole - parts * rows:
        last = again(head_TxWxD[:, -rest:], whole - rest)
        found = jax.tree.map(lambda one, other: jnp.concatenate([one, other]), found, last)
    return _losses(*found)


def _reduce(
    config: DecoderConfig,
    hidden_BxLxD: jax.Array,
    targets_BxL: jax.Array,
    compute: Compute,
    stride: int,
    head_TxRxD: jax.Array,
    first: jax.Array | int,
) -> tuple[jax.Array, jax.Array]:
    """Of the logits of some rows: the log of their summed exponentials, and the target's.

    Each is float32 [1, B, L]; the latter is 0 where the target is no row of these. Row [t, r] is
    row t * stride + first + r of the head.
    """
    cuts, rows, _ = head_TxRxD.shape
    logits_BxLxTxR = jnp.einsum(
        "bld,trd->bltr",
        hidden_BxLxD,
        head_TxRxD.astype(compute.dtype),
        preferred_element_type=jnp.float32,
    )
    along = "tensor" if cuts > 1 else None
    logits_BxLxTxR = capped(config, constrain(logits_BxLxTxR, ROWS, None, along))
    # Which of them are targets is asked of each by itself: an index would gather from other cuts.
    numbers_TxR = stride * jnp.arange(cuts)[:, None] + first + jnp.arange(rows)
    is_target_BxLxTxR = targets_BxL[..., None, None] == numbers_TxR
    return (
        jax.nn.logsumexp(logits_BxLxTxR, axis=(2, 3))[None],
        jnp.sum(jnp.where(is_target_BxLxTxR, logits_BxLxTxR, 0), axis=(2, 3))[None],
    )


def _losses(log_sums_PxBxL: jax.Array, picked_PxBxL: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(log_sums_PxBxL, axis=0) - jnp.sum(picked_PxBxL, axis=0)
