"""The task that trains a decoder of a published family on tokens.

The first parameters are those of a checkpoint, or random. Shapes: as in `model`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from pydantic import Field

from diloco.common.protocol.errors import TaskError
from diloco.common.storage.data_share_allocation import Sizes
from diloco.learner.select_examples import GrainData, require_grain
from diloco.learner.task import (
    AtLeastOne,
    Batch,
    Dtype,
    Files,
    Holder,
    Natural,
    NotNegative,
    Params,
    Task,
    Variables,
    checked_options,
    hint_of_decoder,
)
from diloco.learner.tensors import tree
from diloco.learner.tensors.mesh import by_kind_of_axis
from diloco.learner.tensors.optimizer import Matrices, Optimizer, direction_by, warmup_cosine
from diloco.models.chosen import Chosen, Patterns, with_private
from diloco.models.decoders.attention import Kind
from diloco.models.decoders.config import DecoderConfig, read_config, read_document
from diloco.models.decoders.experts import Load
from diloco.models.decoders.files import Adapters, HuggingFace, LazyFrozenLeaf, read_base
from diloco.models.decoders.lora import (
    ALONE,
    FROZEN,
    TRAINED,
    AdapterParams,
    Lora,
    LoraOptions,
    adapted_of,
    adapter_count,
    base_dtypes,
    half_partition,
    init_adapters,
    read_lora,
    with_adapters,
)
from diloco.models.decoders.model import (
    Compute,
    forward,
    head_of,
    init_params,
    joined,
    token_losses,
)
from diloco.models.decoders.sizes import SIZES, size_named
from diloco.models.decoders.tensor_names_and_shapes import (
    LAYERS,
    TOWER,
    active,
    buffers_of,
    multiplied,
    operations,
    table,
)
from diloco.models.decoders.tokens import Data, TokenFolders
from diloco.models.decoders.vision import (
    ImageOptions,
    ImageTextBatch,
    check_images,
    soft_tokens,
    with_tower,
)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of the data's folders, which are opened when the task first trains or evaluates.

    Attributes:
        look: opens the folders.
        seed: seed of the order of training rows.
        batch: rows in a batch.
        shares: shares of an epoch; 0: learners do not divide epochs.
        workers: processes that read the data.
        held_out: about how many held-out rows to evaluate on.
    """

    look: Callable[[], TokenFolders]
    seed: int
    batch: int
    shares: int
    workers: int
    held_out: int

    @functools.cached_property
    def folders(self) -> TokenFolders:
        require_grain()
        return self.look()

    @functools.cached_property
    def train(self) -> GrainData:
        return GrainData(
            self.folders.train(self.seed),
            batch=self.batch,
            seed=self.seed,
            shares=self.shares,
            workers=self.workers,
        )

    @functools.cached_property
    def unseen(self) -> list[Batch]:
        return self.folders.held_out(self.held_out)

    def batches(self, learner: str, position: int) -> Iterator[Batch]:
        return self.train.batches(learner, position)

    def rows(self, learner: str, position: int, start: int, stop: int) -> Iterator[Batch]:
        return self.train.rows(learner, position, start, stop)

    def every_row(self) -> Sequence[Sequence[Any]]:
        return self.folders.every_row()

    @property
    def sizes(self) -> Sizes:
        return self.train.sizes

    def claimed(
        self, holder: Holder, position: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Batch]:
        return self.train.claimed(holder, position, start, stop)


