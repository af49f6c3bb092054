"""Low-rank adapters (LoRA, arXiv 2106.09685) for a decoder's matrices, which are frozen.

A matrix W [I, O] of a layer computes x W + (alpha / R) x A B, with A [I, R] and B [R, O]. B begins
at zero, so that version 0 is the base; A is drawn as by `peft`. Only A and B are trained and sent.
Each is merged separately, so that their product is not the mean of the learners' products.

Adapters of experts follow `target_parameters` of `peft`: an expert's matrices gate and up are one
matrix there, to which the product A B is added.

A target is a kind of matrix, such as "q", in all layers that have such a matrix. Each group of
layers (`groups`) has its own stacked adapters, as it has its own stacked tensors.

Shapes: as in `model`; R rank, I and O inputs and outputs of a matrix, E experts.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from pydantic import BaseModel, ConfigDict, Field

from diloco.common.protocol.errors import TaskError
from diloco.learner.task import AtLeastOne, Params, Variables
from diloco.learner.tensors import tree
from diloco.models.decoders.config import DecoderConfig
from diloco.models.decoders.experts import ADAPTERS, DOWN, GATE_UP, OUT, UP
from diloco.models.decoders.groups import groups_of
from diloco.models.decoders.model import Product, plain_product
from diloco.models.decoders.tensor_names_and_shapes import (
    LAYERS,
    TensorEntry,
    buffers_of,
    stacked,
    table,
)

TRAINED, FROZEN = "trained/", "frozen/"
_DRAWN = "dropout_keys"
# Experts' parameters by their names in transformers -> the names of their adapters here.
EXPERTS = {"experts.gate_up_proj": GATE_UP, "experts.down_proj": OUT}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """The matrices that have adapters, and the adapters' hyperparameters.

    Attributes:
        rank: the rank, R.
        alpha: adapters are multiplied by alpha / R.
        targets: names of matrices as in `tensor_names_and_shapes`, such as "q", in the order of
            its `table`.
        dropout: share of an adapter's inputs that a training step drops, drawn by the step's key.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """The factor alpha / R of the product A B."""
        return self.alpha / self.rank


class AdapterParams(NamedTuple):
    """The arguments of `model.forward` for adapters.

    Attributes:
        product: multiplies by a layer's matrix, and adds the product of the matrix's adapter.
        beside: the adapters, as a tree to be joined with that of the layers' tensors; None: none.
    """

    product: Product
    beside: Params


ALONE = AdapterParams(plain_product, None)


def kind_of(entry: TensorEntry) -> str:
    """Returns the last part of the name of a layer's tensor, such as "q" of "layers/q"."""
    return entry.name.rpartition("/")[2]


def matrices_of(config: DecoderConfig) -> dict[str, list[TensorEntry]]:
    """Returns the matrices of layers that may have an adapter, except those of experts.

    The keys are `peft`'s names of kinds of matrices, such as "q_proj"; a value has the stacked
    matrix of each group of layers that has this kind.
    """
    found: dict[str, list[TensorEntry]] = {}
    for entry in table(config).values():
        if entry.name.startswith(LAYERS) and entry.transposed and "experts" not in entry.axes:
            found.setdefault(entry.checkpoint_name.split(".")[-2], []).append(entry)
    return found


def experts_of(config: DecoderConfig) -> dict[str, list[TensorEntry]]:
    """Returns the matrices of experts that may have an adapter, in the form of `matrices_of`.

    The keys are those of `EXPERTS`; gate and up of an expert are one matrix.
    """
    found: dict[str, list[TensorEntry]] = {}
    for group in groups_of(config).values():
        experts, D = group.config.experts, config.width
        if experts is None:
            continue
        E, F = experts.count, experts.width
        shapes = {GATE_UP: (E, D, 2 * F), OUT: (E, F, D)}
        axes = {GATE_UP: ("experts", "width", "mlp"), OUT: ("experts", "mlp", "width")}
        within = "" if experts.beside else "mlp."
        for module, name in EXPERTS.items():
            entry = stacked(group, name, within + module, shapes[name], axes[name])
            found.setdefault(module, []).append(entry)
    return found


