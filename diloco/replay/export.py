"""`diloco export`: a run's global model as files, as it is or as it was."""

import asyncio
from pathlib import Path

from diloco.aggregator.arrays.merge import Vector
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError, ObjectMissingError
from diloco.common.storage.tape import Recorded, RunContext
from diloco.common.storage.views import load_version, load_view
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import say, working
from diloco.run.cli.versions import find_targets
from diloco.run.model import files as model_file


def run_export(
    target: str,
    folder: Path,
    form: str,
    version: str | None,
    dtype: str | None = None,
    *,
    merge: bool = False,
) -> None:
    """Write a run's global model, as it is or as it was.

    Raises:
        DilocoError: it cannot be written, or is no longer stored.
    """
    model_file.check_target(folder, form, dtype, merge=merge)
    with working("reading and writing the model"):
        records = asyncio.run(_export(target, folder, form, version, dtype, merge))
    versions = ",".join(str(records[fragment].version) for fragment in sorted(records))
    say(f"versions {versions} are in {folder}")


async def _export(
    target: str, folder: Path, form: str, version: str | None, dtype: str | None, merge: bool
) -> dict[int, wire.Record]:
    async with open_run(target, name="export", reads=True) as opened:
        context = opened.context
        views: dict[int, Vector] = {}
        records: dict[int, wire.Record] = {}
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
        await model_file.write_model(
            folder, form, context, views, records, dtype=dtype, merge=merge
        )
        return records


async def _view_of(context: RunContext, record: wire.Record) -> Vector:
    try:
        return await load_version(context, record)
    except ObjectMissingError as error:
        raise ConfigError(
            f"version {record.version} of fragment {record.fragment} is no longer stored: "
            f"{error.message}",
            hint="choose a later version; garbage collection keeps gc.replay_window_s",
        ) from error