@checked_options("causal_lm", f"docs/models.md has all options; sizes are {', '.join(SIZES)}")
def build(
    *,
    steps: AtLeastOne,
    seed: Natural,
    model: Annotated[str, Field(min_length=1)],
    data: Data,
    end: Annotated[int, Field(ge=-1)] | None = None,
    batch: AtLeastOne = 8,
    length: AtLeastOne = 1024,
    optimizer: Optimizer = "adamw",
    learning_rate: NotNegative = 5e-5,
    warmup_steps: Natural | None = None,
    final_fraction: NotNegative = 0.1,
    weight_decay: NotNegative = 0.1,
    clip: NotNegative = 1.0,
    eval_batches: AtLeastOne = 16,
    dtype: Dtype = "float32",
    remat: bool = True,
    attention: Kind = "auto",
    accumulate: AtLeastOne = 1,
    shares: Natural = 0,
    digests: Sequence[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]] = (),
    workers: Natural = 0,
    fresh: bool = False,
    lora: LoraOptions | None = None,
    trained: Patterns = ("*",),
    frozen: Patterns | None = None,
    private: Patterns = (),
    images: ImageOptions | None = None,
) -> Task:
    """Train a decoder of a published family on tokens; losses are nats per token.

    Args:
        steps: length of the run in global steps.
        seed: decides the order of the data.
        model: a Hugging Face folder; or a published size, whose parameters begin at random.
        data: a folder of token files, or several with their weights: {"/a": 0.7, "/b": 0.3}.
        end: the token that ends each document: attention stays within a document, and nothing is
            predicted from this token. None: as the folder's `tokens.json` says; without that file
            each row counts as one document. -1: each row counts as one document.
        batch: rows in a batch, B.
        length: tokens predicted in a row, L.
        optimizer: "adamw", or "muon" for the matrices of layers.
        learning_rate: the peak; raise it for fresh parameters.
        warmup_steps: global steps of warm-up; a tenth of the run, at most 100, if None.
        final_fraction: last learning rate as a share of the peak.
        weight_decay: decoupled, on matrices only.
        clip: largest global norm of a gradient.
        eval_batches: batches of held-out rows, the same ones each time.
        dtype: "float32" or "bfloat16": of activations and products; parameters stay float32.
        remat: recompute each block in the backward pass.
        attention: "plain": by XLA; "splash": JAX's kernel for TPUs; "auto": that kernel on TPUs
            where it fits (heads of a multiple of 128 numbers, rows of a multiple of 128 tokens),
            else plain.
        accumulate: parts of a batch whose gradients are accumulated.
        shares: shares of each epoch, which learners claim; 0: each learner reads all.
        digests: SHA-256 of `tokens.json` of each folder: learners that have other data are
            refused. Empty: any data.
        workers: processes that read the data.
        fresh: parameters begin at random, though the folder may have some.
        lora: rank, alpha, targets and dropout of adapters. Only adapters are trained then; each
            learner reads the folder's parameters for itself. None: no adapters.
        trained: patterns of the tensors that are trained and synchronized, such as
            "*/expert_*".
        frozen: patterns of tensors not to train among `trained`, such as "*/router*"; what is not
            trained is kept in `dtype`. None: with images the vision tower, "tower/*"; else none.
            Buffers of transformers, such as `layer_scalar`, are never trained.
        private: patterns of trained tensors of which each learner trains its own and sends
            nothing, such as "final_norm".
        images: {row = 1, patches = 2520} for a folder of rows with images: the greatest numbers of
            images in a row and of patches in an image. None: rows have no images, and the vision
            tower is not among the parameters.

    Raises:
        ConfigError: the folder's configuration is missing or not supported.
        TaskError: an option has a wrong type or value.
    """
    source = None if model in SIZES else Path(model)
    config = _config_of(model, source, images)
    compute = Compute(dtype, remat, attention)
    adapters = read_lora(lora, config)
    chosen = _chosen(config, adapters, trained, frozen)
    stored = source is None or fresh

    look = functools.partial(
        TokenFolders,
        data,
        length=length,
        vocab=config.vocab,
        model=source,
        digests=digests,
        images=None if images is None else (images, config),
    )
    rows = _Rows(look, seed, batch, shares, workers, held_out=eval_batches * batch)

    def last() -> int | None:
        found = rows.folders.end if end is None else end
        return None if found == -1 else found

    def sums_of(params: Params, batch: Batch, key: jax.Array | None = None) -> LossSums:
        whole = params if chosen is None else joined(params.trained, params.frozen)
        base, beside = with_adapters(adapters, whole, key)
        told: dict[str, Any] = {"compute": compute, "end": last(), "beside": beside}
        return loss_sums(config, base, batch, **told)

    task = Task(
        init=functools.partial(_init, config, adapters, chosen, dtype),
        loss=lambda params, batch, key: _trained_on(config, sums_of(params, batch, key)),
        weigh=lambda batch: jnp.sum(learned_of(_windows_of(batch), last())),
        batches=rows.batches,
        rows=rows.rows,
        evaluate=functools.partial(_held_out_loss, jax.jit(sums_of), rows),
        tokens_per_batch=batch * length,
        flops_per_token=_flops_per_token(config, adapters, chosen, length),
        active_parameters=None if config.experts is None else active(config),
        optimizer=direction_by(
            optimizer,
            weight_decay=weight_decay,
            clip=clip,
            hint=hint_of_decoder,
            matrices=matrices,
        ),
        schedule=warmup_cosine(
            steps=steps,
            peak=learning_rate,
            warmup_steps=warmup_steps,
            final_fraction=final_fraction,
        ),
        hint=hint_of_decoder,
        partition=functools.partial(partition_of, config, adapters),
        accumulate=accumulate,
        shared=rows if shares else None,
        # Tokens alone are checked by their manifest.
        every_row=None if images is None else rows.every_row,
        load_frozen=functools.partial(read_base, Path(model), config, dtype)
        if adapters is not None and not stored
        else None,
        files=Adapters(config, adapters, None if stored else source, model)
        if adapters is not None
        else _files_of(HuggingFace(config, source, fresh), chosen, dtype),
    )
    return with_private(task, private)


