"""The experts of a layer: a router chooses some for each token, and drops no token.

Rows are sorted by their expert. Accelerators multiply them by `jax.lax.ragged_dot`; a CPU, where
that costs as much as if each expert were given every row, by blocks of one expert each (ADR 97).

On a mesh each device routes its own rows. Experts are gathered along `fsdp`, as every matrix is,
and each is cut along `tensor`.

Shapes: as in `model`; E experts, C of them for a token, T tokens, R = T x C rows of experts, P
blocks of S rows.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco.learner.tensors.mesh import parts_along
from diloco.models.decoders.attention import ROWS
from diloco.models.decoders.layer_kinds import Experts

# What stands beside a layer's tensors: halves of adapters by the tensors that they adapt, as `lora`
# names them. Gate and up of an expert are one there.
ADAPTERS, GATE_UP, OUT = "adapters", "expert_gate_up", "expert_down"
DOWN, UP = "a", "b"  # the two halves, as leaves are named; lora_A and lora_B elsewhere

Activation = Callable[[jax.Array], jax.Array]


class Load(NamedTuple):
    """The spread of a layer's tokens over its experts, float32 [E] each, or [N, E] of all layers.

    Attributes:
        chosen: share of tokens that use each expert; the sum is C.
        probability: mean probability that the router gives each expert.
    """

    chosen: jax.Array
    probability: jax.Array

    def loss(self) -> jax.Array:
        """Returns the load-balancing loss (arXiv 2101.03961, section 2.2) over all layers.

        It is C if all experts have equal loads, and grows as fewer experts get more tokens.
        """
        chosen_E, probability_E = jnp.mean(self.chosen, 0), jnp.mean(self.probability, 0)
        return chosen_E.shape[0] * jnp.sum(chosen_E * probability_E)

    def busiest(self) -> jax.Array:
        """Returns the busiest expert's rows relative to an equal load, averaged over layers."""
        equal_N = jnp.mean(self.chosen, -1)
        return jnp.mean(jnp.max(self.chosen, -1) / equal_N)


def mixed(
    experts: Experts,
    activation: Activation,
    x_BxLxD: jax.Array,
    layer: Mapping[str, jax.Array],
    routed_BxLxD: jax.Array | None = None,
) -> tuple[jax.Array, Load]:
    """Returns the output of experts for tokens, [B, L, D], and the experts' load.

    Args:
        experts: their number, and the rule by which they are chosen.
        activation: of the gate.
        x_BxLxD: tokens.
        layer: its tensors, "router" [D, E] and those of experts, of which gate and up may be one;
            and "router_gain" [E], if it has one, by which an expert's weight is multiplied.
        routed_BxLxD: tokens as the router is given them; None: as experts are.
    """
    routed_BxLxD = x_BxLxD if routed_BxLxD is None else routed_BxLxD
    matrices = [layer["router"].astype(x_BxLxD.dtype), *_adapted(layer, x_BxLxD.dtype)]
    gain_E = layer.get("router_gain", jnp.ones(experts.count))
    given = (x_BxLxD, routed_BxLxD, gain_E, *matrices)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return _mixed(experts, activation, *given)
    cut = None if experts.width % mesh.shape["tensor"] else "tensor"
    rows = None if x_BxLxD.shape[0] % math.prod(map(parts_along, ROWS)) else ROWS

    def on_each_device(*given: jax.Array) -> tuple[jax.Array, Load]:
        y_BxLxD, load = _mixed(experts, activation, *given)
        whole_BxLxD = y_BxLxD if cut is None else jax.lax.psum(y_BxLxD, cut)
        return whole_BxLxD, jax.lax.pmean(load, ROWS)

    inward, outward = PartitionSpec(None, None, cut), PartitionSpec(None, cut)
    everywhere: Any = PartitionSpec()
    found: tuple[jax.Array, Load] = jax.shard_map(
        on_each_device,
        in_specs=(*[PartitionSpec(rows)] * 2, everywhere, everywhere, inward, inward, outward),
        out_specs=(PartitionSpec(rows), Load(everywhere, everywhere)),
        check_vma=False,
    )(*given)
    return found


