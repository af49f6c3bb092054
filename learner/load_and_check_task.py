"""Loads a user's task, and checks it against the contract of `task.py`; allocates no parameters."""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco.common.process.config import RunSettings
from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import Layout, TensorHint
from diloco.learner.task import (
    PROBE,
    Batch,
    Evaluated,
    Params,
    Task,
    Variables,
    check_dtype,
    hint_of,
    is_floating,
    kind,
    leaves_of,
    params_shapes,
    short,
    signature,
    tree_words,
)
from diloco.learner.tensors import tree
from diloco.learner.tensors.tree import named_leaves

# The largest number of metrics that `Task.loss` may return, and the pattern of their names.
MOST_METRICS = 32
_METRIC = re.compile("[a-zA-Z][a-zA-Z0-9_]{0,39}")


def load_task(build: str, *, steps: int, seed: int, options: dict[str, Any]) -> Task:
    """Imports a user's function, calls it to build a task, and checks the task; draws two batches.

    Args:
        build: "package.module:function"; modules of the current directory can be imported.
        steps: length of the run in global steps.
        seed: the run's seed, from which the task is to derive all randomness.
        options: further keyword arguments of the function.

    Raises:
        TaskError: the function cannot be found or called with these arguments, or the task breaks
            a rule of the contract. Exceptions of the user's module or function pass unchanged.
    """
    task = build_task(build, steps=steps, seed=seed, options=options)
    check_task(task, steps=steps)
    return task


def build_task(build: str, *, steps: int, seed: int, options: dict[str, Any]) -> Task:
    """Imports and builds a task as `load_task` does, but checks no rule of the contract.

    Raises:
        TaskError: the function cannot be found, called with these arguments, or returns no `Task`.
    """
    function = function_of(build)
    arguments = _bind(build, function, {"steps": steps, "seed": seed}, options)
    task = function(**arguments)
    if not isinstance(task, Task):
        raise TaskError(
            f"{build} must return a diloco.Task, but it returned {kind(task)}",
            hint="end it with `return Task(init=..., loss=..., ...)`",
        )
    return task


def run_task(settings: RunSettings, options: Mapping[str, Any] | None = None) -> Task:
    """Loads and checks the task that a run's settings name, as `load_task` does.

    Args:
        settings: the run's settings.
        options: options that replace those of the settings, such as a learner's own.
    """
    return load_task(**_named(settings, options))


def model_of(settings: RunSettings) -> Task:
    """Loads the task that a run's settings name, for callers that do not train; draws no batch.

    Raises:
        TaskError: the task cannot be loaded, or breaks a rule for `init` or `hint`.
    """
    task = build_task(**_named(settings, None))
    _check_hints(task, _check_init(task))
    return task


def _named(settings: RunSettings, options: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "build": settings.task.build,
        "steps": settings.run.steps,
        "seed": settings.run.seed,
        "options": {**settings.task.options, **(options or {})},
    }


def check_task(task: Task, *, steps: int) -> None:
    """Checks a task without allocating parameters; draws two batches.

    Raises:
        TaskError: the task breaks a rule of the contract.
    """
    for refusal in refusals(task, steps=steps):
        raise refusal


def refusals(task: Task, *, steps: int) -> Iterator[TaskError]:
    """Yields an error for each rule that a task breaks; draws two batches.

    If `init` or `batches` break a rule, rules that need their results are not checked.
    """
    found: dict[str, Any] = {}

    def tried(name: str, check: Callable[[], Any]) -> Iterator[TaskError]:
        try:
            found[name] = check()
        except TaskError as error:
            yield error

    yield from tried("shapes", lambda: _check_init(task))
    if "shapes" in found:
        yield from tried("hints", lambda: _check_hints(task, found["shapes"]))
    yield from tried("batch", lambda: _check_batches(task))
    if "batch" in found:
        yield from tried("parts", lambda: _check_parts(task, found["batch"]))
    if {"shapes", "batch"} <= found.keys():
        yield from tried("loss", lambda: _check_loss(task, found["shapes"], found["batch"]))
    yield from tried("schedule", lambda: _check_schedule(task, steps))


