"""Computes the experts of a layer: a router chooses some for each token, and drops no token.

A row is the input of one expert for one token. Rows are sorted by expert. Accelerators multiply
them by `jax.lax.ragged_dot`. On a CPU that costs as much as giving every row to each expert; there
rows are multiplied in blocks, each of rows of one expert (ADR 97).

On a mesh each device routes the tokens of its own part of the batch. Matrices of experts are
gathered along the mesh axis `fsdp`, as all matrices are, and each is divided along `tensor`. Along
`expert`, each device has some of the experts: rows are sent to the device of their expert, and
outputs are sent back (ADR 101).

Shapes: as in `model`; E experts, C of them for a token, T tokens, R = T x C rows of experts. In
`by_blocks`, P blocks of S rows. On a mesh, P devices along `expert`, each with X = E / P experts
and S places for the rows that come from each device.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco.learner.tensors.mesh import ROWS, known_spec, parts_along
from diloco.models.decoders.layer_kinds import Experts

# ADAPTERS is a key of a layer's mapping, besides those of its tensors; its value has the layer's
# adapters by the adapted tensors' names in `lora`, where gate and up of an expert are one tensor.
ADAPTERS, GATE_UP, OUT = "adapters", "expert_gate_up", "expert_down"
DOWN, UP = "a", "b"  # names of an adapter's leaves A and B, which are lora_A and lora_B in peft

Activation = Callable[[jax.Array], jax.Array]
# (rows in the order of experts [R, D], rows of each expert [E], gate, up, down) -> output [R, D].
ExpertOutputs = Callable[..., jax.Array]


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
    """Returns (the output of the experts for each token [B, L, D], the experts' load).

    Args:
        experts: the number of experts, and the rule by which they are chosen.
        activation: the function that is applied to the gate's output.
        x_BxLxD: the experts' input for each token.
        layer: the layer's tensors: "router" [D, E], the matrices of experts (gate and up may be one
            tensor), and perhaps "router_gain" [E], which multiplies each expert's weight.
        routed_BxLxD: the router's input for each token; None: the experts' input.
    """
    routed_BxLxD = x_BxLxD if routed_BxLxD is None else routed_BxLxD
    matrices = [layer["router"].astype(x_BxLxD.dtype), *_adapted(layer, x_BxLxD.dtype)]
    gain_E = layer.get("router_gain", jnp.ones(experts.count))
    given = (x_BxLxD, routed_BxLxD, gain_E, *matrices)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes:
        return _mixed(experts, activation, *given)
    cut = None if experts.width % mesh.shape["tensor"] else "tensor"
    axes = known_spec(ROWS)[0]
    count, _, width = x_BxLxD.shape
    rows = None if count % math.prod(map(parts_along, ROWS)) else axes
    parts = parts_along("expert")

    gathered = "fsdp" if parts_along("fsdp") > 1 and not width % parts_along("fsdp") else None

    def on_each_device(*given: jax.Array) -> tuple[jax.Array, Load]:
        *others, gate, up, down = given
        if gathered is not None:
            # Gathered here, so that each device gets only its part of the gradient's sum.
            gather = partial(jax.lax.all_gather, axis_name=gathered, tiled=True)
            gate, up, down = gather(gate, axis=1), gather(up, axis=1), gather(down, axis=2)
        own: list[jax.Array] = [*others, gate, up, down]
        y_BxLxD, load = _mixed(experts, activation, *own, parts=parts)
        whole_BxLxD = y_BxLxD if cut is None else jax.lax.psum(y_BxLxD, cut)
        return whole_BxLxD, jax.lax.pmean(load, axes)

    dealt = "expert" if parts > 1 else None
    inward, outward = PartitionSpec(dealt, gathered, cut), PartitionSpec(dealt, cut, gathered)
    everywhere: Any = PartitionSpec()
    found: tuple[jax.Array, Load] = jax.shard_map(
        on_each_device,
        in_specs=(*[PartitionSpec(rows)] * 2, everywhere, everywhere, inward, inward, outward),
        out_specs=(PartitionSpec(rows), Load(everywhere, everywhere)),
        check_vma=False,
    )(*given)
    return found


def _matrices(layer: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the matrices (gate [E, D, F], up [E, D, F], down [E, F, D]) of a layer's experts."""
    if GATE_UP not in layer:
        return tuple(layer[name] for name in ("expert_gate", "expert_up", OUT))
    both_Ex2xDxF = layer[GATE_UP]
    return both_Ex2xDxF[:, 0], both_Ex2xDxF[:, 1], layer[OUT]


