"""Writes values as Markdown."""

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; a vertical bar within a cell of a row is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    )


def fence(language: str, text: str) -> str:
    """Returns a Markdown block of code in a language such as "python"."""
    return f"```{language}\n{text.rstrip()}\n```"
