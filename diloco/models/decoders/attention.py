"""Computes a decoder's attention: by XLA, or on TPUs by JAX's splash attention kernel.

Splash attention (`jax.experimental.pallas.ops.tpu.splash_attention`) never stores the scores [H, L,
L] of a row, and skips masked blocks. The compiler cannot partition this kernel over a mesh, so each
device gets its own rows and heads.

Shapes: as in `model`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from diloco.common.protocol.errors import TaskError
from diloco.learner.tensors.mesh import ROWS, known_spec, parts_along
from diloco.models.decoders.config import DecoderConfig

Kind = Literal["auto", "plain", "splash"]
# The number that must divide a head's width and a row's length; and the largest block.
LANES, BLOCK = 128, 512
# (whether the layer is a sliding one, q [B, L, H, K], k and v [B, L, G, K]) -> [B, L, H, K].
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def make_attention(
    config: DecoderConfig,
    segments_BxL: jax.Array,
    kind: str,
    blocks_BxL: jax.Array | None = None,
) -> Attend:
    """Returns a function that computes causal attention within each document.

    In sliding layers, a position attends only to the last `config.window` positions, its own
    included.

    Args:
        config: the decoder's configuration.
        segments_BxL: the number of each token's document, int [B, L].
        kind: "plain": by XLA; "splash": by the kernel; "auto": by the kernel on TPUs, if it fits.
        blocks_BxL: the number of each token's image in its row, int [B, L], from 1 on; 0: the token
            is of no image. In sliding layers the tokens of one image attend to each other in both
            directions. None: there are no images.

    Raises:
        TaskError: kind is "splash", and splash attention does not fit.
    """
    if kind == "plain" or (kind == "auto" and _platform() != "tpu"):
        return _plain(config, segments_BxL, blocks_BxL)
    misfit = _misfit(config, segments_BxL)
    if blocks_BxL is not None and any(config.sliding):
        misfit = "images, whose tokens attend both ways"
    if misfit is None:
        return _splash(config, segments_BxL, interpret=_platform() != "tpu")
    if kind == "auto":
        return _plain(config, segments_BxL, blocks_BxL)
    raise TaskError(
        f"causal_lm: attention = 'splash' does not fit: {misfit}",
        hint="attention = 'auto' takes it where it fits",
    )


def _platform() -> str | None:
    """Returns the platform of the mesh's devices, such as "tpu".

    None if there is no mesh, or within `shard_map`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return None
    device: Any = mesh.abstract_device
    return None if device is None else str(device.platform)


def _misfit(config: DecoderConfig, segments_BxL: jax.Array) -> str | None:
    """Returns why the kernel cannot be used; None if it can."""
    rows, length = segments_BxL.shape
    cuts, tensor = math.prod(map(parts_along, ROWS)), parts_along("tensor")
    for what, size, divisor in (
        ("heads of width", config.head_width, LANES),
        ("rows of length", length, LANES),
        ("rows in number", rows, cuts),
        ("heads of keys in number", config.kv_heads, tensor),
    ):
        if size % divisor:
            return f"{what} {size}, which is no multiple of {divisor}"
    return None if _platform() else "there is no mesh"


# --- By XLA


def _plain(config: DecoderConfig, segments_BxL: jax.Array, blocks_BxL: jax.Array | None) -> Attend:
    place_L = jnp.arange(segments_BxL.shape[1])
    distance_LxM = place_L[:, None] - place_L[None, :]
    same_BxLxM = segments_BxL[:, :, None] == segments_BxL[:, None, :]
    full_BxLxM = same_BxLxM & (distance_LxM >= 0)
    near_BxLxM = full_BxLxM
    if blocks_BxL is not None:
        alike_BxLxM = blocks_BxL[:, :, None] == blocks_BxL[:, None, :]
        near_BxLxM |= same_BxLxM & alike_BxLxM & (blocks_BxL[:, :, None] > 0)
    if config.window is not None:
        near_BxLxM &= distance_LxM < config.window

    def attend(
        slides: jax.Array, q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array
    ) -> jax.Array:
        mask_BxLxM = by_kind(config, slides, near_BxLxM, full_BxLxM)
        if config.score_cap is not None:
            return _capped(config, config.score_cap, mask_BxLxM, q_BxLxHxK, k_BxLxGxK, v_BxLxGxK)
        return jax.nn.dot_product_attention(
            q_BxLxHxK,
            k_BxLxGxK,
            v_BxLxGxK,
            mask=mask_BxLxM[:, None],
            scale=config.query_scale,
            implementation="xla",
        )

    return attend