def _held_out_loss(
    sums_of_row: Callable[[Params, Batch], "LossSums"], rows: _Rows, params: Params
) -> float:
    """Returns the mean loss, in nats, over the tokens of held-out rows that would be trained on.

    Args:
        sums_of_row: (parameters, batch of one row) -> sums of the losses.
        rows: the rows.
        params: the parameters.

    Raises:
        TaskError: the held-out rows have no such token.
    """
    sums = [sums_of_row(params, row) for row in rows.unseen]
    if not (learned := sum(int(one.learned) for one in sums)):
        raise TaskError(
            "no token of the held-out rows is trained on",
            hint="hold out more (diloco data prepare --held-out), or raise eval_batches",
        )
    return sum(float(one.losses) for one in sums) / learned


def _files_of(whole: HuggingFace, chosen: Chosen | None, dtype: str) -> Files:
    return whole if chosen is None else InPart(whole, chosen, base_dtypes(whole.config, dtype))


def _config_of(model: str, source: Path | None, images: ImageOptions | None) -> DecoderConfig:
    """Returns the decoder's configuration; with the vision tower if `images` is given.

    Args:
        model: the option `model`: a folder, or a published size.
        source: the folder; None: `model` is a published size.
        images: the option `images`.

    Raises:
        ConfigError: the configuration is missing, or not supported.
        TaskError: `images` does not fit the tower.
    """
    config = size_named(model) if source is None else read_config(source)
    if images is None:
        return config
    document = SIZES[model] if source is None else read_document(source)
    config = with_tower(config, document, repr(model))
    assert config.tower is not None
    check_images(config.tower, images)
    return config


def _chosen(
    config: DecoderConfig, adapters: Lora | None, trained: Patterns, frozen: Patterns | None
) -> Chosen | None:
    """Returns the choice of tensors to train; None: all are trained, or adapters alone.

    Args:
        config: the decoder's configuration.
        adapters: the adapters; None: there are none.
        trained: the option `trained`.
        frozen: the option `frozen`.

    Raises:
        TaskError: tensors are chosen besides adapters, a pattern fits no tensor, or no tensor is
            left to train.
    """
    if adapters is not None and (tuple(trained), frozen) == (("*",), None):
        return None
    if frozen is None:
        frozen = () if config.tower is None else (f"{TOWER}*",)
    chosen = Chosen(trained, (*frozen, *buffers_of(config)))
    if chosen == Chosen(("*",), ()):
        return None
    if adapters is not None:
        raise TaskError(
            "causal_lm: adapters are trained alone, so that no tensor of the base can be chosen",
            hint="leave out lora, or the options trained and frozen",
        )
    chosen.check(table(config))
    return None if all(chosen(name) for name in table(config)) else chosen


