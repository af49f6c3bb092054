"""A decoder-only transformer of the families of `config`: pure functions over a tree of arrays.

The decoder has pre-norm blocks with rotary positions, grouped-query attention and a gated MLP or
experts; further features are attributes of the configuration. `groups.scan_layers` runs the blocks.

Documents that are packed into one row have different segment numbers: attention stays within a
segment, and positions begin at 0 in each segment.

Shapes: B batch, L positions (M: positions attended to), D model width, H heads, G heads of keys and
values, K width of a head, F width of the MLP, V vocabulary, N layers, P width of a per-layer
embedding, a further input of a layer for each token.
"""

import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diloco.common.protocol.errors import TaskError
from diloco.learner.task import Params
from diloco.learner.tensors import tree
from diloco.learner.tensors.mesh import ROWS, constrain, parts_along
from diloco.models.decoders.attention import Kind, by_kind, make_attention
from diloco.models.decoders.config import DecoderConfig
from diloco.models.decoders.experts import Load, mixed
from diloco.models.decoders.groups import FED, SLIDES, Block, Group, KeysAndValues, scan_layers
from diloco.models.decoders.rope import Rope
from diloco.models.decoders.soft_tokens import SoftTokens, in_place, marked, runs
from diloco.models.decoders.tensor_names_and_shapes import BIAS, table

EMBED_STD = 0.02
_GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,
    "relu": jax.nn.relu,
}
# (name of a matrix of layers, input, the layer's tensors) -> product.
Product = Callable[[str, jax.Array, Mapping[str, jax.Array]], jax.Array]


class Compute(NamedTuple):
    """Options of the computation, which change nothing but rounding, memory and time.

    Attributes:
        dtype: dtype of activations and products; norms, logits and loss are `wide`.
        remat: whether to recompute each block in the backward pass.
        attention: what computes attention: the `kind` of `attention.make_attention`.
    """

    dtype: str = "float32"
    remat: bool = True
    attention: Kind = "auto"

    @property
    def wide(self) -> jnp.dtype:
        """The dtype of what is computed at least in float32."""
        return jnp.promote_types(self.dtype, jnp.float32)


DEFAULT = Compute()


class Forward(NamedTuple):
    """The result of running a decoder's blocks.

    Attributes:
        hidden: the normed output of the last block, [B, L, D].
        load: the experts' load, [N, E]; None without experts.
    """

    hidden: jax.Array
    load: Load | None


class Turns(NamedTuple):
    """Cosines and sines of the rotation at each position for one kind of layer, [B, L, K/2]."""

    cos: jax.Array
    sin: jax.Array


def init_params(config: DecoderConfig, key: jax.Array) -> Params:
    """Returns random float32 parameters: small embeddings, matrices that keep the variance."""
    return tree.nested(
        {
            name: _initial(config, name, entry.shape, jax.random.fold_in(key, number))
            for number, (name, entry) in enumerate(sorted(table(config).items()))
        }
    )


