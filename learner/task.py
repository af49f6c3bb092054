"""The contract between this system and what a user trains.

A task is a record of plain functions: how parameters begin, what the loss of a batch is, where
batches come from, how well parameters do. Everything else (learners, fragments, merging) is the
system's. A user's module has a function `build(*, steps, seed, **options) -> Task`.

Rules, checked by `load_task` before anything is allocated:
  1. `init` gives the same structure, shapes and dtypes for every key, and every leaf has a name of
     its own. Leaves are floating, integer or bool; floating leaves are trained and synchronized,
     the others stay as they began.
  2. `loss` of (parameters, batch) is one floating scalar, and can be jitted.
  3. `batches(learner, n)` is endless, its first item is batch number n, and asking twice gives the
     same batch: a learner that restarts resumes by position alone.
  4. `optimizer` is an ordinary one of optax; or, where `schedule` gives the learning rate, it gives
     a direction without one.
  5. `rows`, `partition` and `sample` may be left out. With `rows`, each host of a learner reads
     only its part of a batch; with `partition`, the task says how tensors are cut over devices;
     with `sample`, `diloco sample` prints what the model writes.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from diloco.common.config import BUILT_IN_TASK, BUILT_IN_TASK_0_1, RunSettings
from diloco.common.errors import TaskError
from diloco.common.layout import FLOATING, Hint, TensorHint, default_hint

Params = Any  # a pytree of arrays
Batch = Any  # a pytree of numpy arrays on the host

_CALLABLES = ("init", "loss", "batches", "evaluate", "hint")
_OPTIONAL = {
    "schedule": "leave it out, and `optimizer` is an ordinary one of optax, with its own schedule",
    "rows": "leave it out if a batch is cheap to draw whole",
    "partition": "leave it out, and large tensors are cut along the axis fsdp",
    "sample": "leave it out if the model writes no text",
}
PROBE = "probe"  # the learner's name in checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a learner trains.

    Attributes:
        init: a typed PRNG key -> parameters, any pytree of arrays. Only floating leaves are trained
            and synchronized.
        loss: (parameters, batch) -> the batch's mean loss, a floating scalar. The learner jits and
            differentiates it.
        batches: (learner's name, position) -> endless batches, number `position` first. The same
            name and position always give the same batch.
        evaluate: parameters -> mean loss on held-out data.
        tokens_per_batch: units of work in one batch, whatever the task counts; at least 1.
        optimizer: an ordinary optax optimizer with its learning rate, such as
            `optax.adamw(optax.cosine_decay_schedule(1e-3, steps))`: its schedules follow the run's
            global step. With `schedule`: gradients -> direction *without* learning rate
            (`optax.scale_by_adam()`).
        schedule: the run's global step -> learning rate; the learner then subtracts the
            optimizer's direction times that rate. None: the optimizer has its own.
        hint: (tensor's name, shape) -> how the aggregator merges that tensor.
        rows: (learner's name, position, start, stop) -> as `batches`, but only rows start:stop of
            each batch, along the first axis of its leaves: what one host of several reads. Without
            it, each host draws whole batches and keeps its rows.
        partition: (tensor's name, shape) -> how it is cut over the axes "data", "fsdp" and
            "tensor" of a learner's mesh. Without it, large tensors are cut along `fsdp`.
        sample: (parameters, prompt, PRNG key, temperature) -> endless pieces of text, one for each
            token that follows the prompt; at temperature 0 the likeliest. None for a model that
            writes no text.

    Raises:
        TaskError: a field is not of its kind.
    """

    init: Callable[[jax.Array], Params]
    loss: Callable[[Params, Batch], jax.Array]
    batches: Callable[[str, int], Iterator[Batch]]
    evaluate: Callable[[Params], float]
    tokens_per_batch: int
    optimizer: optax.GradientTransformation
    schedule: Callable[[jax.Array | int], jax.Array | float] | None = None
    hint: Hint = default_hint
    rows: Callable[[str, int, int, int], Iterator[Batch]] | None = None
    partition: Callable[[str, tuple[int, ...]], PartitionSpec] | None = None
    sample: Callable[[Params, str, jax.Array, float], Iterator[str]] | None = None

    def __post_init__(self) -> None:
        for name in _CALLABLES:
            if not callable(value := getattr(self, name)):
                raise TaskError(
                    f"Task.{name} must be a function, but it is {_kind(value)}",
                    hint=f"pass the function itself, not the result of calling it: {name}={name}",
                )
        for name, hint in _OPTIONAL.items():
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TaskError(
                    f"Task.{name} must be a function or None, but it is {_kind(value)}", hint=hint
                )
        tokens = self.tokens_per_batch
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise TaskError(
                f"Task.tokens_per_batch must be an int of at least 1, but it is {tokens!r}",
                hint="count what your task counts: tokens, bytes, examples",
            )
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise TaskError(
                "Task.optimizer must be an optax.GradientTransformation, "
                f"but it is {_kind(self.optimizer)}",
                hint="for example optimizer=optax.scale_by_adam()",
            )


