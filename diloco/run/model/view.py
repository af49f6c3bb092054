"""The global model: views of all fragments as a task's parameters."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Self

import jax
import numpy as np

from diloco.common.protocol import wire
from diloco.common.protocol.errors import TaskError
from diloco.common.storage.tape import RunContext, load_specification
from diloco.common.storage.views import load_view
from diloco.learner.contract import model_of
from diloco.learner.task import Params, Task, held_out_loss, params_shapes
from diloco.learner.tensors import tree
from diloco.learner.tensors.replica import Replica
from diloco.learner.tensors.tree import loaded_frozen
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import working
from diloco.run.model.follower import Follower
from diloco.run.model.load import read_frozen
from diloco.run.model.whole import FollowRules


class GlobalModel:
    """Makes a task's parameters of views.

    Args:
        context: the run's.
        task: the run's.
        held: leaves that are not synchronized, as the run began with them.
    """

    def __init__(self, context: RunContext, task: Task, held: Params) -> None:
        self._context = context
        self._held = held
        shapes = params_shapes(task)
        self._synced, _ = tree.split(shapes, tree.synced_marks(shapes, context.layout))
        self._replica: Replica | None = None

    @classmethod
    async def of_run(
        cls, context: RunContext, task: Task, specification: wire.Specification | None = None
    ) -> Self:
        """With the leaves that the run holds, or the task loads; without one, the bus is asked.

        Raises:
            IntegrityError: they are damaged.
            ObjectMissingError, BusError: they, or the run, cannot be read.
        """
        shapes = params_shapes(task)
        _, held = tree.split(shapes, tree.synced_marks(shapes, context.layout))
        specification = specification or await load_specification(context.bus, context.run)
        if specification.constants is not None:
            arrays = await context.runtime.call(read_frozen, context, specification.constants)
            arrays |= {name: np.asarray(leaf) for name, leaf in loaded_frozen(task).items()}
            held = tree.from_names(held, arrays)
        return cls(context, task, held)

    def params(self, views: Sequence[np.ndarray]) -> Params:
        """Parameters of the views of all fragments, float32 [N]; good until the next call."""
        if self._replica is None:
            sync, layout = self._context.settings.sync, self._context.layout
            self._replica = Replica(sync, layout, self._synced, views)
        else:
            for fragment, view in enumerate(views):
                self._replica.roll_back(fragment, self._replica.place_view(fragment, view))
        return tree.join(self._replica.trained, self._held)


async def held_out_scorer(
    context: RunContext, specification: wire.Specification
) -> Callable[[Sequence[np.ndarray]], float]:
    """Scores the views of all fragments on the task's held-out data; the bus may be away by now.

    Raises:
        TaskError: the task cannot be built here.
        IntegrityError, ObjectMissingError: what the run began with cannot be read.
    """
    task = await asyncio.to_thread(model_of, context.settings)
    model = await GlobalModel.of_run(context, task, specification)
    return lambda views: held_out_loss(task, model.params(views))


async def load_params(context: RunContext, task: Task) -> tuple[Params, list[wire.Record]]:
    """The run's newest global view as parameters, and the records it was taken from.

    Raises:
        RunMismatchError, IntegrityError, DilocoError: as `diloco.common.storage.views.load_view`.
    """
    model = await GlobalModel.of_run(context, task)
    fragments = range(len(context.layout.fragments))
    loaded = [await load_view(context, fragment) for fragment in fragments]
    return model.params([item.view for item in loaded]), [item.record for item in loaded]


async def run_sample(
    target: str, prompt: str, *, length: int, temperature: float, seed: int, follow: bool = False
) -> None:
    """Print a prompt and what follows it; arguments as the command's options.

    Raises:
        TaskError: the run's task has no `sample`.
        DilocoError: no such run; bus or store are away.
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
