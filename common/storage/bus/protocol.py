"""The message bus: streams with compare-and-swap, and broadcasts that are not stored.

Rules of every backend:
- A stream is an ordered log; sequence numbers start at 1 and never repeat.
- `publish` returns once the message is durable. Repeated with the same `msg_id` within the
  stream's duplicate window, it stores nothing and returns the first sequence, but only if the
  stored message has the same subject and payload; else it raises `IdTakenError`. A server compares
  ids alone, so `publish` reads the stored message back.
- `expected_last` is the sequence of the subject's last message, 0 for none: compare-and-swap.
- In a stream of `last_only`, a message with `ttl_s` vanishes that many seconds after it was stored.
- `read` yields every matching message from a sequence on, in order, exactly once per call, and
  then waits for new ones; it survives lost connections by itself.
- `trim` removes old messages of a subject; sequence numbers and compare-and-swap are unaffected.
- An answer may be stale; each method says how. Only `read` proves that an answer is complete: a
  caller that publishes a message and reads up to that message has all messages before it. An action
  that must happen exactly once relies on such a `read`, or on `expected_last`, which the stream's
  leader compares.
- `broadcast` reaches present listeners at most once, and is stored nowhere.
Subjects use NATS's grammar: tokens joined by '.', '*' matches one token, a last '>' the rest.
The checks and the error messages that all backends share are here too.
"""

from collections.abc import AsyncIterator, Iterable
from functools import lru_cache
from typing import NamedTuple, Protocol

from diloco.common.protocol.errors import BusError, BusUnavailableError, IdTakenError

# The most unread broadcasts of one listener; beyond that some are dropped.
LISTEN_BACKLOG = 1024


class Message(NamedTuple):
    """One message of a stream, as the stream stores it."""

    subject: str
    seq: int
    time_s: float  # when the stream stored it, seconds since the epoch
    payload: bytes
    msg_id: str  # '' if it was published without one


class StreamLimits(NamedTuple):
    """The limits of a stream; 0 means no limit.

    Attributes:
        max_age_s: older messages are dropped.
        max_bytes: size of the stream at which its oldest messages are dropped; with `keep_old` the
            stream refuses new messages instead, as a run's tape does.
        max_message_bytes: longer messages are refused.
        duplicate_window_s: how long the stream remembers message ids.
        replicas: number of servers that store the stream.
        last_only: each subject keeps its last message only, which may have a time to live, as in
            NATS's key-value buckets.
    """

    max_age_s: float = 0.0
    max_bytes: int = 0
    max_message_bytes: int = 1 << 20
    duplicate_window_s: float = 120.0
    replicas: int = 1
    last_only: bool = False
    keep_old: bool = False


class Filled(NamedTuple):
    """A stream's size in bytes and its number of readers, each with its limit (0: none known)."""

    size_bytes: int
    max_bytes: int
    readers: int = 0
    max_readers: int = 0


