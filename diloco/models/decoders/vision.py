"""The vision tower, the image encoder of an image-and-text checkpoint (Gemma 4) (ADR 102).

The tower turns patches of an image into embeddings of tokens. Its layers are those of a decoder,
but each patch attends to all patches of its image, and each half of a head is rotated by one of the
patch's two positions. The outputs of each square of patches are averaged to one token.

Shapes: B rows, I images in a row, N = B * I, P patches of an image, W numbers of a patch, E width
of the tower, T tokens of an image, D width of the decoder.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, ConfigDict

from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.learner.task import AtLeastOne, Params
from diloco.learner.tensors.mesh import ROWS, constrain
from diloco.models.decoders.config import DecoderConfig, parse_config
from diloco.models.decoders.families import NEUTRAL
from diloco.models.decoders.groups import Block, Group, scan_layers
from diloco.models.decoders.image_text import VISION
from diloco.models.decoders.layer_kinds import FULL
from diloco.models.decoders.model import (
    Compute,
    layer_of,
    norm,
    plain_product,
    turns_of,
)
from diloco.models.decoders.rope import Rope
from diloco.models.decoders.soft_tokens import SoftTokens
from diloco.models.decoders.tensor_names_and_shapes import BOUNDS

# Keys of `vision_config` that describe the tower's layers, with the values if a file lacks them.
_LAYERS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
_OTHERS: dict[str, Any] = {
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10_240,
    "standardize": False,
    "use_clipped_linears": False,
    "rope_parameters": None,
}
_COUNTS = ("patch_size", "pooling_kernel_size", "position_embedding_size")
# Keys of published files that transformers does not use.
_UNUSED = {
    "default_output_length",
    "global_head_dim",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
}


class ImageOptions(BaseModel):
    """The option `images` of a task.

    Attributes:
        row: the greatest number of images in a row, I.
        patches: the greatest number of patches in an image, P.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    row: AtLeastOne = 1
    patches: AtLeastOne = 2520


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """The hyperparameters of a vision tower.

    Attributes:
        blocks: the tower's layers, as the configuration of a decoder.
        rope: rotary positions along each axis of an image.
        patch_width: numbers of a patch, W.
        places: the greatest number of positions along an axis of an image.
        side: patches along the side of a square of patches that becomes one token.
        standardized: whether the averaged embeddings are shifted and scaled by stored vectors.
        clipped: whether inputs and outputs of matrix products are clipped to stored bounds.
    """

    blocks: DecoderConfig
    rope: Rope
    patch_width: int
    places: int
    side: int
    standardized: bool
    clipped: bool


class ImageTextBatch(NamedTuple):
    """Rows of text with images.

    Attributes:
        windows: token ids, and ~t for a token t that is not trained on, int [B, L + 1].
        patches: pixels from 0 to 1, float [B, I, P, W].
        positions: position (x, y) of each patch in its image, int [B, I, P, 2]; -1: no such patch.
    """

    windows: Any
    patches: Any
    positions: Any


def with_tower(config: DecoderConfig, document: Mapping[str, Any], source: str) -> DecoderConfig:
    """Returns a text model's configuration with the vision tower added to its parameters.

    Args:
        config: the text model's configuration.
        document: the content of the whole checkpoint's `config.json`.
        source: the document's origin, for errors.

    Raises:
        ConfigError: there is no vision tower, or it has a key that is not supported.
    """
    whole, vision = config.image_text, document.get("vision_config")
    if whole is None or whole.image is None or not isinstance(vision, Mapping):
        raise ConfigError(
            f"{source} has no vision_config, but the option images asks for its vision tower",
            hint="give the folder of an image-and-text checkpoint (model_type gemma4), or leave out"
            " images",
        )
    tower = _parse({key: value for key, value in vision.items() if value is not None}, source)
    modules = tuple(each for each in whole.modules if each not in VISION)
    return dataclasses.replace(
        config, tower=tower, image_text=dataclasses.replace(whole, modules=modules)
    )


