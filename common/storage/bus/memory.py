"""A bus in this process's memory, for tests, the simulator and single-process runs."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from diloco.common.protocol.errors import BusError, StreamMissingError, SwapLostError
from diloco.common.storage.bus.protocol import (
    LISTEN_BACKLOG,
    Filled,
    Message,
    StreamLimits,
    check_limits,
    check_patterns,
    check_settings,
    check_subject,
    check_ttl,
    id_taken,
    stream_exists,
    stream_is_full,
    stream_settings,
    stream_went_back,
    subject_matches,
    subjects_overlap,
)


class _Stream:
    """One stream of a `MemoryBroker`: its messages and indexes."""

    def __init__(
        self, name: str, subjects: list[str], limits: StreamLimits, first_seq: int
    ) -> None:
        self.name = name
        self.subjects = subjects
        self.limits = limits
        self.last_seq = first_seq - 1
        self.log: dict[int, Message] = {}  # by sequence, oldest first
        self.last_of: dict[str, int] = {}  # by subject, of the messages still in the log
        self._bytes = 0
        self._ends_at_s: dict[int, float] = {}  # of messages with a time to live
        self._ids: dict[str, Message] = {}  # by msg_id, oldest first, within the window

    def append(
        self,
        subject: str,
        payload: bytes,
        msg_id: str,
        expected: int | None,
        ttl_s: float | None,
        now_s: float,
    ) -> int:
        """Stores a message as `Bus.publish` does, and returns the sequence."""
        self.expire(now_s)
        check_ttl(ttl_s, allowed=self.limits.last_only)
        most = self.limits.max_message_bytes
        if most and len(payload) > most:
            raise BusError(f"message of {len(payload)} bytes: stream {self.name!r} takes {most}")
        # Like nats-server with one replica: a stale expectation is refused even if the msg_id is
        # known, so whoever retries a compare-and-swap must read the subject's last message.
        last = self.last_of.get(subject, 0)
        if expected is not None and last != expected:
            raise SwapLostError(subject, expected, last)
        if (known := self._ids.get(msg_id)) is not None:
            # A message that is gone cannot be compared, so it does not count as the same.
            same = (known.subject, known.payload) == (subject, payload)
            if known.seq not in self.log or not same:
                raise id_taken(subject, known.seq)
            return known.seq
        added = len(subject) + len(payload) + len(msg_id)
        if self.limits.keep_old and self._bytes + added > self.limits.max_bytes > 0:
            raise stream_is_full(subject)
        if self.limits.last_only and subject in self.last_of:
            self._drop(self.last_of[subject])
        self.last_seq += 1
        message = Message(subject, self.last_seq, now_s, payload, msg_id)
        self.log[message.seq] = message
        self.last_of[subject] = message.seq
        if ttl_s is not None:
            self._ends_at_s[message.seq] = now_s + ttl_s
        self._bytes += _size(message)
        if msg_id:
            self._ids[msg_id] = message
        self._drop_beyond_size()
        return message.seq

    def put(self, message: Message) -> None:
        """Adds an exported message with its own sequence and time."""
        self.last_seq = message.seq
        self.log[message.seq] = message
        self.last_of[message.subject] = message.seq
        self._bytes += _size(message)

    def expire(self, now_s: float) -> None:
        """Removes messages and message ids that have expired at `now_s` seconds since the epoch."""
        for seq in [seq for seq, end_s in self._ends_at_s.items() if end_s <= now_s]:
            self._drop(seq)
        if age := self.limits.max_age_s:
            while self.log and self._oldest().time_s <= now_s - age:
                self._drop_oldest()
        while self._ids:
            msg_id, message = next(iter(self._ids.items()))
            if message.time_s > now_s - self.limits.duplicate_window_s:
                break
            del self._ids[msg_id]

    def after(self, position: int, subjects: list[str]) -> tuple[Message | None, int]:
        """Returns the first message of `subjects` from sequence `position` on, or None.

        The second value is the `position` for the next call.
        """
        oldest = self._oldest().seq if self.log else self.last_seq + 1
        position = max(position, oldest)
        while position <= self.last_seq:
            message = self.log.get(position)
            position += 1
            if message and any(subject_matches(s, message.subject) for s in subjects):
                return message, position
        return None, position

    def trim(self, subject: str, below_seq: int) -> None:
        """Removes messages of a subject below a sequence, but never its last message."""
        end = min(below_seq, self.last_of.get(subject, 0))
        for message in [m for m in self.log.values() if m.subject == subject and m.seq < end]:
            del self.log[message.seq]
            self._bytes -= _size(message)

    def last(self, pattern: str) -> int:
        """Returns the sequence of the last message that matches; 0 if none does."""
        if pattern in self.last_of:
            return self.last_of[pattern]
        matching = (seq for known, seq in self.last_of.items() if subject_matches(pattern, known))
        return max(matching, default=0)

    def filled(self) -> Filled:
        """Returns the stream's size and size limit; readers are not counted."""
        return Filled(self._bytes, self.limits.max_bytes)

    def _oldest(self) -> Message:
        return self.log[next(iter(self.log))]

    def _drop_beyond_size(self) -> None:
        while self.limits.max_bytes and self._bytes > self.limits.max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self.log)))

    def _drop(self, seq: int) -> None:
        message = self.log.pop(seq)
        self._ends_at_s.pop(seq, None)
        self._bytes -= _size(message)
        if self.last_of[message.subject] == message.seq:
            del self.last_of[message.subject]


