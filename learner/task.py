"""The contract between this system and a user's training task.

A task is a record of plain functions: how parameters are initialized, the loss of a batch, the
batches, and the evaluation of parameters. The system does the rest (learners, fragments, merging).
A user's module has a function `build(*, steps, seed, **options) -> Task`.

Rules, checked by `load_and_check_task.load_task` before anything is allocated:
  1. `init` returns the same structure, shapes and dtypes for every key, and every leaf has a unique
     name. Leaves are floating, integer or bool. `init` returns a tree of parameters, of which the
     floating leaves are trained; or `Variables`, which separate trained leaves, frozen leaves and
     state.
  2. `loss(parameters, batch, PRNG key)` returns (one floating scalar, scalars by name), or with
     state (scalar, scalars by name, new state). JAX can jit `loss`.
  3. `batches(learner, n)` is endless, its first item is batch number n, and a second call gives the
     same batches: a learner that restarts resumes by position alone.
  4. `optimizer` is an ordinary optimizer of optax. If the task has a `schedule`, which gives the
     learning rate, `optimizer` gives a direction without a learning rate.
  5. `rows`, `partition`, `sample`, `load_frozen` and `holds` may be left out. With `rows`, each
     host of a learner reads only its part of a batch; with `partition`, the task says how tensors
     are cut over devices; with `sample`, `diloco sample` prints text of the model; with
     `load_frozen`, each learner reads frozen leaves itself; with `holds`, learners have parts of
     the model.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from pydantic import ConfigDict, Field, ValidationError, validate_call

from diloco.common.process.config import explain
from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import FLOATING, Hint, Kind, TensorHint, default_hint
from diloco.common.protocol.wire import (
    METRIC_NAME,
    MOST_HELD_OUT_SLICES,
    MOST_METRICS,
    SLICE_NAME,
    WHOLE,
)
from diloco.common.storage.data_share_allocation import Holding, Sizes

Params = Any  # a pytree of arrays
Batch = Any  # a pytree of numpy arrays on the host
Metrics = Mapping[str, Any]  # scalars by name

_CALLABLES = ("init", "loss", "batches", "evaluate", "hint")
_OPTIONAL = {
    "schedule": "leave it out, and `optimizer` is an ordinary one of optax, with its own schedule",
    "rows": "leave it out if a batch is cheap to draw whole",
    "partition": "leave it out, and large tensors are cut along the axis fsdp",
    "sample": "leave it out if the model writes no text",
    "weigh": "leave it out, and parts of a batch are alike",
    "load_frozen": "leave it out, and frozen leaves are stored with the run",
    "every_row": "leave it out, and `diloco check` reads the first batches only",
    "holds": "leave it out, and each learner holds the whole model",
}
PROBE = "probe"  # the learner's name in checks
COMPUTE_DTYPES = (None, "bfloat16")


class Holder(Protocol):
    """Gives the shares of the data that a learner has claimed; `Learner.divide` returns it.

    A *holding* is a share, or the rest of a share, that the learner reads.
    """

    @property
    def epoch(self) -> int:
        """The number of the run's tape: 0, and 1 more each time the run resumes on a new tape.

        The epochs of the data start over with each tape.
        """

    def at(self, position: int) -> Holding | None:
        """Waits until the learner has the holding of batch number `position`, and returns it.

        Returns None if the learner is to end instead.
        """


class Shared(Protocol):
    """Data whose epochs are divided into shares that learners claim, such as `GrainData`."""

    @property
    def sizes(self) -> Sizes:
        """The number of shares in an epoch, and the number of batches in a share."""

    def claimed(
        self, holder: Holder, position: int, start: int = 0, stop: int | None = None
    ) -> Iterator[Batch]:
        """Yields the batches of the shares that `holder` gives; ends when `holder` gives no more.

        Args:
            holder: gives the learner's shares, and waits for them.
            position: the number of the first batch, counted over all shares of the learner.
            start: the first row of each batch to read.
            stop: the row after the last one to read; None: the end of the batch.
        """


class Files(Protocol):
    """Reads and writes a model's folders in a format that other programs use."""

    @property
    def first(self) -> Path | None:
        """The folder with the parameters of the run's version 0; None if the task names none."""

    def read(self, folder: Path) -> Mapping[str, Any]:
        """Opens a checkpoint's folder, and returns its tensors by the parameters' names.

        No values are read yet: each tensor has a `shape`, and slicing its first axis reads rows.
        """

    def write(self, folder: Path, leaves: Mapping[str, Any], dtype: str) -> None:
        """Writes a new folder.

        Args:
            folder: the folder to make.
            leaves: the parameters by name.
            dtype: the dtype in which floating parameters are written.
        """


