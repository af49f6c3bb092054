"""A decoder-only transformer on bytes, and the task that trains it on a corpus.

Pre-norm blocks (RMSNorm, arXiv 1910.07467) with rotary positions (arXiv 2104.09864), causal
multi-head attention and a SwiGLU (arXiv 2002.05202) or GELU MLP; no biases. The blocks are one
`lax.scan`, so each of their tensors is stacked over layers along a leading axis N.

Shapes: B batch, L positions (M: positions attended to), T = B * L tokens, D model width, H heads, K
width of a head (D = H * K), F width of the MLP, V vocabulary, N layers.
"""

import codecs
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from pydantic import AfterValidator, Field

from diloco.common.protocol.errors import TaskError
from diloco.learner.task import (
    AtLeastOne,
    Batch,
    Dtype,
    Metrics,
    Natural,
    NotNegative,
    Params,
    Task,
    checked_options,
    hint_of_decoder,
)
from diloco.learner.tensors.mesh import by_kind_of_axis, constrain
from diloco.learner.tensors.optimizer import Matrices, Optimizer, direction_by, warmup_cosine
from diloco.learner.tensors.utilization import flops_per_token
from diloco.models.bytes_lm import corpus as data
from diloco.models.bytes_lm import skills as exercises

BYTES = 256
# The prompt of a sample if the given prompt is empty.
START = b"\n"
ROTARY_BASE = 10_000
NORM_EPS = 1e-6
EMBED_STD = 0.02
# The best peak rate of Muon over AdamW's, in the sweep of docs/benchmarks.md.
MUON_RATE = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A model size and its peak learning rate, by name in `PRESETS`.

    The name is the number of parameters without embeddings.

    Attributes:
        layers: N.
        width: D.
        heads: H.
        learning_rate: peak rate for AdamW; Muon's is `MUON_RATE` times that.
        tied: whether the output head is the embedding, if the option `tied` is None.
    """

    layers: int
    width: int
    heads: int
    learning_rate: float
    tied: bool = False


PRESETS = {
    "1m": Preset(layers=3, width=160, heads=4, learning_rate=2e-3, tied=True),
    "4m": Preset(layers=5, width=256, heads=4, learning_rate=2e-3, tied=True),
    "10m": Preset(layers=8, width=320, heads=5, learning_rate=1.5e-3, tied=True),
    "35m": Preset(layers=11, width=512, heads=8, learning_rate=1e-3, tied=True),
    "125m": Preset(layers=18, width=768, heads=12, learning_rate=8e-4),
    "400m": Preset(layers=20, width=1280, heads=10, learning_rate=6e-4),
    "1.3b": Preset(layers=26, width=2048, heads=16, learning_rate=4e-4),
    "2.8b": Preset(layers=36, width=2560, heads=20, learning_rate=3e-4),
    "5b": Preset(layers=32, width=3584, heads=28, learning_rate=2.5e-4),
    "12b": Preset(layers=38, width=5120, heads=40, learning_rate=2e-4),
}

# The kinds of each tensor's axes; vectors are not listed, as they are too small to be cut.
LOGICAL_AXES = {
    "embed": ("vocab", "width"),
    "layers/attn/qkv": ("layers", "width", "heads"),
    "layers/attn/out": ("layers", "heads", "width"),
    "layers/mlp/up": ("layers", "width", "mlp"),
    "layers/mlp/gate": ("layers", "width", "mlp"),
    "layers/mlp/down": ("layers", "mlp", "width"),
    "head": ("width", "vocab"),
}

Mlp = Literal["swiglu", "gelu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The hyperparameters that determine the model's parameters and arithmetic.

    Attributes:
        layers: N.
        width: D.
        heads: H; divides D into an even K.
        vocab: V.
        tied: use the embedding as output head.
        mlp: "swiglu" (three matrices, F near 8/3 D) or "gelu" (two matrices, F = 4 D).
        dtype: dtype of activations and matrix products; all else is float32.
        remat: recompute each block in the backward pass, to hold one block's activations at a time.
    """

    layers: int
    width: int
    heads: int
    vocab: int = BYTES
    tied: bool = True
    mlp: Mlp = "swiglu"
    dtype: Dtype = "float32"
    remat: bool = True

    @property
    def head_width(self) -> int:
        """The width of a head, K."""
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        """The width of the MLP, F: both kinds have about equally many parameters."""
        return 4 * self.width if self.mlp == "gelu" else math.ceil(self.width / 24) * 64

    def flops_per_token(self, length: int) -> float:
        """Returns floating-point operations to train on one token, in rows of `length` tokens."""
        mlp = (2 if self.mlp == "gelu" else 3) * self.mlp_width
        layer = self.width * (4 * self.width + mlp)
        multiplied = self.layers * layer + self.vocab * self.width
        return flops_per_token(multiplied, self.layers * self.width * length)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A causal decoder: tokens int [B, L] -> next-token logits float32 [B, L, V]."""

    config: ModelConfig

    def init(self, key: jax.Array) -> Params:
        """Returns first parameters, float32: random normal, with ones for the norms.

        Matrices keep unit variance. Those that write to the residual stream are scaled down: the
        sum of their 2N outputs has unit variance at any depth (GPT-2's rule).
        """
        c = self.config
        keys = iter(jax.random.split(key, 7))

        def matrix(rows: int, columns: int, writers: int = 1) -> jax.Array:
            scale: float = (rows * writers) ** -0.5
            return jax.random.normal(next(keys), (c.layers, rows, columns)) * scale

        attn = {
            "norm": jnp.ones((c.layers, c.width)),
            "qkv": matrix(c.width, 3 * c.width),
            "out": matrix(c.width, c.width, writers=2 * c.layers),
        }
        mlp = {
            "norm": jnp.ones((c.layers, c.width)),
            "up": matrix(c.width, c.mlp_width),
            "down": matrix(c.mlp_width, c.width, writers=2 * c.layers),
        }
        if c.mlp == "swiglu":
            mlp["gate"] = matrix(c.width, c.mlp_width)
        params = {
            "embed": jax.random.normal(next(keys), (c.vocab, c.width)) * EMBED_STD,
            "layers": {"attn": attn, "mlp": mlp},
            "norm": jnp.ones(c.width),
        }
        if not c.tied:
            params["head"] = jax.random.normal(next(keys), (c.width, c.vocab)) * EMBED_STD
        return params

    def apply(self, params: Params, tokens_BxL: jax.Array) -> jax.Array:
        """Returns the next-token logits, float32 [B, L, V]."""
        c = self.config
        # Blocks see one row per token: XLA's CPU backend is a third slower on [B, L, D].
        x_TxD = params["embed"][tokens_BxL.reshape(-1)].astype(c.dtype)
        angles_LxK2 = rotary(tokens_BxL.shape[1], c.head_width)

        def block(x_TxD: jax.Array, layer: Params) -> tuple[jax.Array, None]:
            x_TxD += self._attention(layer["attn"], x_TxD, angles_LxK2)
            x_TxD += self._mlp(layer["mlp"], x_TxD)
            return constrain(x_TxD, ("data", "fsdp")), None

        if c.remat:
            block = jax.checkpoint(block, prevent_cse=False)  # scan prevents it
        x_TxD, _ = jax.lax.scan(block, constrain(x_TxD, ("data", "fsdp")), params["layers"])

        x_TxD = rms_norm(x_TxD, params["norm"])
        head_DxV = params["embed"].T if c.tied else params["head"]
        logits_TxV = jnp.dot(x_TxD, head_DxV.astype(c.dtype), preferred_element_type=jnp.float32)
        return logits_TxV.reshape(*tokens_BxL.shape, c.vocab)

    def _attention(self, p: Params, x_TxD: jax.Array, angles_LxK2: jax.Array) -> jax.Array:
        """Returns causal multi-head attention of the input, which is normed first, [T, D]."""
        c = self.config
        qkv_Tx3D = rms_norm(x_TxD, p["norm"]) @ p["qkv"].astype(c.dtype)
        # Heads are the outer axis, so that a mesh that cuts the columns cuts between heads.
        qkv_BxLxHx3xK = qkv_Tx3D.reshape(-1, len(angles_LxK2), c.heads, 3, c.head_width)
        q_BxHxLxK, k_BxHxLxK, v_BxHxLxK = qkv_BxLxHx3xK.transpose(3, 0, 2, 1, 4)
        q_BxHxLxK = rotate(q_BxHxLxK, angles_LxK2)
        k_BxHxLxK = rotate(k_BxHxLxK, angles_LxK2)
        y_BxHxLxK = attend(q_BxHxLxK, k_BxHxLxK, v_BxHxLxK)
        y_TxD = y_BxHxLxK.transpose(0, 2, 1, 3).reshape(x_TxD.shape)
        found_TxD: jax.Array = y_TxD @ p["out"].astype(c.dtype)
        return found_TxD

    def _mlp(self, p: Params, x_TxD: jax.Array) -> jax.Array:
        """Returns the output of a block's MLP for the input, which is normed first, [T, D]."""
        c = self.config
        x_TxD = rms_norm(x_TxD, p["norm"])
        h_TxF = x_TxD @ p["up"].astype(c.dtype)
        if c.mlp == "swiglu":
            h_TxF *= jax.nn.silu(x_TxD @ p["gate"].astype(c.dtype))
        else:
            h_TxF = jax.nn.gelu(h_TxF)
        found_TxD: jax.Array = h_TxF @ p["down"].astype(c.dtype)
        return found_TxD


def rms_norm(x_TxD: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Returns `x` over its root mean square along D, times `scale`, computed in float32."""
    x32_TxD = x_TxD.astype(jnp.float32)
    mean_square_Tx1 = jnp.mean(jnp.square(x32_TxD), axis=-1, keepdims=True)
    return (x32_TxD * jax.lax.rsqrt(mean_square_Tx1 + NORM_EPS) * scale_D).astype(x_TxD.dtype)


def rotary(length: int, head_width: int) -> jax.Array:
    """Returns the angles float32 [L, K/2] of the rotary positions 0 .. L - 1, in radians."""
    frequency_K2 = ROTARY_BASE ** -(jnp.arange(0, head_width, 2) / head_width)
    return jnp.arange(length)[:, None] * frequency_K2


def rotate(x_BxHxLxK: jax.Array, angles_LxK2: jax.Array) -> jax.Array:
    """Returns `x`, with each pair (x[i], x[i + K/2]) of a head rotated by its position's angle."""
    cos_LxK2 = jnp.cos(angles_LxK2).astype(x_BxHxLxK.dtype)
    sin_LxK2 = jnp.sin(angles_LxK2).astype(x_BxHxLxK.dtype)
    a, b = jnp.split(x_BxHxLxK, 2, axis=-1)
    return jnp.concatenate([a * cos_LxK2 - b * sin_LxK2, b * cos_LxK2 + a * sin_LxK2], axis=-1)


def attend(q_BxHxLxK: jax.Array, k_BxHxLxK: jax.Array, v_BxHxLxK: jax.Array) -> jax.Array:
    """Returns causal softmax attention, [B, H, L, K]; the softmax is computed in float32."""
    length, head_width = q_BxHxLxK.shape[-2:]
    scores_BxHxLxM = jnp.einsum(
        "bhlk,bhmk->bhlm", q_BxHxLxK, k_BxHxLxK, preferred_element_type=jnp.float32
    )
    seen_LxM = jnp.tril(jnp.ones((length, length), bool))
    scores_BxHxLxM = jnp.where(seen_LxM, scores_BxHxLxM * head_width**-0.5, -jnp.inf)
    weights_BxHxLxM = jax.nn.softmax(scores_BxHxLxM, axis=-1).astype(v_BxHxLxK.dtype)
    return jnp.einsum("bhlm,bhmk->bhlk", weights_BxHxLxM, v_BxHxLxK)


def task_loss(
    model: Decoder,
    params: Params,
    windows_BxL1: Batch,
    key: jax.Array,  # noqa: ARG001 - the Task's contract
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (mean loss in nats per token, {}), as `Task.loss` does; ignores `key`."""
    return next_token_loss(model, params, windows_BxL1), {}


def next_token_loss(model: Decoder, params: Params, windows_BxL1: Batch) -> jax.Array:
    """Returns mean cross entropy in nats per token, float32 []; windows are int [B, L + 1]."""
    logits_BxLxV = model.apply(params, windows_BxL1[:, :-1])
    losses_BxL: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxLxV, windows_BxL1[:, 1:]
    )
    return jnp.mean(losses_BxL)


def matrices(name: str, shape: tuple[int, ...], *, heads: int) -> Matrices | None:
    """Returns how Muon divides a tensor into matrices; None: Adam updates the tensor.

    Each layer is a matrix of its own, and in the tensor qkv also q, k and v of each head.

    Args:
        name: the tensor's name.
        shape: the tensor's shape.
        heads: H.
    """
    if name == "layers/attn/qkv":
        layers, width, columns = shape
        split = (layers, width, heads, 3, columns // heads // 3)
        return Matrices(split, inputs=(1,), outputs=(2, 4))
    is_matrix = name.startswith("layers/") and len(shape) == 3
    return Matrices(shape, inputs=(1,), outputs=(2,)) if is_matrix else None


def partition(name: str, shape: tuple[int, ...]) -> PartitionSpec:  # noqa: ARG001 - the contract
    """Returns a tensor's partition over a learner's mesh, by the kinds of its axes.

    Tensors that are not in `LOGICAL_AXES` stay whole.
    """
    return by_kind_of_axis(LOGICAL_AXES.get(name, ()))


@dataclasses.dataclass(frozen=True)
class _Windows:
    """The windows of a corpus, which is read at the first training or evaluation."""

    corpus: str
    held_out: str | None
    seed: int
    batch: int
    length: int
    skills: float

    @functools.cached_property
    def text(self) -> data.Corpus:
        found = data.load_corpus(self.corpus, self.held_out)
        data.require_length(found, self.length)
        return found

    def rows(self, learner: str, position: int, start: int, stop: int) -> Iterator[Batch]:
        drawn = data.batches(
            self.text,
            seed=self.seed,
            learner=learner,
            position=position,
            batch=self.batch,
            length=self.length,
            rows=slice(start, stop),
        )
        return self._with_exercises(drawn, learner, position, start) if self.skills else drawn

    def _with_exercises(
        self, drawn: Iterator[data.Windows], learner: str, position: int, start: int
    ) -> Iterator[Batch]:
        for number, windows in enumerate(drawn, position):
            key = (self.seed, data.stable_hash(learner), number)
            yield exercises.mix(windows, share=self.skills, first=start, batch=self.batch, key=key)

    def batches(self, learner: str, position: int) -> Iterator[Batch]:
        return self.rows(learner, position, 0, self.batch)

    def unseen(self, count: int) -> list[Batch]:
        return data.eval_windows(self.text, count=count, batch=self.batch, length=self.length)


def _known_preset(name: str) -> str:
    if name not in PRESETS:
        raise ValueError(f"presets are {', '.join(PRESETS)}")
    return name


Sample = Callable[[Params, str, jax.Array, float], Iterator[str]]


def make_sampler(model: Decoder, length: int) -> Sample:
    """Returns a function that `Task.sample` takes: it continues a prompt, endlessly.

    Args:
        model: the model of bytes.
        length: L, the length in bytes that the model was trained on; it predicts each byte from the
            last L bytes.

    Returns:
        (parameters, prompt, typed key, temperature) -> pieces of text; at temperature 0 each byte
        is the most probable one.
    """

    @jax.jit
    def next_byte(
        params: Params, window_L: jax.Array, last: jax.Array, key: jax.Array, heat: jax.Array
    ) -> jax.Array:
        logits_LxV = model.apply(params, window_L[None])[0]
        logits_V = logits_LxV[last, :BYTES].astype(jnp.float32)
        drawn = jax.random.categorical(key, logits_V / jnp.maximum(heat, 1e-6))
        return jnp.where(heat > 0, drawn, jnp.argmax(logits_V))

    def sample(params: Params, prompt: str, key: jax.Array, temperature: float) -> Iterator[str]:
        seen = (prompt.encode() or START)[-length:]
        # A character may be several bytes; the model may also write invalid bytes.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for number in range(1 << 31):
            window_L = np.zeros(length, np.int32)
            window_L[: len(seen)] = np.frombuffer(seen, np.uint8)
            chosen = next_byte(
                params, window_L, len(seen) - 1, jax.random.fold_in(key, number), temperature
            )
            written = bytes([int(chosen)])
            seen = (seen + written)[-length:]
            yield decoder.decode(written)

    return sample


def _with_skills(loss: float, found: exercises.Skills) -> Metrics:
    """Returns a loss of text, the mean share of exact answers, and each skill as a slice."""
    exact = sum(figures["exact"] for figures in found.values()) / len(found)
    return {"loss": loss, "exact": exact, "slices": found}


@checked_options("the built-in task", "see the task's options in the run's configuration")
def build(
    *,
    steps: AtLeastOne,
    seed: Natural,
    preset: Annotated[str, AfterValidator(_known_preset)] = "1m",
    corpus: str = data.STDLIB,
    held_out: str | None = None,
    batch: AtLeastOne = 8,
    length: AtLeastOne = 128,
    optimizer: Optimizer = "adamw",
    learning_rate: Annotated[float, Field(gt=0)] | None = None,
    warmup_steps: Natural | None = None,
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1,
    weight_decay: NotNegative = 0.1,
    clip: Annotated[float, Field(gt=0)] = 1.0,
    eval_batches: AtLeastOne = 16,
    dtype: Dtype = "float32",
    vocab: Annotated[int, Field(ge=BYTES)] = BYTES,
    tied: bool | None = None,
    mlp: Mlp = "swiglu",
    remat: bool = True,
    skills: Annotated[float, Field(ge=0, le=1)] = 0.0,
) -> Task:
    """Train a byte-level transformer on a corpus; losses are nats per byte.

    Args:
        steps: length of the run in global steps.
        seed: decides which windows are drawn.
        preset: the size: "1m", "4m", "10m", "35m", "125m", "400m", "1.3b", "2.8b", "5b" or "12b".
        corpus: "stdlib", the source of Python's standard library, or the path of a folder of text;
            a tenth of its files is held out.
        held_out: path of another folder of text, all of which is held out in place of that tenth.
        batch: windows in a batch, B.
        length: bytes predicted in each window, L.
        optimizer: "adamw", or "muon" for the matrices of layers.
        learning_rate: peak rate; the preset's for the optimizer, if None.
        warmup_steps: global steps of warm-up; a tenth of the run, at most 100, if None.
        final_fraction: last learning rate as a share of the peak.
        weight_decay: decoupled, on matrices only.
        clip: largest global norm of a gradient.
        eval_batches: batches of held-out windows, the same ones each time.
        dtype: "float32" or "bfloat16": of activations and products; parameters stay float32.
        vocab: size of the vocabulary, V, at least 256.
        tied: whether the head is the embedding; the preset's choice if None.
        mlp: "swiglu" or "gelu".
        remat: recompute activations in the backward pass (on a CPU this is faster, too).
        skills: share of rows that are exercises: induction, copying, brackets, addition, retrieval;
            `evaluate` then also gives the share of unseen exercises that are answered exactly.

    Raises:
        TaskError: an option has a wrong type or value, or the corpus is missing or too small.
    """
    size = PRESETS[preset]
    model = Decoder(
        ModelConfig(
            layers=size.layers,
            width=size.width,
            heads=size.heads,
            vocab=vocab,
            tied=size.tied if tied is None else tied,
            mlp=mlp,
            dtype=dtype,
            remat=remat,
        )
    )

    if skills and length < exercises.LONGEST:
        raise TaskError(
            f"length={length} with skills={skills:g}: an exercise has {exercises.LONGEST} bytes",
            hint="choose a longer length, or skills=0",
        )
    windows = _Windows(corpus, held_out, seed, batch, length, skills)
    eval_loss = jax.jit(functools.partial(next_token_loss, model))
    measure = exercises.make_measure(model.apply)

    def evaluate(params: Params) -> float | Metrics:
        unseen = windows.unseen(eval_batches)
        loss = sum(float(eval_loss(params, window)) for window in unseen) / len(unseen)
        return _with_skills(loss, measure(params)) if skills else loss

    return Task(
        init=model.init,
        loss=functools.partial(task_loss, model),
        batches=windows.batches,
        evaluate=evaluate,
        tokens_per_batch=batch * length,
        flops_per_token=model.config.flops_per_token(length),
        optimizer=direction_by(
            optimizer,
            weight_decay=weight_decay,
            clip=clip,
            hint=hint_of_decoder,
            matrices=functools.partial(matrices, heads=size.heads),
        ),
        schedule=warmup_cosine(
            steps=steps,
            peak=learning_rate or size.learning_rate * (MUON_RATE if optimizer == "muon" else 1),
            warmup_steps=warmup_steps,
            final_fraction=final_fraction,
        ),
        hint=hint_of_decoder,
        rows=windows.rows,
        partition=partition,
        sample=make_sampler(model, length),
    )
