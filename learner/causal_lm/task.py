"""The task that trains a decoder of people's checkpoints on tokens.

Shapes: as in `model`.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from diloco.common.errors import TaskError
from diloco.common.holdings import Sizes
from diloco.common.layout import TensorHint
from diloco.learner import tree
from diloco.learner.causal_lm.attention import KINDS
from diloco.learner.causal_lm.config import DecoderConfig, read_config
from diloco.learner.causal_lm.files import Adapters, HuggingFace, read_base
from diloco.learner.causal_lm.lora import (
    ALONE,
    FROZEN,
    Beside,
    Lora,
    adapter_count,
    base_dtypes,
    half_partition,
    init_adapters,
    read_lora,
    with_adapters,
)
from diloco.learner.causal_lm.model import Compute, head_of, hidden_of, init_params, token_losses
from diloco.learner.causal_lm.sizes import LAYERS, SIZES, size_named, table
from diloco.learner.causal_lm.tokens import Data, TokenFolders, check_data
from diloco.learner.optimizer import Matrices, adamw, muon, warmup_cosine
from diloco.learner.reading import GrainData, require_grain
from diloco.learner.task import Batch, Holder, Params, Task, Variables, named_leaves

Optimizer = Literal["adamw", "muon"]
DTYPES = ("float32", "bfloat16")
MESH_AXES = {"width": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": "tensor"}


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shares of data that is not looked at before somebody reads."""

    data: Callable[[], GrainData]

    @property
    def sizes(self) -> Sizes:
        return self.data().sizes

    def claimed(
        self, holder: Holder, position: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Batch]:
        return self.data().claimed(holder, position, start, stop)


