"""Reads a TOML file into a checked configuration."""

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from diloco.common.process.config.daemon import Config
from diloco.common.process.config.environment import with_environment
from diloco.common.process.config.run import RunSettings
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.names import NAME

# Pydantic's error types for a value that should be a table.
_TABLES = {"dict_type", "model_type", "model_attributes_type"}
_WHOLE, _NUMBER = "must be a whole number", "must be a number"
# The end of a sentence about a key, by pydantic's type of the error.
_EXPECTED = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "value_error": "{error}",
}
_FORMS = {
    f"^{NAME.pattern}$": "must have up to 40 lower-case letters, digits and hyphens, and a letter "
    "or digit first",
    r"^([\w.]+:\w+)?$": 'must name a function as "package.module:function"',
}


def load_config(path: Path | str, *, connects: bool = True) -> Config:
    """Loads the configuration from a TOML file, overridden by variables such as DILOCO_BUS_URL.

    Args:
        path: path of the file.
        connects: False for callers that use no store: the file may then lack the section `store`,
            which Terraform adds to some files.

    Raises:
        ConfigError: no such file, not TOML, or a key that is missing, unknown or out of range.
    """
    written = read_document(Path(path))
    if "formation" in written.get("learner", {}):
        raise ConfigError(
            f"{path}: learner.formation says which slices train now, which the supervisor decides",
            hint="leave it out; `slices` and `peers` describe a learner of several slices",
        )
    document = with_environment(written)
    if not connects:
        document = {"store": {"url": "unused"}, **document}
    return make_config(document, source=str(path))


def read_document(path: Path) -> dict[str, Any]:
    """Reads the TOML file `path`, unchecked.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no configuration file {str(path)!r}",
            hint="give the path of the run's TOML file; docs/configuration.md shows one",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"cannot read {str(path)!r}: it is not text in UTF-8", hint="name the run's TOML file"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def placed_config(document: Mapping[str, Any]) -> Config:
    """Makes a configuration from `document`; environment variables override its daemon sections.

    Raises:
        ConfigError: a key is missing, unknown or out of range.
    """
    return make_config(with_environment(document), source="the command line")


def make_config(document: Mapping[str, Any], *, source: str) -> Config:
    """Makes a checked configuration.

    Args:
        document: section -> key -> value.
        source: where the document comes from, for the text of errors.

    Raises:
        ConfigError: a key is missing, unknown or out of range.
    """
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError(
            f"{source}: {explain(error)}", hint="docs/configuration.md lists every key"
        ) from error


def with_mesh(config: Config, learner: str, mesh: str) -> Config:
    """Returns the configuration with another mesh for one learner, such as "fsdp=4,tensor=2".

    Raises:
        ConfigError: the text is not a mesh.
    """
    document = config.model_dump()
    islands = document["learner"]["islands"]
    islands[learner] = {**islands.get(learner, {}), "mesh": mesh}
    return make_config(document, source=f"--mesh {mesh!r}")


def parse_settings(fields: Mapping[str, Any]) -> RunSettings:
    """Parses the settings of a run's specification: section -> key -> value.

    Raises:
        ConfigError: a key is missing, unknown or out of range, as another release made the run.
    """
    try:
        return RunSettings.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(
            f"the run's specification: {explain(error)}",
            hint="was the run created by another version of this program?",
        ) from error


def explain(error: ValidationError) -> str:
    """Returns the keys of a validation error, and what is wrong with each, in one line."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(_unknown(key))
        elif item["type"] == "missing":
            lines.append(f"{key!r} is missing")
        elif item["type"] in _TABLES:
            lines.append(f"{key!r} must be a table, got {item['input']!r}"[:300])
        else:
            lines.append(f"{key!r} {_expected(item)}, got {item['input']!r}"[:300])
    return "; ".join(lines)


def _expected(item: ErrorDetails) -> str:
    found = item.get("ctx", {})
    if item["type"] == "string_pattern_mismatch":
        return _FORMS.get(found["pattern"], f"must be of the form {found['pattern']}")
    words = _EXPECTED.get(item["type"])
    return words.format_map(found) if words else f"is wrong: {item['msg']}"


def _unknown(key: str) -> str:
    """Returns a sentence about an unknown key, with the most similar known key if there is one."""
    known = [
        f"{section}.{name}"
        for section, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for name in field.annotation.model_fields
    ]
    alike = difflib.get_close_matches(key, [*known, *Config.model_fields], n=1, cutoff=0.7)
    return f"unknown key {key!r}{f': did you mean {alike[0]!r}?' if alike else ''}"
