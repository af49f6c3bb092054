"""What a local run was begun with, kept in its folder, so that it can be resumed there."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from diloco.cli.opening import FOLDERS, at_home
from diloco.common.config import make_config
from diloco.common.errors import ConfigError
from diloco.common.nats_server import is_folder_of_server, is_served
from diloco.local.options import LocalOptions

FILE, CONFIG = "local.json", "run.toml"
# Options that say which processes there are; the rest is in the run's file.
KEPT = ("learners", "mesh", "hosts", "aggregators", "cpu", "source")


def note(folder: Path, options: LocalOptions) -> None:
    """Keep the options that a resumption needs."""
    kept = {name: getattr(options, name) for name in KEPT}
    (folder / FILE).write_text(json.dumps(kept) + "\n")


def write_config(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write the run's file; its path."""
    path = folder / CONFIG
    path.write_text(tomli_w.dumps(document))
    return path


def begun(folder: Path, options: LocalOptions) -> tuple[LocalOptions, dict[str, Any]]:
    """The options and the document of the run in a folder, which may have been moved.

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