def build(
    *,
    steps: int,
    seed: int,
    model: str,
    data: Data,
    end: int | None = None,
    batch: int = 8,
    length: int = 1024,
    optimizer: Optimizer = "adamw",
    learning_rate: float = 5e-5,
    warmup_steps: int | None = None,
    final_fraction: float = 0.1,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    eval_batches: int = 16,
    dtype: str = "float32",
    remat: bool = True,
    attention: str = "auto",
    accumulate: int = 1,
    shares: int = 0,
    digests: Sequence[str] = (),
    workers: int = 0,
    fresh: bool = False,
    lora: Mapping[str, Any] | None = None,
) -> Task:
    """Train Llama 3, Qwen 3 or Gemma 3 on tokens; losses are nats per token.

    Args:
        steps: length of the run in global steps.
        seed: decides the order of the data.
        model: a Hugging Face folder, or a name of `sizes.SIZES`, whose parameters begin at random.
        data: a folder of token files (`windows`), or several with their weights.
        end: the token behind each document: none sees another, and none is predicted from the
            last. None: what the data's manifest says; without one rows are taken as they are. -1:
            they are so.
        batch: rows in a batch, B.
        length: tokens predicted in each, L.
        optimizer: "adamw", or "muon" for the matrices of layers.
        learning_rate: the peak.
        warmup_steps: global steps of warm-up; a tenth of the run, at most 100, if None.
        final_fraction: last learning rate as a share of the peak.
        weight_decay: decoupled, on matrices only.
        clip: largest global norm of a gradient.
        eval_batches: batches of held-out rows, the same ones each time.
        dtype: "float32" or "bfloat16": of activations and products; parameters stay float32.
        remat: recompute each block in the backward pass.
        attention: "auto", "plain" or "splash" (`attention.make_attention`).
        accumulate: parts of a batch, one after the other.
        shares: in how many shares each epoch is divided, which learners claim; 0: each reads all.
        digests: SHA-256 of `tokens.json` of each folder: learners that have other data are
            refused. None: whatever is there.
        workers: processes that read.
        fresh: parameters begin at random, though the folder may have some.
        lora: rank, alpha, targets and dropout of adapters (`lora.Lora`): they alone are trained,
            beside the folder's parameters, which each learner reads for itself.

    Raises:
        ConfigError: the folder's configuration is missing, or is not honoured.
        TaskError: an option has a wrong type or value.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    _check_options({name: value for name, value in given.items() if name != "lora"})
    source = None if model in SIZES else Path(model)
    config = size_named(model) if source is None else read_config(source)
    compute = Compute(dtype, remat, attention)
    adapters = read_lora(lora, config)
    stored = source is None or fresh

    # Who creates a run, or exports from one, has no data.
    @functools.cache
    def folders() -> TokenFolders:
        require_grain()
        return TokenFolders(data, length=length, vocab=config.vocab, model=source, digests=digests)

    @functools.cache
    def train() -> GrainData:
        dataset = folders().train(seed)
        return GrainData(dataset, batch=batch, seed=seed, shares=shares, workers=workers)

    @functools.cache
    def held_out() -> list[np.ndarray]:
        return folders().held_out(eval_batches * batch)

    def loss_of(params: Params, windows_BxL1: Any, key: jax.Array | None = None) -> jax.Array:
        last = folders().end if end is None else end
        base, beside = with_adapters(adapters, params, key)
        return next_token_loss(
            config,
            base,
            windows_BxL1,
            compute=compute,
            end=None if last == -1 else last,
            beside=beside,
        )

    eval_loss = jax.jit(loss_of)

    def evaluate(params: Params) -> float:
        rows = held_out()
        return sum(float(eval_loss(params, row)) for row in rows) / len(rows)

    return Task(
        init=functools.partial(_init, config, adapters, dtype),
        loss=lambda params, windows, key: (loss_of(params, windows, key), {}),
        batches=lambda learner, position: train().batches(learner, position),
        rows=lambda *given: train().rows(*given),
        evaluate=evaluate,
        tokens_per_batch=batch * length,
        flops_per_token=_flops_per_token(config, adapters, length),
        optimizer=_direction(optimizer, weight_decay, clip),
        schedule=warmup_cosine(
            steps=steps,
            peak=learning_rate,
            warmup_steps=min(100, steps // 10) if warmup_steps is None else warmup_steps,
            final_fraction=final_fraction,
        ),
        hint=hint,
        partition=functools.partial(_partition, config, adapters),
        accumulate=accumulate,
        shared=_Shared(train) if shares else None,
        load_frozen=functools.partial(read_base, Path(model), config, dtype)
        if adapters is not None and not stored
        else None,
        files=HuggingFace(config, source, fresh)
        if adapters is None
        else Adapters(config, adapters, None if stored else source, model),
    )


def _init(config: DecoderConfig, adapters: Lora | None, dtype: str, key: jax.Array) -> Params:
    if adapters is None:
        return init_params(config, key)
    held = base_dtypes(config, dtype)
    base = init_params(config, jax.random.fold_in(key, 0))
    leaves = {name: leaf.astype(held[name]) for name, leaf in named_leaves(base)}
    trained = init_adapters(config, adapters, jax.random.fold_in(key, 1))
    return Variables(trained=trained, frozen=tree.from_names(base, leaves))


def _flops_per_token(config: DecoderConfig, adapters: Lora | None, length: int) -> float:
    """As of a task. A frozen matrix is multiplied with once backward: it has no gradient."""
    whole = config.flops_per_token(length)
    if adapters is None:
        return whole
    return whole - 2.0 * config.multiplied + 6.0 * adapter_count(config, adapters)


def next_token_loss(
    config: DecoderConfig,
    params: Params,
    windows_BxL1: Any,
    *,
    compute: Compute,
    end: int | None,
    beside: Beside = ALONE,
) -> jax.Array:
    """Mean cross entropy in nats per predicted token, float32[]; windows are int[B, L + 1]."""
    tokens_BxL, targets_BxL = windows_BxL1[:, :-1], windows_BxL1[:, 1:]
    told = {"compute": compute, **beside._asdict()}
    head_VxD = head_of(config, params)
    if end is None:
        hidden_BxLxD = hidden_of(config, params, tokens_BxL, **told)
        return jnp.mean(token_losses(config, head_VxD, hidden_BxLxD, targets_BxL, compute=compute))
    ended_BxL = tokens_BxL == end
    # A document's end is of the document; what follows it is of the next.
    segments_BxL = 1 + jnp.cumsum(ended_BxL, axis=1) - ended_BxL
    hidden_BxLxD = hidden_of(config, params, tokens_BxL, segments_BxL, **told)
    losses_BxL = token_losses(config, head_VxD, hidden_BxLxD, targets_BxL, compute=compute)
    losses_BxL = jnp.where(ended_BxL, 0, losses_BxL)
    return jnp.sum(losses_BxL) / jnp.maximum(1, jnp.sum(~ended_BxL))


def hint(name: str, shape: tuple[int, ...]) -> TensorHint:  # noqa: ARG001 - the Task's contract
    """The embedding is averaged and a fragment of its own; layers are normed one by one."""
    if name == "embed":
        return TensorHint(merge="average", alone=True)
    return TensorHint(norm_axes=1 if name.startswith(LAYERS) else 0)


def matrices(name: str, shape: tuple[int, ...]) -> Matrices | None:
    """What Muon orthogonalizes: each layer's matrices."""
    if not name.startswith(LAYERS) or len(shape) != 3:
        return None
    return Matrices(shape, inputs=(1,), outputs=(2,))


