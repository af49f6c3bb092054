"""Low-rank adapters (LoRA, arXiv 2106.09685) for a decoder's matrices, which are frozen.

A matrix W [I, O] of a layer computes x W + (alpha / R) x A B, with A [I, R] and B [R, O]. B begins
at zero, so that version 0 is the base; A is drawn as by `peft`. Only A and B are trained and sent.
Each is merged separately, so that their product is not the mean of the learners' products.

Adapters of experts follow `target_parameters` of `peft`: gate and up of an expert are one matrix,
to which the product A B is added.

Shapes: as in `model`; R rank, I and O inputs and outputs of a matrix, E experts.
"""

import dataclasses
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
from diloco.models.decoders.config import DecoderConfig
from diloco.models.decoders.experts import ADAPTERS, DOWN, GATE_UP, OUT, UP
from diloco.models.decoders.model import Product, plain_product
from diloco.models.decoders.tensors import LAYERS, TensorEntry, table

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
        targets: names of matrices as in `tensors`, such as "q", in the order of its table.
        dropout: share of an adapter's inputs that a training step drops, drawn by the step's key,
            which depends on the run's seed, the learner and the position.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """The factor of the product A B."""
        return self.alpha / self.rank


class AdapterParams(NamedTuple):
    """The arguments of `model.hidden_of` for adapters."""

    product: Product
    beside: Params


ALONE = AdapterParams(plain_product, None)


def matrices_of(config: DecoderConfig) -> dict[str, TensorEntry]:
    """Returns the matrices that may have an adapter, without experts', by `peft`'s names."""
    return {
        entry.checkpoint_name.split(".")[-2]: entry
        for entry in table(config).values()
        if entry.transposed and "experts" not in entry.axes
    }


def experts_of(config: DecoderConfig) -> dict[str, TensorEntry]:
    """Returns the experts' parameters that may have an adapter, by `peft`'s names."""
    if config.experts is None:
        return {}
    N, E, D, F = config.layers, config.experts.count, config.width, config.experts.width
    shapes = {GATE_UP: (N, E, D, 2 * F), OUT: (N, E, F, D)}
    axes = {GATE_UP: ("width", "mlp"), OUT: ("mlp", "width")}
    return {
        module: TensorEntry(
            name=LAYERS + name,
            checkpoint_name=f"model.layers.{{}}.mlp.{module}",
            shape=shapes[name],
            transposed=False,
            axes=("layers", "experts", *axes[name]),
        )
        for module, name in EXPERTS.items()
    }


def adapted_of(config: DecoderConfig) -> dict[str, TensorEntry]:
    """Returns all tensors that may have an adapter, by their names in `tensors`."""
    known = matrices_of(config) | experts_of(config)
    return {entry.name: entry for entry in known.values()}


