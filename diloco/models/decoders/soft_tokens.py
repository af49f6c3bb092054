"""Puts embeddings of images in place of the embeddings of image tokens.

An image token is the placeholder id `ImageText.image`; a run of them stands for one image.

Shapes: as in `model`; I images of a row, S embeddings of an image.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from diloco.models.decoders.image_text import ImageText


class SoftTokens(NamedTuple):
    """Embeddings of images.

    Attributes:
        rows: the embeddings of each row's images, in order, S for each image, [B, I * S, D].
        counts: the number of tokens of each image, int [B, I]; the first so many of the image's S
            embeddings are used.
    """

    rows: jax.Array
    counts: jax.Array


def marked(whole: ImageText, images: SoftTokens, tokens_BxL: jax.Array) -> jax.Array:
    """Returns whether each token is an image token with an embedding, bool [B, L].

    An image token of a row of text stands for nothing, as in transformers: it is embedded as the
    padding token, and attends as text does.

    Args:
        whole: the checkpoint's properties; `whole.image` must not be None.
        images: the embeddings.
        tokens_BxL: token ids.
    """
    assert whole.image is not None
    image_BxL = jnp.equal(tokens_BxL, whole.image)
    own_B = jnp.sum(images.counts, axis=1)
    return image_BxL & (jnp.cumsum(image_BxL, axis=1) <= own_B[:, None])


def runs(marked_BxL: jax.Array) -> jax.Array:
    """Returns the number of each token's run of image tokens, int [B, L].

    Runs are numbered in each row from 1 on; 0: the token is no image token.

    Args:
        marked_BxL: whether each token is an image token, from `marked`.
    """
    begins_BxL = marked_BxL & ~jnp.pad(marked_BxL, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(marked_BxL, jnp.cumsum(begins_BxL, axis=1), 0)


def in_place(images: SoftTokens, marked_BxL: jax.Array, x_BxLxD: jax.Array) -> jax.Array:
    """Returns `x` with the embeddings of images in place of those of image tokens, [B, L, D].

    Args:
        images: the embeddings, which are used in order.
        marked_BxL: whether each token is an image token, from `marked`.
        x_BxLxD: embeddings of all tokens; the result has their dtype.
    """
    ends_BxI = jnp.cumsum(images.counts, axis=1)
    unused_BxI = images.rows.shape[1] // images.counts.shape[1] - images.counts
    ordinal_BxL = jnp.cumsum(marked_BxL, axis=1) - 1
    passed_BxLxI = ordinal_BxL[..., None] >= ends_BxI[:, None]
    place_BxL = ordinal_BxL + jnp.sum(passed_BxLxI * unused_BxI[:, None], axis=-1)
    place_BxL = jnp.where(marked_BxL, place_BxL, 0)
    rows_BxLxD = jnp.take_along_axis(images.rows, place_BxL[..., None], axis=1, mode="clip")
    return jnp.where(marked_BxL[..., None], rows_BxLxD.astype(x_BxLxD.dtype), x_BxLxD)
