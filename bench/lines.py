"""Lines of the examples: of code, and of those the ones that are there for this system.

A line counts as the system's if it names something of it. Docstrings, comments and blank lines
count for nothing.

    python -m bench.lines
"""

import ast
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
OURS = ("diloco", "island", "TABLE", "Leaf(", "Task(", "Variables", "TensorHint", "GrainData")


def code_of(source: str) -> list[str]:
    """A program's lines, without its docstring, comments and blank lines."""
    tree = ast.parse(source)
    first = tree.body[0].end_lineno or 0 if ast.get_docstring(tree) else 0
    lines = source.splitlines()[first:]
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def main() -> None:
    """Print a row for each example."""
    for path in sorted(EXAMPLES.glob("*.py")):
        code = code_of(path.read_text())
        ours = sum(any(word in line for word in OURS) for line in code)
        print(f"{path.name:<20} {len(code):>4} lines of code, {ours:>3} for diloco")


if __name__ == "__main__":
    main()