class LoraOptions(BaseModel):
    """The option `lora` of a task."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    rank: AtLeastOne
    alpha: Annotated[float, Field(gt=0)] | None = None
    targets: Annotated[Sequence[str], Field(min_length=1)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


def read_lora(given: LoraOptions | None, config: DecoderConfig) -> Lora | None:
    """Resolves the option `lora` for this decoder; returns None without it.

    Raises:
        TaskError: a target is no matrix of this decoder.
    """
    if given is None:
        return None
    if config.unlike is not None:
        raise TaskError(
            f"causal_lm: the option 'lora' is for decoders whose layers are alike, but those of"
            f" {config.family} are not",
            hint="train all parameters, or adapters of peft under transformers' Trainer"
            " (docs/library.md)",
        )
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
    names = tuple(
        entry.name.removeprefix(LAYERS) for module, entry in known.items() if module in targets
    )
    alpha = 2 * given.rank if given.alpha is None else given.alpha
    return Lora(rank=given.rank, alpha=float(alpha), targets=names, dropout=float(given.dropout))


def init_adapters(config: DecoderConfig, lora: Lora, key: jax.Array) -> Params:
    """Returns new float32 adapters: A uniform within 1 / sqrt(I), as by `peft`; B zero."""
    adapters: dict[str, Any] = {}
    for number, name in enumerate(lora.targets):
        *stacked, inputs, outputs = adapted_of(config)[LAYERS + name].shape
        bound = 1 / math.sqrt(inputs)
        drawn = jax.random.fold_in(key, number)
        adapters[name] = {
            DOWN: jax.random.uniform(
                drawn, (*stacked, inputs, lora.rank), minval=-bound, maxval=bound
            ),
            UP: jnp.zeros((*stacked, lora.rank, outputs)),
        }
    return {"layers": adapters}


def base_dtypes(config: DecoderConfig, dtype: str) -> dict[str, np.dtype]:
    """Returns the dtypes of frozen tensors: `dtype`, or float32 for norms and gains of experts.

    This changes no result, as products round the others to `dtype` anyway.
    """
    wide = ("norm", "router_gain")
    return {n: jnp.dtype(jnp.float32 if n.endswith(wide) else dtype) for n in table(config)}


def with_adapters(
    lora: Lora | None, variables: Params, key: jax.Array | None
) -> tuple[Params, AdapterParams]:
    """Returns a decoder's parameters, and arguments for its adapters (none without adapters).

    Args:
        lora: the adapters' hyperparameters; None: no adapters.
        variables: the parameters; with adapters, `Variables`, whose frozen part is the base.
        key: the step's typed key, for dropout; None: no dropout.
    """
    if lora is None:
        return variables, ALONE
    assert isinstance(variables, Variables)
    adapters = variables.trained["layers"]
    # Experts get their adapters with the scale already applied.
    scaled = {
        name: halves | {UP: halves[UP] * lora.scale} if name in EXPERTS.values() else halves
        for name, halves in adapters.items()
    }
    beside: dict[str, Any] = {ADAPTERS: scaled}
    if lora.dropout and key is not None:
        layers = next(iter(adapters.values()))[DOWN].shape[0]
        beside[_DRAWN] = jax.random.split(key, layers)

    def product(name: str, x_BxLxI: jax.Array, layer: Mapping[str, Any]) -> jax.Array:
        y_BxLxO = plain_product(name, x_BxLxI, layer)
        if name not in lora.targets:
            return y_BxLxO
        halves = layer[ADAPTERS][name]
        if _DRAWN in layer:
            drawn = jax.random.fold_in(layer[_DRAWN], lora.targets.index(name))
            x_BxLxI = _dropped(lora.dropout, x_BxLxI, drawn)
        low_BxLxR = x_BxLxI @ halves[DOWN].astype(x_BxLxI.dtype)
        added_BxLxO: jax.Array = low_BxLxR @ halves[UP].astype(x_BxLxI.dtype)
        return y_BxLxO + added_BxLxO * lora.scale

    return variables.frozen, AdapterParams(product, beside)


def _dropped(share: float, x: jax.Array, key: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 1 - share, x.shape)
    left: jax.Array = jnp.where(kept, x / (1 - share), 0)
    return left


def half_partition(half: str, whole: PartitionSpec) -> PartitionSpec:
    """Returns the partition of A or B: that of its matrix on the axis that they share."""
    *stacked, inputs, outputs = whole
    return PartitionSpec(*stacked, *((inputs,) if half == DOWN else (None, outputs)))


def adapter_count(config: DecoderConfig, lora: Lora) -> int:
    """Returns the number of parameters of all adapters, which are trained."""
    shapes = [adapted_of(config)[LAYERS + name].shape for name in lora.targets]
    return sum(
        math.prod(stacked) * lora.rank * (inputs + outputs) for *stacked, inputs, outputs in shapes
    )


class AdaptedMatrix:
    """A stacked matrix plus its adapter; each layer is computed when it is read.

    Args:
        base: the matrix, [N, I, O]; of experts [N, E, I, O].
        down: A, [N, I, R], or [N, E, I, R].
        up: B, [N, R, O], or [N, E, R, O].
        scale: factor of the product A B.
    """

    def __init__(self, base: Any, down: np.ndarray, up: np.ndarray, scale: float) -> None:
        self._base, self._down, self._up, self._scale = base, down, up, scale
        self.shape = base.shape

    def __getitem__(self, layer: int) -> np.ndarray:
        added: np.ndarray = self._down[layer].astype(np.float32) @ self._up[layer]
        return np.asarray(self._base[layer]).astype(np.float32) + self._scale * added
