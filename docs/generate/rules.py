"""runbooks/broken-invariant.md: the rules by which the oracle checks a tape."""

from diloco.judge.oracle import RULES


def blocks() -> dict[str, str]:
    """Returns the block "rules": a line for each rule, with its name and its sentence."""
    return {"rules": "\n".join(f"- `{rule}`: {sentence}" for rule, sentence in RULES.items())}
