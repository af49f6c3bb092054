"""Puts the interval that a plan has found into the run's file, and leaves all else as it is."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from diloco.common.config import RunSettings
from diloco.common.errors import ConfigError
from diloco.plan.intervals import Interval, advice, with_interval

_SECTION: Final = re.compile(r"^\s*\[")
KEYS: Final = ("interval_steps", "fragments", "min_steps")


def write_interval(path: Path, settings: RunSettings, found: list[Interval]) -> str:
    """Set H to the smallest that the links carry, with what must not exceed it; says what was done.

    Args:
        path: the run's file.
        settings: as planned.
        found: what each H would be.

    Raises:
        ConfigError: no H is carried, or the file cannot be changed line by line.
    """
    carried = next((interval.steps for interval in found if interval.carried), None)
    if carried is None:
        raise ConfigError(
            f"{path} is as it was: {advice(found, settings.sync.interval_steps)}",
            hint="name faster links, or set sync.interval_steps yourself",
        )
    before, after = settings.sync, with_interval(settings, carried).sync
    values = {key: getattr(after, key) for key in KEYS}
    text = path.read_text()
    changed = _with_keys(text, "sync", values)
    expected = tomllib.loads(text)
    expected["sync"] = expected.get("sync", {}) | values
    if not _says(changed, expected):
        said = ", ".join(f"sync.{key} = {value}" for key, value in values.items())
        raise ConfigError(
            f"{path} is as it was: its [sync] is not written with a line for each key",
            hint=f"set {said} yourself",
        )
    path.write_text(changed)
    said = ", ".join(
        f"{key} = {value} (was {getattr(before, key)})" for key, value in values.items()
    )
    return f"{path}, [sync]: {said}"


def _says(text: str, expected: Mapping[str, object]) -> bool:
    try:
        return tomllib.loads(text) == expected
    except tomllib.TOMLDecodeError:
        return False


def _with_keys(text: str, section: str, values: Mapping[str, int]) -> str:
    """The text with whole numbers in a section; comments stay."""
    lines, missing = text.splitlines(), dict(values)
    header = re.compile(rf"^\s*\[\s*{section}\s*\]\s*(#.*)?$")
    begins = next((at for at, line in enumerate(lines) if header.match(line)), None)
    if begins is None:
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        begins = len(lines) - 1
    at = begins + 1
    while at < len(lines) and not _SECTION.match(lines[at]):
        key, equals, rest = lines[at].partition("=")
        if equals and key.strip() in missing:
            _, hash_, comment = rest.partition("#")
            kept = f"  #{comment}" if hash_ else ""
            lines[at] = f"{key.rstrip()} = {missing.pop(key.strip())}{kept}"
        at += 1
    lines[begins + 1 : begins + 1] = [f"{key} = {value}" for key, value in missing.items()]
    return "\n".join(lines) + "\n"
