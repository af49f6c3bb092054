"""The message bus: streams with compare-and-swap, and messages that are not kept.

Rules of every backend:
- A stream is an ordered log; sequence numbers start at 1 and never repeat.
- `publish` returns once the message is durable. With the same `msg_id` again (within the
  stream's duplicate window) it stores nothing and returns the first one's sequence; but if that
  is another message, of whomever, or gone by now, it says so. A server compares ids alone, so its
  answer is no proof: what stands is read back.
- `expected_last` is the sequence of the subject's last message, 0 for none: compare-and-swap.
- With `ttl_s` a message vanishes so long after it was stored, in a stream of `last_only`.
- `read` yields every matching message from a sequence on, in order, exactly once per call, and
  then waits for new ones; it survives lost connections by itself.
- `trim` removes what is old of a subject; sequence numbers and compare-and-swap stay as they are.
- An answer may be stale; each read says how. Only `read` can prove that it is not: what comes
  before a message of one's own was there before it. Whatever must happen exactly once hangs on
  `read` until that message is seen, or on `expected_last`, which is judged where the stream grows.
- `broadcast` reaches whoever listens now, at most once, and is kept nowhere.
Subjects use NATS's grammar: tokens joined by '.', '*' matches one token, a last '>' the rest.
What every backend refuses, and in which words, stands here too.
"""

from collections.abc import AsyncIterator, Iterable
from functools import lru_cache
from typing import NamedTuple, Protocol

from diloco.common.protocol.errors import BusError, BusUnavailableError, IdTakenError

# Broadcasts that one listener may leave unread; then the oldest are dropped.
LISTEN_BACKLOG = 1024


class Message(NamedTuple):
    """One message of a stream."""

    subject: str
    seq: int
    time_s: float  # when the stream stored it, seconds since the epoch
    payload: bytes
    msg_id: str  # '' if it was published without one


class StreamLimits(NamedTuple):
    """The limits of a stream; 0 means no limit. Of the tape nothing goes but by garbage collection.

    `keep_old`: a stream at `max_bytes` takes no new message, instead of dropping its oldest.
    `last_only`: of each subject its last message alone, which may have a time to live: a bucket
    of keys and values, as NATS calls it.
    """

    max_age_s: float = 0.0
    max_bytes: int = 0
    max_message_bytes: int = 1 << 20
    duplicate_window_s: float = 120.0
    replicas: int = 1
    last_only: bool = False
    keep_old: bool = False


class Filled(NamedTuple):
    """The fill of a stream and its readers, and the most there may be (0: none is known)."""

    size_bytes: int
    max_bytes: int
    readers: int = 0
    max_readers: int = 0


