"""docs/benchmarks.md: what is known to train worse, from `diloco.common.process.config.advice`."""

from diloco.common.process.config.advice import RULES
from docs.generate.markdown import table


def blocks() -> dict[str, str]:
    """The table of rules."""
    rows = [
        (", ".join(f"`{key}`" for key in rule.about.split(", ")), rule.cost, rule.evidence)
        for rule in RULES
    ]
    return {"advice": table(["settings", "what it has cost", "evidence"], rows)}
