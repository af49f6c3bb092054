"""Events of the log as lines that a person reads, for a terminal."""

from collections.abc import Iterable, Mapping
from datetime import datetime, tzinfo
from typing import Any

# What every line of a process has, and its reader knows.
_KNOWN = ("action", "level", "timestamp", "run", "aggregator", "exception")
_MARKS = {"warning": "warning: ", "error": "error: ", "critical": "error: "}
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def as_line(event: Mapping[str, Any], zone: tzinfo | None = None) -> str:
    """An event, with its trace below it if it has one.

    Args:
        event: as JSON lines have it.
        zone: of the reader's clock; None: this machine's.
    """
    at = datetime.fromisoformat(event["timestamp"]).astimezone(zone)
    # A learner knows its own name; in an aggregator's line it is one of many.
    hidden = _KNOWN if "aggregator" in event else (*_KNOWN, "learner")
    words = [_words(key, value) for key, value in event.items() if key not in hidden]
    mark = _MARKS.get(event.get("level", ""), "")
    said = event["action"].replace("_", " ")
    line = f"{at:%H:%M:%S}  {mark}{said}{': ' if words else ''}{', '.join(words)}"
    trace = event.get("exception")
    return f"{line}\n{trace}" if trace else line


def _words(key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith("_per_s"):
            return f"{value:,.0f} {_spaced(key.removesuffix('_per_s'))}/s"
        if key.endswith("_s"):
            return f"{_spaced(key.removesuffix('_s'))} {value:.3g} s"
        if key.endswith("_bytes"):
            return f"{_spaced(key.removesuffix('_bytes'))} {_bytes(value)}"
    return f"{_spaced(key)} {_shown(value)}"


def _spaced(key: str) -> str:
    return key.replace("_", " ")


def _bytes(count: float) -> str:
    return next((f"{count / one:.1f} {name}" for one, name in _UNITS if count >= one), f"{count} B")


def _shown(value: Any) -> str:
    match value:
        case bool() | str() | None:
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case Mapping():
            return " ".join(f"{key}={_shown(item)}" for key, item in value.items()) or "none"
        case Iterable():
            return " ".join(_shown(item) for item in value) or "none"
    return str(value)
