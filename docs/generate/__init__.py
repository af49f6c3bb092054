"""Fills the generated blocks of the pages from the code; `make reference` runs it.

A block is the text between `<!-- generated: NAME -->` and `<!-- end -->`; the rest of a page is
written by hand. So each description is written once, in the code that it describes. Each module of
this package has a function `blocks`, which returns the text of some blocks by name.
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
    """Returns the text of every block by its name, without the markers."""
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
    """Yields the paths of the pages that have blocks."""
    for path in sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "runbooks").glob("*.md")]):
        if BLOCK.search(path.read_text()):
            yield path


def filled(page: str, made: dict[str, str]) -> str:
    """Returns the text of a page with its blocks replaced.

    Args:
        page: the text of the page.
        made: the new text of each block, by name.
    """
    return BLOCK.sub(lambda found: f"{found[1]}\n{made[found['name']].strip()}\n\n{found[4]}", page)