class Bus(Protocol):
    """The interface of the bus that daemons use; the module's docstring has the rules."""

    async def create_stream(
        self, stream: str, subjects: list[str], limits: StreamLimits, *, first_seq: int = 1
    ) -> None:
        """Creates `stream`, whose first message gets `first_seq`; leaves an existing one as it is.

        Raises:
            BusError: the stream exists with other settings (each difference is named), its subjects
                overlap with another stream's, or the server refuses the settings.
            BusUnavailableError: no answer.
        """

    async def streams(self) -> list[str]:
        """Returns the names of all streams, sorted.

        Staleness: the servers' leader answers; a stream that is created or removed during the call
        may be missing or present.
        """

    async def remove_stream(self, stream: str) -> None:
        """Removes `stream` with all its messages; does nothing if there is no such stream.

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
        """Appends a message to the stream that stores `subject`; returns the message's sequence.

        Args:
            subject: the message's subject, without wildcards.
            payload: the message's bytes.
            msg_id: the message's id, by which a repeated call stores nothing more.
            expected_last: the sequence that the subject's last message must have; 0: there must be
                none; None: any.
            ttl_s: seconds after which the message vanishes, in a stream of `last_only`.

        Raises:
            SwapLostError: the subject's last message is not `expected_last`.
            IdTakenError: another message was stored under `msg_id`, or the message is gone by now.
            BusUnavailableError: no answer, and the message may or may not have been stored; or the
                stream is full (`keep_old`).
            BusError: refused for good (no such stream, too large, not permitted; `ttl_s` below a
                second, or in a stream that is not `last_only`).
        """

    async def last(self, stream: str, subject: str) -> Message | None:
        """Returns the last message of `subject`, which may be a pattern; None if there is none.

        Staleness: without bound. With a learner's credentials any replica may answer, even one that
        lacks messages acknowledged to this client, and the next answer may be older than this one.
        With other credentials the stream's leader answers; the answer is stale only while the
        leader does not know yet that it was replaced (seconds). Use the message's sequence to begin
        a `read`, or as an `expected_last`, which the server then compares.

        Raises:
            StreamMissingError: there is no such stream.
            BusUnavailableError: no answer.
            BusError: not permitted, or the bus is closed.
        """

    async def last_sequence(self, stream: str) -> int:
        """Returns the sequence of the stream's last message; 0 if the stream is empty.

        Staleness: the stream's leader answers, and counts all messages acknowledged before the
        call, unless the leader does not know yet that it was replaced (seconds). So the answer is a
        lower bound, and may be lower than an earlier answer.

        Raises:
            StreamMissingError: there is no such stream.
            BusUnavailableError: no answer.
            BusError: not permitted, or the bus is closed.
        """

    async def filled(self, stream: str) -> Filled:
        """Returns how full a stream is, and how many readers it has.

        Staleness: as in `last_sequence`; messages published meanwhile are not counted.

        Raises:
            StreamMissingError: there is no such stream.
            BusUnavailableError: no answer.
            BusError: not permitted, or the bus is closed.
        """

    async def trim(self, stream: str, subject: str, below_seq: int) -> None:
        """Removes messages of `subject` (no wildcards) with sequences below `below_seq`.

        The subject's last message is never removed.

        Raises:
            StreamMissingError: there is no such stream.
            BusUnavailableError: no answer; none, some or all messages were removed: call again.
            BusError: not permitted, or the bus is closed.
        """

    async def restore(
        self,
        stream: str,
        subjects: list[str],
        limits: StreamLimits,
        messages: Iterable[Message],
    ) -> int:
        """Creates `stream` with the messages of an exported stream; returns their number.

        Subjects, sequence numbers, times and message ids stay as exported, gaps between sequence
        numbers included.

        Raises:
            BusError: the stream exists already, or the server refuses a message.
            BusUnavailableError: no answer; the stream may have been created in part.
        """

    def read(self, stream: str, subjects: list[str], start_seq: int) -> AsyncIterator[Message]:
        """Yields messages of `subjects` from `start_seq` (1: all) on, then new ones, for ever.

        Staleness: the reading may lag behind the stream's end without bound and without notice; but
        it keeps the stream's order, without gaps, and never goes back. A reader that has received a
        message has received all messages of these subjects that were stored earlier.

        Raises:
            BusError: no such stream, bad or overlapping subjects, not permitted, or `start_seq` is
                more than one beyond the stream's end (the server lost messages).
        """

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Sends a message to present listeners; does nothing if there is no connection.

        Raises:
            BusError: `subject` is malformed.
        """

    def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """Yields (subject, payload) of every broadcast that matches `subject` from now on.

        Staleness: a broadcast arrives within moments or never, so silence proves nothing.

        Raises:
            BusError: `subject` is not a valid pattern, or is not permitted.
        """

    async def close(self) -> None:
        """Releases the connection; reads and listeners end, and other requests raise `BusError`."""


def stream_exists(stream: str) -> BusError:
    """Returns the error for restoring a stream that exists already."""
    return BusError(
        f"stream {stream!r} exists already",
        hint="a tape is imported into a server that does not have it",
    )


def stream_went_back(stream: str, start_seq: int, last: int) -> BusError:
    """Returns the error for a reader whose position lies beyond the end of the stream."""
    return BusError(
        f"stream {stream!r} ends at {last}, but sequence {start_seq - 1} was seen earlier",
        hint="the server lost acknowledged messages (a power cut without sync_interval: always?) "
        "or the stream was recreated; restore it, or start a new run",
    )