def _parse(vision: dict[str, Any], source: str) -> Tower:
    def refuse(what: str) -> None:
        raise ConfigError(
            f"{source}: vision_config: {what}, which would change what the tower computes",
            hint="leave out the option images: the tower is carried as it is",
        )

    for key in vision.keys() - NEUTRAL - _LAYERS.keys() - _OTHERS.keys() - _UNUSED:
        refuse(f"{key} = {vision[key]!r:.80} is not known")
    said = _LAYERS | _OTHERS | vision
    for key in ("num_hidden_layers", "head_dim", *_COUNTS):
        if isinstance(said[key], bool) or not isinstance(said[key], int) or said[key] < 1:
            refuse(f"{key} is {said[key]!r:.80}, but an int of at least 1 is expected")
    if said["head_dim"] % 4 or said["attention_bias"]:
        refuse(f"head_dim is {said['head_dim']}, attention_bias {said['attention_bias']!r:.80}")
    rope = {"rope_type": "axial", "rope_theta": 100.0} | (said["rope_parameters"] or {})
    kind, theta = rope.pop("rope_type"), rope.pop("rope_theta")
    if rope or kind not in ("axial", "default") or not isinstance(theta, int | float):
        refuse(f"rope_parameters is {said['rope_parameters']!r:.80}")
    layers = {
        "model_type": "gemma4_text",
        **{key: said[key] for key in _LAYERS},
        "layer_types": [FULL] * said["num_hidden_layers"],
        "global_head_dim": said["head_dim"],
        "hidden_size_per_layer_input": 0,
        "vocab_size": 1,
    }
    blocks = parse_config(layers, source=f"{source}: vision_config")
    return Tower(
        blocks=dataclasses.replace(blocks, layer_differences=None, scaled_layers=False),
        rope=Rope(float(theta)),
        patch_width=3 * said["patch_size"] ** 2,
        places=said["position_embedding_size"],
        side=said["pooling_kernel_size"],
        standardized=bool(said["standardize"]),
        clipped=bool(said["use_clipped_linears"]),
    )


def check_images(tower: Tower, images: ImageOptions) -> None:
    """Checks that the number of patches of the option `images` makes whole tokens.

    Raises:
        TaskError: the number of patches is no multiple of the patches of a token.
    """
    if images.patches % tower.side**2:
        raise TaskError(
            f"causal_lm: images.patches is {images.patches}, but each token of an image stands for"
            f" {tower.side} x {tower.side} patches",
            hint=f"choose a multiple of {tower.side**2}: {tower.side**2} for each token that an"
            " image may have",
        )


def tokens_of_image(tower: Tower, positions_Px2: np.ndarray) -> int | None:
    """Returns the number of tokens of an image whose patches have these positions (x, y).

    None if the patches do not fill a rectangle of whole squares, or if a position is not below
    `tower.places`.
    """
    wide, high = positions_Px2.max(axis=0, initial=-1) + 1
    count = len(positions_Px2)
    inside = max(wide, high) <= tower.places and positions_Px2.min(initial=0) >= 0
    if not count or not inside or wide * high != count or wide % tower.side or high % tower.side:
        return None
    number_P = positions_Px2[:, 0] + wide * positions_Px2[:, 1]
    return count // tower.side**2 if len(np.unique(number_P)) == count else None


