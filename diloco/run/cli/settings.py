"""Parses options of the command line: settings (`--set`), and lists of fragments."""

import tomllib
from collections.abc import Mapping
from typing import Any

from diloco.common.process.config import RunSettings, parse_settings
from diloco.common.protocol.errors import ConfigError


def assign(document: dict[str, Any], assignment: str) -> None:
    """Sets one key of a document of settings, which is changed in place.

    Args:
        document: settings as nested dictionaries.
        assignment: section.key=value; a value that is not TOML is taken as a string.

    Raises:
        ConfigError: `assignment` has another form, or its section is a value.
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
        if not isinstance(section, dict):
            raise ConfigError(
                f"--set {assignment!r}: {part!r} is a value, and has no keys",
                hint=f"for example --set {key.partition(f'.{part}')[0]}.{part}={text}",
            )
    section[path[-1]] = value


def parse_assigned(document: Mapping[str, object]) -> RunSettings:
    """Parses a document of a run's settings that `assign` has changed.

    Raises:
        ConfigError: a setting is unknown, or has an invalid value.
    """
    try:
        return parse_settings(document)
    except ConfigError as error:
        raise ConfigError(
            error.message.replace("the run's specification: ", ""),
            hint="docs/configuration.md lists every key",
        ) from error


def parse_fragments(text: str) -> frozenset[int]:
    """Returns the fragments in a list such as 0-11 or 0,3,5-7.

    Raises:
        ConfigError: the text is not such a list.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise ConfigError(
                f"--fragments {text!r}: {part!r} is neither a fragment nor a range",
                hint="for example --fragments 0-11, or --fragments 0,3,5-7",
            )
        found.update(range(int(first), int(last) + 1))
    return frozenset(found)
