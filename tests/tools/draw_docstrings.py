"""Prints public docstrings of production code, drawn by lot, to be read once by a stranger.

`python tests/tools/draw_docstrings.py COMMIT [DRAW]` prints ten: the commit's whole hash is the
seed, so that nobody chooses; a later draw has a number from 2 on.
"""

import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("aggregator", "common", "diloco", "infra", "learner")
MANY = 10


def public(path: str, node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Place, name and docstring of every public class and function of a file."""
    for one in node.body:
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if one.name.startswith("_"):
            continue
        if text := ast.get_docstring(one):
            yield f"{path}:{one.lineno} {prefix}{one.name}\n{text}\n"
        if isinstance(one, ast.ClassDef):
            yield from public(path, one, f"{prefix}{one.name}.")


if __name__ == "__main__":
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    paths = sorted(path for path in listed if path.split("/")[0] in FOLDERS)
    found = [text for path in paths for text in public(path, ast.parse((ROOT / path).read_text()))]
    random.seed(sys.argv[1])
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
        drawn = random.sample(found, MANY)
    print("\n".join(drawn))
