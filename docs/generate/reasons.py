"""docs/protocol.md: the reasons why a message is no update, or an update is rejected."""

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
    """Returns the row of a reason at a stage: name, meaning, whether an offence, runbook."""
    text = re.sub(r"\b[a-z]+\.[a-z_]+\b", lambda key: f"`{key[0]}`", reason.text)
    offence = "yes" if reason.offence and stage != "no update" else ""
    runbook = Path(reason.runbook)
    return f"`{reason}`", text, offence, f"[{runbook.stem}](../{runbook})"


def listed(stage: Stage) -> str:
    """Returns the title and the table of the reasons at one stage of the checks."""
    rows = [row(reason, stage) for reason in Reason if stage in reason.stages]
    return f"{TITLES[stage]}\n\n{table(['reason', 'meaning', 'offence', 'runbook'], rows)}"


def blocks() -> dict[str, str]:
    """Returns the block "reasons": the tables of all stages."""
    return {"reasons": "\n\n".join(listed(stage) for stage in TITLES)}
