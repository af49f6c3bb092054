"""`diloco check`: finds out the kind of a file, and checks that a run could use the file."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from diloco.common.protocol.errors import ConfigError, DilocoError, Exit
from diloco.run.cli.command import command, group
from diloco.run.cli.screen import progress, say, say_plainly

if TYPE_CHECKING:
    from diloco.common.process.config import Config

app = group()
# Top-level keys of a fleet's file that no run's file has.
_OF_FLEETS = ("project", "run_toml", "releases", "subnets")
MOST_BYTES = 4 << 20


@command(app)
def check(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="TOML of a run or of a fleet; a task as TASK.py or module:function; folder or URL "
            "of prepared data",
        ),
    ],
    learner: Annotated[
        str, typer.Option("--learner", help="learner whose options the task gets", metavar="NAME")
    ] = "a",
    steps: Annotated[
        int, typer.Option("--steps", help="steps of the task to take; 0: do not build it", min=0)
    ] = 8,
) -> int:
    """Check a file: of a run, of a fleet, a task, or prepared data.

    Reports all faults at once. For a run: unknown keys, values out of range, settings known to
    train badly, a mesh that does not fit the model, tensors missing from its checkpoint, rows with
    images that do not fit it, and a task that fails in a few steps on the CPU (if this machine has
    the memory). For a fleet: faults in the files that it names; and, as warnings, names that are
    missing from a dated table of Google Cloud's zones and machines. For prepared data: shards
    without the right digest. Needs no bus and no store. The exit status is 1 if something is
    refused, 74 if data is damaged.
    """
    path = Path(file)
    if "://" in file or (path.is_dir() and not (path / "run.toml").exists()):
        return _check_data(file)
    if path.is_dir():
        path /= "run.toml"
    _check_file(path)
    if path.suffix == ".py" or (":" in file and not path.exists()):
        return _try_task(_config_of_task(file), learner, steps)
    if _is_fleet(path):
        from diloco.infra.provision.command import say_findings

        checked = say_findings(path)
        if not checked.refused:
            say_plainly("nothing is refused")
        return Exit.FAILED if checked.refused else 0
    return _check_run(path, learner, steps)


def _check_file(path: Path) -> None:
    """Refuses devices and pipes, which have no end, and files too large for memory.

    A path at which there is nothing passes.

    Raises:
        ConfigError: the file is not a regular file, or is larger than `MOST_BYTES`.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{str(path)!r} is not a regular file", hint="name a file")
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise ConfigError(
            f"{str(path)!r} has {path.stat().st_size:,} bytes: neither a TOML file nor a task has "
            f"more than {MOST_BYTES:,}",
            hint="give TOML of a run or of a fleet, a task's .py, or a folder of prepared data",
        )


def _is_fleet(path: Path) -> bool:
    try:
        return not tomllib.loads(path.read_text()).keys().isdisjoint(_OF_FLEETS)
    except (ValueError, OSError, RecursionError):
        return False  # the reader of run files reports the fault


def _check_data(place: str) -> int:
    from diloco.models.data.folder import find_damage, show

    with progress("check", in_bytes=True) as hear:
        manifest, damage = find_damage(place, hear)
    for sentence in damage:
        say_plainly(f"damaged: {sentence}")
    if damage:
        return Exit.DAMAGED
    show(place, manifest)
    return 0


def _check_run(path: Path, learner: str, steps: int) -> int:
    from diloco.common.process.config import load_config, warnings
    from diloco.common.storage.bus.jetstream import check_url

    config = load_config(path)
    check_url(config.bus.url)
    for sentence in warnings(config.settings()):
        say(f"[yellow]warning:[/] {escape(sentence)}")
    say(f"{escape(str(path))} is a file of run [bold]{config.run.name}[/]")
    # A run without a task has learners with their own training loops.
    return _try_task(config, learner, steps) if "task" in config.model_fields_set else 0


def _config_of_task(name: str) -> "Config":
    """Returns a configuration of a run with this task, for a trial.

    Args:
        name: "module:function", or a file below the current folder, whose function is `build`.

    Raises:
        ConfigError: there is no such file, or no run could import it by a module's name.
    """
    from diloco.common.process.config import make_config

    path = Path(name)
    if path.suffix == ".py":
        if not path.exists():
            raise ConfigError(f"there is no file {name!r}", hint="diloco check FILE")
        inside = path.resolve().is_relative_to(here := Path.cwd().resolve())
        parts = path.resolve().relative_to(here).with_suffix("").parts if inside else ()
        if not parts or not all(part.isidentifier() for part in parts):
            raise ConfigError(
                f"no run could import {name!r}: a task is a module below the current folder",
                hint="start in its folder, and give it a name of letters, digits and underscores",
            )
        name = ".".join(parts) + ":build"
    document = {
        "run": {"name": "check", "steps": 1000},
        "task": {"build": name},
        "store": {"url": "unused"},
    }
    return make_config(document, source=name)


def _try_task(config: "Config", learner: str, steps: int) -> int:
    """Takes some steps of the task, prints the outcome, and returns the exit status.

    Args:
        config: the run's configuration.
        learner: name of the learner whose options the task gets.
        steps: the number of steps, of which the first compiles; 1 counts as 2, with 0 nothing is
            tried.
    """
    if not steps:
        return 0
    from diloco.learner.try_task import tried

    with progress("check") as hear:
        trial = tried(config, learner, max(steps, 2), hear)
    for name, value in trial.facts:
        say(f"{name + ':':<26} {escape(value)}")
    for sentence in trial.warned:
        say(f"[yellow]warning:[/] {escape(sentence)}")
    for error in trial.refused:
        say(f"[red]refused:[/] {escape(_words(error))}")
    if trial.untried:
        say(f"[yellow]not tried:[/] {escape(trial.untried)}")
    elif not trial.refused:
        say("[green]a learner would take it[/]")
    return Exit.FAILED if trial.refused else 0


def _words(error: DilocoError) -> str:
    return f"{error.message}\n  hint: {error.hint}" if error.hint else error.message