def load_task(build: str, *, steps: int, seed: int, options: dict[str, Any]) -> Task:
    """Import a task, build it and check it against the contract.

    Args:
        build: "package.module:function"; modules of the current directory can be imported.
        steps: length of the run in global steps.
        seed: the run's seed; the task derives all its randomness from it.
        options: further keyword arguments of the function.

    Raises:
        TaskError: the function cannot be found or called so, or its task breaks a rule. What the
            user's module or function itself raises passes through unchanged.
    """
    function = _find(build)
    arguments = _bind(build, function, {"steps": steps, "seed": seed}, options)
    task = function(**arguments)
    if not isinstance(task, Task):
        raise TaskError(
            f"{build} must return a diloco.Task, but it returned {_kind(task)}",
            hint="end it with `return Task(init=..., loss=..., ...)`",
        )
    check_task(task, steps=steps)
    return task


def run_task(settings: RunSettings, options: Mapping[str, Any] | None = None) -> Task:
    """The task of a run, with other `options` for one learner; errors as `load_task`."""
    return load_task(
        settings.task.build,
        steps=settings.run.steps,
        seed=settings.run.seed,
        options={**settings.task.options, **(options or {})},
    )


def check_task(task: Task, *, steps: int) -> None:
    """Check what can be checked without allocating parameters; two batches are drawn.

    Raises:
        TaskError: a rule of the contract is broken.
    """
    shapes = _check_init(task)
    _check_hints(task, shapes)
    _check_loss(task, shapes, _check_batches(task))
    _check_schedule(task, steps)


def params_shapes(task: Task) -> Params:
    """The pytree of `jax.ShapeDtypeStruct` that `init` would give; allocates nothing.

    Raises:
        TaskError: `init` cannot be traced.
    """

    def init(key: jax.Array) -> Params:  # a new function each time, or JAX answers from its cache
        return task.init(key)

    try:
        return jax.eval_shape(init, jax.random.key(0))
    except Exception as error:
        raise TaskError(
            f"Task.init must map a PRNG key to a pytree of arrays, but it failed: {_short(error)}",
            hint="call task.init(jax.random.key(0)) yourself to see where",
        ) from error


def is_trained(leaf: Any) -> bool:
    """Whether a leaf of the parameters is trained and synchronized: it is of a floating dtype."""
    return jnp.result_type(leaf).name in FLOATING


def named_leaves(params: Params) -> list[tuple[str, Any]]:
    """Leaves of `params` with readable names such as "layers/attn/qkv", in JAX's order.

    Names depend on the tree's structure alone. They hold letters, digits and `._/-`; any other
    character becomes `_`. A tree that is one leaf is named "params".

    Raises:
        TaskError: two leaves have the same name.
    """
    named: dict[str, Any] = {}
    paths: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = _readable(
            jax.tree_util.keystr(path, simple=True, separator="/") if path else "params"
        )
        if name in named:
            raise TaskError(
                f"every leaf of the parameters needs a name of its own, but {paths[name]} and "
                f"{jax.tree_util.keystr(path)} are both called {name!r}",
                hint="rename a key; characters other than A-Z a-z 0-9 . _ / - become _",
            )
        named[name], paths[name] = leaf, jax.tree_util.keystr(path)
    return list(named.items())


