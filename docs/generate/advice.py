"""docs/benchmarks.md: settings known to train worse, of `diloco.common.process.config.advice`."""

from diloco.common.process.config.advice import RULES
from docs.generate.markdown import table


def blocks() -> dict[str, str]:
    """Returns the block "advice": a table of the rules on settings."""
    rows = [
        (", ".join(f"`{key}`" for key in rule.about.split(", ")), rule.cost, rule.evidence)
        for rule in RULES
    ]
    return {"advice": table(["settings", "what it has cost", "evidence"], rows)}