class Bus(Protocol):
    """The bus that daemons use; see the module's rules."""

    async def create_stream(
        self, stream: str, subjects: list[str], limits: StreamLimits, *, first_seq: int = 1
    ) -> None:
        """Create `stream`, whose first message gets `first_seq`; one that is there stays as it is.

        Raises:
            BusError: it exists with other settings (each difference is named), its subjects overlap
                with another stream's, or the settings make no sense to the server.
            BusUnavailableError: no answer.
        """

    async def streams(self) -> list[str]:
        """The names of all streams, sorted.

        Staleness: as the servers' leader has them; one made or removed this moment may be missing
        or there.
        """

    async def remove_stream(self, stream: str) -> None:
        """Remove `stream` with all its messages; one that is not there is no error.

        Raises:
            BusError: not permitted.
            BusUnavailableError: no answer.
        """

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """Append a message to the stream that owns `subject`; returns its sequence.

        Raises:
            SwapLostError: the subject's last message is not `expected_last`.
            IdTakenError: a message was stored under `msg_id` that is another, or gone by now.
            BusUnavailableError: no answer, and the message may or may not have been stored; or the
                stream is full (`keep_old`).
            BusError: refused for good (no such stream, too large, not permitted; `ttl_s` below a
                second, or in a stream that is not `last_only`).
        """

    async def last(self, stream: str, subject: str) -> Message | None:
        """The last message of `subject`, or of all that match it as a pattern; None if none does.

        Staleness: without bound. With the credentials of a learner any replica may answer, also one
        that is behind what was acknowledged, even to this client, and the next answer may be
        older than this one. With others the stream's leader answers, which is behind only while it
        does not know yet that it was replaced (seconds). It is a place to begin to `read` from,
        and what `expected_last` then proves or refutes.

        Raises:
            StreamMissingError: there is no such stream.
            BusUnavailableError: no answer.
            BusError: not permitted, or the bus is closed.
        """

    async def last_sequence(self, stream: str) -> int:
        """Sequence of the stream's last message; 0 if it is empty.

        Staleness: asked of the stream's leader. All that was acknowledged before the call is
        counted, but for a leader that does not know yet that it was replaced (seconds); so it is
        a lower bound, and may be lower than an earlier answer.

        Raises:
            StreamMissingError: there is no such stream.
            BusUnavailableError: no answer.
            BusError: not permitted, or the bus is closed.
        """

    async def filled(self, stream: str) -> Filled:
        """The fill of a stream and of its readers.

        Staleness: as of `last_sequence`; what was published meanwhile is missing.

        Raises:
            StreamMissingError: there is no such stream.
            BusUnavailableError: no answer.
            BusError: not permitted, or the bus is closed.
        """

    async def trim(self, stream: str, subject: str, below_seq: int) -> None:
        """Remove messages of `subject` (no wildcards) below `below_seq`, but never its last one.

        Raises:
            StreamMissingError: there is no such stream.
            BusUnavailableError: no answer; nothing, some or all was removed: call again.
            BusError: not permitted, or the bus is closed.
        """

    async def restore(
        self,
        stream: str,
        subjects: list[str],
        limits: StreamLimits,
        messages: Iterable[Message],
    ) -> int:
        """Create `stream` with the messages of one that was exported; returns how many it has.

        Subjects, sequence numbers, times and message ids are the exported ones, and what was
        missing between them is missing here.

        Raises:
            BusError: there is such a stream already, or it does not take a message.
            BusUnavailableError: no answer; the stream may be there in part.
        """

    def read(self, stream: str, subjects: list[str], start_seq: int) -> AsyncIterator[Message]:
        """Messages of `subjects` from `start_seq` (1: all of them) on, then new ones, for ever.

        Staleness: it may lag behind the stream's end without bound, and nothing tells that it
        does; but it gives the stream's order, without gaps, and never goes back. Who has read a
        message knows everything of these subjects that was stored before it.

        Raises:
            BusError: no such stream, bad or overlapping subjects, not permitted, or the position is
                more than one beyond the stream's end (the server lost messages).
        """

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Tell whoever listens; never raises for want of a connection or a listener.

        Raises:
            BusError: `subject` is none.
        """

    def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """(subject, payload) of every broadcast that matches `subject` from now on.

        Staleness: it comes within moments or never; silence says nothing.

        Raises:
            BusError: `subject` is no pattern, or not permitted.
        """

    async def close(self) -> None:
        """Release the connection."""


def stream_exists(stream: str) -> BusError:
    """The error of restoring a stream where there is one."""
    return BusError(
        f"stream {stream!r} exists already",
        hint="a tape is imported into a server that does not have it",
    )


def stream_went_back(stream: str, start_seq: int, last: int) -> BusError:
    """The error of a reader whose position lies beyond the end of the stream."""
    return BusError(
        f"stream {stream!r} ends at {last}, but sequence {start_seq - 1} was seen earlier",
        hint="the server lost acknowledged messages (a power cut without sync_interval: always?) "
        "or the stream was recreated; restore it, or start a new run",
    )


def id_taken(subject: str, seq: int) -> IdTakenError:
    """The error of a message that a stream holds for a copy of another one."""
    return IdTakenError(
        f"a message for {subject!r} was not stored: sequence {seq} has its id, and is another",
        hint="look who sent that sequence: a learner that publishes under others' ids is hostile",
    )


def stream_is_full(subject: str) -> BusUnavailableError:
    """The error of a message that a stream with `keep_old` has no room for."""
    return BusUnavailableError(
        f"the stream of {subject!r} is full",
        hint="nothing is lost, writers wait until there is room: runbooks/tape-full.md",
    )


def check_limits(limits: StreamLimits) -> None:
    """Refuse limits that no server takes.

    Raises:
        BusError: negative ones, no replica, or a duplicate window of none or beyond the age.
    """
    if min(limits) < 0 or limits.replicas < 1:
        raise BusError(f"stream limits must not be negative: {limits}")
    if limits.duplicate_window_s <= 0 or 0 < limits.max_age_s < limits.duplicate_window_s:
        raise BusError(
            f"duplicate_window_s is {limits.duplicate_window_s}: it must be more than 0 "
            f"and within max_age_s ({limits.max_age_s})"
        )


def check_ttl(ttl_s: float | None, *, allowed: bool) -> None:
    """Refuse a time to live that no server takes.

    Raises:
        BusError: less than a second, or in a stream that is not `last_only`.
    """
    if ttl_s is not None and (ttl_s < 1 or not allowed):
        raise BusError(
            f"a message cannot live for {ttl_s} s",
            hint="at least 1 s, and only in a stream of `last_only`",
        )


def stream_settings(subjects: list[str], limits: StreamLimits) -> dict[str, object]:
    """The settings, by name, in which two creations of one stream must be equal."""
    return {"subjects": sorted(subjects), **limits._asdict()}


def check_settings(stream: str, there: dict[str, object], asked: dict[str, object]) -> None:
    """Compare an existing stream's settings with those asked for.

    Raises:
        BusError: they differ; every difference is named.
    """
    differences = [f"{k} is {there[k]!r}, not {asked[k]!r}" for k in asked if there[k] != asked[k]]
    if differences:
        raise BusError(
            f"stream {stream!r} exists with other settings: {'; '.join(differences)}",
            hint="use the settings it was created with, or another run's name",
        )


@lru_cache(maxsize=1 << 14)
def subject_matches(pattern: str, subject: str) -> bool:
    """Whether `subject` (without wildcards) is one that `pattern` stands for."""
    patterns, tokens = pattern.split("."), subject.split(".")
    if patterns[-1] == ">":
        patterns.pop()
        if len(tokens) <= len(patterns):
            return False
        tokens = tokens[: len(patterns)]
    return len(patterns) == len(tokens) and all(
        p in {"*", t} for p, t in zip(patterns, tokens, strict=True)
    )


def subjects_overlap(first: str, second: str) -> bool:
    """Whether some subject matches both patterns."""
    a, b = first.split("."), second.split(".")
    for left, right in zip(a, b, strict=False):
        if ">" in {left, right}:
            return True
        if left != right and "*" not in {left, right}:
            return False
    return len(a) == len(b)


def check_subject(subject: str, *, wildcards: bool = False) -> None:
    """Refuse what is not a subject, or (unless allowed) one with wildcards.

    A server would store a message under the literal subject 'a.*', hence a check of our own.

    Raises:
        BusError: `subject` breaks the grammar.
    """
    tokens = subject.split(".")
    refused = {">"} if wildcards else {"*", ">"}
    literal = tokens[:-1] if wildcards else tokens
    if refused & {*literal} or not all(tokens) or not subject.isprintable() or " " in subject:
        raise BusError(f"{subject!r} is not a subject{' pattern' if wildcards else ''}")


def check_patterns(subjects: list[str]) -> None:
    """Refuse an empty list of subjects, one with bad grammar, or two that overlap.

    Raises:
        BusError: a server would refuse them too.
    """
    if not subjects:
        raise BusError("no subjects given")
    for index, subject in enumerate(subjects):
        check_subject(subject, wildcards=True)
        for other in subjects[:index]:
            if subjects_overlap(other, subject):
                raise BusError(f"subjects {other!r} and {subject!r} overlap")
