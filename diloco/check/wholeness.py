"""The doctor's sentences on whether tape and store are whole; `evidence.py` has the judgements."""

from collections.abc import Iterator

from diloco.check import evidence
from diloco.check.audit import Objects
from diloco.check.symptoms import BROKEN_INVARIANT, Finding
from diloco.projections.history import History

DEBUG_WITH_REPLAY = "runbooks/debug-with-replay.md"
KEEP = (
    "stop the aggregators and copy tape and store before anything else; `diloco replay` says what "
    "is left"
)


def wholeness(history: History, objects: Objects) -> Iterator[Finding]:
    """Messages that are gone, records that were changed, objects newer than the tape."""
    for hole in evidence.holes(history):
        yield Finding(
            severity="error",
            about="tape",
            sentence=f"{hole.messages} messages are gone, {hole.first_seq} to {hole.last_seq}: no "
            "garbage collection takes messages from there",
            advice=KEEP,
            runbook=DEBUG_WITH_REPLAY,
        )
    for breach in evidence.broken_chains(history):
        yield Finding(
            severity="error",
            about="tape: chain",
            sentence=f"{breach.where}: {breach.what}",
            advice=KEEP,
            runbook=BROKEN_INVARIANT,
        )
    if objects.newer:
        yield Finding(
            severity="error",
            about="tape",
            sentence=f"it ends before its objects: the store has {len(objects.newer):,} of what "
            f"came later, such as {next(iter(objects.newer))}",
            advice=f"the stream was cut, or an older copy restored; {KEEP}",
            runbook=DEBUG_WITH_REPLAY,
        )
