"""A task on one host of a learner: its mesh, shardings, compiled step and data.

Each host of a learner makes an `Island`, and so do the dry run and the benchmarks.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diloco.common.process.config import Config, LearnerSection
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.layout import Layout
from diloco.learner.load_and_check_task import held_by, run_task
from diloco.learner.task import Batch, Holder, Params, Task, hint_of
from diloco.learner.tensors import tree
from diloco.learner.tensors.inner_step import InnerStep, key_of, make_inner_step
from diloco.learner.tensors.mesh import (
    ROWS,
    BatchPlacer,
    make_mesh,
    param_shardings,
    state_shardings,
    within,
)
from diloco.learner.tensors.send_and_adopt import Replica


class Island:
    """A learner's task on its mesh of devices: shapes, shardings, programs and batches.

    Args:
        config: the learner's configuration.
        learner: its name.
        devices: devices of all its hosts; all that JAX has, if None.

    Attributes:
        learner: the learner's name.
        settings: the run's settings.
        task: the run's task with this learner's options, of the modules that the learner holds.
        layout: the run's layout, which divides the tensors into fragments.
        holds: the modules that the learner holds; empty: all. `fragments` are their fragments.
        mesh: the mesh of the devices.
        whole: the tree of the shapes, with shardings, of all leaves, also of other modules.
        shapes: the tree of the shapes of the leaves that are held.
        hint: (tensor's name, shape) -> `TensorHint`, which says how the tensor is merged.
        division: says which leaves of `shapes` are trained, synchronized or local.
        shardings: shardings of the parameters on the mesh, a tree like `shapes`.
        state: shapes of the inner optimizer's state; `state_shardings` are its shardings.
        anchor: the memory in which views are kept: "device" or "host".

    Raises:
        DilocoError: the task breaks a rule, or does not fit the mesh.
    """

    def __init__(self, config: Config, learner: str, devices: list[Any] | None = None) -> None:
        settings = config.settings()
        hardware = config.learner.island(learner)
        self.learner = learner
        self.settings = settings
        whole = run_task(settings, hardware.options)
        batch = next(whole.batches(learner, 0))
        assert hardware.mesh is not None
        present = len(config.learner.formation) or config.learner.slices
        self.mesh = make_mesh(hardware.mesh, devices, present)
        self.layout: Layout = tree.task_layout(whole, settings.sync)
        self.hint = hint_of(whole, whole.shapes)
        task, self.holds = held_by(whole, learner, self.layout)
        if self.holds and (jax.process_count() > 1 or config.learner.formation):
            raise ConfigError(
                f"{learner!r} has several hosts, and holds {len(self.holds)} of "
                f"{len(self.layout.modules)} modules",
                hint="let Task.holds give a learner of several hosts, or with slices, all modules",
            )
        self.fragments = self.layout.held(self.holds)
        self.task: Task = task_of_slices(task, batch, config.learner, self.mesh)
        self.shapes = self.task.shapes
        self.division = tree.division_of(self.task, self.shapes)
        if self.division.private and config.learner.checkpoint_dir is None:
            raise ConfigError(
                "the task has private leaves, which are nowhere but in this learner's checkpoints",
                hint="set learner.checkpoint_dir; and checkpoint_upload, to outlive this machine",
            )
        lies = param_shardings(whole, self.layout, whole.shapes, self.mesh)
        self.whole: Params = jax.tree.map(_with_sharding, whole.shapes, lies)
        self.shardings: Params = tree.from_names(self.shapes, tree.by_name(lies))
        trained = self.division.trained_of(self.shapes)
        self.state = jax.eval_shape(self.task.optimizer.init, trained)
        self.state_shardings = state_shardings(
            self.state, trained, self.division.trained_of(self.shardings), self.mesh
        )
        self.anchor = hardware.anchor or settings.sync.anchor
        self._precision = hardware.matmul_precision
        self._compiler_options = hardware.compiler_options
        # Fewer slices take fewer rows, in proportion to the tokens.
        self._share = self.task.tokens_per_batch < task.tokens_per_batch
        if self._share:
            rows = rows_of(batch) * self.task.tokens_per_batch // task.tokens_per_batch
            batch = jax.tree.map(lambda leaf: leaf[:rows] if np.ndim(leaf) else leaf, batch)
        self._placer = BatchPlacer(self.mesh, batch)
        self._whole = self._placer.whole and not self._share
        self._sharded_batch = self._placer.sharded(batch)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Sets the mesh and the precision with which programs in the block are traced and run."""
        with within(self.mesh, self._precision):
            yield

    def replica(self, views: Iterable[np.ndarray]) -> Replica:
        """Returns the learner's tensors, with the values of `views`.

        Args:
            views: the newest view of each held fragment, in order: float32 [fragment's size].
        """
        synced, _ = tree.split(self.shapes, self.division.synced)
        shardings, _ = tree.split(self.shardings, self.division.synced)
        return Replica(
            self.settings.sync,
            self.layout,
            synced,
            views,
            shardings=tree.by_name(shardings),
            anchor=self.anchor,
        )

    def inner_step(self) -> InnerStep:
        """Returns the jitted inner step, an `InnerStep`, with this island's shardings."""
        return make_inner_step(
            self.task,
            shardings=(self.shardings, self.state_shardings),
            compiler_options=self._compiler_options,
        )

    def key(self) -> np.ndarray:
        """Returns the PRNG key data of the inner step, from the run's seed and learner's name."""
        return key_of(self.settings.run.seed, self.learner)

    def init_state(self, params: Params) -> Any:
        """Returns a fresh state of the inner optimizer for `params`, with its shardings."""
        init = jax.jit(self.task.optimizer.init, out_shardings=self.state_shardings)
        return init(self.division.trained_of(params))

    def sharded_state(self) -> Any:
        """Returns the shapes of the inner optimizer's state, with their shardings."""
        return jax.tree.map(_with_sharding, self.state, self.state_shardings)

    def sharded_params(self) -> Params:
        """Returns the shapes of the parameters, with their shardings."""
        return jax.tree.map(_with_sharding, self.shapes, self.shardings)

    def sharded_batch(self) -> Any:
        """Returns the shapes of a batch, with their shardings."""
        return self._sharded_batch

    def feed(self, position: int, holder: Holder | None = None) -> Iterator[Batch]:
        """Yields batches, placed on the mesh; this host reads only the rows for its devices.

        Args:
            position: number of the first batch.
            holder: gives the shares of the data that this learner has claimed; None: batches are
                those of the task by the learner's name.
        """
        start, stop = self._placer.rows
        if self.task.shared is not None and holder is not None:
            rows: Iterator[Batch] = self.task.shared.claimed(
                holder, position, 0 if self._whole else start, None if self._whole else stop
            )
        elif self._whole:
            rows = self.task.batches(self.learner, position)
        elif self.task.rows is not None:
            rows = self.task.rows(self.learner, position, start, stop)
        else:
            rows = (
                jax.tree.map(lambda leaf: leaf[start:stop] if np.ndim(leaf) else leaf, batch)
                for batch in self.task.batches(self.learner, position)
            )
        return map(self._placer.place, rows)


def rows_of(batch: Batch) -> int:
    """Returns the number of rows of a batch, which all its arrays have."""
    return max((np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)), default=0)


