"""Finds versions that an operator names: by number, checkpoint, time or age."""

import re
from datetime import UTC, datetime

from diloco.aggregator import rollback
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage import checkpoint_files
from diloco.common.storage.tape import Recorded, RunContext

AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


async def find_targets(
    context: RunContext, to: str, *, option: str = "--to"
) -> dict[int, Recorded]:
    """Returns the record of each fragment that an operator names.

    Args:
        context: the run's context.
        to: a version; one version a fragment, joined by commas; a checkpoint's name; a time in ISO
            8601 (UTC without a zone); or an age such as 2h.
        option: the option's name, for messages.

    Raises:
        ConfigError: `to` is invalid, or earlier than the tape.
    """
    count = len(context.layout.fragments)
    if re.fullmatch(r"\d{4}-\d{12}", to):
        file = checkpoint_files.load_file(context.store, context.run, to)
        if file.specification.epoch != context.epoch:
            raise ConfigError(
                f"checkpoint {to} is of epoch {file.specification.epoch}, the run is in epoch "
                f"{context.epoch}",
                hint="only a new server can resume from it: diloco run resume",
            )
        return await rollback.find_versions(
            context, {record.fragment: record.version for record in file.records}
        )
    if re.fullmatch(r"\d+(,\d+)*", to):
        versions = [int(part) for part in to.split(",")]
        if len(versions) == 1:
            versions *= count
        if len(versions) != count:
            raise ConfigError(
                f"{option} {to}: {len(versions)} versions for {count} fragments",
                hint="give one version for all, or one for each, joined by commas",
            )
        return await rollback.find_versions(context, dict(enumerate(versions)))
    at_s = parse_time(to, context.runtime.clock(), option)
    return await rollback.find_time(context, at_s)


def parse_time(text: str, now_s: float, option: str) -> float:
    """Returns the seconds since the epoch of a time in ISO 8601, or of an age such as 2h.

    Args:
        text: the time, in UTC if it has no zone; or the age: a number and s, m, h or d.
        now_s: the time from which an age counts, in seconds since the epoch.
        option: the option's name, for messages.

    Raises:
        ConfigError: the text is neither a time nor an age.
    """
    if ago := AGO.fullmatch(text):
        return now_s - float(ago[1]) * UNITS_S[ago[2]]
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r} is not a version, a checkpoint or a time",
            hint="for example 120, 12,12,11,11, 0000-000000001234, 2h or 2026-01-31T12:00:00Z",
        ) from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
