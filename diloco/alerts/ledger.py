"""Which alerts fire: the findings of many looks become alerts that fire and resolve once. Pure.

An alert is what is amiss with one thing and is told on one page: "learner a" and
runbooks/lagging-learner.md. Its sentences may change from look to look, as the seconds in them do.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from diloco.check.symptoms import Finding

SEVERITIES = ("warning", "error")


class Key(NamedTuple):
    """What makes two findings the same alert."""

    about: str
    runbook: str


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One thing that is amiss.

    Attributes:
        key: what it is about, and its runbook.
        severity: the worst of its findings.
        sentences: what is amiss; `advice` what to do.
        since_s: when it was first seen, seconds since the epoch.
    """

    key: Key
    severity: Literal["warning", "error"]
    sentences: tuple[str, ...]
    advice: str
    since_s: float

    def id(self, run: str) -> str:
        """The same for all that is told of one alert, from its firing to its end."""
        text = "\0".join((run, *self.key, f"{self.since_s:.3f}"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Notice(NamedTuple):
    """What people are to be told; `ended_s` is None while it fires."""

    alert: Alert
    ended_s: float | None = None


@dataclass
class _Seen:
    alert: Alert
    told: Literal["warning", "error"] | None = None
    gone_s: float | None = None


@dataclass
class Ledger:
    """What was seen and told.

    Args:
        hold_s: an alert fires once it was there for so long, and ends once it was gone for so long.
        least: findings below this severity are nobody's concern.
    """

    hold_s: float = 0.0
    least: Literal["warning", "error"] = "warning"
    _seen: dict[Key, _Seen] = field(default_factory=dict)

    def look(
        self, findings: Iterable[Finding], now_s: float, *, blind: bool = False
    ) -> list[Notice]:
        """What there is to tell after a look; a severity that rises is told again.

        Args:
            findings: of the look.
            now_s: its time, seconds since the epoch.
            blind: it could not see everything: what is not among them may still be amiss.
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
        """All that fires has ended, with the run itself."""
        told = [seen.alert for seen in self._seen.values() if seen.told]
        self._seen.clear()
        return [Notice(alert, now_s) for alert in told]

    def firing(self) -> list[Alert]:
        """What people were told of, and not that it is over."""
        return [seen.alert for seen in self._seen.values() if seen.told]

    def restore(self, told: Iterable[Alert]) -> None:
        """Go on from what another process had told."""
        for alert in told:
            self._seen[alert.key] = _Seen(alert, alert.severity)


def alerts(findings: Iterable[Finding], now_s: float) -> Mapping[Key, Alert]:
    """Findings that ask for something, one alert for each thing and page."""
    found: dict[Key, Alert] = {}
    for one in findings:
        if one.severity not in SEVERITIES:
            continue
        key = Key(one.about, one.runbook or "")
        severity: Literal["warning", "error"] = "error" if one.severity == "error" else "warning"
        known = found.get(key)
        if known is None:
            found[key] = Alert(
                key=key, severity=severity, sentences=(one.sentence,), advice=one.advice,
                since_s=now_s,
            )  # fmt: skip
        else:
            worst = severity if severity == "error" else known.severity
            sentences = (*known.sentences, one.sentence)
            found[key] = replace(known, severity=worst, sentences=sentences)
    return found
