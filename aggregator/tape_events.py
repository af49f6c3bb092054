"""What the tape tells the owner of a fragment, message by message."""

from typing import NamedTuple

from diloco.aggregator.core import events
from diloco.common import names, wire
from diloco.common.bus import Message
from diloco.common.config import RunSettings
from diloco.common.errors import WireError
from diloco.common.tape import RunContext, parse_changed


class RecordStored(NamedTuple):
    """A record of the fragment is on the tape, ours or another's."""

    stream_seq: int


class SettingsStored(NamedTuple):
    """Changed settings, with the machine's event of them."""

    settings: RunSettings
    event: events.Changed


class EndStored(NamedTuple):
    """The run's end is on the tape."""


def subjects(run: str, fragment: int) -> list[str]:
    """Everything on the tape that the owner of a fragment must know."""
    return [
        names.join(run, "*"),
        names.leave(run, "*"),
        names.update(run, "*", fragment),
        names.record(run, fragment),
        names.settings(run),
        names.quarantine(run, "*"),
        names.stop(run),
        names.end(run),
    ]


def decode_message(
    context: RunContext, fragment: int, message: Message
) -> events.Event | RecordStored | SettingsStored | EndStored | None:
    """What a message of `subjects` is for the fragment's owner; None if it is for another's.

    Raises:
        WireError: as `decode_event`.
    """
    if message.subject == names.end(context.run):
        return EndStored()
    if message.subject == names.record(context.run, fragment):
        return RecordStored(message.seq)
    if message.subject == names.settings(context.run):
        settings = parse_changed(context.settings, message.payload)
        return SettingsStored(settings, events.Changed(message.time_s, message.seq))
    return decode_event(message, fragment)


def decode_event(message: Message, fragment: int) -> events.Event | None:
    """The machine's event in a message of the tape; None if it is not for this fragment.

    Raises:
        WireError: it cannot be decoded, or speaks for somebody else than its subject.
    """
    at_s, seq = message.time_s, message.seq
    _, run, kind, *rest = message.subject.split(".")
    match kind:
        case "quarantine":
            word = wire.decode(wire.Quarantine, message.payload)
            _check_sender(rest[0] == word.learner and run == word.run)
            return events.Quarantined(at_s, seq, word.learner, word.active)
        case "join":
            join = wire.decode(wire.Join, message.payload)
            _check_sender(rest[0] == join.learner and run == join.run)
            return events.Joined(at_s, seq, join.learner)
        case "leave":
            leave = wire.decode(wire.Leave, message.payload)
            _check_sender(rest[0] == leave.learner and run == leave.run)
            if not leave.fragments:
                return events.Departed(at_s, seq, leave.learner, leave.incarnation)
            if fragment in leave.fragments:
                return events.Finished(at_s, seq, leave.learner, leave.incarnation)
            return None
        case "update":
            manifest = wire.decode(wire.Manifest, message.payload)
            _check_sender(rest[0] == manifest.learner and run == manifest.run)
            _check_sender(rest[1] == str(manifest.fragment))
            return events.Announced(at_s, seq, manifest)
    return events.Stopped(at_s, seq)


def _check_sender(matches: bool) -> None:
    if not matches:
        raise WireError(
            "sender", "the message names another run, learner or fragment than its subject"
        )
