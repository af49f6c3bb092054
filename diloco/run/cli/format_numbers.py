"""Formats numbers for people: bytes, counts and times in fitting units."""

from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of measure: numbers are divided by `scale` and followed by `name`."""

    scale: float
    name: str


_TIMES = (Unit(86400, "days"), Unit(3600, "hours"), Unit(60, "minutes"), Unit(1, "seconds"))
_TOKENS = (Unit(1e12, "T"), Unit(1e9, "G"), Unit(1e6, "M"), Unit(1e3, "k"), Unit(1, ""))
_BYTES = (Unit(1e12, "TB"), Unit(1e9, "GB"), Unit(1e6, "MB"), Unit(1e3, "kB"), Unit(1, "B"))


def time_unit(longest_s: float) -> Unit:
    """Returns the unit for times up to `longest_s` seconds: days, hours, minutes or seconds."""
    return next((unit for unit in _TIMES if longest_s >= 3 * unit.scale), _TIMES[-1])


def count_unit(greatest: float) -> Unit:
    """Returns the unit for counts up to `greatest`: T, G, M, k or 1 (without a name)."""
    return next((unit for unit in _TOKENS if greatest >= unit.scale), _TOKENS[-1])


def byte_unit(greatest: float) -> Unit:
    """Returns the unit for sizes up to `greatest` bytes: TB, GB, MB, kB or B."""
    return next((unit for unit in _BYTES if greatest >= unit.scale), _BYTES[-1])


def human_count(count: float) -> str:
    """Returns a count with three digits and a unit: '1.23 M' for 1234567."""
    unit = count_unit(abs(count))
    return f"{count / unit.scale:.3g} {unit.name}".rstrip() if unit.name else f"{count:.0f}"


def human_bytes(count: float) -> str:
    """Returns a number of bytes with a unit: '1.2 MB' for 1234567."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_time(seconds: float) -> str:
    """Returns a time in one unit or two: '1 h 23 min' for 5000 seconds."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def age(seconds: float) -> str:
    """Returns a time in whole units of one kind: '3 s', '5 min', '2 h' or '4 d'."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
