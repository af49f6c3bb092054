"""From the options of `diloco local` to a configuration document."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.common.config import RunSettings, parse_settings
from diloco.common.errors import ConfigError
from diloco.local.hardware import Hardware, set_hardware

if TYPE_CHECKING:
    from diloco.local.run import LocalOptions

DEFAULT_STEPS = 600
# A local run is short, and somebody may want to see a learner return.
CHECKPOINT_S = 15.0
# After Ctrl-C nobody wants to wait long, and the whole run ends.
LEAVE_S = 5.0


def local_document(
    options: "LocalOptions", name: str, learners: list[str], run_dir: Path
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


def assign(document: dict[str, Any], assignment: str) -> None:
    """Set one key: section.key=value, the value as TOML or else as plain text.

    Raises:
        ConfigError: it is no assignment.
    """
    key, equals, text = assignment.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2:
        raise ConfigError(
            f"--set {assignment!r}: expected section.key=value",
            hint="for example --set outer.learning_rate=0.5",
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    section = document
    for part in path[:-1]:
        section = section.setdefault(part, {})
    section[path[-1]] = value


def parse_assigned(document: Mapping[str, object]) -> RunSettings:
    """The settings of a run after assignments.

    Raises:
        ConfigError: no setting of that name, or no such value.
    """
    try:
        return parse_settings(document)
    except ConfigError as error:
        raise ConfigError(
            error.message.replace("the run's specification: ", ""),
            hint="docs/configuration.md lists every key",
        ) from error


def parse_fragments(text: str) -> frozenset[int]:
    """Fragments from a list such as 0-11 or 0,3,5-7.

    Raises:
        ConfigError: it is no such list.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise ConfigError(
                f"--fragments {text!r}: {part!r} is no fragment and no range",
                hint="for example --fragments 0-11, or --fragments 0,3,5-7",
            )
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)
