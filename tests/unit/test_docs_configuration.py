"""docs/configuration.md lists every key of common/config.py with its type and default."""

import json
import re
import tomllib
import typing
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from diloco.common.config import (
    DAEMON_SECTIONS,
    Config,
    IslandSection,
    MeshSection,
    RunSettings,
    Section,
    make_config,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
TABLE = re.compile(r"^##+ `(?P<section>\w+)`[^|]*?\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)
# Tables within a section of the file, in the page's order.
WITHIN: dict[str, type[Section]] = {"mesh": MeshSection, "islands": IslandSection}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
WORDS = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true or false",
    MeshSection: "mesh",
    IslandSection: "island",
}


def sections() -> dict[str, type[Section]]:
    found = {}
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        found[name] = field.annotation
    return found


def type_of(annotation: object) -> str:
    """A key's type in the words of the page."""
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
    if origin is dict:
        values = "" if arguments[1] is typing.Any else f" of {type_of(arguments[1])}"
        return f"table{values}"
    if type(None) in arguments:
        return type_of(arguments[0])
    assert isinstance(annotation, type)
    return WORDS[annotation]


def toml(value: object) -> str:
    """A default as it would stand in the file."""
    if isinstance(value, MeshSection):
        value = ",".join(f"{axis}={size}" for axis, size in value.model_dump().items())
    return "none" if value is None else json.dumps(value)


def rows_of(section: type[Section]) -> list[tuple[str, str, str]]:
    hints = typing.get_type_hints(section, include_extras=True)
    return [
        (
            f"`{name}`",
            type_of(hints[name]),
            "required" if field.default is PydanticUndefined else f"`{toml(field.default)}`",
        )
        for name, field in section.model_fields.items()
    ]


def rows_in_page() -> dict[str, list[tuple[str, str, str]]]:
    tables = {}
    for found in TABLE.finditer(PAGE.read_text()):
        rows = [row.strip("|").split(" | ") for row in found["rows"].splitlines()[2:]]
        tables[found["section"]] = [
            (row[0].strip(), row[1].strip(), row[2].strip()) for row in rows
        ]
        assert all(row[3].strip(" |") for row in rows), "a key without a meaning"
    return tables


def test_sections_are_in_the_page_and_in_order() -> None:
    found = list(rows_in_page())
    assert [name for name in found if name in WITHIN] == [*WITHIN]
    assert [name for name in found if name not in WITHIN] == [
        *RunSettings.model_fields,
        *DAEMON_SECTIONS,
    ]


@pytest.mark.parametrize("name", sections() | WITHIN)
def test_keys_types_and_defaults_are_in_the_page(name: str) -> None:
    assert rows_in_page()[name] == rows_of((sections() | WITHIN)[name])


def examples() -> list[str]:
    return re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_load() -> None:
    least = tomllib.loads(examples()[0])
    assert len(examples()) == 3
    for text in examples():
        document = {**least, **tomllib.loads(text)}
        make_config(document, source="docs/configuration.md")


def test_the_complete_example_has_every_key_at_its_default() -> None:
    document = tomllib.loads(max(examples(), key=len))
    for name, section in sections().items():
        defaults = {
            key: field.default
            for key, field in section.model_fields.items()
            if field.default not in (None, {}, PydanticUndefined)
        }
        parsed = section.model_validate(document[name])
        assert {key for key in defaults if key not in document[name]} == set()
        assert {key: getattr(parsed, key) for key in defaults} == defaults, name
