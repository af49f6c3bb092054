"""Embeddings of images in place of the tokens that stand for them.

Shapes: as in `model`; I images of a row, S embeddings of an image.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from diloco.models.decoders.image_text import ImageText


class SoftTokens(NamedTuple):
    """Embeddings of images, which stand in place of their tokens.

    Attributes:
        rows: the embeddings of the images of each row, S for an image, in order, [B, I * S, D].
        counts: the number of tokens of each image, int [B, I]; its further embeddings are unused.
    """

    rows: jax.Array
    counts: jax.Array


def marked(whole: ImageText, tokens_BxL: jax.Array) -> jax.Array:
    """Returns whether each token stands for an image, bool [B, L]."""
    assert whole.image is not None
    return jnp.equal(tokens_BxL, whole.image)


def runs(marked_BxL: jax.Array) -> jax.Array:
    """Numbers the runs of marks in each row from 1 on, int [B, L]; 0 where there is no mark."""
    begins_BxL = marked_BxL & ~jnp.pad(marked_BxL, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(marked_BxL, jnp.cumsum(begins_BxL, axis=1), 0)


def in_place(images: SoftTokens, marked_BxL: jax.Array, x_BxLxD: jax.Array) -> jax.Array:
    """Returns `x` with the embeddings of images in place of marked tokens, in order, [B, L, D]."""
    ends_BxI = jnp.cumsum(images.counts, axis=1)
    unused_BxI = images.rows.shape[1] // images.counts.shape[1] - images.counts
    ordinal_BxL = jnp.cumsum(marked_BxL, axis=1) - 1
    passed_BxLxI = ordinal_BxL[..., None] >= ends_BxI[:, None]
    place_BxL = ordinal_BxL + jnp.sum(passed_BxLxI * unused_BxI[:, None], axis=-1)
    place_BxL = jnp.where(marked_BxL, place_BxL, 0)
    rows_BxLxD = jnp.take_along_axis(images.rows, place_BxL[..., None], axis=1, mode="clip")
    return jnp.where(marked_BxL[..., None], rows_BxLxD.astype(x_BxLxD.dtype), x_BxLxD)