def _initial(config: DecoderConfig, name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    last = name.rpartition("/")[2]
    if last.endswith("norm"):
        return jnp.zeros(shape) if config.offset_norms else jnp.ones(shape)
    if last.endswith(BIAS):
        return jnp.zeros(shape)
    if last.endswith(("_min", "_max")):
        return jnp.full(shape, -jnp.inf if last.endswith("_min") else jnp.inf)
    if last in ("scale", "router_scale", "router_gain", "std_scale"):
        return jnp.ones(shape)
    if name in ("embed", "head", "fed_embed"):
        return jax.random.normal(key, shape) * EMBED_STD
    # Each layer adds two outputs to the residual stream: 2N together.
    writers = 2 * config.layers if last in ("o", "down", "expert_down") else 1
    return jax.random.normal(key, shape) / math.sqrt(shape[-2] * writers)


def plain_product(name: str, x_BxLxI: jax.Array, layer: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the product of `x` and a layer's matrix, plus the matrix's bias if it has one.

    Args:
        name: the matrix's name.
        x_BxLxI: the input.
        layer: the layer's tensors by name.
    """
    y_BxLxO = x_BxLxI @ layer[name].astype(x_BxLxI.dtype)
    bias_O = layer.get(name + BIAS)
    return y_BxLxO if bias_O is None else y_BxLxO + bias_O.astype(y_BxLxO.dtype)


def head_of(config: DecoderConfig, params: Params) -> jax.Array:
    """Returns the output head, [V, D]: a hidden state times its transpose gives logits."""
    head_VxD: jax.Array = params["embed"] if config.tied else params["head"]
    return head_VxD


def capped(config: DecoderConfig, logits: jax.Array) -> jax.Array:
    """Returns logits bounded to +-`config.logit_cap` by tanh; unchanged if that is None."""
    if config.logit_cap is None:
        return logits
    return jnp.tanh(logits / config.logit_cap) * config.logit_cap


def logits_of(
    config: DecoderConfig,
    params: Params,
    tokens_BxL: jax.Array,
    segments_BxL: jax.Array | None = None,
    *,
    compute: Compute = DEFAULT,
    **options: Any,
) -> jax.Array:
    """Returns each next token's logits, float32 [B, L, V]; arguments as in `forward`."""
    hidden_BxLxD = hidden_of(config, params, tokens_BxL, segments_BxL, compute=compute, **options)
    head_VxD = head_of(config, params).astype(compute.dtype)
    logits_BxLxV = jnp.einsum(
        "bld,vd->blv", hidden_BxLxD, head_VxD, preferred_element_type=compute.wide
    )
    return capped(config, logits_BxLxV)


def hidden_of(*given: Any, **options: Any) -> jax.Array:
    """Returns the normed output of the last block, [B, L, D]; arguments as in `forward`."""
    return forward(*given, **options).hidden


def forward(
    config: DecoderConfig,
    params: Params,
    tokens_BxL: jax.Array,
    segments_BxL: jax.Array | None = None,
    *,
    compute: Compute = DEFAULT,
    product: Product = plain_product,
    beside: Params = None,
    images: SoftTokens | None = None,
) -> Forward:
    """Runs tokens through all blocks.

    Args:
        config: the decoder's configuration.
        params: the decoder's parameters, as `init_params` returns them.
        tokens_BxL: token ids, int.
        segments_BxL: segment of each token, int; a token attends only within its segment. None:
            each row is one segment.
        compute: options of the computation.
        product: the function that multiplies by a matrix of a layer, and adds the product of the
            matrix's adapter if there is one.
        beside: the adapters, as a tree to be joined with that of the layers' tensors; None: there
            are no adapters.
        images: embeddings of the image tokens; None: there are no images.

    Raises:
        TaskError: rows are longer than the rotary positions are defined for.
    """
    _check_length(config, tokens_BxL.shape[1])
    x_BxLxD, fed_NxBxLxP = _embedded(config, params, tokens_BxL, compute, images)
    if segments_BxL is None:
        segments_BxL = jnp.ones_like(tokens_BxL)
    positions_BxL, blocks_BxL = _positions(segments_BxL), None
    if images is not None and config.image_text is not None and config.image_text.both_ways:
        blocks_BxL = runs(marked(config.image_text, images, tokens_BxL))

    def block_of(group: Group) -> Block:
        own = group.config
        near, full = _seen(own, positions_BxL, compute)
        attend = make_attention(own, segments_BxL, compute.attention, blocks_BxL)

        def block(x_BxLxD: jax.Array, layer: Any, taken: KeysAndValues | None) -> Any:
            turns = by_kind(own, layer[SLIDES], near, full)
            attend_here = partial(attend, layer[SLIDES])
            x_BxLxD, kept, load = layer_of(
                own, x_BxLxD, layer, (turns,), attend_here, product, taken
            )
            return x_BxLxD, kept if group.keeps else None, load

        return jax.checkpoint(block, prevent_cse=False) if compute.remat else block

    layers = joined(params["layers"], beside or {})
    x_BxLxD, load = scan_layers(config, layers, x_BxLxD, fed_NxBxLxP, block_of)
    return Forward(norm(config, x_BxLxD, params["norm"]), load)


def joined(one: Params, other: Params) -> Params:
    """Returns the union of two trees of nested dictionaries; where both have a leaf, `one`'s."""
    if not isinstance(one, dict):
        return one
    return {
        name: joined(one.get(name, other.get(name)), other.get(name, one.get(name)))
        for name in one | other
    }


def _embedded(
    config: DecoderConfig,
    params: Params,
    tokens_BxL: jax.Array,
    compute: Compute,
    images: SoftTokens | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns (the first layer's input, the per-layer embeddings or None if there are none)."""
    whole, soft_BxLx1, given_BxL = config.image_text, None, tokens_BxL
    if whole is not None:
        soft_BxLx1 = jnp.isin(tokens_BxL, jnp.asarray(whole.soft))[..., None]
        tokens_BxL = jnp.where(soft_BxLx1[..., 0], whole.padding, tokens_BxL)

    def rows(name: str) -> jax.Array:
        found: jax.Array = params[name][tokens_BxL].astype(compute.dtype)
        # A soft token is embedded as padding, but must not train the row of padding.
        if soft_BxLx1 is None:
            return found
        return jnp.where(soft_BxLx1, jax.lax.stop_gradient(found), found)

    x_BxLxD = rows("embed")
    if config.scaled_embeddings:
        x_BxLxD = x_BxLxD * jnp.asarray(config.width**0.5, compute.dtype)
    if images is not None:
        assert whole is not None
        x_BxLxD = in_place(images, marked(whole, images, given_BxL), x_BxLxD)
    x_BxLxD = constrain(x_BxLxD, ROWS)
    return x_BxLxD, _fed(config, params, rows, x_BxLxD)


def _fed(
    config: DecoderConfig, params: Params, rows: Callable[[str], jax.Array], x_BxLxD: jax.Array
) -> jax.Array | None:
    """Returns the per-layer embeddings, [N, B, L, P]: each layer's further input for a token."""
    if not config.fed_width:
        return None
    shape = (*x_BxLxD.shape[:2], config.layers, config.fed_width)
    rows_BxLxNxP = rows("fed_embed").reshape(shape)
    rows_BxLxNxP = rows_BxLxNxP * jnp.asarray(config.fed_width**0.5, x_BxLxD.dtype)
    projected_BxLxNxP = (x_BxLxD @ params["fed_matrix"].astype(x_BxLxD.dtype)).reshape(shape)
    projected_BxLxNxP = norm(config, projected_BxLxNxP * config.width**-0.5, params["fed_norm"])
    return jnp.moveaxis((projected_BxLxNxP + rows_BxLxNxP) * 2**-0.5, 2, 0)


def _check_length(config: DecoderConfig, length: int) -> None:
    if config.rope.kind == "dynamic" and length > config.positions:
        raise TaskError(
            f"rows of {length} tokens are longer than the decoder's max_position_embeddings,"
            f" {config.positions}, beyond which rope_type 'dynamic' depends on the length",
            hint="choose a smaller length, or rope_type 'yarn' in config.json",
        )


def _seen(config: DecoderConfig, positions_BxL: jax.Array, compute: Compute) -> tuple[Turns, Turns]:
    """Returns rotations (of sliding layers, of full layers); equal if all are of one kind."""
    full = near = None
    if not all(config.sliding):
        full = turns_of(config.rope, config.head_width, positions_BxL, compute)
    if any(config.sliding):
        near = turns_of(config.local_rope, config.head_width, positions_BxL, compute)
    found = [each for each in (near, full) if each is not None]
    return found[0], found[-1]


def _positions(segments_BxL: jax.Array) -> jax.Array:
    """Returns the position of each token in its segment, from 0 on, int [B, L]."""
    place_BxL = jnp.broadcast_to(jnp.arange(segments_BxL.shape[1]), segments_BxL.shape)
    begins_BxL = jnp.diff(segments_BxL, axis=1, prepend=segments_BxL[:, :1] - 1) != 0
    first_BxL = jax.lax.cummax(jnp.where(begins_BxL, place_BxL, 0), axis=1)
    return place_BxL - first_BxL


def turns_of(rope: Rope, width: int, positions_BxL: jax.Array, compute: Compute) -> Turns:
    """Returns the rotary embedding of each position: cosines and sines times `rope.amplitude`.

    Args:
        rope: the frequencies and the amplitude.
        width: K, how many of a head's elements are rotated; the results are [B, L, K/2].
        positions_BxL: the position of each token in its document.
        compute: the dtype of the angles.
    """
    frequencies_K2 = rope.frequencies(width)
    angles_BxLxK2 = positions_BxL[..., None].astype(compute.wide) * frequencies_K2
    return Turns(rope.amplitude * jnp.cos(angles_BxLxK2), rope.amplitude * jnp.sin(angles_BxLxK2))


def layer_of(
    config: DecoderConfig,
    x_BxLxD: jax.Array,
    layer: Mapping[str, jax.Array],
    turns: tuple[Turns, ...],
    attend: Callable[..., jax.Array],
    product: Product,
    taken: KeysAndValues | None,
) -> tuple[jax.Array, KeysAndValues, Load | None]:
    """Computes one layer; returns (its output, its keys and values, the load of its experts).

    The load is None without experts.

    Args:
        config: the configuration of a decoder whose layers are all alike.
        x_BxLxD: the layer's input.
        layer: the layer's tensors, by their names in `tensor_names_and_shapes`.
        turns: rotations; with several, each rotates an equal part of a head.
        attend: the function of (queries, keys, values) that computes attention.
        product: the function that multiplies by a matrix of the layer.
        taken: keys and values of another layer, if `config.takes_keys`; else they are not used.
    """
    given_BxLxD = norm(config, x_BxLxD, layer["attn_norm"])
    q_BxLxHxK, *own = _heads(config, given_BxLxD, layer, turns, product, taken)
    y_BxLxHxK = attend(q_BxLxHxK, *own)
    output_BxLxD = product("o", y_BxLxHxK.reshape(*x_BxLxD.shape[:2], -1), layer)
    if config.post_norms:
        output_BxLxD = norm(config, output_BxLxD, layer["attn_post_norm"])
    x_BxLxD = constrain(x_BxLxD + output_BxLxD, ROWS)
    output_BxLxD, load = _mlp_and_experts(config, x_BxLxD, layer, product)
    if config.post_norms:
        output_BxLxD = norm(config, output_BxLxD, layer["mlp_post_norm"])
    x_BxLxD = constrain(x_BxLxD + output_BxLxD, ROWS)
    if config.fed_width:
        gate = _GATES[config.activation](product("fed_gate", x_BxLxD, layer))
        output_BxLxD = product("fed_up", gate * layer[FED], layer)
        x_BxLxD = x_BxLxD + norm(config, output_BxLxD, layer["fed_post_norm"])
    if config.scaled_layers:
        x_BxLxD = x_BxLxD * jax.lax.stop_gradient(layer["scale"]).astype(x_BxLxD.dtype)
    return x_BxLxD, (own[0], own[1]), load


def _heads(
    config: DecoderConfig,
    x_BxLxD: jax.Array,
    layer: Mapping[str, jax.Array],
    turns: tuple[Turns, ...],
    product: Product,
    taken: KeysAndValues | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (rotated queries [B, L, H, K], rotated keys [B, L, G, K], values [B, L, G, K])."""

    def heads(name: str) -> jax.Array:
        rows_BxLxHK = constrain(product(name, x_BxLxD, layer), ROWS, None, "tensor")
        return rows_BxLxHK.reshape(*x_BxLxD.shape[:2], -1, config.head_width)

    def normed(rows_BxLxHxK: jax.Array, name: str) -> jax.Array:
        return norm(config, rows_BxLxHxK, layer[name]) if config.head_norms else rows_BxLxHxK

    q_BxLxHxK = _rotate(normed(heads("q"), "q_norm"), turns)
    if config.takes_keys:
        assert taken is not None
        return q_BxLxHxK, *taken
    k_BxLxGxK = heads("k")
    v_BxLxGxK = k_BxLxGxK if config.keys_are_values else heads("v")
    if config.value_norms:
        v_BxLxGxK = norm(config, v_BxLxGxK)
    return q_BxLxHxK, _rotate(normed(k_BxLxGxK, "k_norm"), turns), v_BxLxGxK


def _rotate(x_BxLxHxK: jax.Array, turns: tuple[Turns, ...]) -> jax.Array:
    """Returns rotated heads; each of several rotations rotates an equal part of a head."""
    if len(turns) == 1:
        return _turned(x_BxLxHxK, turns[0])
    parts = jnp.split(x_BxLxHxK, len(turns), axis=-1)
    return jnp.concatenate([_turned(*each) for each in zip(parts, turns, strict=True)], axis=-1)


def _turned(x_BxLxHxK: jax.Array, turns: Turns) -> jax.Array:
    """Returns `x`, with each pair (x[i], x[i + K/2]) of a head rotated by its position's angle."""
    cos_BxLx1xK2 = turns.cos[:, :, None].astype(x_BxLxHxK.dtype)
    sin_BxLx1xK2 = turns.sin[:, :, None].astype(x_BxLxHxK.dtype)
    a, b = jnp.split(x_BxLxHxK, 2, axis=-1)
    turned = [a * cos_BxLx1xK2 - b * sin_BxLx1xK2, b * cos_BxLx1xK2 + a * sin_BxLx1xK2]
    return jnp.concatenate(turned, axis=-1)


def _mlp_and_experts(
    config: DecoderConfig, x_BxLxD: jax.Array, layer: Mapping[str, jax.Array], product: Product
) -> tuple[jax.Array, Load | None]:
    """Returns (the output of the MLP, of the experts or of both together; the experts' load)."""
    given_BxLxD = norm(config, x_BxLxD, layer["mlp_norm"])
    if config.experts is None:
        return _mlp(config, given_BxLxD, layer, product), None
    gate = _GATES[config.activation]
    if not config.experts.beside:
        return mixed(config.experts, gate, given_BxLxD, layer)
    dense_BxLxD = _mlp(config, given_BxLxD, layer, product)
    given_BxLxD = norm(config, x_BxLxD, layer["experts_norm"])
    scale_D = layer["router_scale"].astype(x_BxLxD.dtype) * config.width**-0.5
    routed_BxLxD = norm(config, x_BxLxD) * scale_D
    output_BxLxD, load = mixed(config.experts, gate, given_BxLxD, layer, routed_BxLxD)
    output_BxLxD = norm(config, output_BxLxD, layer["experts_post_norm"])
    return norm(config, dense_BxLxD, layer["dense_post_norm"]) + output_BxLxD, load


def _mlp(
    config: DecoderConfig, x_BxLxD: jax.Array, layer: Mapping[str, jax.Array], product: Product
) -> jax.Array:
    gate = _GATES[config.activation]
    h_BxLxF = gate(product("gate", x_BxLxD, layer)) * product("up", x_BxLxD, layer)
    return product("down", constrain(h_BxLxF, ROWS, None, "tensor"), layer)


def norm(config: DecoderConfig, x: jax.Array, weight: jax.Array | None = None) -> jax.Array:
    """Returns `x` over its root mean square along the last axis, computed at least in float32.

    Args:
        config: the decoder's configuration.
        x: the input.
        weight: numbers w by which the result is multiplied along the last axis; with
            `config.offset_norms` by 1 + w. None: by 1.
    """
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    root = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + config.norm_eps)
    if weight is None:
        return (x32 * root).astype(x.dtype)
    scale = weight.astype(x32.dtype)
    if config.offset_norms:
        scale = 1 + scale
    return (x32 * root * scale).astype(x.dtype)


# The most rows of a head for which logits are computed at once; a larger head is divided equally.
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
    """Returns the cross entropy of each target, in nats, float32 [B, L].

    Args:
        config: the decoder's configuration.
        head_VxD: the output head.
        hidden_BxLxD: the normed output of the last block.
        targets_BxL: token ids, int [B, L].
        compute: options of the computation.
        most_rows: rows of the head for which each device computes logits at once.
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
    # Only one part's logits are in memory at a time, forward and backward.
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
    """Computes the logits of some rows of the head; returns (log-sum-exp, logit of the target).

    Each is float32 [1, B, L]; the target's logit counts as 0 if the target is not among these rows.
    Row [t, r] of `head_TxRxD` is row t * stride + first + r of the whole head.
    """
    cuts, rows, _ = head_TxRxD.shape
    logits_BxLxTxR = jnp.einsum(
        "bld,trd->bltr",
        hidden_BxLxD,
        head_TxRxD.astype(compute.dtype),
        preferred_element_type=compute.wide,
    )
    along = "tensor" if cuts > 1 else None
    logits_BxLxTxR = capped(config, constrain(logits_BxLxTxR, ROWS, None, along))
    # Compares every row with the target: indexing would gather from other devices.
    numbers_TxR = stride * jnp.arange(cuts)[:, None] + first + jnp.arange(rows)
    is_target_BxLxTxR = targets_BxL[..., None, None] == numbers_TxR
    return (
        jax.nn.logsumexp(logits_BxLxTxR, axis=(2, 3))[None],
        jnp.sum(jnp.where(is_target_BxLxTxR, logits_BxLxTxR, 0), axis=(2, 3))[None],
    )


def _losses(log_sums_PxBxL: jax.Array, picked_PxBxL: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(log_sums_PxBxL, axis=0) - jnp.sum(picked_PxBxL, axis=0)