def held_by(task: Task, learner: str, layout: Layout) -> tuple[Task, tuple[str, ...]]:
    """Returns the part of a task that a learner holds, and the modules; draws a batch.

    Args:
        task: the task of the whole model.
        learner: the learner's name.
        layout: the task's layout.

    Returns:
        `tree.held_task` and `tree.held_modules`.

    Raises:
        TaskError: `Task.holds` returns something else than modules of the task, or the loss cannot
            be computed with these modules alone.
    """
    holds = tree.held_modules(task, learner, layout)
    if not holds:
        return task, ()
    part = tree.held_task(task, layout, holds)
    try:
        _check_loss(part, part.shapes, next(task.batches(learner, 0)))
    except TaskError as error:
        raise TaskError(
            f"{learner!r} holds the modules {', '.join(holds)}, and all other leaves are None: "
            f"{error.message}",
            hint="let Task.loss compute with what a learner holds, or Task.holds give it more",
        ) from error
    return part, holds


def function_of(build: str) -> Callable[..., Any]:
    """Imports and returns the function that `build`, "package.module:function", names.

    Raises:
        TaskError: the module or the function cannot be found, or `build` is empty.
    """
    if not build:
        raise TaskError(
            "this run has no task: its learners join from training loops of their own",
            hint="join it with diloco.join; diloco.load and diloco export read its parameters",
        )
    module_name, colon, function_name = build.partition(":")
    if not (module_name and colon and function_name):
        raise TaskError(
            f'a task is named "package.module:function", but {build!r} came',
            hint='for example "diloco.models.bytes_lm:build" or "examples.digits:build"',
        )
    function = getattr(_import(module_name), function_name, None)
    if not callable(function):
        raise TaskError(
            f"{build!r}: the module {module_name} has no function {function_name!r}",
            hint="check the name after the colon",
        )
    return function  # type: ignore[no-any-return] # callable() does not narrow Any


def _look_here() -> str:
    """Puts the current folder on the import path; returns the folder."""
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
    # A bundle of a stranger's run may name any function: one that takes any keyword, as many of
    # Python's own do, is not a task.
    any_keyword = given.keys() - signature.parameters.keys()
    if any_keyword and any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
        raise TaskError(
            f"{build} must name {' and '.join(sorted(any_keyword))} among its parameters, and it "
            "takes any keyword instead",
            hint="def build(*, steps, seed, ...)",
        )
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
    shapes = task.shapes
    again = params_shapes(task)
    if signature(shapes) != signature(again):
        raise TaskError(
            "Task.init must give the same structure, shapes and dtypes each time, but two calls "
            f"gave {tree_words(shapes)} and {tree_words(again)}",
            hint="let nothing but the key and the task's options decide how parameters look",
        )
    leaves = named_leaves(shapes)
    for name, leaf in leaves:
        check_dtype(name, leaf.dtype)
    parameters = shapes.trained if isinstance(shapes, Variables) else shapes
    if not any(is_floating(leaf) and leaf.size for leaf in jax.tree.leaves(parameters)):
        raise TaskError(
            "Task.init must give at least one floating leaf to train, but it gave "
            f"{tree_words(shapes)}",
            hint="return the model's parameters, for example model.init(key, x)['params']",
        )
    return shapes


