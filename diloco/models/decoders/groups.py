"""Divides a decoder's layers into groups of equal layers, and loops over all layers (ADR 98).

The layers of a group have tensors of the same shapes, which are stacked; each group has a
configuration of its own, which describes a decoder of such layers alone. Layers run in stages: a
stage is successive layers that repeat one sequence of groups, and is one `lax.scan` over the
repetitions of the shortest such sequence.

Shapes: as in `model`; S layers of a group in one repetition, X repetitions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diloco.models.decoders.config import DecoderConfig
from diloco.models.decoders.experts import Load

DENSE = "dense"  # the group of a mixture's layers without experts
SLIDES, FED = "slides", "fed"  # keys of a layer's further inputs, next to its tensors
# The keys and values of a layer, [B, L, G, K] each.
KeysAndValues = tuple[jax.Array, jax.Array]


class Group(NamedTuple):
    """Layers of a decoder that are alike.

    Attributes:
        name: key of the group's tensors within the tree of all layers' tensors; "": the decoder has
            one group, whose tensors are the tree itself.
        config: configuration of a decoder with these layers only.
        numbers: indices of these layers in the whole decoder.
        keeps: whether layers of another group use keys and values of these layers.
    """

    name: str
    config: DecoderConfig
    numbers: tuple[int, ...]
    keeps: bool


# Computes one layer: (x [B, L, D], the layer's tensors, keys and values of another layer if this
# layer uses such) -> (x, keys and values to keep for other layers, the load of its experts).
Block = Callable[
    [jax.Array, Mapping[str, Any], KeysAndValues | None],
    tuple[jax.Array, KeysAndValues | None, Load | None],
]


class Stage(NamedTuple):
    """Layers that run in one loop.

    Attributes:
        names: the name of the group of each layer in one repetition.
        repeats: the number of repetitions, X.
    """

    names: tuple[str, ...]
    repeats: int


@functools.cache
def groups_of(config: DecoderConfig) -> dict[str, Group]:
    """Returns the groups of a decoder's layers by name, in the order of their first layers."""
    names = _names(config)
    found = {}
    for name in dict.fromkeys(names):
        numbers = tuple(number for number, each in enumerate(names) if each == name)
        own = _own_config(config, name, numbers)
        shared = 0 if config.layer_differences is None else config.layer_differences.shared
        found[name] = Group(name, own, numbers, keeps=shared > 0 and not own.takes_keys)
    return found


def stages_of(config: DecoderConfig) -> tuple[Stage, ...]:
    """Returns a decoder's stages, in order; one, or two if some layers compute no keys.

    The second stage has the layers that use keys and values of layers in the first.
    """
    names = _names(config)
    first = len(names) - (
        0 if config.layer_differences is None else config.layer_differences.shared
    )
    return tuple(_stage(part) for part in (names[:first], names[first:]) if part)