@runtime_checkable
class MergedFiles(Files, Protocol):
    """The `Files` of a task that trains adapters of a frozen base model, such as LoRA."""

    def write_merged(self, folder: Path, leaves: Mapping[str, Any], dtype: str) -> None:
        """Writes a new folder with the base model into which the adapters are merged.

        Args:
            folder: the folder to make.
            leaves: all leaves by name: the trained adapters and the frozen base model.
            dtype: the dtype in which floating parameters are written.
        """


class Variables(NamedTuple):
    """Parameters that are not all trained: a result of `Task.init`, and argument of `Task.loss`.

    Attributes:
        trained: leaves that are trained and synchronized; all floating.
        frozen: leaves that never change, and are part of no update or version.
        state: leaves whose new values `loss` returns, such as batch statistics. Each learner keeps
            its own values; leaves for which `hint` says `kind="averaged"` are averaged over the
            fleet.
    """

    trained: Params
    frozen: Params = None
    state: Params = None


class Evaluated(NamedTuple):
    """The result of `Task.loss`: a batch's mean loss, further scalars by name, and the new state.

    `state` is None for a task without state.
    """

    loss: jax.Array
    metrics: Metrics
    state: Params = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A training task: parameters, loss, data and optimizer of a learner.

    Attributes:
        init: a typed PRNG key -> parameters, any pytree of arrays, of which floating leaves are
            trained and synchronized; or `Variables`.
        loss: (the result of `init`, batch, PRNG key) -> (the batch's mean loss, a floating scalar;
            further scalars by name). With state, (loss, scalars, new state). The learner jits and
            differentiates this function. The key follows from the run's seed, the learner's name
            and the number of the batch.
        batches: (learner's name, position) -> endless batches, number `position` first. The same
            name and position always give the same batch.
        evaluate: parameters -> mean loss on held-out data; or scalars by name, `loss` among them,
            and under "slices" a dictionary with the same for parts of that data, such as classes or
            languages, by the part's name.
        tokens_per_batch: units of work in one batch, whatever the task counts; at least 1.
        optimizer: an ordinary optax optimizer with its learning rate, such as
            `optax.adamw(optax.cosine_decay_schedule(1e-3, steps))`: its schedules follow the run's
            global step. With `schedule`: gradients -> direction *without* learning rate
            (`optax.scale_by_adam()`).
        schedule: the run's global step, an int or a traced JAX integer -> learning rate; the
            learner then subtracts the optimizer's direction times that rate. None: the optimizer
            has its own.
        hint: (tensor's name, shape) -> `TensorHint`: how the aggregator merges that tensor.
        rows: (learner's name, position, start, stop) -> as `batches`, but only rows start:stop of
            each batch, along the first axis of its leaves. A host of a learner of several hosts
            then reads only the rows for its devices. None: each host draws whole batches.
        partition: (tensor's name, shape) -> `PartitionSpec`: how that tensor is cut over the axes
            "data", "fsdp", "expert" and "tensor" of a learner's mesh. None: large tensors are cut
            along `fsdp`.
        sample: (parameters, prompt, PRNG key, temperature) -> endless pieces of text, one for each
            token that follows the prompt; temperature 0: greedy. None for a model that
            writes no text.
        load_frozen: () -> the frozen leaves, in the shapes of `init`. Each learner then loads these
            leaves itself, such as from its disk, and compares them with digests; the run stores the
            digests only. None: the run stores the frozen leaves.
        accumulate: number of parts into which a batch's rows are divided. A step uses the mean of
            the parts' gradients, and needs memory for the activations of one part only.
        weigh: a part of a batch -> the part's weight in that mean, a scalar, such as its number of
            tokens. None: equal weights.
        compute_dtype: "bfloat16": `loss` gets the trained leaves rounded to bfloat16; the leaves
            themselves keep the dtypes of `init`. None: no rounding.
        shared: data whose epochs learners divide by claims (`GrainData.shared`): learners then read
            this data, and `batches` is for checks of the task only.
        flops_per_token: floating-point operations of training on one token, forward and backward,
            without recomputation: the learner then reports `mfu`, where the peak of its devices is
            known. None: no `mfu`.
        active_parameters: number of parameters that one token uses, in a mixture of experts; None:
            all.
        every_row: () -> all rows of the data, as sequences; indexing a row that no step could use
            raises a TaskError. `diloco check` reads all of them. None: it reads the first batches.
        holds: learner's name -> the modules (`TensorHint.module`) that this learner holds. `loss`
            then gets None in place of each leaf of another module; `evaluate` gets all. None: each
            learner holds the whole model.
        files: reads parameters from folders (`run create --from`) and writes them
            (`diloco export --format hf`) in a format that other programs use.

    Raises:
        TaskError: a field has an invalid type or value.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[..., Any]
    batches: Callable[[str, int], Iterator[Batch]]
    evaluate: Callable[[Params], float | Metrics]
    tokens_per_batch: int
    optimizer: optax.GradientTransformation
    schedule: Callable[[jax.Array | int], jax.Array | float] | None = None
    hint: Hint = default_hint
    rows: Callable[[str, int, int, int], Iterator[Batch]] | None = None
    partition: Callable[[str, tuple[int, ...]], PartitionSpec] | None = None
    sample: Callable[[Params, str, jax.Array, float], Iterator[str]] | None = None
    load_frozen: Callable[[], Params] | None = None
    accumulate: int = 1
    weigh: Callable[[Batch], jax.Array] | None = None
    compute_dtype: str | None = None
    shared: Shared | None = None
    files: Files | None = None
    flops_per_token: float | None = None
    active_parameters: int | None = None
    every_row: Callable[[], Sequence[Sequence[Any]]] | None = None
    holds: Callable[[str], Collection[str]] | None = None

    def __post_init__(self) -> None:
        for name in _CALLABLES:
            if not callable(value := getattr(self, name)):
                raise TaskError(
                    f"Task.{name} must be a function, but it is {kind(value)}",
                    hint=f"pass the function itself, not the result of calling it: {name}={name}",
                )
        for name, hint in _OPTIONAL.items():
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TaskError(
                    f"Task.{name} must be a function or None, but it is {kind(value)}", hint=hint
                )
        _require_count("tokens_per_batch", self.tokens_per_batch, COUNTED)
        _require_count("accumulate", self.accumulate, "1 takes a batch whole")
        per_token = self.flops_per_token
        if per_token is not None and not (isinstance(per_token, int | float) and per_token > 0):
            raise TaskError(
                f"Task.flops_per_token must be a number above 0 or None, not {per_token!r}",
                hint="floating-point operations of a token's step, forward and backward",
            )
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise TaskError(
                f"Task.compute_dtype must be one of {COMPUTE_DTYPES}, not {self.compute_dtype!r}",
                hint="parameters stay as `init` gives them: it is the loss that is given others",
            )
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise TaskError(
                "Task.optimizer must be an optax.GradientTransformation, "
                f"but it is {kind(self.optimizer)}",
                hint="for example optimizer=optax.scale_by_adam()",
            )

    @functools.cached_property
    def shapes(self) -> Params:
        """The tree of `jax.ShapeDtypeStruct` of the result of `init`, which is traced once.

        Raises:
            TaskError: `init` cannot be traced.
        """
        return params_shapes(self)

    def evaluated(self, params: Params, batch: Batch, key: jax.Array) -> Evaluated:
        """Calls `loss` on a batch, and returns the result as an `Evaluated`.

        Raises:
            TaskError: the result is neither (loss, metrics) nor (loss, metrics, state).
        """
        said = self.loss(params, batch, key)
        parts = said if isinstance(said, tuple) else (said,)
        if len(parts) not in (2, 3) or not isinstance(parts[1], Mapping):
            raise TaskError(
                "Task.loss must return (loss, metrics), or (loss, metrics, state), but it returned"
                f" {', '.join(type(one).__name__ for one in parts) or 'nothing'}",
                hint="metrics are a dictionary of scalars by name; {} for none",
            )
        return Evaluated(*parts)


COUNTED = "count what your task counts: tokens, bytes, examples"


def _require_count(name: str, value: Any, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TaskError(f"Task.{name} must be an int of at least 1, but it is {value!r}", hint=hint)


class TaskScores(NamedTuple):
    """The figures that `Task.evaluate` measures: the loss, and other scalars by name.

    Attributes:
        figures: figures of all held-out data, by the figure's name; `loss` is among them.
        slices: figures of parts (slices) of that data, by the slice's name, then the figure's.
    """

    figures: dict[str, float]
    slices: dict[str, dict[str, float]]

    def losses(self) -> dict[str, float]:
        """Returns the loss of all held-out data, under the name `WHOLE`, and that of each slice."""
        of_slices = {name: figures["loss"] for name, figures in self.slices.items()}
        return {WHOLE: self.figures["loss"], **of_slices}


_METRIC, _SLICE = re.compile(METRIC_NAME), re.compile(SLICE_NAME)


def held_out_loss(task: Task, params: Params) -> float:
    """Evaluates `params` by `Task.evaluate`; returns the mean loss on held-out data.

    Raises:
        TaskError: `Task.evaluate` returns figures of an invalid form.
    """
    return scores(task.evaluate(params)).figures["loss"]


def scores(said: float | Metrics) -> TaskScores:
    """Parses a value that `Task.evaluate` returned.

    Raises:
        TaskError: the loss is missing, a score is not a number, or a slice has no data.
    """
    said = said if isinstance(said, Mapping) else {"loss": said}
    parts = said.get("slices", {})
    if not isinstance(parts, Mapping) or len(parts) > MOST_HELD_OUT_SLICES:
        raise TaskError(
            "Task.evaluate must return as slices a dictionary of at most "
            f"{MOST_HELD_OUT_SLICES} names, but it returned {kind(parts)}",
            hint='for example {"loss": loss, "slices": {"de": loss_of_de, "en": loss_of_en}}',
        )
    figures = _figures({name: value for name, value in said.items() if name != "slices"}, "")
    slices = {name: _slice(name, part, figures["loss"]) for name, part in parts.items()}
    return TaskScores(figures, slices)


def _slice(name: Any, said: Any, loss: float) -> dict[str, float]:
    of = f" for the slice {name!r}"
    if not isinstance(name, str) or _SLICE.fullmatch(name) is None:
        raise TaskError(
            f"Task.evaluate names a slice {name!r}",
            hint="use letters, digits and ._+-, at most 50, a letter or digit first",
        )
    figures = _figures(said if isinstance(said, Mapping) else {"loss": said}, of)
    if math.isfinite(loss) and not math.isfinite(figures["loss"]):
        raise TaskError(
            f"Task.evaluate returned the loss {figures['loss']}{of}, where that of all held-out "
            f"data is {loss:.4g}: the slice is empty, or its mean is not one",
            hint="name the slices that have held-out examples, and no others",
        )
    return figures


def _figures(said: Metrics, of: str) -> dict[str, float]:
    """Converts scalars to floats, by name; `of` says in errors which data was evaluated."""
    if "loss" not in said:
        raise TaskError(
            f"Task.evaluate returned no loss{of}, but {', '.join(map(str, said)) or 'nothing'}",
            hint='name the held-out loss "loss" among them',
        )
    wrong = [name for name in said if not isinstance(name, str) or _METRIC.fullmatch(name) is None]
    if wrong or len(said) > MOST_METRICS:
        raise TaskError(
            f"Task.evaluate returned {len(said)} figures{of}"
            + (f", and calls one {wrong[0]!r}" if wrong else ""),
            hint=f"name at most {MOST_METRICS}, in letters, digits and _, at most 50, a letter"
            " first",
        )
    return {name: _figure(f"{name}{of}", value) for name, value in said.items()}


def _figure(what: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"Task.evaluate must return a number, or numbers by name, but {what} is not one: "
            f"{short(error)}",
            hint="return means over the held-out data, such as float(jnp.mean(losses))",
        ) from error


def params_shapes(task: Task) -> Params:
    """Returns the pytree of `jax.ShapeDtypeStruct` of `init`'s result; allocates nothing.

    Raises:
        TaskError: `init` cannot be traced.
    """

    def init() -> Params:  # a new function each time, or JAX answers from its cache
        return task.init(jax.random.key(0))

    try:
        return jax.eval_shape(init)
    except Exception as error:
        raise TaskError(
            f"Task.init must map a PRNG key to a pytree of arrays, but it failed: {short(error)}",
            hint="call task.init(jax.random.key(0)) yourself to see where",
        ) from error


def is_floating(leaf: Any) -> bool:
    """True if the dtype of a leaf is a floating one that can be trained (`FLOATING`)."""
    return jnp.result_type(leaf).name in FLOATING


def check_dtype(name: str, dtype: Any) -> None:
    """Checks that a run can store leaves of a dtype; `name` names the leaf in errors.

    Raises:
        TaskError: the dtype is not floating, integer or bool, or has another machine's byte order.
    """
    whole = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)
    if not (whole or dtype.name in FLOATING):
        raise TaskError(
            f"leaves of the parameters must be {', '.join(FLOATING)}, integer or bool, but "
            f"{name!r} is {dtype}",
            hint="hold a complex number as two floats; keep PRNG keys, texts and objects out"
            " of the parameters, of flax.nnx by nnx.split(model, nnx.Param, ...)",
        )
    if not getattr(dtype, "isnative", True):
        raise TaskError(
            f"the leaf {name!r} of the parameters has the byte order of another machine: "
            f"{dtype.str}",
            hint="give it this machine's: array.astype(array.dtype.newbyteorder('='))",
        )


def hint_of(task: Task, shapes: Params) -> Hint:
    """Returns the hint of a task; for `Variables`, hints get the kind of the leaf's field.

    Leaves of `frozen` have the kind "frozen". Leaves of `state` have the kind "local", or
    "averaged" where `Task.hint` says so.

    Args:
        task: the task; its `hint` is called with names that lack the prefix `trained/`.
        shapes: shapes of the task's parameters; unless a `Variables`, `Task.hint` is returned.
    """
    if not isinstance(shapes, Variables):
        return task.hint

    def hint(name: str, shape: tuple[int, ...]) -> TensorHint:
        said = task.hint(own_name(name), shape)
        if not isinstance(said, TensorHint):
            raise TaskError(
                f"Task.hint must return a TensorHint, but for {name!r} it returned {kind(said)}",
                hint="return diloco.TensorHint() for a tensor that needs nothing special",
            )
        return dataclasses.replace(said, kind=_kind_of_place(name.partition("/")[0], said.kind))

    return hint


def hint_of_decoder(name: str, shape: tuple[int, ...]) -> TensorHint:  # noqa: ARG001 - a `Hint`
    """Returns the `TensorHint` for a tensor of a decoder, by the tensor's name.

    Embeddings are merged by weighted average, and share no fragment with other tensors. Tensors
    that stack layers have one norm for each layer.
    """
    if name in ("embed", "fed_embed"):
        return TensorHint(merge="average", alone=True)
    stacked = name.startswith(("layers/", "tower/layers/"))
    return TensorHint(norm_axes=1 if stacked else 0)


def own_name(name: str) -> str:
    """Removes the prefix `trained/` from a leaf's name, since a task's functions do not use it."""
    return name.removeprefix(TRAINED)


TRAINED = "trained/"


def _kind_of_place(place: str, said: Kind) -> Kind:
    if place == "state":
        return said if said == "averaged" else "local"
    return "frozen" if place == "frozen" else said


P = ParamSpec("P")
# Types with which options of a task's `build` are annotated, for `checked_options`.
AtLeastOne = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
Dtype = Literal["float32", "bfloat16"]


def checked_options(task: str, hint: str) -> Callable[[Callable[P, "Task"]], Callable[P, "Task"]]:
    """Decorates a task's `build`: checks that options have the annotated types, converts none.

    Args:
        task: the task's name in errors.
        hint: the advice in errors.

    Returns:
        The decorator; the decorated `build` raises a TaskError for an option of another type.
    """

    def decorated(build: Callable[P, Task]) -> Callable[P, Task]:
        checked = validate_call(config=ConfigDict(strict=True, allow_inf_nan=False))(build)

        @functools.wraps(build)
        def call(*args: P.args, **options: P.kwargs) -> Task:
            try:
                return checked(*args, **options)
            except ValidationError as error:
                raise TaskError(f"options of {task}: {explain(error)}", hint=hint) from error

        return call

    return decorated


def kind(value: Any) -> str:
    """Returns a value's type and text, for an error message."""
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 60 else text[:57] + '...'})"


def short(error: Exception) -> str:
    """Returns an exception's type and first line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def signature(shapes: Any) -> list[str]:
    """Returns the path, dtype and shape of each leaf, as text."""
    return [f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves_of(shapes)]


def tree_words(shapes: Any) -> str:
    """Returns a tree's leaves as a text of at most 400 characters, for an error."""
    text = ", ".join(signature(shapes)) or "no leaves"
    return text if len(text) <= 400 else text[:397] + "..."


def leaves_of(shapes: Any) -> list[tuple[str, Any]]:
    """Returns (path, leaf) of each leaf of a tree, with the path as text."""
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    return [(jax.tree_util.keystr(path) or "(one leaf)", leaf) for path, leaf in leaves]