def _partition(
    config: DecoderConfig, adapters: Lora | None, name: str, shape: tuple[int, ...]
) -> PartitionSpec:
    """How a tensor is cut over a learner's mesh: by what its axes are; vectors are whole."""
    entries = table(config)
    if adapters is not None and (name := name.removeprefix(FROZEN)) not in entries:
        matrix, _, half = name.rpartition("/")
        return half_partition(half, _partition(config, None, matrix, entries[matrix].shape))
    entry = entries[name]
    if len(shape) - entry.stacked < 2:
        return PartitionSpec()
    return PartitionSpec(*(MESH_AXES.get(axis) for axis in entry.axes))


def _direction(
    optimizer: Optimizer, weight_decay: float, clip: float
) -> optax.GradientTransformation:
    if optimizer == "adamw":
        return adamw(weight_decay=weight_decay, clip=clip, hint=hint)
    return muon(weight_decay=weight_decay, clip=clip, hint=hint, matrices=matrices)


_LEAST = {
    "batch": 1,
    "length": 1,
    "eval_batches": 1,
    "accumulate": 1,
    "steps": 1,
    "warmup_steps": 0,
    "shares": 0,
    "workers": 0,
    "end": -1,
    "seed": 0,
}
_CHOICES = {"attention": KINDS, "dtype": DTYPES, "optimizer": get_args(Optimizer)}


def _check_options(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in _CHOICES:
            _require(name, value, value in _CHOICES[name], f"one of {', '.join(_CHOICES[name])}")
        elif name in _LEAST:
            ok = type(value) is int and value >= _LEAST[name]
            _require(name, value, ok, f"an int of at least {_LEAST[name]}")
        elif name in ("remat", "fresh"):
            _require(name, value, isinstance(value, bool), "true or false")
        elif name == "model":
            _require(name, value, isinstance(value, str) and value, "a folder's path")
        elif name == "digests":
            ok = isinstance(value, list | tuple) and all(map(_is_digest, value))
            _require(name, value, ok, "a list of SHA-256 digests of 64 hexadecimal digits")
        elif name == "data":
            expected = 'a folder\'s path, or paths with weights above 0: {"/a" = 0.7, "/b" = 0.3}'
            _require(name, value, check_data(value), expected)
        else:
            ok = type(value) in (int, float) and math.isfinite(value) and value >= 0
            _require(name, value, ok, "a finite number of at least 0")


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _require(name: str, value: Any, ok: Any, expected: str) -> None:
    if not ok:
        raise TaskError(
            f"causal_lm: the option {name} must be {expected}, but it is {value!r}",
            hint=f"docs/models.md has all options; sizes are {', '.join(SIZES)}",
        )
