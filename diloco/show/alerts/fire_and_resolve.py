"""Turns the findings of repeated checks into alerts that fire once and resolve once. Pure.

All findings with the same subject and runbook, such as "learner a" and runbooks/lagging-learner.md,
are one alert. The alert's sentences may change from check to check, such as by the seconds in them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from diloco.run.cli.format_numbers import human_time
from diloco.run.state import Finding

SEVERITIES = ("warning", "error")
# The version of the webhook's JSON, described in docs/watch.md; keys may be added, but neither
# renamed nor removed.
VERSION = 1

# Findings with the same subject and runbook are the same alert.
Key = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One problem of one subject.

    Attributes:
        about: the subject, as `Finding.about`.
        runbook: path of the runbook; "": none.
        severity: the worst severity of the alert's findings.
        sentences: the findings' sentences; `advice`: what to do.
        since_s: when the problem was first seen, in seconds since the epoch.
    """

    about: str
    runbook: str
    severity: Literal["warning", "error"]
    sentences: tuple[str, ...]
    advice: str
    since_s: float

    @property
    def key(self) -> Key:
        """Subject and runbook, which identify the alert within a run at a time."""
        return self.about, self.runbook

    def id(self, run: str) -> str:
        """Returns the id that all messages on this alert have, firing or resolved: 32 hex digits.

        An alert on the same problem of run `run` at a later time has another id.
        """
        text = "\0".join((run, *self.key, f"{self.since_s:.3f}"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Notice(NamedTuple):
    """A message to people about an alert.

    Attributes:
        ended_s: when the problem was gone, in seconds since the epoch; None: the alert fires.
    """

    alert: Alert
    ended_s: float | None = None

    def body(self, run: str) -> dict[str, Any]:
        """Returns the JSON object that is posted to a webhook; `run` is the run's name."""
        alert, ended_s = self.alert, self.ended_s
        return {
            "version": VERSION,
            "status": "resolved" if ended_s is not None else "firing",
            "id": alert.id(run),
            "run": run,
            "severity": alert.severity,
            "about": alert.about,
            "summary": "; ".join(alert.sentences),
            "advice": alert.advice,
            "runbook": alert.runbook,
            "starts_at": _time(alert.since_s),
            "ends_at": _time(ended_s) if ended_s is not None else None,
            "text": self.line(run),
        }

    def line(self, run: str) -> str:
        """Returns the notice as one line of text; `run` is the run's name."""
        alert, told = self.alert, "; ".join(self.alert.sentences)
        about = f"run {run}, {alert.about}"
        if self.ended_s is not None:
            # The alert's sentences are in the present tense, and no longer true.
            after = human_time(max(0.0, self.ended_s - alert.since_s))
            return f'[resolved] {about}: over after {after}; it was "{told}"'
        where = f" ({alert.runbook})" if alert.runbook else ""
        return f"[{alert.severity.upper()}] {about}: {told}{where}"


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@dataclass
class _Seen:
    alert: Alert
    told: Literal["warning", "error"] | None = None
    gone_s: float | None = None


@dataclass
class AlertLedger:
    """The alerts that were seen, and which of these were reported.

    Args:
        hold_s: an alert fires once its problem has lasted this many seconds, and resolves once the
            problem has been gone for as many.
        least: alerts below this severity are ignored.
    """

    hold_s: float = 0.0
    least: Literal["warning", "error"] = "warning"
    _seen: dict[Key, _Seen] = field(default_factory=dict)

    def look(
        self, findings: Iterable[Finding], now_s: float, *, blind: bool = False
    ) -> list[Notice]:
        """Takes the findings of a check; returns the notices to send.

        There is a notice if an alert fires or resolves, and if its severity rises to error.

        Args:
            findings: the findings of the check.
            now_s: the time of the check, in seconds since the epoch.
            blind: whether the check could not see the whole run: then no alert resolves.
        """
        found = alerts(findings, now_s)
        notices = []
        for key, alert in found.items():
            if SEVERITIES.index(alert.severity) >= SEVERITIES.index(self.least):
                notices += self._take(key, alert, now_s)
        gone = [] if blind else [key for key in self._seen if key not in found]
        for key in gone:
            notices += self._miss(key, now_s)
        return notices

    def _take(self, key: Key, alert: Alert, now_s: float) -> list[Notice]:
        seen = self._seen.setdefault(key, _Seen(alert))
        seen.alert, seen.gone_s = replace(alert, since_s=seen.alert.since_s), None
        worse = seen.told == "warning" and alert.severity == "error"
        if worse or (seen.told is None and now_s - seen.alert.since_s >= self.hold_s):
            seen.told = alert.severity
            return [Notice(seen.alert)]
        return []

    def _miss(self, key: Key, now_s: float) -> list[Notice]:
        seen = self._seen[key]
        seen.gone_s = now_s if seen.gone_s is None else seen.gone_s
        if seen.told is not None and now_s - seen.gone_s < self.hold_s:
            return []
        del self._seen[key]
        return [Notice(seen.alert, seen.gone_s)] if seen.told else []

    def end(self, now_s: float) -> list[Notice]:
        """Resolves all firing alerts at `now_s`, since the run has ended; returns the notices."""
        told = [seen.alert for seen in self._seen.values() if seen.told]
        self._seen.clear()
        return [Notice(alert, now_s) for alert in told]

    def firing(self) -> list[Alert]:
        """Returns the alerts that were reported as firing, and not yet as resolved."""
        return [seen.alert for seen in self._seen.values() if seen.told]

    def restore(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Restores the alerts that an earlier process has reported as firing.

        Args:
            told: the fields of each alert, by name.

        Raises:
            KeyError, TypeError, ValueError: the fields are not those of `Alert`.
        """
        for fields in told:
            typed = {"sentences": tuple(fields["sentences"]), "since_s": float(fields["since_s"])}
            alert = Alert(**{**fields, **typed})
            self._seen[alert.key] = _Seen(alert, alert.severity)


def alerts(findings: Iterable[Finding], now_s: float) -> Mapping[Key, Alert]:
    """Groups findings into alerts, one for each subject and runbook, first seen at `now_s`.

    Findings below a warning are left out. Returns the alerts by key.
    """
    found: dict[Key, Alert] = {}
    for one in findings:
        if one.severity != "warning" and one.severity != "error":
            continue
        alert = Alert(
            about=one.about, runbook=one.runbook or "", severity=one.severity,
            sentences=(one.sentence,), advice=one.advice, since_s=now_s,
        )  # fmt: skip
        if (known := found.get(alert.key)) is not None:
            worst = known.severity if alert.severity == "warning" else alert.severity
            alert = replace(known, severity=worst, sentences=(*known.sentences, one.sentence))
        found[alert.key] = alert
    return found
