"""What a webhook is sent: one JSON object for each alert that fires or resolves. Pure.

docs/alerts.md describes it; keys are added, and neither renamed nor taken away.
"""

from datetime import UTC, datetime
from typing import Any

from diloco.alerts.ledger import Alert, Key, Notice
from diloco.cli.units import human_time

VERSION = 1


def body(run: str, notice: Notice) -> dict[str, Any]:
    """A notice as it is posted."""
    alert, resolved = notice.alert, notice.ended_s is not None
    return {
        "version": VERSION,
        "status": "resolved" if resolved else "firing",
        "id": alert.id(run),
        "run": run,
        "severity": alert.severity,
        "about": alert.key.about,
        "summary": "; ".join(alert.sentences),
        "advice": alert.advice,
        "runbook": alert.key.runbook,
        "starts_at": _time(alert.since_s),
        "ends_at": _time(notice.ended_s) if notice.ended_s is not None else None,
        "text": line(run, notice),
    }


def line(run: str, notice: Notice) -> str:
    """A notice as one line, for people."""
    alert, told = notice.alert, "; ".join(notice.alert.sentences)
    about = f"run {run}, {alert.key.about}"
    if notice.ended_s is not None:
        # Its last words are in the present tense, and no longer true.
        after = human_time(max(0.0, notice.ended_s - alert.since_s))
        return f'[resolved] {about}: over after {after}; it was "{told}"'
    where = f" ({alert.key.runbook})" if alert.key.runbook else ""
    return f"[{alert.severity.upper()}] {about}: {told}{where}"


def trial(now_s: float) -> Alert:
    """An alert that says that it is none."""
    return Alert(
        key=Key("webhook", ""), severity="warning", sentences=("a test of `diloco watch`",),
        advice="nothing is to be done", since_s=now_s,
    )  # fmt: skip


def as_document(alert: Alert) -> dict[str, Any]:
    """An alert as a file keeps it."""
    return {
        "about": alert.key.about, "runbook": alert.key.runbook, "severity": alert.severity,
        "sentences": list(alert.sentences), "advice": alert.advice, "since_s": alert.since_s,
    }  # fmt: skip


def from_document(kept: dict[str, Any]) -> Alert:
    """The alert that a file has kept.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    return Alert(
        key=Key(str(kept["about"]), str(kept["runbook"])),
        severity="error" if kept["severity"] == "error" else "warning",
        sentences=tuple(str(sentence) for sentence in kept["sentences"]),
        advice=str(kept["advice"]),
        since_s=float(kept["since_s"]),
    )


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
