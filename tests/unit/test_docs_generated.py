"""The generated blocks of the pages are what the code gives; `make reference` writes them."""

import functools
import re
from pathlib import Path

import pytest

from diloco.common.process import metrics
from diloco.common.protocol import errors
from docs.generate import BLOCK, blocks, filled, pages
from docs.generate.configuration import WITHIN, sections
from docs.generate.messages import messages

ROOT = Path(__file__).parents[2]
PAGES = list(pages())


@functools.cache
def made() -> dict[str, str]:
    """Every block: not at import, which each worker of the tests would pay for."""
    return blocks()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_the_code_says(page: Path) -> None:
    assert filled(page.read_text(), made()) == page.read_text(), "run `make reference`"


def test_every_block_stands_in_one_page() -> None:
    used = [found["name"] for page in PAGES for found in BLOCK.finditer(page.read_text())]
    assert sorted(used) == sorted(made())


def test_every_marker_belongs_to_a_block() -> None:
    for page in PAGES:
        text = page.read_text()
        found = len(BLOCK.findall(text))
        assert text.count("<!-- generated") == text.count("<!-- end") == found


@pytest.mark.parametrize("section", {**sections(), **WITHIN}.values(), ids=lambda one: one.__name__)
def test_every_key_is_described(section) -> None:
    assert all(field.description for field in section.model_fields.values())


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.__name__)
def test_every_field_is_described(message) -> None:
    assert all(field.description for field in message.model_fields.values())


def test_the_reference_is_whole() -> None:
    """Each command, error, metric and message has its line."""
    text = "".join(page.read_text() for page in PAGES)
    commands = {"diloco local", "diloco run create", "diloco host guard", "diloco restore"}
    assert all(re.search(rf"^#+ {command}$", text, re.MULTILINE) for command in commands)
    assert all(f"| `{name}` |" in text for name in vars(errors) if name.endswith("Error"))
    catalogue = metrics.DAEMON + metrics.LEARNER + metrics.AGGREGATOR + metrics.FOLLOWER
    assert all(f"| `{metric.name}` |" in text for metric in catalogue)
    assert all(f"### {message.__name__}" in text for message in messages())