def _readable(path: str) -> str:
    parts = re.sub(r"[^A-Za-z0-9._/-]", "_", path).split("/")
    return "/".join("_" * max(1, len(part)) if part.strip(".") == "" else part for part in parts)


def _find(build: str) -> Callable[..., Any]:
    if not build:
        raise TaskError(
            "this run has no task: its learners join from training loops of their own",
            hint="join it with diloco.join; diloco.load and diloco export read its parameters",
        )
    if build == BUILT_IN_TASK_0_1 and not _users_own(build.partition(":")[0]):
        build = BUILT_IN_TASK
    module_name, colon, function_name = build.partition(":")
    if not (module_name and colon and function_name):
        raise TaskError(
            f'a task is named "package.module:function", but {build!r} came',
            hint='for example "diloco.learner.model:build" or "examples.digits:build"',
        )
    function = getattr(_import(module_name), function_name, None)
    if not callable(function):
        raise TaskError(
            f"{build!r}: the module {module_name} has no function {function_name!r}",
            hint="check the name after the colon",
        )
    return function  # type: ignore[no-any-return] # callable() does not narrow Any


def _users_own(name: str) -> bool:
    """Whether a module can be imported by this name and is not ours, seen from the repository."""
    _look_here()
    parent = name.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(parent)
        if found is None or _is_ours(found.submodule_search_locations):
            return False
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # The parent is a file, not a folder.
        return False


def _is_ours(folders: Iterable[str] | None) -> bool:
    ours = Path(__file__).resolve().parent
    return any(Path(folder).resolve() == ours for folder in folders or ())


