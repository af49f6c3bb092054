"""`diloco sample`: text that the global model writes, if its task can."""

import asyncio
import itertools
import sys

import jax

from diloco.common.protocol.errors import TaskError
from diloco.learner.contract import model_of
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import working
from diloco.run.model.view import load_params


async def run_sample(
    target: str, prompt: str, *, length: int, temperature: float, seed: int
) -> None:
    """Print a prompt and what follows it; arguments as the command's options.

    Raises:
        TaskError: the run's task has no `sample`.
        DilocoError: no such run; bus or store are away.
    """
    async with open_run(target, name="sample", reads=True) as run:
        settings = run.context.settings
        task = await asyncio.to_thread(model_of, settings)
        if task.sample is None:
            raise TaskError(
                f"the task {settings.task.build} cannot generate text: it has no sample function",
                hint="see docs/tasks.md, Samples",
            )
        with working("loading the newest model"):
            params, _ = await load_params(run.context, task)
    sys.stdout.write(prompt)
    pieces = task.sample(params, prompt, jax.random.key(seed), temperature)
    for piece in itertools.islice(pieces, length):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