def task_of_slices(task: Task, batch: Batch, section: LearnerSection, mesh: Mesh) -> Task:
    """Returns a learner's task for the slices that train now, if the learner has several.

    With `learner.keep_batch` a step takes the whole batch, in as many more parts as there are fewer
    slices, so that each device needs no more memory. Otherwise it takes the share of those slices,
    and the task's tokens are those of that share.

    Args:
        task: the task with all slices.
        batch: one whole batch, or its shapes.
        section: the learner's settings.
        mesh: the mesh of the slices that train now.

    Raises:
        ConfigError: a batch cannot be divided over every number of slices that the settings allow.
    """
    if section.slices == 1:
        return task
    now = len(section.formation) or section.slices
    cuts = math.prod(mesh.shape[axis] for axis in ROWS) // now
    rows = rows_of(batch)
    found = {
        present: _of_so_many(task, rows, cuts * present, present, section)
        for present in range(section.min_slices, section.slices + 1)
    }
    return found[now]


def _of_so_many(task: Task, rows: int, cuts: int, present: int, section: LearnerSection) -> Task:
    """Returns the task of `present` slices; `cuts` is the number of parts of their batches' rows.

    Raises:
        ConfigError: the rows cannot be divided so.
    """
    if section.keep_batch:
        least = math.ceil(task.accumulate * section.slices / present)
        for parts in range(least, rows // cuts + 1):
            if rows % (parts * cuts) == 0:
                return dataclasses.replace(task, accumulate=parts)
    else:
        share, rest = divmod(rows * present, section.slices)
        tokens, odd = divmod(task.tokens_per_batch * present, section.slices)
        if not rest and not odd and share % (task.accumulate * cuts) == 0:
            return dataclasses.replace(task, tokens_per_batch=tokens)
    raise ConfigError(
        f"a batch of {rows} rows cannot be divided over {present} of {section.slices} slices, in "
        f"{cuts} parts",
        hint="choose a batch that each number of slices from learner.min_slices on divides, raise"
        " learner.min_slices, or change learner.keep_batch",
    )


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