def soft_tokens(
    config: DecoderConfig, params: Params, rows: ImageTextBatch, compute: Compute
) -> SoftTokens:
    """Runs the vision tower on the images of some rows; returns their tokens' embeddings.

    Args:
        config: the configuration of a decoder with a vision tower.
        params: the decoder's parameters, the tower's included.
        rows: the rows that have the images.
        compute: options of the computation.
    """
    tower, given = config.tower, params["tower"]
    assert tower is not None
    B, images, P, _ = rows.patches.shape
    positions_NxPx2 = rows.positions.reshape(B * images, P, 2)
    there_NxP = positions_NxPx2[..., 0] >= 0
    place_NxPx2 = jnp.maximum(positions_NxPx2, 0)
    pixels_NxPxW = (2 * (rows.patches.reshape(B * images, P, -1) - 0.5)).astype(compute.dtype)
    table_2xSxE = given["positions"].astype(compute.dtype)
    placed_NxPxE = table_2xSxE[0][place_NxPx2[..., 0]] + table_2xSxE[1][place_NxPx2[..., 1]]
    x_NxPxE = pixels_NxPxW @ given["embed"].astype(compute.dtype)
    x_NxPxE = constrain(x_NxPxE + jnp.where(there_NxP[..., None], placed_NxPxE, 0), ROWS)
    block_of = partial(_block_of, tower, place_NxPx2, there_NxP, compute)
    x_NxPxE, _ = scan_layers(tower.blocks, given["layers"], x_NxPxE, None, block_of)
    pooled_NxTxE = _pooled(tower, jnp.where(there_NxP[..., None], x_NxPxE, 0), place_NxPx2)
    if tower.standardized:
        bias_E, scale_E = (jax.lax.stop_gradient(given[name]) for name in ("std_bias", "std_scale"))
        pooled_NxTxE = (pooled_NxTxE - bias_E) * scale_E
    normed_NxTxE = norm(tower.blocks, pooled_NxTxE.astype(compute.dtype))
    rows_NxTxD = normed_NxTxE @ given["projection"].astype(compute.dtype)
    counts_N = jnp.sum(there_NxP, axis=1) // tower.side**2
    return SoftTokens(rows_NxTxD.reshape(B, -1, config.width), counts_N.reshape(B, images))


def _block_of(
    tower: Tower, place_NxPx2: jax.Array, there_NxP: jax.Array, compute: Compute, group: Group
) -> Block:
    own = group.config
    turns = tuple(
        turns_of(tower.rope, own.head_width // 2, place_NxPx2[..., n], compute) for n in (0, 1)
    )
    attend = partial(
        jax.nn.dot_product_attention,
        mask=there_NxP[:, None, None],
        scale=own.query_scale,
        implementation="xla",
    )

    def block(x_NxPxE: jax.Array, layer: Mapping[str, jax.Array], _taken: Any) -> Any:
        product = _bounded if tower.clipped else plain_product
        x_NxPxE, _, _ = layer_of(own, x_NxPxE, layer, turns, attend, product, None)
        return x_NxPxE, None, None

    return jax.checkpoint(block, prevent_cse=False) if compute.remat else block


def _bounded(name: str, x: jax.Array, layer: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the product of `x` and a layer's matrix; clips input and output to stored bounds.

    Args:
        name: the matrix's name.
        x: the input, [..., inputs].
        layer: the layer's tensors by name; the bounds are not trained.
    """
    ends = [jax.lax.stop_gradient(layer[f"{name}_{end}"]).astype(x.dtype) for end in BOUNDS]
    return jnp.clip(plain_product(name, jnp.clip(x, *ends[:2]), layer), *ends[2:])


def _pooled(tower: Tower, x_NxPxE: jax.Array, place_NxPx2: jax.Array) -> jax.Array:
    """Returns the mean of each square of patches, times sqrt(E), [N, T, E], at least float32.

    Args:
        tower: the tower.
        x_NxPxE: the last layer's output; 0 where there is no patch.
        place_NxPx2: position (x, y) of each patch; 0 where there is none.
    """
    tokens = x_NxPxE.shape[1] // tower.side**2
    wide_N = place_NxPx2[..., 0].max(axis=1) + 1
    square_NxPx2 = place_NxPx2 // tower.side
    token_NxP = square_NxPx2[..., 0] + (wide_N // tower.side)[:, None] * square_NxPx2[..., 1]
    x_NxPxE = x_NxPxE.astype(jnp.promote_types(x_NxPxE.dtype, jnp.float32))
    shares_NxPxT = jax.nn.one_hot(token_NxP, tokens, dtype=x_NxPxE.dtype) / tower.side**2
    mean_NxTxE: jax.Array = jnp.einsum("npt,npe->nte", shares_NxPxT, x_NxPxE)
    return mean_NxTxE * jnp.asarray(tower.blocks.width**0.5, mean_NxTxE.dtype)
