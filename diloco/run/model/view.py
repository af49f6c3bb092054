"""Turns the views of all fragments into a task's parameters, to evaluate or to sample from."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Self

import jax
import numpy as np

from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.errors import TaskError
from diloco.common.protocol.layout import Layout
from diloco.common.storage.tape import RunContext, load_specification
from diloco.common.storage.views import load_view
from diloco.learner.load_and_check_task import model_of
from diloco.learner.task import Params, Task, scores
from diloco.learner.tensors import tree
from diloco.learner.tensors.tree import loaded_frozen
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import working
from diloco.run.model.follower import Follower
from diloco.run.model.load import Arrays, arrays_of, held_leaves
from diloco.run.model.whole import FollowRules


class GlobalModel:
    """Builds a task's parameters from the views of fragments.

    Args:
        layout: the run's layout.
        task: the run's task.
        held: by name, the leaves that are not synchronized and that the run's store has
            (`held_leaves`); the task loads the other leaves that are not synchronized.
    """

    def __init__(self, layout: Layout, task: Task, held: Arrays) -> None:
        self._layout = layout
        shapes = task.shapes
        self._synced, self._held = tree.split(shapes, tree.synced_marks(shapes, layout))
        loaded = {name: np.asarray(leaf) for name, leaf in loaded_frozen(task).items()}
        if leaves := held | loaded:
            self._held = tree.from_names(self._held, leaves)

    @classmethod
    async def of_run(
        cls, context: RunContext, task: Task, specification: wire.Specification | None = None
    ) -> Self:
        """Returns a model with the leaves that are read from the run's store.

        Args:
            context: the run's context.
            task: the run's task.
            specification: the run's specification; None: it is read from the bus.

        Raises:
            IntegrityError: a leaf is damaged.
            ObjectMissingError, BusError: a leaf, or the run, cannot be read.
        """
        specification = specification or await load_specification(context.bus, context.run)
        return cls(context.layout, task, await held_leaves(context, specification))

    def params(self, views: Sequence[np.ndarray]) -> Params:
        """Returns the task's parameters, on the default device.

        Args:
            views: the view of each fragment, float32 [elements], in order of fragments.
        """
        arrays = arrays_of(self._layout, views)
        leaves = {name: jax.device_put(leaf) for name, leaf in arrays.items()}
        return tree.join(tree.from_names(self._synced, leaves), self._held)


class ScoredTask:
    """Evaluates a run's task; made for a process of its own, by `Isolated`.

    Arguments come one by one, since they pass through a pipe: `hold` once, `see` for each fragment,
    then `losses`.

    Args:
        settings: the run's settings.

    Raises:
        TaskError: the task cannot be built here.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self._task = model_of(settings)
        self._model: GlobalModel | None = None
        self._views: list[np.ndarray] = []

    def digest(self) -> str:
        """Returns the digest of the layout that the task would have, to compare with the run's."""
        return tree.task_layout(self._task, self._settings.sync).digest

    def hold(self, layout: Layout, held: Arrays) -> None:
        """Takes the arguments `layout` and `held` of `GlobalModel`, before the first `see`."""
        self._model = GlobalModel(layout, self._task, held)

    def see(self, view: np.ndarray) -> None:
        """Takes the view of the next fragment, float32 [elements], in order of fragments."""
        self._views.append(view)

    def losses(self) -> dict[str, float]:
        """Returns the held-out losses with the views taken, and forgets the views.

        They are by name of a slice of the data; the loss on all data is the first.
        """
        assert self._model is not None
        views, self._views = self._views, []
        return scores(self._task.evaluate(self._model.params(views))).losses()


async def held_out_scorer(
    context: RunContext, specification: wire.Specification
) -> Callable[[Sequence[np.ndarray]], dict[str, float]]:
    """Returns a function that evaluates the task on views.

    The function takes the view of each fragment, float32 [elements]. It returns held-out losses by
    name of a slice of the data; the loss on all data is the first. It needs no bus.

    Raises:
        TaskError: the task cannot be built here.
        IntegrityError, ObjectMissingError: leaves in the run's store are damaged or missing.
    """
    task = await asyncio.to_thread(model_of, context.settings)
    model = await GlobalModel.of_run(context, task, specification)
    return lambda views: scores(task.evaluate(model.params(views))).losses()


async def load_params(context: RunContext, task: Task) -> tuple[Params, list[wire.RecordWord]]:
    """Returns the run's newest global parameters, and the words of their records, by fragment.

    Raises:
        DilocoError: bus or store are unreachable; an object is missing or damaged.
    """
    model = await GlobalModel.of_run(context, task)
    fragments = range(len(context.layout.fragments))
    loaded = [await load_view(context, fragment) for fragment in fragments]
    return model.params([item.view for item in loaded]), [item.record for item in loaded]


async def run_sample(
    target: str, prompt: str, *, length: int, temperature: float, seed: int, follow: bool = False
) -> None:
    """Prints a prompt and the text generated after it; arguments as of `diloco sample`.

    Raises:
        TaskError: the run's task has no `sample`.
        DilocoError: no such run; bus or store are unreachable.
    """
    async with open_run(target, name="sample", reads=True) as run:
        context = run.context
        task = await asyncio.to_thread(model_of, context.settings)
        sampled = task.sample
        if sampled is None:
            raise TaskError(
                f"the task {context.settings.task.build} cannot generate text: it has no sample "
                "function",
                hint="see docs/tasks.md, Samples",
            )

        def write(params: Params) -> None:
            pieces = sampled(params, prompt, jax.random.key(seed), temperature)
            for piece in itertools.chain([prompt], itertools.islice(pieces, length), ["\n"]):
                sys.stdout.write(piece)
                sys.stdout.flush()

        if not follow:
            with working("loading the newest model"):
                params, _ = await load_params(context, task)
            write(params)
            return
        model = await GlobalModel.of_run(context, task)
        fragments = tuple(range(len(context.layout.fragments)))
        async with Follower(context, FollowRules(fragments)) as follower:
            while (change := await follower.advance()) is not None:
                sys.stdout.write(f"--- version {change.records[-1].version}\n")
                params = model.params([follower.view(fragment) for fragment in fragments])
                await asyncio.to_thread(write, params)
