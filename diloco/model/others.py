"""A run's global model in the format that others have, which its task writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.common.config import RunSettings
from diloco.common.errors import ConfigError
from diloco.common.held import Held
from diloco.common.tape import RunContext
from diloco.learner.contract import model_of
from diloco.learner.frozen import loaded_frozen
from diloco.learner.task import Files, MergedFiles, Task
from diloco.model.load import Arrays


def write_for_others(
    folder: Path,
    context: RunContext,
    settings: RunSettings,
    arrays: Arrays,
    *,
    constants: str | None,
    dtype: str,
    merge: bool,
) -> None:
    """Have a run's task write its parameters.

    Args:
        folder: new, or empty.
        context: of the run.
        settings: that name the task.
        arrays: parameters by name, those that the run stores.
        constants: the object that names the leaves that are not synchronized.
        dtype: that floats are written in.
        merge: adapters are added to their base.

    Raises:
        ConfigError: it cannot be written, or the task has no such format.
        IntegrityError: the base that is merged into is not the run's.
    """
    task = model_of(settings)
    files = _files_of(task, settings)
    if merge:
        write = _merging(files)
        write(folder, {**arrays, **_base_of(task, context, constants)}, dtype)
    else:
        files.write(folder, arrays, dtype)


def _files_of(task: Task, settings: RunSettings) -> Files:
    if task.files is None:
        raise ConfigError(
            f"--format hf: the run's task, {settings.task.build!r}, writes no format of others",
            hint="diloco.learner.causal_lm:build does; safetensors and orbax are for every task",
        )
    return task.files


def _merging(files: Files) -> Callable[[Path, dict[str, Any], str], None]:
    if not isinstance(files, MergedFiles):
        raise ConfigError(
            "--merge: the run's task has no adapters",
            hint="leave it out: what is exported is the whole model",
        )
    return files.write_merged


def _base_of(task: Task, context: RunContext, constants: str | None) -> dict[str, Any]:
    """The leaves that learners load by themselves, which are compared with the run's."""
    loaded = loaded_frozen(task)
    if constants is not None and loaded:
        held = Held(context.run, context.store.get, constants)
        for name, leaf in loaded.items():
            held.check(name, leaf)
    return loaded