def adapted_of(config: DecoderConfig) -> dict[str, TensorEntry]:
    """Returns all tensors that may have an adapter, by their names in `tensor_names_and_shapes`."""
    known = matrices_of(config) | experts_of(config)
    return {entry.name: entry for entries in known.values() for entry in entries}


def targets_of(config: DecoderConfig, lora: Lora) -> list[TensorEntry]:
    """Returns the tensors that have an adapter, sorted by target, then by group of layers."""
    entries = adapted_of(config).values()
    return [entry for name in lora.targets for entry in entries if kind_of(entry) == name]


class LoraOptions(BaseModel):
    """The option `lora` of a task.

    Attributes:
        rank: the rank, R.
        alpha: adapters are multiplied by alpha / R; None: alpha is 2 R.
        targets: `peft`'s names of the matrices that have adapters; None: all but those of experts.
        dropout: share of an adapter's inputs that a training step drops.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    rank: AtLeastOne
    alpha: Annotated[float, Field(gt=0)] | None = None
    targets: Annotated[Sequence[str], Field(min_length=1)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


def read_lora(given: LoraOptions | None, config: DecoderConfig) -> Lora | None:
    """Returns the adapters' hyperparameters for the option `lora`; None if `given` is None.

    Raises:
        TaskError: a target is not a matrix of this decoder, or dropout is given for experts.
    """
    if given is None:
        return None
    known = matrices_of(config) | experts_of(config)
    targets = matrices_of(config) if given.targets is None else given.targets
    if unknown := [one for one in targets if one not in known]:
        raise TaskError(
            f"causal_lm: the option 'lora.targets' has {unknown}, but there are {', '.join(known)}",
            hint='for example lora = {rank = 16, alpha = 32, targets = ["q_proj", "v_proj"]}',
        )
    if given.dropout and (experts := [one for one in targets if one in EXPERTS]):
        raise TaskError(
            f"causal_lm: 'lora.dropout' is {given.dropout}, but adapters of {experts[0]} have none,"
            " as in peft",
            hint="leave dropout out, or the experts",
        )
    names = tuple(kind_of(known[module][0]) for module in known if module in targets)
    alpha = 2 * given.rank if given.alpha is None else given.alpha
    return Lora(rank=given.rank, alpha=float(alpha), targets=names, dropout=float(given.dropout))


def init_adapters(config: DecoderConfig, lora: Lora, key: jax.Array) -> Params:
    """Returns new float32 adapters: A uniform in +-1 / sqrt(I), as by `peft`, and B zero.

    The tree has the names of the decoder's tree, with the leaves "a" and "b" for each matrix.
    """
    adapters: dict[str, Any] = {}
    for number, entry in enumerate(targets_of(config, lora)):
        *layers, inputs, outputs = entry.shape
        bound = 1 / math.sqrt(inputs)
        drawn = jax.random.fold_in(key, number)
        adapters[f"{entry.name}/{DOWN}"] = jax.random.uniform(
            drawn, (*layers, inputs, lora.rank), minval=-bound, maxval=bound
        )
        adapters[f"{entry.name}/{UP}"] = jnp.zeros((*layers, lora.rank, outputs))
    return tree.nested(adapters)


def base_dtypes(config: DecoderConfig, dtype: str) -> dict[str, np.dtype]:
    """Returns the dtype that each frozen tensor has in memory, by the tensor's name.

    It is float32 for norms, gains of experts and buffers, and `dtype` for all others. That changes
    no result: a step rounds the others to `dtype` before each product anyway.
    """
    wide, buffers = ("norm", "router_gain"), {*buffers_of(config)}
    return {
        name: jnp.dtype(jnp.float32 if name in buffers or name.endswith(wide) else dtype)
        for name in table(config)
    }


def with_adapters(
    lora: Lora | None, variables: Params, key: jax.Array | None
) -> tuple[Params, AdapterParams]:
    """Returns (the decoder's own parameters, the arguments of `model.forward` for its adapters).

    Args:
        lora: the adapters' hyperparameters; None: no adapters.
        variables: the parameters; with adapters, `Variables`, whose frozen part is the base.
        key: the step's typed key, for dropout; None: no dropout.
    """
    if lora is None:
        return variables, ALONE
    assert isinstance(variables, Variables)
    groups = _by_group(variables.trained["layers"])
    ends = list(itertools.accumulate(map(_layers_of, groups.values())))
    keys = jax.random.split(key, ends[-1]) if lora.dropout and key is not None else None
    beside: dict[str, Any] = {}
    for (name, adapters), end in zip(groups.items(), ends, strict=True):
        # Experts get their adapters with the scale already applied.
        own: dict[str, Any] = {
            ADAPTERS: {
                kind: halves | {UP: halves[UP] * lora.scale} if kind in EXPERTS.values() else halves
                for kind, halves in adapters.items()
            }
        }
        if keys is not None:
            own[_DRAWN] = keys[end - _layers_of(adapters) : end]
        beside |= {name: own} if name else own

    def product(name: str, x_BxLxI: jax.Array, layer: Mapping[str, Any]) -> jax.Array:
        y_BxLxO = plain_product(name, x_BxLxI, layer)
        halves = layer.get(ADAPTERS, {}).get(name)
        if halves is None:
            return y_BxLxO
        if _DRAWN in layer:
            drawn = jax.random.fold_in(layer[_DRAWN], lora.targets.index(name))
            x_BxLxI = _dropped(lora.dropout, x_BxLxI, drawn)
        low_BxLxR = x_BxLxI @ halves[DOWN].astype(x_BxLxI.dtype)
        added_BxLxO: jax.Array = low_BxLxR @ halves[UP].astype(x_BxLxI.dtype)
        return y_BxLxO + added_BxLxO * lora.scale

    return variables.frozen, AdapterParams(product, beside)


def _by_group(adapters: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the adapters of each group of layers by its name; "": all layers are one group."""
    alike = any(DOWN in halves for halves in adapters.values())
    return {"": adapters} if alike else dict(adapters)


def _layers_of(adapters: Mapping[str, Any]) -> int:
    """Returns the number of layers that adapters of one group stack."""
    layers: int = next(iter(adapters.values()))[DOWN].shape[0]
    return layers


def _dropped(share: float, x: jax.Array, key: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 1 - share, x.shape)
    left: jax.Array = jnp.where(kept, x / (1 - share), 0)
    return left


def half_partition(half: str, whole: PartitionSpec) -> PartitionSpec:
    """Returns the partition of A or B: the axis of rank R stays whole.

    Args:
        half: `DOWN` for A, `UP` for B.
        whole: the partition of the adapted matrix.
    """
    *stacked, inputs, outputs = whole
    return PartitionSpec(*stacked, *((inputs,) if half == DOWN else (None, outputs)))


def adapter_count(config: DecoderConfig, lora: Lora) -> int:
    """Returns the number of parameters of all adapters."""
    shapes = [entry.shape for entry in targets_of(config, lora)]
    return sum(
        math.prod(layers) * lora.rank * (inputs + outputs) for *layers, inputs, outputs in shapes
    )


class AdaptedMatrix:
    """A stacked matrix with its adapter added; each layer is computed when it is read.

    Args:
        base: the matrix, [N, I, O]; of experts [N, E, I, O], or gate and up [N, E, 2, I, O].
        down: A, [N, I, R]; of experts [N, E, I, R], or [N, E, 1, I, R].
        up: B, [N, R, O]; of experts [N, E, R, O], or [N, E, 2, R, O].
        scale: factor of the product A B.
    """

    def __init__(self, base: Any, down: np.ndarray, up: np.ndarray, scale: float) -> None:
        self._base, self._down, self._up, self._scale = base, down, up, scale
        self.shape = base.shape

    def __getitem__(self, layer: int) -> np.ndarray:
        added: np.ndarray = self._down[layer].astype(np.float32) @ self._up[layer]
        return np.asarray(self._base[layer]).astype(np.float32) + self._scale * added
