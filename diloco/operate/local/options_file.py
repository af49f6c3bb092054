"""Builds a local run's configuration from its options, and restores both when it is resumed.

The *document* is the content of the run's TOML file: sections, each with keys and values.
"""

import json
import tomllib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from diloco.common.process.config import make_config, read_document
from diloco.common.process.nats_server import is_folder_of_server, is_served
from diloco.common.protocol.errors import ConfigError
from diloco.operate.local.command import LocalOptions
from diloco.operate.local.hardware import Hardware, set_hardware
from diloco.run.cli.opening import FOLDERS, at_home
from diloco.run.cli.settings import assign

DEFAULT_STEPS = 250
# Settings for the built-in task without a file: they reach the loss of the defaults in half as
# many steps, but send more than some links carry. The rate is the best of five for the task's own
# size and this number of steps.
BUILT_IN = {
    "task": {"options": {"optimizer": "muon", "learning_rate": 0.01}},
    "sync": {
        "fragments": 4,
        "interval_steps": 6,
        "min_steps": 3,
        "overlap_steps": 2,
        "adopt": "blend",
    },
}
# The interval of learners' checkpoints, which is short so that a killed learner loses little of a
# short run.
CHECKPOINT_S = 15.0
# The most seconds that a learner takes to send its last updates after Ctrl-C; the user waits.

LEAVE_S = 5.0
# Seconds that the creation of a run may take, such as of a large model from files.
CREATED_S = 3600.0


def local_document(
    options: LocalOptions, name: str, learners: list[str], run_dir: Path
) -> tuple[dict[str, Any], dict[str, Hardware]]:
    """Returns the document of a local run, and each learner's hardware by its name.

    Args:
        options: the command line's.
        name: the run's name, unless the options' file has one.
        learners: the learners' names.
        run_dir: the run's folder.

    Raises:
        ConfigError: an option is invalid.
    """
    own = options.config is not None or options.task is not None
    document: dict[str, Any] = {} if own else deepcopy(BUILT_IN)
    if options.config is not None:
        document = read_document(options.config)
    run = document.setdefault("run", {})
    run.setdefault("name", name)
    run["steps"] = options.steps or run.get("steps", DEFAULT_STEPS)
    task = document.setdefault("task", {})
    if options.task:
        task["build"] = options.task
    if options.corpus:
        task["options"] = {
            **task.get("options", {}),
            "corpus": str(Path(options.corpus).absolute()),
        }
    learner = document.setdefault("learner", {})
    learner.setdefault("checkpoint_dir", str(run_dir / "checkpoints"))
    learner.setdefault("checkpoint_interval_s", CHECKPOINT_S)
    learner.setdefault("drain_timeout_s", LEAVE_S)
    if options.speed:
        learner["speed"] = _speeds(options.speed, learners)
    # The run is created while its daemons start.
    document.setdefault("bus", {}).setdefault("wait_for_run_s", CREATED_S)
    document["store"] = {"url": str(run_dir / "store")}
    for assignment in options.settings:
        assign(document, assignment)
    hardware = set_hardware(learner, learners, options.mesh, options.hosts)
    return document, hardware


def _speeds(text: str, learners: list[str]) -> dict[str, float]:
    try:
        speeds = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--speed {text!r}: expected numbers joined by commas", hint="for example 1,1,0.5,1"
        ) from error
    if len(speeds) != len(learners) or not all(0 < speed <= 1 for speed in speeds):
        raise ConfigError(
            f"--speed {text!r}: expected {len(learners)} shares of full speed in (0, 1]",
            hint="one for each learner: --learners 4 --speed 1,1,0.5,1",
        )
    return dict(zip(learners, speeds, strict=True))


FILE, CONFIG = "local.json", "run.toml"
# Options that determine the processes, and are kept in FILE; the run's file has all others.
KEPT = ("learners", "mesh", "hosts", "aggregators", "cpu", "source")


def save_options(folder: Path, options: LocalOptions) -> None:
    """Writes the options that a resumption needs into the run's folder."""
    kept = {name: getattr(options, name) for name in KEPT}
    (folder / FILE).write_text(json.dumps(kept) + "\n")


def write_config(folder: Path, document: Mapping[str, Any]) -> Path:
    """Writes the document as the run's TOML file into its folder; returns the file's path."""
    path = folder / CONFIG
    path.write_text(tomli_w.dumps(document))
    return path


def load_options(folder: Path, options: LocalOptions) -> tuple[LocalOptions, dict[str, Any]]:
    """Returns the options and the document of the run in a folder, which may have been moved.

    Args:
        folder: the run's folder.
        options: the options of `diloco local --resume`; most others than --kill must be absent.

    Raises:
        ConfigError: there is no such run, it is running, or options disagree with it.
    """
    if not ((folder / FILE).is_file() and is_folder_of_server(folder / "nats")):
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a run of diloco local",
            hint="give the folder that it named when it began, such as runs/local-...",
        )
    if is_served(folder / "nats"):
        raise ConfigError(
            f"the run in {str(folder)!r} is running",
            hint=f"watch it: diloco status {folder}",
        )
    _check_options(options)
    kept = json.loads((folder / FILE).read_text())
    document = tomllib.loads((folder / CONFIG).read_text())
    config = at_home(make_config(document, source=str(folder / CONFIG)), folder)
    document["store"]["url"] = config.store.url
    for key in FOLDERS:
        document["learner"][key] = getattr(config.learner, key)
    return replace(options, **kept, kill=options.kill or ["none"]), document


def _check_options(options: LocalOptions) -> None:
    defaults = LocalOptions()
    given = [
        name
        for name in (*KEPT, "steps", "run_dir", "config", "task", "corpus", "speed", "settings")
        if getattr(options, name) != getattr(defaults, name)
    ]
    if given:
        called = {"settings": "set", "source": "from"}
        names = ", ".join(f"--{called.get(name, name)}" for name in given)
        raise ConfigError(
            f"--resume takes the run as it was begun, without {names.replace('_', '-')}",
            hint="change its settings, also its length, with: diloco run set FOLDER KEY=VALUE",
        )