def _look_here() -> str:
    """Have modules of the current folder found; the folder."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    return here


def _import(name: str) -> Any:
    here = _look_here()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            hint = f"start in the folder that holds {name.partition('.')[0]!r}; this is {here}"
        else:
            hint = f"{name} itself imports {missing!r}; install it in this environment"
        raise TaskError(
            f"the task's module {name!r} cannot be imported: no module named {missing!r}", hint=hint
        ) from error


def _bind(
    build: str, function: Callable[..., Any], given: dict[str, int], options: dict[str, Any]
) -> dict[str, Any]:
    if taken := sorted(given.keys() & options.keys()):
        raise TaskError(
            f"{', '.join(taken)} may not be among a task's options: the run gives them",
            hint="set the run's own steps and seed instead",
        )
    signature = inspect.signature(function)
    try:
        signature.bind(**given, **options)
    except TypeError as error:
        names = ", ".join(name for name in signature.parameters if name not in given)
        raise TaskError(
            f"{build} cannot be called with steps, seed and the options "
            f"{sorted(options) or '(none)'}: {error}",
            hint=f"its options are: {names or '(none)'}; it must take steps and seed by keyword",
        ) from error
    return {**given, **options}


def _check_init(task: Task) -> Params:
    shapes = params_shapes(task)
    again = params_shapes(task)
    if _signature(shapes) != _signature(again):
        raise TaskError(
            "Task.init must give the same structure, shapes and dtypes each time, but two calls "
            f"gave {_tree(shapes)} and {_tree(again)}",
            hint="let nothing but the key and the task's options decide how parameters look",
        )
    leaves = named_leaves(shapes)
    for name, leaf in leaves:
        if not (is_trained(leaf) or leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer)):
            raise TaskError(
                f"leaves of the parameters must be {', '.join(FLOATING)}, integer or bool, but "
                f"{name!r} is {leaf.dtype}",
                hint="hold a complex number as two floats; keep PRNG keys out of the parameters",
            )
    if not any(is_trained(leaf) and leaf.size for _, leaf in leaves):
        raise TaskError(
            f"Task.init must give at least one floating leaf to train, but it gave {_tree(shapes)}",
            hint="return the model's parameters, for example model.init(key, x)['params']",
        )
    return shapes


def _check_hints(task: Task, shapes: Params) -> None:
    for name, leaf in named_leaves(shapes):
        hint = task.hint(name, leaf.shape)
        if not isinstance(hint, TensorHint):
            raise TaskError(
                f"Task.hint must return a TensorHint, but for {name!r} it returned {_kind(hint)}",
                hint="return diloco.TensorHint() for a tensor that needs nothing special",
            )
        if not 0 <= hint.norm_axes <= leaf.ndim:
            raise TaskError(
                f"TensorHint.norm_axes counts leading axes, but for {name!r} of shape "
                f"{leaf.shape} it is {hint.norm_axes}",
                hint=f"choose a number from 0 to {leaf.ndim}",
            )


def _check_batches(task: Task) -> Batch:
    from_0 = task.batches(PROBE, 0)
    _, batch_1 = _draw(from_0), _draw(from_0)
    for leaf in jax.tree.leaves(batch_1):
        if not isinstance(leaf, np.ndarray | np.generic):
            raise TaskError(
                f"a batch must be a pytree of numpy arrays, but it holds {_kind(leaf)}",
                hint="use np.asarray on the host; the learner places batches on its devices",
            )
    resumed = _draw(task.batches(PROBE, 1))
    if not _equal(batch_1, resumed):
        raise TaskError(
            "Task.batches(name, n) must begin with batch number n and always give the same one, "
            "but the second batch from position 0 is not the first one from position 1",
            hint="derive each batch from (seed, name, position), for example with "
            "np.random.default_rng([seed, zlib.crc32(name.encode()), position])",
        )
    return batch_1


def _draw(batches: Any) -> Batch:
    try:
        return next(batches)
    except (StopIteration, TypeError) as error:
        kind = "it ended" if isinstance(error, StopIteration) else _short(error)
        raise TaskError(
            f"Task.batches(name, position) must return an endless iterator, but {kind}",
            hint="write it as a generator: `while True: yield batch`",
        ) from error


def _equal(one: Batch, other: Batch) -> bool:
    def content(batch: Batch) -> list[Any]:  # bytes, so that NaN equals itself
        arrays = [(path, np.asarray(leaf)) for path, leaf in _leaves(batch)]
        return [(path, array.dtype, array.shape, array.tobytes()) for path, array in arrays]

    return content(one) == content(other)


def _check_loss(task: Task, shapes: Params, batch: Batch) -> None:
    try:
        loss = jax.eval_shape(task.loss, shapes, batch)
    except Exception as error:
        raise TaskError(
            "Task.loss must be traceable by jax.jit on (parameters, batch), but it failed: "
            f"{_short(error)}",
            hint="call task.loss(task.init(jax.random.key(0)), batch) yourself to see where",
        ) from error
    if not isinstance(loss, jax.ShapeDtypeStruct) or loss.shape or not is_trained(loss):
        raise TaskError(
            f"Task.loss must return one floating scalar, but it returned {_tree(loss)}",
            hint="return the mean over the batch, such as jnp.mean(losses), and nothing beside it",
        )


def _check_schedule(task: Task, steps: int) -> None:
    if task.schedule is None:
        return
    try:
        jax.eval_shape(task.schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        raise TaskError(
            "Task.schedule must be a function that JAX can trace (the learner's step is compiled "
            f"with it), but it failed: {_short(error)}",
            hint="use jnp.where or optax's schedules in place of Python's if",
        ) from error
    for step in (0, steps):
        rate = float(task.schedule(step))
        if not (math.isfinite(rate) and rate >= 0):
            raise TaskError(
                "Task.schedule must give a finite learning rate of at least 0, but at global step "
                f"{step} it gave {rate}",
                hint="the learner subtracts: the rate itself is positive",
            )


def _kind(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 60 else text[:57] + '...'})"


def _short(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _signature(shapes: Any) -> list[str]:
    return [f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in _leaves(shapes)]


def _tree(shapes: Any) -> str:
    text = ", ".join(_signature(shapes)) or "no leaves"
    return text if len(text) <= 400 else text[:397] + "..."


def _leaves(shapes: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    return [(jax.tree_util.keystr(path) or "(one leaf)", leaf) for path, leaf in leaves]
