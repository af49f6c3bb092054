"""docs/configuration.md: its files load, and the complete one has every key at its default."""

import re
import tomllib
from pathlib import Path

from pydantic_core import PydanticUndefined

from diloco.common.process.config import make_config
from docs.generate.configuration import sections

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def examples() -> list[str]:
    return re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_load() -> None:
    least = tomllib.loads(examples()[0])
    assert len(examples()) == 4
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