class MemoryBroker:
    """The streams that the `MemoryBus` clients of one process share.

    The broker is deterministic: it has no threads, no clock but `clock`, and serves readers in the
    order of their registration. It must not be used from several threads or event loops at once.

    Args:
        clock: returns seconds since the epoch; used for message times and the streams' limits.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._readers: dict[asyncio.Event, None] = {}  # dicts as sets that keep their order
        self._listeners: dict[_Listener, None] = {}

    def create_stream(
        self, stream: str, subjects: list[str], limits: StreamLimits, first_seq: int = 1
    ) -> None:
        """Creates a stream, as `Bus.create_stream`."""
        check_patterns(subjects)
        check_limits(limits)
        old = self._streams.get(stream)
        if old is not None:
            asked = stream_settings(subjects, limits)
            check_settings(stream, stream_settings(old.subjects, old.limits), asked)
            return
        for other in self._streams.values():
            if any(subjects_overlap(a, b) for a in subjects for b in other.subjects):
                raise BusError(f"subjects of stream {stream!r} overlap with {other.name!r}'s")
        self._streams[stream] = _Stream(stream, list(subjects), limits, first_seq)

    def remove_stream(self, stream: str) -> None:
        """Removes a stream, as `Bus.remove_stream`."""
        self._streams.pop(stream, None)

    def publish(
        self,
        subject: str,
        payload: bytes,
        msg_id: str | None,
        expected_last: int | None,
        ttl_s: float | None = None,
    ) -> int:
        """Publishes a message, as `Bus.publish`."""
        check_subject(subject)
        for stream in self._streams.values():
            if any(subject_matches(s, subject) for s in stream.subjects):
                break
        else:
            raise BusError(f"no stream takes subject {subject!r}")
        now_s = self._clock()
        seq = stream.append(subject, bytes(payload), msg_id or "", expected_last, ttl_s, now_s)
        for reader in self._readers:
            reader.set()
        return seq

    def names(self) -> list[str]:
        """Returns the names of all streams, sorted."""
        return sorted(self._streams)

    def restore(
        self,
        stream: str,
        subjects: list[str],
        limits: StreamLimits,
        messages: Iterable[Message],
    ) -> int:
        """Creates a stream from exported messages, as `Bus.restore`."""
        if stream in self._streams:
            raise stream_exists(stream)
        self.create_stream(stream, subjects, limits)
        for message in messages:
            if not any(subject_matches(pattern, message.subject) for pattern in subjects):
                del self._streams[stream]
                raise BusError(f"stream {stream!r} does not take subject {message.subject!r}")
            self._streams[stream].put(message)
        return len(self._streams[stream].log)

    def stream(self, name: str) -> _Stream:
        """Returns the stream `name` without expired messages.

        Raises:
            StreamMissingError: there is no such stream.
        """
        found = self._streams.get(name)
        if found is None:
            raise StreamMissingError(f"no stream {name!r}", hint="create the run first")
        found.expire(self._clock())
        return found

    def broadcast(self, subject: str, payload: bytes) -> None:
        """Hands a message to all present listeners."""
        check_subject(subject)
        for listener in self._listeners:
            if subject_matches(listener.pattern, subject):
                listener.backlog.append((subject, bytes(payload)))
                listener.ready.set()

    def add_reader(self, ready: asyncio.Event) -> None:
        """Makes every later publish set `ready`."""
        self._readers[ready] = None

    def drop_reader(self, ready: asyncio.Event) -> None:
        """Undoes `add_reader`."""
        del self._readers[ready]

    def add_listener(self, listener: "_Listener") -> None:
        """Appends every later broadcast that matches to the listener's backlog."""
        self._listeners[listener] = None

    def drop_listener(self, listener: "_Listener") -> None:
        """Undoes `add_listener`."""
        del self._listeners[listener]