def _names(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the name of the group of each layer of a decoder."""
    if config.layer_differences is None and not config.dense:
        return ("",) * config.layers
    if config.layer_differences is None:
        return tuple(
            DENSE if number in config.dense else "mixed" for number in range(config.layers)
        )
    first = config.layers - config.layer_differences.shared
    return tuple(
        ("sliding" if slides else "full") + (_SHARED if number >= first else "")
        for number, slides in enumerate(config.sliding)
    )


_SHARED = "_shared"


def _stage(names: tuple[str, ...]) -> Stage:
    for length in range(1, len(names) + 1):
        repeats, rest = divmod(len(names), length)
        if not rest and names == names[:length] * repeats:
            break
    return Stage(names[:length], repeats)


def _own_config(config: DecoderConfig, name: str, numbers: tuple[int, ...]) -> DecoderConfig:
    layer_differences = config.layer_differences
    sliding = tuple(config.sliding[number] for number in numbers)
    own = dataclasses.replace(config, layer_differences=None, dense=(), sliding=sliding)
    if name == DENSE:
        own = dataclasses.replace(own, experts=None)
    if layer_differences is None:
        return own
    if not own.sliding[0]:
        own = dataclasses.replace(
            own,
            head_width=layer_differences.full_head_width,
            kv_heads=layer_differences.full_kv_heads,
            keys_are_values=layer_differences.full_keys_are_values,
        )
    if name.endswith(_SHARED):
        own = dataclasses.replace(
            own, takes_keys=True, mlp_width=layer_differences.shared_mlp_width
        )
    return own


def scan_layers(
    config: DecoderConfig,
    layers: Mapping[str, Any],
    x_BxLxD: jax.Array,
    fed_NxBxLxP: jax.Array | None,
    block_of: Callable[[Group], Block],
) -> tuple[jax.Array, Load | None]:
    """Runs all layers; returns (output of the last layer [B, L, D], load of the experts [N, E]).

    The load has a row for each layer with experts; None without experts.

    Args:
        config: the decoder's configuration.
        layers: stacked tensors of the layers by name; with several groups, such a mapping by the
            name of each group.
        x_BxLxD: the first layer's input.
        fed_NxBxLxP: per-layer embeddings, a further input of each layer; None: there are none.
        block_of: returns the function that computes one layer of a group.
    """
    groups = groups_of(config)
    blocks = {name: block_of(group) for name, group in groups.items()}
    kept: dict[str, KeysAndValues] = {
        name: _none_yet(group.config, x_BxLxD) for name, group in groups.items() if group.keeps
    }
    loads: list[Load] = []
    for stage in stages_of(config):
        scanned = {
            name: _folded(groups[name], layers[name] if name else layers, fed_NxBxLxP, stage)
            for name in set(stage.names)
        }
        takes = groups[stage.names[0]].config.takes_keys
        step = functools.partial(_step, stage, blocks, kept if takes else {})
        (x_BxLxD, last), load = jax.lax.scan(step, (x_BxLxD, {} if takes else kept), scanned)
        kept = last or kept
        if load is not None:
            loads.append(jax.tree.map(lambda each: each.reshape(-1, each.shape[-1]), load))
    if not loads:
        return x_BxLxD, None
    return x_BxLxD, jax.tree.map(lambda *each: jnp.concatenate(each), *loads)


def _none_yet(config: DecoderConfig, x_BxLxD: jax.Array) -> KeysAndValues:
    none = jnp.zeros((*x_BxLxD.shape[:2], config.kv_heads, config.head_width), x_BxLxD.dtype)
    return none, none


def _folded(
    group: Group, layers: Mapping[str, Any], fed_NxBxLxP: jax.Array | None, stage: Stage
) -> Any:
    """Returns a group's tensors and its layers' further inputs for a stage's scan, [X, S, ...]."""
    given = {**layers, SLIDES: jnp.asarray(group.config.sliding)}
    if fed_NxBxLxP is not None:
        given[FED] = fed_NxBxLxP[jnp.asarray(group.numbers)]
    return jax.tree.map(lambda each: each.reshape(stage.repeats, -1, *each.shape[1:]), given)


def _step(
    stage: Stage,
    blocks: Mapping[str, Block],
    taken: Mapping[str, KeysAndValues],
    carry: tuple[jax.Array, dict[str, KeysAndValues]],
    scanned: Mapping[str, Any],
) -> tuple[tuple[jax.Array, dict[str, KeysAndValues]], Load | None]:
    """Computes one repetition of a stage: the function that `lax.scan` repeats.

    Args:
        stage: the stage.
        blocks: the function that computes one layer of a group, by the group's name.
        taken: keys and values for layers that compute none, by the group that computed them.
        carry: (the layers' input, last keys and values of each group that keeps some).
        scanned: tensors and further inputs of this repetition, [S, ...], by group.

    Returns:
        (the new carry, the load of the repetition's layers with experts, [layers, E]).
    """
    x_BxLxD, kept = carry
    done = dict.fromkeys(stage.names, 0)
    loads: list[Load] = []
    for name in stage.names:
        place = done[name]
        layer = jax.tree.map(lambda each, place=place: each[place], scanned[name])
        x_BxLxD, own, load = blocks[name](x_BxLxD, layer, taken.get(name.removesuffix(_SHARED)))
        kept = kept if own is None else kept | {name: own}
        if load is not None:
            loads.append(load)
        done[name] += 1
    if not loads:
        return (x_BxLxD, kept), None
    return (x_BxLxD, kept), jax.tree.map(lambda *each: jnp.stack(each), *loads)


def attended(config: DecoderConfig, length: int) -> int:
    """Returns the multiplications of queries with keys for one token, in rows of `length` tokens.

    Each position counts as if it attended to all `length` positions, or all of its window.
    """
    total = 0
    for group in groups_of(config).values():
        own = group.config
        near = min(length, own.window or length)
        positions = sum(near if slides else length for slides in own.sliding)
        total += own.heads * own.head_width * positions
    return total
