"""Scenario scripts: text files in which each event is followed by the effects it must have.

A line that starts at the margin is a comment (`#`) or an event; the indented lines below an event
are what came of it. `play` runs the events and gives the whole file as it came out; a test compares
that with the file. REWRITE=1 writes it instead: read the diff before you commit it.
"""

import difflib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

REWRITE = os.environ.get("REWRITE") == "1"
FOLDER = Path(__file__).parent


def files(kind: str) -> list[Path]:
    """The scripts of one kind."""
    return sorted((FOLDER / kind).glob("*.txt"))


def play(text: str, perform: Callable[[str], Iterator[str]]) -> str:
    """The script with the effects that `perform` gives for each of its events."""
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("  "):
            continue
        lines.append(line)
        if line and not line.startswith("#"):
            try:
                lines += [f"  {effect}" for effect in perform(line)]
            except Exception as error:
                error.add_note(f"in line {number} of the script: {line}")
                raise
    return "\n".join(lines) + "\n"


def check(path: Path, perform: Callable[[str], Iterator[str]]) -> None:
    """Compare a script with what comes of it, or write that down."""
    expected = path.read_text()
    found = play(expected, perform)
    if REWRITE:
        path.write_text(found)
        return
    difference = "\n".join(
        difflib.unified_diff(
            expected.splitlines(), found.splitlines(), "the script", "what came of it", lineterm=""
        )
    )
    assert not difference, f"{path.name}:\n{difference}"


def split(line: str) -> tuple[list[str], dict[str, str]]:
    """Words of an event, and its `key=value` words."""
    words, values = [], {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if equals:
            values[key] = value
        else:
            words.append(word)
    return words, values