class _Listener:
    """The messages of one `listen` call that its caller has not taken yet."""

    def __init__(self, pattern: str, ready: asyncio.Event) -> None:
        self.pattern = pattern
        self.ready = ready
        self.backlog: deque[tuple[str, bytes]] = deque(maxlen=LISTEN_BACKLOG)


class MemoryBus:
    """One client of a `MemoryBroker`; makes a broker of its own if none is given."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self._waiting: dict[asyncio.Event, None] = {}
        self._closed = False

    async def create_stream(
        self, stream: str, subjects: list[str], limits: StreamLimits, *, first_seq: int = 1
    ) -> None:
        """Implements `Bus.create_stream`."""
        self._open_broker().create_stream(stream, subjects, limits, first_seq)

    async def streams(self) -> list[str]:
        """Implements `Bus.streams`."""
        return self._open_broker().names()

    async def remove_stream(self, stream: str) -> None:
        """Implements `Bus.remove_stream`."""
        self._open_broker().remove_stream(stream)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """Implements `Bus.publish`."""
        return self._open_broker().publish(subject, payload, msg_id, expected_last, ttl_s)

    async def last(self, stream: str, subject: str) -> Message | None:
        """Implements `Bus.last`."""
        check_subject(subject, wildcards=True)
        found = self._open_broker().stream(stream)
        return found.log.get(found.last(subject))

    async def last_sequence(self, stream: str) -> int:
        """Implements `Bus.last_sequence`."""
        return self._open_broker().stream(stream).last_seq

    async def filled(self, stream: str) -> Filled:
        """Implements `Bus.filled`."""
        return self._open_broker().stream(stream).filled()

    async def trim(self, stream: str, subject: str, below_seq: int) -> None:
        """Implements `Bus.trim`."""
        check_subject(subject)
        self._open_broker().stream(stream).trim(subject, below_seq)

    async def restore(
        self,
        stream: str,
        subjects: list[str],
        limits: StreamLimits,
        messages: Iterable[Message],
    ) -> int:
        """Implements `Bus.restore`."""
        return self._open_broker().restore(stream, subjects, limits, messages)

    async def read(
        self, stream: str, subjects: list[str], start_seq: int
    ) -> AsyncIterator[Message]:
        """Implements `Bus.read`; ends when the bus closes."""
        check_patterns(subjects)
        last = self._open_broker().stream(stream).last_seq
        if start_seq > last + 1:
            raise stream_went_back(stream, start_seq, last)
        position = start_seq
        ready = asyncio.Event()
        self._waiting[ready] = None
        self.broker.add_reader(ready)
        try:
            while not self._closed:
                message, position = self.broker.stream(stream).after(position, subjects)
                if message:
                    yield message
                    continue
                ready.clear()
                await ready.wait()
        finally:
            self.broker.drop_reader(ready)
            del self._waiting[ready]

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Implements `Bus.broadcast`; nothing happens when the bus is closed."""
        if not self._closed:
            self.broker.broadcast(subject, payload)

    async def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """Implements `Bus.listen`; ends when the bus closes.

        Yields broadcasts sent after the first `anext`; beyond `LISTEN_BACKLOG` unread messages, the
        oldest messages are dropped.
        """
        check_subject(subject, wildcards=True)
        ready = asyncio.Event()
        listener = _Listener(subject, ready)
        self._open_broker().add_listener(listener)
        self._waiting[ready] = None
        try:
            while not self._closed:
                if listener.backlog:
                    yield listener.backlog.popleft()
                    continue
                ready.clear()
                await ready.wait()
        finally:
            self.broker.drop_listener(listener)
            del self._waiting[ready]

    async def close(self) -> None:
        """Leaves the broker; reads and listeners of this client end."""
        self._closed = True
        for ready in self._waiting:
            ready.set()

    def _open_broker(self) -> MemoryBroker:
        if self._closed:
            raise BusError("this bus is closed")
        return self.broker


def _size(message: Message) -> int:
    return len(message.subject) + len(message.payload) + len(message.msg_id)
