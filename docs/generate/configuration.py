"""docs/configuration.md: tables of keys and a complete file, from the configuration's fields."""

import json
import types
import typing
from collections.abc import Mapping

import tomli_w
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from diloco.common.process.config import (
    CHANGEABLE,
    Config,
    IslandSection,
    LearnerBounds,
    MeshSection,
    Section,
)
from docs.generate.markdown import fence, table

# Tables within a section of the file.
WITHIN: dict[str, type[Section]] = {
    "mesh": MeshSection,
    "islands": IslandSection,
    "bounds of a learner": LearnerBounds,
}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
WORDS: dict[object, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    MeshSection: "mesh",
    IslandSection: "island",
    LearnerBounds: "bounds of a learner",
}
EXAMPLES: Mapping[str, Mapping[str, object]] = {
    "run": {"name": "demo", "steps": 400},
    "task": {"options": {"preset": "1m", "corpus": "stdlib"}},
    "store": {"url": "/srv/diloco/store"},
    "learner": {"checkpoint_dir": "/srv/diloco/checkpoints"},
}


def sections() -> dict[str, type[Section]]:
    """Returns the class of each section of a run's file by name, in the file's order."""
    found: dict[str, type[Section]] = {}
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        found[name] = field.annotation
    return found


def type_of(annotation: object) -> str:
    """Returns the type of a key in words, with its bounds."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner, *details = arguments
        bounds = [
            f"{sign} {getattr(item, name):.12g}"
            for detail in details
            for item in getattr(detail, "metadata", [detail])
            for name, sign in SIGNS.items()
            if hasattr(item, name)
        ]
        return " ".join([type_of(inner), ", ".join(bounds)]).strip()
    if origin is typing.Literal:
        return "one of " + ", ".join(f"`{toml(choice)}`" for choice in arguments)
    if origin is tuple:
        return f"list: {type_of(arguments[0])}"
    if origin is dict:
        values = "" if arguments[1] is typing.Any else f" of {type_of(arguments[1])}"
        return f"table{values}"
    if type(None) in arguments:
        return type_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(type_of(each) for each in arguments)
    return WORDS[annotation]


def toml(value: object) -> str:
    """Returns a value as it is written in a run's file; "none" for None."""
    if isinstance(value, MeshSection):
        value = ",".join(f"{axis}={size}" for axis, size in value.model_dump().items())
    return "none" if value is None else json.dumps(value)


def default_of(field: FieldInfo) -> str:
    """Returns a key's default as Markdown, or "required"."""
    return "required" if field.default is PydanticUndefined else f"`{toml(field.default)}`"


def keys(section: type[Section]) -> str:
    """Returns the table of a section's keys: type, default and meaning."""
    hints = typing.get_type_hints(section, include_extras=True)
    rows = [
        (f"`{name}`", type_of(hints[name]), default_of(field), field.description or "")
        for name, field in section.model_fields.items()
    ]
    return table(["key", "type", "default", "meaning"], rows)


def complete() -> str:
    """Returns a run's file with every key at its default, or at an example if it has none."""
    document: dict[str, dict[str, object]] = {}
    for name, section in sections().items():
        values: dict[str, object] = {
            key: toml(field.default).strip('"')
            if isinstance(field.default, Section)
            else field.default
            for key, field in section.model_fields.items()
        } | dict(EXAMPLES.get(name, {}))
        document[name] = {
            key: value
            for key, value in values.items()
            if value is not None and value != {} and value is not PydanticUndefined
        }
    return fence("toml", tomli_w.dumps(document))


def changeable() -> str:
    """Returns the list of the keys that `diloco run set` can change."""
    named = [
        f"`{section}.{key}`"
        for section, keys in CHANGEABLE.items()
        for key in (sorted(keys) if keys is not None else ["*"])
    ]
    return ", ".join(named)


def blocks() -> dict[str, str]:
    """Returns the blocks of docs/configuration.md: tables of keys, and a complete file."""
    tables = {
        f"config {name}": f"{(section.__doc__ or '').partition(chr(10))[0]}\n\n{keys(section)}"
        for name, section in sections().items()
    }
    within = {f"config {name}": keys(section) for name, section in WITHIN.items()}
    return {
        **tables,
        **within,
        "config complete": complete(),
        "config changeable": changeable(),
    }
