"""What operators and aggregators do to a run, in words, from the messages that say it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.common import wire

# Of messages from before anybody put a name to them.
UNKNOWN = "unknown"
_PAUSES = {"run.paused: False -> True": "paused", "run.paused: True -> False": "continued"}


@dataclass(frozen=True)
class Event:
    """Something that happened to a run, in words; `by`: who did it, "" for a learner's own."""

    at_s: float
    what: str
    by: str


def act_of(body: wire.Body, at_s: float) -> Event | None:
    """What was done to the run, if this message says something of the kind."""
    match body:
        case wire.End():
            return Event(at_s, "end: every fragment's last version is committed", "aggregators")
        case wire.Stop() as stop:
            what = f"stop at global step {stop.global_step} ({stop.reason})"
            return Event(at_s, what, stop.by or UNKNOWN)
        case wire.Settings() as settings:
            return Event(at_s, _change(settings.changed), settings.by or UNKNOWN)
        case wire.Checkpoint() as checkpoint:
            return Event(at_s, f"checkpoint {checkpoint.name}", checkpoint.by or UNKNOWN)
        case wire.Quarantine() as word:
            done = "quarantined" if word.active else "let in again"
            return Event(at_s, f"{word.learner} {done}: {word.reason}", word.by)
        case wire.Record(what="restore") as record:
            what = f"fragment {record.fragment} rolled back to version {record.restored_version}"
            return Event(at_s, what, record.aggregator)
    return None


def _change(changed: Sequence[str]) -> str:
    """A change of settings in words; a pause by its own name."""
    if len(changed) == 1 and changed[0] in _PAUSES:
        return _PAUSES[changed[0]]
    return f"settings changed: {'; '.join(changed) or 'carried over from the tape before'}"