def _matrices(layer: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns gate, up and down of experts."""
    if GATE_UP not in layer:
        return tuple(layer[name] for name in ("expert_gate", "expert_up", OUT))
    both_Ex2xDxF = layer[GATE_UP]
    return both_Ex2xDxF[:, 0], both_Ex2xDxF[:, 1], layer[OUT]


def _adapted(layer: Mapping[str, Any], dtype: Any) -> list[jax.Array]:
    """Returns gate, up and down of experts, with their adapters added."""
    found = [matrix.astype(dtype) for matrix in _matrices(layer)]
    halves = layer.get(ADAPTERS, {})

    def product(name: str) -> jax.Array:
        added: jax.Array = halves[name][DOWN].astype(dtype) @ halves[name][UP].astype(dtype)
        return added

    if GATE_UP in halves:
        gate_ExDxF, up_ExDxF = jnp.split(product(GATE_UP), 2, axis=-1)
        found = [found[0] + gate_ExDxF, found[1] + up_ExDxF, found[2]]
    if OUT in halves:
        found[2] += product(OUT)
    return found


def _mixed(
    experts: Experts,
    activation: Activation,
    x_BxLxD: jax.Array,
    routed_BxLxD: jax.Array,
    gain_E: jax.Array,
    router_DxE: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
) -> tuple[jax.Array, Load]:
    """`mixed` of a device's own tokens, by the part of each expert that it has."""
    x_TxD = x_BxLxD.reshape(-1, x_BxLxD.shape[-1])
    scores_TxE = routed_BxLxD.reshape(x_TxD.shape) @ router_DxE
    probability_TxE = jax.nn.softmax(scores_TxE.astype(jnp.float32))
    weight_TxC, chosen_TxC = jax.lax.top_k(probability_TxE, experts.chosen)
    if experts.normed:
        weight_TxC /= jnp.sum(weight_TxC, -1, keepdims=True)
    weight_TxC *= gain_E[chosen_TxC].astype(jnp.float32)

    order_R = jnp.argsort(chosen_TxC.reshape(-1))
    sizes_E = jnp.bincount(chosen_TxC.reshape(-1), length=experts.count)
    rows_RxD = x_TxD[order_R // experts.chosen]
    matrices = (gate_ExDxF, up_ExDxF, down_ExFxD)
    told_RxD = jax.lax.platform_dependent(
        rows_RxD,
        sizes_E,
        *matrices,
        cpu=partial(by_blocks, activation),
        default=partial(by_groups, activation),
    )
    told_TxCxD = told_RxD[jnp.argsort(order_R)].reshape(*chosen_TxC.shape, -1)
    y_TxD = jnp.einsum("tcd,tc->td", told_TxCxD, weight_TxC.astype(x_TxD.dtype))
    load = Load(sizes_E / x_TxD.shape[0], jnp.mean(probability_TxE, 0))
    return y_TxD.reshape(x_BxLxD.shape), load


def by_groups(
    activation: Activation,
    rows_RxD: jax.Array,
    sizes_E: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
) -> jax.Array:
    """Returns the output of each row's expert, [R, D]; rows are sorted by expert."""
    multiply = partial(jax.lax.ragged_dot, group_sizes=sizes_E)
    h_RxF = activation(multiply(rows_RxD, gate_ExDxF)) * multiply(rows_RxD, up_ExDxF)
    return multiply(h_RxF, down_ExFxD)


def by_blocks(
    activation: Activation,
    rows_RxD: jax.Array,
    sizes_E: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
    *,
    size: int | None = None,
) -> jax.Array:
    """Computes `by_groups` in blocks of one expert each; its last block may be partly empty."""
    count, experts = rows_RxD.shape[0], sizes_E.shape[0]
    size = size or block_rows(count, experts)
    blocks = -(-count // size) + experts
    until_E = jnp.cumsum(-(-sizes_E // size))
    expert_P = jnp.clip(jnp.searchsorted(until_E, jnp.arange(blocks), side="right"), 0, experts - 1)

    # For each row: its expert, and its place among that expert's rows.
    ends_E = jnp.cumsum(sizes_E)
    expert_R = jnp.searchsorted(ends_E, jnp.arange(count), side="right")
    before_R = jnp.arange(count) - (ends_E - sizes_E)[expert_R]
    place_R = size * (until_E - -(-sizes_E // size))[expert_R] + before_R

    padded = jnp.zeros((blocks * size, rows_RxD.shape[1]), rows_RxD.dtype)
    x_PxSxD = padded.at[place_R].set(rows_RxD, unique_indices=True).reshape(blocks, size, -1)

    def multiply(x_PxSxI: jax.Array, matrices_ExIxO: jax.Array) -> jax.Array:
        return jnp.einsum("psi,pio->pso", x_PxSxI, matrices_ExIxO[expert_P])

    h_PxSxF = activation(multiply(x_PxSxD, gate_ExDxF)) * multiply(x_PxSxD, up_ExDxF)
    y_PxSxD = multiply(h_PxSxF, down_ExFxD)
    return y_PxSxD.reshape(blocks * size, -1)[place_R]


def block_rows(rows: int, experts: int) -> int:
    """Returns S, rows / experts: then there are at most twice as many blocks as experts."""
    return max(8, rows // experts)
