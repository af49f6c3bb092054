"""The tape's messages as events for the owner of a fragment."""

from typing import NamedTuple

from diloco.aggregator.core import events
from diloco.common.process.config import RunSettings
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.layout import Layout
from diloco.common.storage.bus import Message
from diloco.common.storage.tape import RunContext, check_length, decode, parse_changed


class TapeRecord(NamedTuple):
    """A record of the fragment is on the tape, ours or another's."""

    stream_seq: int


class TapeSettings(NamedTuple):
    """Changed settings, with the machine's event of them."""

    settings: RunSettings
    event: events.Changed


class TapeUpdate(NamedTuple):
    """A message under an update's subject: the machine knows whether its sender can pay for more.

    What is too long for its fragment comes without its bytes, and with `why`.
    """

    message: Message
    event: events.Undecoded
    why: WireError | None = None


class TapeEnd(NamedTuple):
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
) -> events.Event | TapeUpdate | TapeRecord | TapeSettings | TapeEnd | None:
    """Decode a message of `subjects` for the fragment's owner; None if it is for another's.

    Raises:
        WireError: as `decode_event`.
    """
    if message.subject == names.end(context.run):
        return TapeEnd()
    if message.subject == names.record(context.run, fragment):
        return TapeRecord(message.seq)
    if message.subject == names.settings(context.run):
        settings = parse_changed(context.settings, message)
        return TapeSettings(settings, events.Changed(message.time_s, message.seq))
    parsed = names.parse_subject(message.subject)
    if parsed is not None and parsed.kind == "update" and parsed.learner is not None:
        return _update_stored(context.layout, message, parsed.learner)
    return decode_event(message, fragment)


def _update_stored(layout: Layout, message: Message, learner: str) -> TapeUpdate:
    size_bytes = len(message.payload)
    event = events.Undecoded(message.time_s, message.seq, learner, size_bytes)
    try:
        check_length(layout, message.subject, size_bytes)
    except WireError as error:
        return TapeUpdate(message._replace(payload=b""), event, error)
    return TapeUpdate(message, event)


def decode_event(message: Message, fragment: int) -> events.Event | None:
    """The machine's event in a message of the tape; None if it is not for this fragment.

    Raises:
        WireError: it cannot be decoded, or speaks for somebody else than its subject.
    """
    parsed = names.parse_subject(message.subject)
    if parsed is not None and parsed.kind == "stop":
        # By its subject alone, as all daemons take it: a run that nobody could stop is worse.
        return events.Stopped(message.time_s, message.seq)
    body = decode(message.subject, message.payload)
    return event_of(body, message.seq, message.time_s, fragment, len(message.payload))


def event_of(
    body: wire.Body, seq: int, stored_at_s: float, fragment: int, size_bytes: int
) -> events.Event | None:
    """The machine's event in what a message of the tape says; None if it has none of it."""
    match body:
        case wire.Quarantine() as word:
            return events.Quarantined(stored_at_s, seq, word.learner, word.active)
        case wire.Join() as join:
            return events.Joined(stored_at_s, seq, join.learner)
        case wire.Leave() as leave if not leave.fragments:
            return events.Departed(stored_at_s, seq, leave.learner, leave.incarnation)
        case wire.Leave() as leave if fragment in leave.fragments:
            return events.Finished(stored_at_s, seq, leave.learner, leave.incarnation)
        case wire.Manifest() as manifest if manifest.fragment == fragment:
            return events.Announced(stored_at_s, seq, manifest, size_bytes)
        case wire.Stop():
            return events.Stopped(stored_at_s, seq)
    return None
