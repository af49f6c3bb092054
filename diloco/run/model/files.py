"""Writes a run's global model to files: parameters, layout, settings, and their origin."""

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import tomli_w

from diloco.aggregator.arrays.codec_kernels import Vector
from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError, ObjectMissingError
from diloco.common.protocol.frozen import Frozen
from diloco.common.protocol.layout import layout_bytes
from diloco.common.storage.tape import Recorded, RunContext, load_specification
from diloco.common.storage.views import load_version, load_view
from diloco.run.cli.folders import make_folder
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import say, working
from diloco.run.cli.versions import find_targets
from diloco.run.model.load import Arrays, arrays_of, held_leaves

if TYPE_CHECKING:
    from diloco.learner.task import Files, Task

FORMATS = ("safetensors", "orbax", "hf")
DTYPES = ("float32", "bfloat16", "float16")


def check_target(
    folder: Path, form: str = "safetensors", dtype: str | None = None, *, merge: bool = False
) -> None:
    """Refuses invalid arguments of `write_model`, before anything is computed.

    Raises:
        ConfigError: no such format, `dtype` or `merge` with a format that has none, or the folder
            exists and is not empty.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format {form!r}: expected {', '.join(FORMATS)}")
    if dtype is not None and (form != "hf" or dtype not in DTYPES):
        raise ConfigError(
            f"--dtype {dtype!r} with --format {form}: expected {', '.join(DTYPES)}, of format hf",
            hint="the other formats keep the dtypes of the run",
        )
    if merge and form != "hf":
        raise ConfigError(
            f"--merge with --format {form}: expected hf",
            hint="the other formats have adapters and base by their names",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} already exists", hint="give a new folder")


async def write_model(
    folder: Path,
    form: str,
    context: RunContext,
    views: Mapping[int, Vector],
    records: Mapping[int, wire.AnyRecord],
    *,
    settings: RunSettings | None = None,
    dtype: str | None = None,
    merge: bool = False,
    own: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Writes the model that the views of all fragments make.

    `model.safetensors` or the folder `model` (orbax) has the parameters by the task's names, and
    the leaves that are not synchronized, with their values at the run's creation. `layout.json` has
    the layout, `settings.toml` the settings, `about.json` the run, versions, digests and global
    step. In the format `hf`, `about.json` is beside files that the run's task writes for other
    programs.

    Args:
        folder: made by this function.
        form: one of `FORMATS`.
        context: the run's context.
        views: the view of every fragment, float32 [elements], by fragment.
        records: the records that made the views, by fragment.
        settings: the settings in force when the views were made; None: the specification's.
        dtype: one of `DTYPES`, in which floats are written in the format `hf`; None: float32.
        merge: whether adapters are added to their base, in the format `hf`.
        own: by name, leaves that a learner keeps for itself, instead of their values at the run's
            creation.

    Raises:
        ConfigError: the folder cannot be written, or the task has no such format.
        IntegrityError: the base to merge into is not the run's.
    """
    check_target(folder, form, dtype, merge=merge)
    settings = settings or context.settings
    # By the layout alone: exporting needs neither the task nor its data.
    arrays = arrays_of(context.layout, [views[fragment] for fragment in sorted(views)])
    specification = await load_specification(context.bus, context.run)
    arrays |= {**await held_leaves(context, specification), **own}
    if form == "hf":
        write = partial(
            _write_for_others,
            constants=specification.constants,
            dtype=dtype or DTYPES[0],
            merge=merge,
        )
        await context.runtime.call(write, folder, context, settings, arrays)
        _write_json(folder / "about.json", _about(context, records))
        _share_weights(folder)
        return
    try:
        make_folder(folder)
        layout = {"digest": context.layout.digest, **msgpack.unpackb(layout_bytes(context.layout))}
        _write_json(folder / "layout.json", layout)
        _write_json(folder / "about.json", _about(context, records))
        (folder / "settings.toml").write_text(tomli_w.dumps(settings.model_dump()))
        await context.runtime.call(_write_params, folder, form, arrays)
        _share_weights(folder)
    except OSError as error:
        raise ConfigError(f"cannot write to {str(folder)!r}: {error.strerror}") from error


def _share_weights(folder: Path) -> None:
    """Gives safetensors files the mode of `about.json`, since safetensors makes them private."""
    mode = (folder / "about.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def _about(context: RunContext, records: Mapping[int, wire.AnyRecord]) -> dict[str, Any]:
    ordered = [records[fragment] for fragment in sorted(records)]
    return {
        "run": context.run,
        "epoch": context.epoch,
        "layout": context.layout.digest,
        "versions": [record.version for record in ordered],
        "view_digests": [record.view_digest for record in ordered],
        "global_step": max(record.global_step for record in ordered),
        # Each fragment counts the tokens of its updates, which all fragments share.
        "tokens": sum(record.totals.tokens_credited for record in ordered) // len(ordered),
        "closed_at_s": max(record.closed_at_s for record in ordered),
    }


def _write_params(folder: Path, form: str, arrays: Arrays) -> None:
    if form == "safetensors":
        from safetensors.numpy import save_file

        leaves = {name: np.ascontiguousarray(leaf) for name, leaf in arrays.items()}
        save_file(leaves, folder / "model.safetensors")
        return
    import orbax.checkpoint as ocp

    from diloco.learner.tensors.tree import nested

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / "model").absolute(), nested(arrays))


