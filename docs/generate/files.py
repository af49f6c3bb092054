"""Pages made of other files: the list of decisions, the examples."""

from pathlib import Path

from docs.generate.markdown import fence

ROOT = Path(__file__).parents[2]
ADR = ROOT / "docs" / "adr"


def blocks() -> dict[str, str]:
    """A line for each decision; the example."""
    pages = sorted(
        path for path in (ROOT / "docs" / "adr").glob("*.md") if path.name != "README.md"
    )
    titles = [path.read_text().partition("\n")[0].removeprefix("# ") for path in pages]
    lines = [f"- [{title}]({path.name})" for path, title in zip(pages, titles, strict=True)]
    examples = {
        "example digits": "digits.py",
        "example own loop": "own_loop.py",
        "example torch": "own_loop_torch.py",
        "example lora": "lora.py",
        "example batch norm": "batch_norm.py",
        "example own files": "own_files.py",
    }
    return {"decisions": "\n".join(lines)} | {
        block: fence("python", (ROOT / "examples" / name).read_text())
        for block, name in examples.items()
    }
