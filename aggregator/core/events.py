"""Events, the machine's inputs (tape, driver, time), and effects, which it asks the driver for.

Times are in seconds since the epoch: `stored_at_s` by the server's clock, `at_s` by the owner's.
"""

from typing import Literal, NamedTuple

from diloco.aggregator.core.state import Quarantine, State
from diloco.aggregator.core.updates import Admitted, UpdateId
from diloco.common.protocol import wire


class Joined(NamedTuple):
    """Event: a learner's join on the tape; its sequence is the incarnation."""

    stored_at_s: float
    stream_seq: int
    learner: str


class Departed(NamedTuple):
    """Event: a learner's leave on the tape."""

    stored_at_s: float
    stream_seq: int
    learner: str
    incarnation: int


class Finished(NamedTuple):
    """Event: a learner has announced that it sends no more updates of this fragment."""

    stored_at_s: float
    stream_seq: int
    learner: str
    incarnation: int


class Announced(NamedTuple):
    """Event: a manifest of this fragment on the tape, with the length of its message."""

    stored_at_s: float
    stream_seq: int
    manifest: wire.Manifest
    size_bytes: int = 0


class Undecoded(NamedTuple):
    """Event: a message under an update's subject was not decoded: it is invalid, or was skipped.

    Messages of senders without allowance are skipped (`admission.may_announce`).
    """

    stored_at_s: float
    stream_seq: int
    learner: str
    size_bytes: int


class Stopped(NamedTuple):
    """Event: the run's stop message on the tape."""

    stored_at_s: float
    stream_seq: int


class Changed(NamedTuple):
    """Event: a message on the tape changed settings; the `rules` given with it are the new ones."""

    stored_at_s: float
    stream_seq: int


class Quarantined(NamedTuple):
    """Event: a message on the tape quarantines a learner, or releases it (`active` is False)."""

    stored_at_s: float
    stream_seq: int
    learner: str
    active: bool


class Fetched(NamedTuple):
    """Event: all shards of an update are read and verified; `norm` is the update's L2 norm."""

    at_s: float
    # Time and norm are not on the tape, so the machine records both as an observation.
    update: UpdateId
    norm: float


class Failed(NamedTuple):
    """Event: an update's shards are not what its manifest states."""

    at_s: float
    update: UpdateId
    reason: str
    detail: str


class Broke(NamedTuple):
    """Event: adding an update to the sum failed, for a reason that its bytes do not explain."""

    at_s: float
    update: UpdateId


class Liveness(NamedTuple):
    """Event: a learner has shown a sign of life again, or has been silent for too long."""

    at_s: float
    learner: str
    incarnation: int
    live: bool


class Timer(NamedTuple):
    """Event: the time that `rounds.deadline` asked for has come."""

    at_s: float


class CutKnown(NamedTuple):
    """Event: the sequence of the fragment's last update, from the stream's leader; 0: none."""

    at_s: float
    stream_seq: int


class Made(NamedTuple):
    """Event: the version of the last `Commit` is made, with this digest; the sum is free."""

    at_s: float
    view_digest: str


class Tick(NamedTuple):
    """Event: the present time, without anything that happened.

    The machine gets it before a tape message that comes more than `machine.TICK_S` seconds after
    the previous event.
    """

    at_s: float


class Committed(NamedTuple):
    """Event: the record of the last `Commit` is on the tape."""

    at_s: float
    # Not a guess: in doubt the publisher has read back which record is on the tape (invariant 1).
    record_seq: int


FromTape = Joined | Departed | Finished | Announced | Undecoded | Stopped | Changed | Quarantined
Event = FromTape | Fetched | Failed | Broke | Liveness | Timer | Tick | CutKnown | Made | Committed


class Fetch(NamedTuple):
    """Effect: read and verify an update's shards, several at once; answer `Fetched` or `Failed`."""

    update: UpdateId
    manifest: wire.Manifest


class Merge(NamedTuple):
    """Effect: add the update just fetched to the round's sum, before the next event."""

    admitted: Admitted


class Discard(NamedTuple):
    """Effect: drop the round's sum; its updates are read again."""


class OpenRound(NamedTuple):
    """Effect: tell the learners that a round for this version is open."""

    version: int


class AskCut(NamedTuple):
    """Effect: ask the stream's leader for the fragment's last update; answer `CutKnown`.

    Answer only after the machine has received that update's announcement, and all before it.
    """


class Commit(NamedTuple):
    """Effect: make a version, unless the record has only verdicts, and commit the record.

    For a version answer `Made` before any other event. Then, while later events are handled, store
    the objects, publish the record, and answer `Committed`.

    `state` is the machine's state when the round closed: it contains all that the record states.
    """

    what: Literal["version", "verdict"]
    reason: str
    final: bool
    at_s: float
    state: State


class Ignored(NamedTuple):
    """Effect: count a message that is no valid update, and keep a sample of it."""

    learner: str
    reason: str
    detail: str


Effect = Fetch | Merge | Discard | OpenRound | AskCut | Commit | Ignored | Quarantine


Result = tuple[State, tuple[Effect, ...]]
