"""`diloco evaluate`, `diloco sample` and `diloco follow`."""

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diloco.common.process.signals import interrupts_wait
from diloco.run.cli import options as shared
from diloco.run.cli.command import command, group

app = group()


@command(app, logs="info")
def evaluate(
    run: shared.RunOrTape,
    version: shared.Version = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="score every new version until the run ends")
    ] = False,
    every_s: Annotated[
        float,
        typer.Option("--every-s", help="with --follow: least seconds between scores", min=0),
    ] = 10.0,
    share: Annotated[
        float,
        typer.Option("--share", help="with --follow: most of the time to spend", min=0.01, max=1),
    ] = 1.0,
    keep: Annotated[
        bool, typer.Option(help="keep scores in the run's store, for diloco report")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="print each score as JSON")] = False,
    lm_eval: Annotated[
        str | None,
        typer.Option(
            "--lm-eval", help="also score lm_eval's tasks: YAML files, by commas", metavar="TASKS"
        ),
    ] = None,
    lm_eval_python: Annotated[
        str | None,
        typer.Option(
            "--lm-eval-python",
            help="Python that has lm_eval[hf] [default: this one]",
            metavar="PYTHON",
        ),
    ] = None,
) -> None:
    """Score the global model on the task's held-out data."""
    with interrupts_wait():
        from diloco.run.model.evaluate import Pace, run_evaluate
        from diloco.run.model.lm_eval import LmEval

    asyncio.run(
        run_evaluate(
            run,
            version=version,
            pace=Pace(every_s, share) if follow else None,
            keeps=keep,
            json=json,
            lm_eval=None if lm_eval is None else LmEval.of_options(lm_eval, lm_eval_python),
        )
    )


@command(app)
def sample(
    run: shared.RunOrTape,
    prompt: Annotated[str, typer.Option("--prompt", help="start of the text")] = "def ",
    length: Annotated[int, typer.Option("--length", help="tokens to generate", min=1)] = 300,
    temperature: Annotated[
        float, typer.Option("--temperature", help="sampling temperature; 0 is greedy", min=0)
    ] = 0.7,
    seed: Annotated[int, typer.Option("--seed", help="random seed")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="repeat this with every new version until the run ends")
    ] = False,
) -> None:
    """Generate text with the newest global model.

    For the built-in task, and for tasks with a `sample` function (docs/tasks.md).
    """
    with interrupts_wait():
        from diloco.run.model.view import run_sample

    asyncio.run(
        run_sample(run, prompt, length=length, temperature=temperature, seed=seed, follow=follow)
    )


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """The options of `diloco follow`."""

    to: Annotated[Path, typer.Option("--to", help="folder of the versions", metavar="DIR")]
    form: Annotated[
        str, typer.Option("--format", help="hf, safetensors or deltas", metavar="FORMAT")
    ] = "safetensors"
    every: Annotated[
        int, typer.Option("--every", help="least versions from one written to the next", min=1)
    ] = 1
    keep: Annotated[int, typer.Option("--keep", help="newest versions that are kept", min=1)] = 3
    command: Annotated[
        str | None,
        typer.Option("--exec", help="run this after each version, with its folder", metavar="CMD"),
    ] = None
    credentials: Annotated[
        Path | None,
        typer.Option("--credentials", help="a reader's file [default: as in RUN]", metavar="FILE"),
    ] = None
    metrics_port: shared.MetricsPort = None


@command(app, logs="info")
def follow(run: shared.Run, options: FollowOptions) -> None:
    """Keep a folder with the newest whole version of the model.

    DIR/latest is a link to it. Ends with the run or at SIGTERM; needs a reader's credentials only.
    """
    with interrupts_wait():
        from diloco.run.cli.opening import run_config
        from diloco.run.model.deltas import served_folder
        from diloco.run.model.follow import follow as open_following
        from diloco.run.model.serving import FolderRules, serve_folder

    config = run_config(run)
    section = config.metrics
    if options.metrics_port is not None:
        section = section.model_copy(update={"port": options.metrics_port})
    model = open_following(run, credentials=options.credentials, every=options.every)
    rules = FolderRules(options.to, options.form, options.keep, options.command)
    serve_folder(model, partial(served_folder, model, rules), config.run.name, section)