@dataclasses.dataclass(frozen=True)
class InPart:
    """Reads and writes a decoder's parameters of which some are frozen; the `Files` of a task.

    Leaves are named as in `Variables`: "trained/" or "frozen/", then the tensor's name.

    Attributes:
        whole: reads and writes all tensors.
        chosen: selects the trained tensors.
        dtypes: dtype in memory of each frozen tensor, by name.
    """

    whole: HuggingFace
    chosen: Chosen
    dtypes: Mapping[str, np.dtype]

    @property
    def first(self) -> Path | None:
        """The folder with the run's first parameters; None: they are random."""
        return self.whole.first

    def read(self, folder: Path) -> Mapping[str, Any]:
        """Returns the tensors of a checkpoint's folder, by leaf; reads no values yet."""
        rows = self.whole.read(folder)
        return {TRAINED + name: rows[name] for name in rows if self.chosen(name)} | {
            FROZEN + name: LazyFrozenLeaf(rows[name], self.dtypes[name])
            for name in rows
            if not self.chosen(name)
        }

    def write(self, folder: Path, leaves: Mapping[str, Any], dtype: str) -> None:
        """Writes trained and frozen leaves as a checkpoint to a new folder, in `dtype`."""
        own = {name.partition("/")[2]: leaf for name, leaf in leaves.items()}
        self.whole.write(folder, own, dtype)


def _init(
    config: DecoderConfig,
    adapters: Lora | None,
    chosen: Chosen | None,
    dtype: str,
    key: jax.Array,
) -> Params:
    if adapters is None and chosen is None:
        return init_params(config, key)
    held = base_dtypes(config, dtype)
    if chosen is not None:
        leaves = tree.by_name(init_params(config, key))
        trained = {name: leaf for name, leaf in leaves.items() if chosen(name)}
        frozen = {n: leaf.astype(held[n]) for n, leaf in leaves.items() if n not in trained}
        return Variables(trained=tree.nested(trained), frozen=tree.nested(frozen))
    assert adapters is not None
    base = init_params(config, jax.random.fold_in(key, 0))
    leaves = {name: leaf.astype(held[name]) for name, leaf in tree.named_leaves(base)}
    first = init_adapters(config, adapters, jax.random.fold_in(key, 1))
    return Variables(trained=first, frozen=tree.from_names(base, leaves))


def _flops_per_token(
    config: DecoderConfig, adapters: Lora | None, chosen: Chosen | None, length: int
) -> float:
    """Returns floating-point operations to train on one token, in rows of `length` tokens.

    Frozen matrices have no gradient of their own, which saves a third of their operations.
    """
    whole = operations(config, length)
    if chosen is not None:
        return whole - 2.0 * multiplied(config, lambda name: not chosen(name))
    if adapters is None:
        return whole
    return whole - 2.0 * multiplied(config) + 6.0 * adapter_count(config, adapters)


