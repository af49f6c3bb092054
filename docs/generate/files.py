"""Blocks made of other files: the list of decisions, and the examples."""

import re
from pathlib import Path

from docs.generate.markdown import fence

ROOT = Path(__file__).parents[2]
ADR = ROOT / "docs" / "adr"
LANGUAGES = {".py": "python", ".sh": "sh"}


def blocks() -> dict[str, str]:
    """Returns the block "decisions", a line for each, and a block with the code of each example."""
    pages = sorted(
        path for path in (ROOT / "docs" / "adr").glob("*.md") if path.name != "README.md"
    )
    lines = [_decision(path) for path in pages]
    examples = {
        "example digits": "digits.py",
        "example own loop": "own_loop.py",
        "example torch": "own_loop_torch.py",
        "example lora": "lora.py",
        "example batch norm": "batch_norm.py",
        "example nnx": "nnx_module.py",
        "example own files": "own_files.py",
        "example slurm": "slurm_island.sh",
    }
    return {"decisions": "\n".join(lines)} | {
        block: fence(LANGUAGES[Path(name).suffix], (ROOT / "examples" / name).read_text())
        for block, name in examples.items()
    }


def _decision(path: Path) -> str:
    """Returns a decision's line: its title, and which decision replaced it, if one did."""
    title, _, rest = path.read_text().partition("\n")
    line = f"- [{title.removeprefix('# ')}]({path.name})"
    by = re.match(r"\s*Superseded by (\[.*?\]\(.*?\))", rest)
    return f"{line}, replaced by {by[1]}" if by else line