def _adapted(layer: Mapping[str, Any], dtype: Any) -> list[jax.Array]:
    """Returns the matrices [gate, up, down] of a layer's experts, with adapters added."""
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
    *,
    parts: int = 1,
) -> tuple[jax.Array, Load]:
    """Computes `mixed` on one device, for the device's tokens, with its part of each matrix.

    If `parts`, the number of devices along `expert`, is above 1, the device has X experts only.
    """
    x_TxD = x_BxLxD.reshape(-1, x_BxLxD.shape[-1])
    scores_TxE = routed_BxLxD.reshape(x_TxD.shape) @ router_DxE
    # At least in float32.
    wide = jnp.promote_types(scores_TxE.dtype, jnp.float32)
    probability_TxE = jax.nn.softmax(scores_TxE.astype(wide))
    weight_TxC, chosen_TxC = jax.lax.top_k(probability_TxE, experts.chosen)
    if experts.normed:
        weight_TxC /= jnp.sum(weight_TxC, -1, keepdims=True)
    weight_TxC *= gain_E[chosen_TxC].astype(wide)

    order_R = jnp.argsort(chosen_TxC.reshape(-1))
    sizes_E = jnp.bincount(chosen_TxC.reshape(-1), length=experts.count)
    rows_RxD = x_TxD[order_R // experts.chosen]
    matrices = (gate_ExDxF, up_ExDxF, down_ExFxD)
    outputs_of: ExpertOutputs = partial(_own_outputs, activation)
    if parts > 1:
        most = x_TxD.shape[0] * min(experts.chosen, experts.count // parts)
        outputs_of = partial(_exchanged_outputs, outputs_of, parts, most)
    output_RxD = outputs_of(rows_RxD, sizes_E, *matrices)
    output_TxCxD = output_RxD[jnp.argsort(order_R)].reshape(*chosen_TxC.shape, -1)
    y_TxD = jnp.einsum("tcd,tc->td", output_TxCxD, weight_TxC.astype(x_TxD.dtype))
    load = Load(sizes_E / x_TxD.shape[0], jnp.mean(probability_TxE, 0))
    return y_TxD.reshape(x_BxLxD.shape), load


def _own_outputs(
    activation: Activation, rows_RxD: jax.Array, sizes_E: jax.Array, *matrices: jax.Array
) -> jax.Array:
    """Returns the output of each row's expert, [R, D]: `by_blocks` on CPUs, else `by_groups`."""
    output_RxD: jax.Array = jax.lax.platform_dependent(
        rows_RxD,
        sizes_E,
        *matrices,
        cpu=partial(by_blocks, activation),
        default=partial(by_groups, activation),
    )
    return output_RxD


def _exchanged_outputs(
    outputs_of: ExpertOutputs,
    parts: int,
    most: int,
    rows_RxD: jax.Array,
    sizes_E: jax.Array,
    *matrices: jax.Array,
) -> jax.Array:
    """Returns the output of each row's expert, [R, D], computed on the device of the expert.

    Args:
        outputs_of: computes the outputs of rows whose experts are on this device.
        parts: the number of devices along `expert`, P.
        most: the greatest number of rows that one device can send to another, S; no row is dropped.
        rows_RxD: this device's rows, in the order of their experts.
        sizes_E: the number of these rows of each expert.
        matrices: gate, up and down of the experts on this device.
    """
    # The number of rows of each expert, by sender and by the device that has the expert.
    sizes_PxPxX = jax.lax.all_gather(sizes_E, "expert").reshape(parts, parts, -1)
    rows_PxP = jnp.sum(sizes_PxPxX, -1)
    journey = _Journey(jax.lax.axis_index("expert"), most, rows_PxP)
    come_PxSxD = journey.there(rows_RxD)

    # Unused places come last, after the places of all experts' rows.
    own_PxX = sizes_PxPxX[:, journey.here]
    find = jax.vmap(partial(jnp.searchsorted, side="right"), (0, None))
    expert_PxS = find(jnp.cumsum(own_PxX, 1), jnp.arange(most))
    order_Q = jnp.argsort(expert_PxS.reshape(-1))
    come_QxD = come_PxSxD.reshape(-1, rows_RxD.shape[1])[order_Q]
    output_QxD = outputs_of(come_QxD, jnp.sum(own_PxX, 0), *matrices)
    return journey.back(output_QxD[jnp.argsort(order_Q)].reshape(come_PxSxD.shape), rows_RxD)


class _Journey(NamedTuple):
    """Sends rows to the devices of their experts along the mesh axis `expert`, and outputs back.

    XLA for CPUs has no ragged exchange: there each device sends `most` rows to each other, whether
    they are used or not.

    Attributes:
        here: this device's index along the axis.
        most: the greatest number of rows from one device to another, S.
        rows: the number of rows from each device to each device, [sender P, receiver P].
    """

    here: jax.Array
    most: int
    rows: jax.Array

    @property
    def _begins(self) -> jax.Array:
        """The index of each sender's first row for each receiver, [sender P, receiver P]."""
        return jnp.cumsum(self.rows, 1) - self.rows

    def there(self, rows_RxD: jax.Array) -> jax.Array:
        """Sends this device's rows; returns the rows that come from each device, [P, S, D].

        Of sender p the first rows[p, here] rows are used.
        """
        parts, begins_P = len(self.rows), self._begins[self.here]

        def ragged(rows_RxD: jax.Array) -> Any:
            places = jnp.zeros((parts * self.most, rows_RxD.shape[1]), rows_RxD.dtype)
            return jax.lax.ragged_all_to_all(
                rows_RxD,
                places,
                begins_P,
                self.rows[self.here],
                jnp.full(parts, self.here * self.most, begins_P.dtype),
                self.rows[:, self.here],
                axis_name="expert",
            ).reshape(parts, self.most, -1)

        def whole(rows_RxD: jax.Array) -> Any:
            places_PxS = begins_P[:, None] + jnp.arange(self.most)
            sent_PxSxD = rows_RxD.at[places_PxS].get(mode="clip")
            return jax.lax.all_to_all(sent_PxSxD, "expert", 0, 0)

        come: jax.Array = jax.lax.platform_dependent(rows_RxD, cpu=whole, default=ragged)
        return come

    def back(self, output_PxSxD: jax.Array, like_RxD: jax.Array) -> jax.Array:
        """Sends outputs back to the rows' senders; returns the outputs of this device's own rows.

        Args:
            output_PxSxD: output of each row that `there` returned, in the same order.
            like_RxD: this device's own rows; the result has their order, shape and dtype.
        """
        parts, begins_P = len(self.rows), self._begins[self.here]

        def ragged(output_PxSxD: jax.Array) -> Any:
            return jax.lax.ragged_all_to_all(
                output_PxSxD.reshape(parts * self.most, -1),
                jnp.zeros_like(like_RxD),
                self.most * jnp.arange(parts, dtype=begins_P.dtype),
                self.rows[:, self.here],
                self._begins[:, self.here],
                self.rows[self.here],
                axis_name="expert",
            )

        def whole(output_PxSxD: jax.Array) -> Any:
            come_PxSxD = jax.lax.all_to_all(output_PxSxD, "expert", 0, 0)
            row_R = jnp.arange(len(like_RxD))
            ends_P = jnp.cumsum(self.rows[self.here])
            owner_R = jnp.searchsorted(ends_P, row_R, side="right")
            return come_PxSxD[owner_R, row_R - begins_P[owner_R]]

        came: jax.Array = jax.lax.platform_dependent(output_PxSxD, cpu=whole, default=ragged)
        return came


def by_groups(
    activation: Activation,
    rows_RxD: jax.Array,
    sizes_E: jax.Array,
    gate_ExDxF: jax.Array,
    up_ExDxF: jax.Array,
    down_ExFxD: jax.Array,
) -> jax.Array:
    """Returns the output of each row's expert, [R, D], by ragged products.

    Args:
        activation: the function that is applied to the gate's output.
        rows_RxD: the rows, sorted by expert.
        sizes_E: the number of rows of each expert.
        gate_ExDxF: the experts' matrices gate.
        up_ExDxF: the experts' matrices up.
        down_ExFxD: the experts' matrices down.
    """
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
    """Returns what `by_groups` returns, computed in blocks of `size` rows of one expert.

    An expert's last block may be partly empty. `size` None: `block_rows`.
    """
    count, experts = rows_RxD.shape[0], sizes_E.shape[0]
    size = size or block_rows(count, experts)
    blocks = -(-count // size) + experts
    until_E = jnp.cumsum(-(-sizes_E // size))
    expert_P = jnp.clip(jnp.searchsorted(until_E, jnp.arange(blocks), side="right"), 0, experts - 1)

    # For each row: its expert, and its index in the blocks of that expert.
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
    """Returns the rows of a block, S: rows / experts, but at least 8.

    So there are at most about twice as many blocks as experts.
    """
    return max(8, rows // experts)