def _trained_on(config: DecoderConfig, sums: "LossSums") -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (a step's loss, with the load-balancing loss of experts; further scalars by name)."""
    if config.experts is None or sums.load is None:
        return sums.mean(), {}
    measured = {"experts_busiest": sums.load.busiest(), "experts_loss": sums.load.loss()}
    return sums.mean() + config.experts.balance * measured["experts_loss"], measured


class LossSums(NamedTuple):
    """Sums over a batch's predictions of tokens that are trained on.

    Attributes:
        losses: the sum of their cross entropies, in nats, a scalar.
        learned: the number of these predictions, a scalar.
        load: the experts' load over all tokens; None without experts.
    """

    losses: jax.Array
    learned: jax.Array
    load: Load | None

    def mean(self) -> jax.Array:
        """Returns the mean cross entropy, in nats; 0 if there is no such prediction."""
        return self.losses / jnp.maximum(1, self.learned)


def _windows_of(batch: Batch) -> Any:
    return batch.windows if isinstance(batch, ImageTextBatch) else batch


def learned_of(windows_BxL1: Any, end: int | None) -> jax.Array:
    """Returns which of each window's L predictions are trained on, bool [B, L].

    Args:
        windows_BxL1: windows in which ~t, below 0, is a token t that is not trained on.
        end: the token that ends a document; None: each row is one document.
    """
    # Nothing is predicted from a document's end token: the next token is of another document.
    learned_BxL: jax.Array = windows_BxL1[:, 1:] >= 0
    if end is None:
        return learned_BxL
    return learned_BxL & (tokens_of(windows_BxL1)[:, :-1] != end)


def tokens_of(windows_BxL1: Any) -> jax.Array:
    """Returns the token ids of windows in which ~t, below 0, is a token t not trained on."""
    return jnp.where(windows_BxL1 < 0, ~windows_BxL1, windows_BxL1)


def loss_sums(
    config: DecoderConfig,
    params: Params,
    batch: Batch,
    *,
    compute: Compute,
    end: int | None,
    beside: AdapterParams = ALONE,
) -> LossSums:
    """Runs a decoder on a batch, and returns sums of its losses.

    Args:
        config: the decoder's configuration.
        params: the decoder's parameters.
        batch: windows, int[B, L + 1], in which ~t is a token t that is not trained on; or
            `ImageTextBatch`, windows with images.
        compute: options of the computation.
        end: the token that ends a document; None: each row is one document.
        beside: the arguments of `model.forward` for adapters.
    """
    windows_BxL1, images = _windows_of(batch), None
    if isinstance(batch, ImageTextBatch):
        images = soft_tokens(config, params, batch, compute)
    ids_BxL1, learned_BxL = tokens_of(windows_BxL1), learned_of(windows_BxL1, end)
    tokens_BxL, targets_BxL = ids_BxL1[:, :-1], ids_BxL1[:, 1:]
    segments_BxL = None
    if end is not None:
        ended_BxL = tokens_BxL == end
        # A document's end token belongs to the document, and the next token to the next one.
        segments_BxL = 1 + jnp.cumsum(ended_BxL, axis=1) - ended_BxL
    told = {"compute": compute, "images": images, **beside._asdict()}
    hidden_BxLxD, load = forward(config, params, tokens_BxL, segments_BxL, **told)
    head_VxD = head_of(config, params)
    losses_BxL = token_losses(config, head_VxD, hidden_BxLxD, targets_BxL, compute=compute)
    losses = jnp.sum(jnp.where(learned_BxL, losses_BxL, 0))
    return LossSums(losses, jnp.sum(learned_BxL), load)


def matrices(name: str, shape: tuple[int, ...]) -> Matrices | None:
    """Returns how Muon divides a tensor into matrices; None: Adam updates the tensor.

    Each layer, and each expert, is a matrix of its own.

    Args:
        name: the tensor's name.
        shape: the tensor's shape.
    """
    if not name.removeprefix(TOWER).startswith(LAYERS) or len(shape) < 3:
        return None
    return Matrices(shape, inputs=(len(shape) - 2,), outputs=(len(shape) - 1,))


def partition_of(
    config: DecoderConfig, adapters: Lora | None, name: str, shape: tuple[int, ...]
) -> PartitionSpec:
    """Returns a tensor's partition over a learner's mesh, by the kinds of its axes.

    Vectors stay whole.

    Args:
        config: the decoder's configuration.
        adapters: the adapters; None: there are none.
        name: the tensor's name; of an adapter's A or B: the matrix's name, "/" and `DOWN` or `UP`.
        shape: the tensor's shape.
    """
    entries = table(config)
    lying = functools.partial(by_kind_of_axis, mixture=config.experts is not None)
    if (name := name.removeprefix(FROZEN)) not in entries:
        assert adapters is not None
        matrix, _, half = name.rpartition("/")
        return half_partition(half, lying(adapted_of(config)[matrix].axes))
    entry = entries[name]
    if len(shape) - entry.stacked < 2:
        return PartitionSpec()
    return lying(entry.axes)