def _check_hints(task: Task, shapes: Params) -> None:
    hint_of_leaf = hint_of(task, shapes)
    for name, leaf in named_leaves(shapes):
        hint = hint_of_leaf(name, leaf.shape)
        if not isinstance(hint, TensorHint):
            raise TaskError(
                f"Task.hint must return a TensorHint, but for {name!r} it returned {kind(hint)}",
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
                f"a batch must be a pytree of numpy arrays, but it holds {kind(leaf)}",
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
    except StopIteration as error:
        raise batches_ended("its second batch") from error
    except TypeError as error:
        raise TaskError(
            f"Task.batches(name, position) must return an iterator, but {short(error)}",
            hint="write it as a generator: `while True: yield batch`",
        ) from error


def batches_ended(before: str) -> TaskError:
    """Returns the error for a task whose batches end; `before` names the batch that is missing."""
    return TaskError(
        f"Task.batches(name, position) ended before {before}; it must last as long as the run",
        hint="begin the data's next epoch where one ends: number n stands in epoch "
        "n // batches_per_epoch, at place n % batches_per_epoch",
    )


def _equal(one: Batch, other: Batch) -> bool:
    def content(batch: Batch) -> list[Any]:  # bytes, so that NaN equals itself
        arrays = [(path, np.asarray(leaf)) for path, leaf in leaves_of(batch)]
        return [(path, array.dtype, array.shape, array.tobytes()) for path, array in arrays]

    return content(one) == content(other)


def _check_parts(task: Task, batch: Batch) -> None:
    """Checks that `Task.accumulate` divides the rows of a batch.

    Raises:
        TaskError: it does not.
    """
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf) and np.shape(leaf)[0] % task.accumulate:
            raise TaskError(
                f"Task.accumulate is {task.accumulate}, but a batch has {np.shape(leaf)[0]} rows",
                hint="choose a number that divides the rows of a batch",
            )


def _check_loss(task: Task, shapes: Params, batch: Batch) -> None:
    def said(params: Params, batch: Batch, key: jax.Array) -> Evaluated:
        found = task.evaluated(params, batch, key)
        return found._replace(metrics=dict(found.metrics))

    try:
        found = jax.eval_shape(said, shapes, batch, jax.random.key(0))
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            "Task.loss must be traceable by jax.jit on (parameters, batch, key), but it failed: "
            f"{short(error)}",
            hint="it takes these three and returns (loss, metrics), as in `def loss(params, batch,"
            " key): return value, {}`; call it yourself to see where it fails",
        ) from error
    if not _is_scalar(found.loss):
        raise TaskError(
            f"Task.loss must return one floating scalar, but it returned {tree_words(found.loss)}",
            hint="return the mean over the batch, such as jnp.mean(losses), or (loss, metrics)",
        )
    _check_metrics(found.metrics)
    _check_state(shapes, found.state)


def _is_scalar(said: Any) -> bool:
    return isinstance(said, jax.ShapeDtypeStruct) and not said.shape and is_floating(said)


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if not isinstance(name, str) or _METRIC.fullmatch(name) is None:
            raise TaskError(
                f"a metric of Task.loss is called {name!r}",
                hint="use letters, digits and _, at most 40, a letter first",
            )
        if not isinstance(value, jax.ShapeDtypeStruct) or value.shape:
            raise TaskError(
                f"the metric {name!r} of Task.loss must be a scalar, not {tree_words(value)}",
                hint="return its mean over the batch",
            )
    if len(metrics) > MOST_METRICS:
        raise TaskError(
            f"Task.loss returned {len(metrics)} metrics",
            hint=f"they travel with each heartbeat: keep {MOST_METRICS} at most",
        )


def _check_state(shapes: Params, state: Params) -> None:
    wanted = shapes.state if isinstance(shapes, Variables) else None
    if signature(state) != signature(wanted):
        raise TaskError(
            f"Task.loss must return the state as `init` gives it, {tree_words(wanted)}, but it "
            f"returned {tree_words(state)}",
            hint="return (loss, metrics, new state), of the same names, shapes and dtypes as"
            " Variables.state",
        )


def _check_schedule(task: Task, steps: int) -> None:
    if task.schedule is None:
        return
    schedule = jax.jit(task.schedule)
    try:
        rates = {step: float(schedule(np.int32(step))) for step in (0, steps)}
    except Exception as error:
        raise TaskError(
            "Task.schedule must be a function that JAX can trace (the learner's step is compiled "
            f"with it), but it failed: {short(error)}",
            hint="use jnp.where or optax's schedules in place of Python's if",
        ) from error
    for step, rate in rates.items():
        if not (math.isfinite(rate) and rate >= 0):
            raise TaskError(
                "Task.schedule must give a finite learning rate of at least 0, but at global step "
                f"{step} it gave {rate}",
                hint="the learner subtracts: the rate itself is positive",
            )
