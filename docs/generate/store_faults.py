"""docs/reliability.md: how the store `gs://` handles each fault that a test server injects."""

import importlib
import sys
from pathlib import Path
from typing import Any

from docs.generate.markdown import table

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
testbench: Any = importlib.import_module("testbench")


def blocks() -> dict[str, str]:
    """Returns the block "store faults": a table of faults by operation, and one of its words."""
    rows = [
        [
            f"`{name}`",
            meaning,
            *(testbench.expected(name, one) or "-" for one in testbench.OPERATIONS),
        ]
        for name, meaning in testbench.INSTRUCTIONS.items()
    ]
    words = [[word or "-", meaning] for word, meaning in testbench.WORDS.items()]
    made = table(["instruction", "what the server does", *testbench.OPERATIONS], rows)
    return {"store faults": f"{made}\n\n{table(['', 'means'], words)}"}