def _write_for_others(
    folder: Path,
    context: RunContext,
    settings: RunSettings,
    arrays: Arrays,
    *,
    constants: str | None,
    dtype: str,
    merge: bool,
) -> None:
    """Writes a run's parameters in the format of its task (`Task.files`).

    Args:
        folder: new, or empty.
        context: the run's context.
        settings: the settings that name the task.
        arrays: by name, the parameters that the run stores.
        constants: name of the object that lists the leaves that are not synchronized.
        dtype: dtype in which floats are written.
        merge: whether adapters are added to their base.

    Raises:
        ConfigError: the folder cannot be written, or the task has no such format.
        IntegrityError: the base to merge into is not the run's.
    """
    from diloco.learner.load_and_check_task import model_of

    task = model_of(settings)
    files = _files_of(task, settings)
    if merge:
        write = _merging(files)
        write(folder, {**arrays, **_base_of(task, context, constants)}, dtype)
    else:
        files.write(folder, arrays, dtype)


def _files_of(task: "Task", settings: RunSettings) -> "Files":
    if task.files is None:
        raise ConfigError(
            f"the run's task, {settings.task.build!r}, writes no format of others, such as hf",
            hint="diloco.models.decoders:build does; safetensors and orbax are for every task",
        )
    return task.files


def _merging(files: "Files") -> Callable[[Path, dict[str, Any], str], None]:
    from diloco.learner.task import MergedFiles

    if not isinstance(files, MergedFiles):
        raise ConfigError(
            "--merge: the run's task has no adapters",
            hint="leave it out: what is exported is the whole model",
        )
    return files.write_merged


def _base_of(task: "Task", context: RunContext, constants: str | None) -> dict[str, Any]:
    """Returns the leaves that each learner loads by itself, once checked by the run's digests."""
    from diloco.learner.tensors.tree import loaded_frozen

    loaded = loaded_frozen(task)
    if constants is not None and loaded:
        held = Frozen(context.run, context.store.get, constants)
        for name, leaf in loaded.items():
            held.check(name, leaf)
    return loaded


def run_export(
    target: str,
    folder: Path,
    form: str,
    version: str | None,
    dtype: str | None = None,
    *,
    merge: bool = False,
    learner: str | None = None,
) -> None:
    """Writes a run's global model, and prints its versions; arguments as of `diloco export`.

    Raises:
        DilocoError: the folder cannot be written, or the version is no longer stored.
    """
    check_target(folder, form, dtype, merge=merge)
    with working("reading and writing the model"):
        export = _export_run(target, folder, form, version, dtype, merge, learner)
        records = asyncio.run(export)
    versions = ",".join(str(records[fragment].version) for fragment in sorted(records))
    say(f"versions {versions} are in {folder}")


async def _export_run(
    target: str,
    folder: Path,
    form: str,
    version: str | None,
    dtype: str | None,
    merge: bool,
    learner: str | None,
) -> dict[int, wire.AnyRecord]:
    async with open_run(target, name="export", reads=True) as opened:
        context = opened.context
        views: dict[int, Vector] = {}
        records: dict[int, wire.AnyRecord] = {}
        at: dict[int, Recorded] = {}
        if version is not None:
            at = await find_targets(context, version, option="--version")
        for fragment in range(len(context.layout.fragments)):
            if fragment in at:
                records[fragment] = at[fragment].record
                views[fragment] = await _view_of(context, at[fragment].record)
            else:
                loaded = await load_view(context, fragment)
                records[fragment], views[fragment] = loaded.record, loaded.view
        own: Arrays = {}
        if learner is not None:
            from diloco.run.model.own_leaves import own_leaves  # needs JAX

            own = await context.runtime.call(own_leaves, context, opened.config.learner, learner)
        await write_model(folder, form, context, views, records, dtype=dtype, merge=merge, own=own)
        return records


async def _view_of(context: RunContext, record: wire.AnyRecord) -> Vector:
    try:
        return await load_version(context, record)
    except ObjectMissingError as error:
        raise ConfigError(
            f"version {record.version} of fragment {record.fragment} is no longer stored: "
            f"{error.message}",
            hint="choose a later version; garbage collection keeps gc.replay_window_s",
        ) from error
