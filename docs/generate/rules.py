"""runbooks/broken-invariant.md: the rules that the oracle holds a tape to."""

from diloco.judge.oracle import RULES


def blocks() -> dict[str, str]:
    """Each rule with its sentence."""
    return {"rules": "\n".join(f"- `{rule}`: {sentence}" for rule, sentence in RULES.items())}
