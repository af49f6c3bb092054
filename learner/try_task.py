"""Tries a task on the CPU: checks the task, takes a few steps, and reports all errors at once."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diloco.common.process.config import Config, LearnerSection, MeshSection, warnings
from diloco.common.protocol.errors import DilocoError, TaskError
from diloco.common.protocol.layout import Layout
from diloco.learner.dry_run import device_bytes
from diloco.learner.island import task_of_slices
from diloco.learner.load_and_check_task import batches_ended, build_task, held_by, refusals
from diloco.learner.task import Params, Task, scores
from diloco.learner.tensors import tree
from diloco.learner.tensors.inner_step import StepOutcome, make_inner_step
from diloco.learner.tensors.mesh import abstract_mesh, param_shardings, rows_of_batch
from diloco.learner.train import SignCheck

# A warning is given if a step spends more than this share of its time waiting for its batch.
SLOW_DATA = 0.1
MOST_ROWS = 8  # rows without use, after which no further row is read
PART = (
    1 << 24
)  # numbers of a checkpoint's tensor that are in memory at a time, unless a row has more


@dataclass
class Trial:
    """The findings of a trial of a task.

    Attributes:
        refused: errors that would end a learner.
        warned: warnings, as sentences.
        facts: (name, value) of measured figures, in order.
        untried: a sentence that says why no step was taken; empty: steps were taken, or an error
            prevented them.
    """

    refused: list[DilocoError] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    untried: str = ""

    def refuse(self, error: Exception | SystemExit) -> None:
        """Adds an error that would end a learner; exceptions of the task become a `TaskError`."""
        if isinstance(error, SystemExit):
            error = TaskError(f"the task ends its process: SystemExit({error.code!r})")
        elif not isinstance(error, DilocoError):
            error = TaskError(f"{type(error).__name__}: {error}")
        # A row without use is found by itself, and in its batch.
        if str(error) not in map(str, self.refused):
            self.refused.append(error)


def tried(config: Config, learner: str, steps: int, hear: Callable[[int, int], None]) -> Trial:
    """Builds a run's task, checks it by its contract and the learner's mesh, and takes some steps.

    No step is taken, and nothing allocated, if this machine has too little memory for a step.
    Where the task says how (`Task.every_row`), all rows of its data are read.

    Args:
        config: the learner's configuration.
        learner: the learner's name.
        steps: the number of inner steps to take, at least 2.
        hear: called after each row that is read with (rows read, rows in all).
    """
    trial, settings = Trial(), config.settings()
    hardware = config.learner.island(learner)
    assert hardware.mesh is not None
    trial.warned += warnings(settings)
    try:
        task = build_task(
            settings.task.build,
            steps=settings.run.steps,
            seed=settings.run.seed,
            options={**settings.task.options, **hardware.options},
        )
        trial.refused += refusals(task, steps=settings.run.steps)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the task's own, too, is what the trial tells
        trial.refuse(error)
        return trial
    try:
        _read_rows(trial, task, hear)
        layout = tree.task_layout(task, settings.sync)
        part, holds = held_by(task, learner, layout)
        _describe(trial, part, layout, holds)
        _check_mesh(task, layout, hardware.mesh, learner, config.learner)
        _read_first_parameters(trial, task)
    except DilocoError as error:
        trial.refuse(error)
    if trial.refused:
        return trial
    # Held-out data is scored with the whole model, which learners need not hold.
    needed = max(_step_bytes(part), device_bytes(task.shapes))
    if needed > (free := _free_bytes()):
        trial.untried = (
            f"parameters, gradients and the optimizer's state take {needed / 1e9:.1f} GB, and this"
            f" machine has {free / 1e9:.1f} GB free, so that no step was taken; diloco learner"
            f" --config FILE --learner {learner} --dry-run --devices {hardware.mesh.given} compiles"
            " one without allocating them"
        )
    else:
        _train(trial, task, part, learner, settings.run.seed, steps)
    return trial


def _check_mesh(
    task: Task, layout: Layout, sizes: MeshSection, learner: str, section: LearnerSection
) -> None:
    """Checks by shapes alone that a mesh fits the model's tensors and the batch.

    Raises:
        ConfigError: the mesh does not fit, or some number of the learner's slices does not divide a
            batch.
        TaskError: `Task.partition` returns something other than a PartitionSpec that fits a tensor.
    """
    mesh, batch = abstract_mesh(sizes), next(task.batches(learner, 0))
    param_shardings(task, layout, task.shapes, mesh)
    rows_of_batch(mesh, batch)
    whole: Any = abstract_mesh(sizes, section.slices)
    task_of_slices(task, batch, section, whole)


def _read_rows(trial: Trial, task: Task, hear: Callable[[int, int], None]) -> None:
    """Reads all rows of `Task.every_row`; refuses rows without use, `MOST_ROWS` of them at most.

    Raises:
        TaskError: the task finds no rows.
    """
    sources = task.every_row() if task.every_row is not None else ()
    places = [(rows, place) for rows in sources for place in range(len(rows))]
    wrong = 0
    for number, (rows, place) in enumerate(places, start=1):
        try:
            rows[place]
        except TaskError as error:
            trial.refuse(error)
            wrong += 1
        hear(number, len(places))
        if wrong == MOST_ROWS:
            break
    if places:
        trial.facts.append(("rows", f"{number:,} of {len(places):,} read, {wrong} of no use"))


def _read_first_parameters(trial: Trial, task: Task) -> None:
    """Reads the files with the parameters of version 0, as `diloco run create` would, in parts.

    If the task cannot name the folder, a warning is added, since learners do not need these files.

    Raises:
        ConfigError: a file is damaged; a tensor is missing, found twice or of another shape, or has
            a number that is infinite or not a number.
    """
    try:
        folder = None if task.files is None else task.files.first
    except TaskError as error:
        trial.warned.append(f"{error.message}: learners need none, diloco run create does")
        return
    if task.files is not None and folder is not None:
        there = task.files.read(folder)
        for leaf in there.values():
            _read_through(leaf)
        trial.facts.append(("first parameters", f"{len(there)} tensors of {str(folder)!r}"))


def _read_through(leaf: Any) -> None:
    """Reads a tensor of a checkpoint's folder in parts of about `PART` numbers, and drops them."""
    rows, *each = leaf.shape or (1,)
    step = max(1, PART // max(1, math.prod(each)))
    for start in range(0, rows, step):
        np.asarray(leaf[start : min(start + step, rows)] if leaf.shape else leaf)


def _step_bytes(task: Task) -> int:
    """Returns the bytes that a step needs at least: parameters, gradients, optimizer's state."""
    trained = tree.division_of(task, task.shapes).trained_of(task.shapes)
    state = jax.eval_shape(task.optimizer.init, trained)
    return device_bytes((task.shapes, trained, state))


def _free_bytes() -> int:
    """Returns the bytes of memory that are available on this machine; if unknown, of all memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: all memory, used or not
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def _describe(trial: Trial, task: Task, layout: Layout, holds: tuple[str, ...]) -> None:
    fragments, shapes = layout.held(holds), tree.by_name(task.shapes)
    synced = sum(one.elements for one in fragments)
    held = sum(tensor.size for tensor in layout.constants if tensor.name in shapes)
    averaged = sum(one.elements for one in fragments if one.averaged)
    if holds:
        trial.facts.append(("holds", f"{', '.join(holds)}, and counts these alone"))
    trial.facts += [
        ("trained", f"{synced - averaged:,} parameters in {len(fragments)} fragments"),
        ("averaged state", f"{averaged:,} numbers"),
        ("frozen, private, or local state", f"{held:,} numbers, never sent"),
        ("tokens per step", f"{task.tokens_per_batch:,}"),
    ]
    if task.active_parameters is not None:
        trial.facts.append(("passed by a token", f"{task.active_parameters:,} parameters"))


def _train(trial: Trial, task: Task, part: Task, learner: str, seed: int, steps: int) -> None:
    """Takes a few steps, evaluates on held-out data, and adds all findings to `trial`.

    `part` is the task of the modules that the learner holds.
    """
    try:
        outcomes = list(_steps(trial, part, _first_parameters(part, seed), learner, steps))
        _judge(trial, part, outcomes)
        _compare_learners(trial, task, learner)
        # The steps donated the first parameters.
        said = scores(task.evaluate(_first_parameters(task, seed)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        trial.refuse(error)
        return
    every = {"held-out, before training": said.figures}
    every |= {f"held-out, slice {name}": figures for name, figures in said.slices.items()}
    for what, figures in every.items():
        words = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        trial.facts.append((what, words))
    wrong = [name for name, value in said.figures.items() if not math.isfinite(value)]
    if wrong:
        trial.warned.append(f"Task.evaluate gives no finite {', '.join(wrong)}")


def _first_parameters(task: Task, seed: int) -> Params:
    """Returns the result of `Task.init`, with the frozen leaves of `Task.load_frozen`."""
    params = jax.jit(task.init)(jax.random.key(seed))
    loaded = {name: np.asarray(leaf) for name, leaf in tree.loaded_frozen(task).items()}
    return tree.from_names(params, tree.by_name(params) | jax.device_put(loaded))


def _steps(
    trial: Trial, task: Task, params: Params, learner: str, steps: int
) -> Iterator[StepOutcome]:
    division = tree.division_of(task, task.shapes)
    state: Any = task.optimizer.init(division.trained_of(params))
    inner_step, batches = make_inner_step(task), task.batches(learner, 0)
    waited_s, took_s = [], []
    for position in range(steps):
        began_s = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            raise batches_ended(f"batch number {position}")
        drawn_s = time.perf_counter()
        numbers = np.int32(position), np.uint32(position)
        params, state, outcome = inner_step(params, state, batch, *numbers)
        yield jax.device_get(outcome)
        waited_s.append(drawn_s - began_s)
        took_s.append(time.perf_counter() - began_s)
    # The first step compiles.
    step_s = float(np.median(took_s[1:]))
    # Medians, since reading ahead is slow once, at its beginning.
    share = float(np.median(waited_s[1:])) / max(step_s, 1e-9)
    words = f"{1000 * step_s:.1f} ms, {share:.0%} of it for its batch"
    trial.facts.append(("a step on this CPU", words))
    if share > SLOW_DATA:
        trial.warned.append(
            f"{share:.0%} of a step is waiting for its batch: read ahead (docs/data.md)"
        )


def _judge(trial: Trial, task: Task, outcomes: list[StepOutcome]) -> None:
    losses = [float(outcome.loss) for outcome in outcomes]
    trial.facts.append(("loss", ", ".join(f"{loss:.4g}" for loss in losses)))
    for name in outcomes[-1].metrics:
        trial.facts.append((name, f"{float(outcomes[-1].metrics[name]):.4g}"))
    if not all(map(math.isfinite, losses)):
        trial.refuse(
            TaskError(
                "the loss is infinite or not a number within the first steps",
                hint="lower the learning rate, or look in Task.loss for a division by 0",
            )
        )
    judge = SignCheck()
    try:
        for outcome in outcomes:
            if not judge.done and outcome.descent is not None:
                judge.look(float(outcome.descent))
    except TaskError as error:
        trial.refuse(error)
    shapes = task.shapes
    trained, _ = tree.split(shapes, tree.division_of(task, shapes).trained)
    still = np.all([outcome.still for outcome in outcomes], axis=0)
    names = [name for name, zero in zip(tree.by_name(trained), still, strict=True) if zero]
    if names:
        trial.warned.append(f"no gradient in {len(outcomes)} steps: {', '.join(names[:8])}")


def _compare_learners(trial: Trial, task: Task, learner: str) -> None:
    """Adds a warning if learners of two names draw the same batch; not if they claim shares."""
    if task.shared is not None:
        return
    one, other = (next(task.batches(name, 0)) for name in (learner, f"{learner}-2"))
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
    if all(itertools.starmap(np.array_equal, pairs)):
        trial.warned.append(
            "two learners with different names draw the same batch: derive it from the name, too"
        )
