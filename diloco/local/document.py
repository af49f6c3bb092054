"""From the options of `diloco local` to a configuration document."""

import tomllib
from pathlib import Path
from typing import Any

from diloco.cli.settings import assign
from diloco.common.errors import ConfigError
from diloco.local.hardware import Hardware, set_hardware
from diloco.local.options import LocalOptions

DEFAULT_STEPS = 600
# A local run is short, and somebody may want to see a learner return.
CHECKPOINT_S = 15.0
# After Ctrl-C nobody wants to wait long, and the whole run ends.
LEAVE_S = 5.0


def local_document(
    options: LocalOptions, name: str, learners: list[str], run_dir: Path
) -> tuple[dict[str, Any], dict[str, Hardware]]:
    """The sections of a local run's file, and what each learner trains on.

    Raises:
        ConfigError: an option that cannot be understood.
    """
    document = _read(options.config) if options.config else {}
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
    learner.setdefault("compilation_cache_dir", str(run_dir / "compiled"))
    learner.setdefault("checkpoint_dir", str(run_dir / "checkpoints"))
    learner.setdefault("checkpoint_interval_s", CHECKPOINT_S)
    learner.setdefault("drain_timeout_s", LEAVE_S)
    if options.speed:
        learner["speed"] = _speeds(options.speed, learners)
    document["store"] = {"url": str(run_dir / "store")}
    for assignment in options.settings:
        assign(document, assignment)
    hardware = set_hardware(learner, learners, options.mesh, options.hosts)
    return document, hardware


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


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