def id_taken(subject: str, seq: int) -> IdTakenError:
    """Returns the error for a message whose id another message of the stream has."""
    return IdTakenError(
        f"a message for {subject!r} was not stored: another message at sequence {seq} has its id",
        hint="find its sender: a learner that publishes under others' ids is hostile",
    )


def stream_is_full(subject: str) -> BusUnavailableError:
    """Returns the error for a message that does not fit into a stream with `keep_old`."""
    return BusUnavailableError(
        f"the stream of {subject!r} is full",
        hint="nothing is lost, writers wait until there is room: runbooks/tape-full.md",
    )


def check_limits(limits: StreamLimits) -> None:
    """Refuses limits that no server accepts.

    Raises:
        BusError: a limit is negative, there is no replica, or the duplicate window is 0 or longer
            than the greatest age.
    """
    if min(limits) < 0 or limits.replicas < 1:
        raise BusError(f"stream limits must not be negative: {limits}")
    if limits.duplicate_window_s <= 0 or 0 < limits.max_age_s < limits.duplicate_window_s:
        raise BusError(
            f"duplicate_window_s is {limits.duplicate_window_s}: it must be more than 0 "
            f"and within max_age_s ({limits.max_age_s})"
        )


def check_ttl(ttl_s: float | None, *, allowed: bool) -> None:
    """Refuses a time to live that no server accepts.

    Raises:
        BusError: `ttl_s` is below a second, or the stream is not `last_only`.
    """
    if ttl_s is not None and (ttl_s < 1 or not allowed):
        raise BusError(
            f"a message cannot live for {ttl_s} s",
            hint="at least 1 s, and only in a stream of `last_only`",
        )


def stream_settings(subjects: list[str], limits: StreamLimits) -> dict[str, object]:
    """Returns setting -> value of a stream; whoever creates the stream again must give the same."""
    return {"subjects": sorted(subjects), **limits._asdict()}


def check_settings(stream: str, there: dict[str, object], asked: dict[str, object]) -> None:
    """Compares an existing stream's settings, `there`, with those asked for.

    Raises:
        BusError: a setting differs; every difference is named.
    """
    differences = [f"{k} is {there[k]!r}, not {asked[k]!r}" for k in asked if there[k] != asked[k]]
    if differences:
        raise BusError(
            f"stream {stream!r} exists with other settings: {'; '.join(differences)}",
            hint="use the settings it was created with, or another run's name",
        )


@lru_cache(maxsize=1 << 14)
def subject_matches(pattern: str, subject: str) -> bool:
    """True if `subject` (without wildcards) matches `pattern`."""
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
    """True if some subject matches both patterns."""
    a, b = first.split("."), second.split(".")
    for left, right in zip(a, b, strict=False):
        if ">" in {left, right}:
            return True
        if left != right and "*" not in {left, right}:
            return False
    return len(a) == len(b)


def check_subject(subject: str, *, wildcards: bool = False) -> None:
    """Refuses a malformed subject, and a subject with wildcards unless `wildcards` is True.

    A server would store a message under the literal subject 'a.*'.

    Raises:
        BusError: `subject` breaks the grammar.
    """
    tokens = subject.split(".")
    refused = {">"} if wildcards else {"*", ">"}
    literal = tokens[:-1] if wildcards else tokens
    if refused & {*literal} or not all(tokens) or not subject.isprintable() or " " in subject:
        raise BusError(f"{subject!r} is not a subject{' pattern' if wildcards else ''}")


def check_patterns(subjects: list[str]) -> None:
    """Refuses an empty list of subjects, a malformed subject, or two subjects that overlap.

    Raises:
        BusError: the list breaks one of these rules, as it would at a server.
    """
    if not subjects:
        raise BusError("no subjects given")
    for index, subject in enumerate(subjects):
        check_subject(subject, wildcards=True)
        for other in subjects[:index]:
            if subjects_overlap(other, subject):
                raise BusError(f"subjects {other!r} and {subject!r} overlap")