def _capped(
    config: DecoderConfig,
    cap: float,
    mask_BxLxM: jax.Array,
    q_BxLxHxK: jax.Array,
    k_BxMxGxK: jax.Array,
    v_BxMxGxK: jax.Array,
) -> jax.Array:
    """Computes attention with scores bounded by tanh, which JAX's attention does not offer."""
    rows, length, heads, width = q_BxLxHxK.shape
    q_BxLxGxQxK = q_BxLxHxK.reshape(rows, length, config.kv_heads, -1, width)
    scores_BxGxQxLxM = config.query_scale * jnp.einsum(
        "blgqk,bmgk->bgqlm",
        q_BxLxGxQxK,
        k_BxMxGxK,
        preferred_element_type=jnp.promote_types(q_BxLxHxK.dtype, jnp.float32),
    )
    scores_BxGxQxLxM = jnp.tanh(scores_BxGxQxLxM / cap) * cap
    seen_BxGxQxLxM = jnp.where(mask_BxLxM[:, None, None], scores_BxGxQxLxM, -jnp.inf)
    shares_BxGxQxLxM = jax.nn.softmax(seen_BxGxQxLxM, axis=-1).astype(v_BxMxGxK.dtype)
    y_BxLxGxQxK = jnp.einsum("bgqlm,bmgk->blgqk", shares_BxGxQxLxM, v_BxMxGxK)
    return y_BxLxGxQxK.reshape(rows, length, heads, width)


def by_kind(config: DecoderConfig, slides: jax.Array, near: Any, full: Any) -> Any:
    """Returns `near` for a sliding layer, `full` for another.

    Args:
        config: the decoder's configuration; if all its layers are of one kind, nothing is selected
            at run time.
        slides: whether the layer is a sliding one, bool [].
        near: a tree of arrays for sliding layers.
        full: a tree of equal shapes for other layers.
    """
    if all(config.sliding):
        return near
    if not any(config.sliding):
        return full
    return jax.tree.map(lambda one, other: jnp.where(slides, one, other), near, full)


# --- By the kernel


def _splash(config: DecoderConfig, segments_BxL: jax.Array, *, interpret: bool) -> Attend:
    length = segments_BxL.shape[1]
    heads = config.heads // parts_along("tensor")
    made = functools.partial(_kernel, heads=heads, cap=config.score_cap, interpret=interpret)
    full = made(masks.CausalMask((length, length)))
    near = full
    if config.window is not None:
        window = masks.LocalMask((length, length), (config.window - 1, 0), 0)
        near = made(window)
    of_heads = known_spec(ROWS, "tensor")

    def rows(kernel: Any) -> Callable[..., jax.Array]:
        each = jax.vmap(
            lambda q, k, v, ids: kernel(q, k, v, segment_ids=splash.SegmentIds(ids, ids))
        )
        return jax.shard_map(
            each,
            in_specs=(of_heads, of_heads, of_heads, known_spec(ROWS)),
            out_specs=of_heads,
            check_vma=False,
        )

    def attend(
        slides: jax.Array, q_BxLxHxK: jax.Array, k_BxLxGxK: jax.Array, v_BxLxGxK: jax.Array
    ) -> jax.Array:
        scaled_BxLxHxK = (q_BxLxHxK * config.query_scale).astype(q_BxLxHxK.dtype)
        given = [_heads_first(each) for each in (scaled_BxLxHxK, k_BxLxGxK, v_BxLxGxK)]
        if len(set(config.sliding)) == 1:
            kernel = near if config.sliding[0] else full
            y_BxHxLxK = rows(kernel)(*given, segments_BxL)
        else:
            y_BxHxLxK = jax.lax.cond(slides, rows(near), rows(full), *given, segments_BxL)
        return _heads_first(y_BxHxLxK)

    return attend


def _kernel(mask: masks.Mask, *, heads: int, cap: float | None, interpret: bool) -> Any:
    length = mask.shape[0]
    block = math.gcd(length, BLOCK)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=cap,
        interpret=interpret,
    )


def _heads_first(x: jax.Array) -> jax.Array:
    """Swaps the axes of positions and heads: [B, L, H, K] to [B, H, L, K], or back."""
    return jnp.swapaxes(x, 1, 2)
