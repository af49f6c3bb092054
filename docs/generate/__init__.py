"""Fills the generated blocks of the pages from the code; `make reference` runs it.

A block stands between `<!-- generated: NAME -->` and `<!-- end -->`. What is around it is
written by hand, what is in it comes from the code: a description is written once, beside what it
describes.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from docs.generate import (
    advice,
    commands,
    configuration,
    docstrings,
    errors,
    files,
    logs,
    messages,
    metrics,
    reasons,
    rules,
    store_faults,
    worked_example,
)

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(<!-- generated: (?P<name>[\w -]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL
)


def blocks() -> dict[str, str]:
    """Every block by its name, without the markers."""
    return {
        **advice.blocks(),
        **configuration.blocks(),
        **messages.blocks(),
        **worked_example.blocks(),
        **metrics.blocks(),
        **commands.blocks(),
        **errors.blocks(),
        **reasons.blocks(),
        **files.blocks(),
        **docstrings.blocks(),
        **logs.blocks(),
        **rules.blocks(),
        **store_faults.blocks(),
    }


def pages() -> Iterator[Path]:
    """The pages that have blocks."""
    for path in sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "runbooks").glob("*.md")]):
        if BLOCK.search(path.read_text()):
            yield path


def filled(page: str, made: dict[str, str]) -> str:
    """A page with its blocks as they are now."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{made[found['name']].strip()}\n\n{found[4]}", page)
