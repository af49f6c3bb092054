"""docs/protocol.md: why a message is no update, or an update is rejected."""

import re
from pathlib import Path

from diloco.common.protocol.reasons import Reason, Stage
from docs.generate.markdown import table

TITLES: dict[Stage, str] = {
    "no update": "No update at all, counted and dropped:",
    "manifest": "Rejected by the manifest alone:",
    "objects": "Rejected by its objects:",
}


def row(reason: Reason, stage: Stage) -> tuple[str, ...]:
    """One reason, as it is at one stage."""
    text = re.sub(r"\b[a-z]+\.[a-z_]+\b", lambda key: f"`{key[0]}`", reason.text)
    offence = "yes" if reason.offence and stage != "no update" else ""
    runbook = Path(reason.runbook)
    return f"`{reason}`", text, offence, f"[{runbook.stem}](../{runbook})"


def listed(stage: Stage) -> str:
    """The reasons of one stage."""
    rows = [row(reason, stage) for reason in Reason if stage in reason.stages]
    return f"{TITLES[stage]}\n\n{table(['reason', 'meaning', 'offence', 'runbook'], rows)}"


def blocks() -> dict[str, str]:
    """All reasons, by stage."""
    return {"reasons": "\n\n".join(listed(stage) for stage in TITLES)}
