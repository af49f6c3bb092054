"""The simulation's bus: the in-memory broker's streams, and each actor's faulty client of them.

The broker calls `hear` for each message that it stores, and finds a message's readers by subject,
so that the cost of a run with many readers is that of its deliveries alone.
"""

import asyncio
import bisect
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from simrelease import as_earlier

from diloco.common.protocol.errors import AccessDeniedError, BusUnavailableError, SwapLostError
from diloco.common.storage.bus import (
    Filled,
    MemoryBroker,
    MemoryBus,
    Message,
    StreamLimits,
    check_patterns,
    stream_went_back,
    subject_matches,
)

if TYPE_CHECKING:
    from simactor import Actor

# The number of its last messages from which one may be delivered to a reader again.
REDELIVERED = 64
# The least time that moves the virtual clock.
TICK_S = 1e-3


class Reader:
    """The messages that the iterator of one `read` call has not yielded yet."""

    def __init__(self, stream: str, subjects: list[str]) -> None:
        self.stream = stream
        self.subjects = subjects
        self.queue: deque[Message] = deque()
        self.ready: asyncio.Future[None] | None = None
        # The server has lost messages, and the reader must begin anew.
        self.cut_off = False

    def give(self, message: Message) -> None:
        self.queue.append(message)
        self.wake()

    def wake(self) -> None:
        """Wake the task that waits for a message, so that it looks again."""
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(None)


class Pattern:
    """A subject pattern, the readers of this pattern, and the known subjects that it matches."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.readers: dict[Reader, None] = {}
        self.subjects: list[str] = []


class SimBroker(MemoryBroker):
    """The world's streams.

    Args:
        clock: returns seconds of Unix time.
        hear: called with (stream, message) after each message is stored.
        trimming: called with (stream, subject, sequence) before the subject's messages below that
            sequence are removed.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        hear: Callable[[str, Message], None],
        trimming: Callable[[str, str, int], None],
    ) -> None:
        super().__init__(clock)
        self._hear = hear
        self._trimming = trimming
        self._owners: dict[str, str] = {}
        # By stream: each subject's sequences, the patterns, and each subject's patterns.
        self._seqs: dict[str, dict[str, list[int]]] = defaultdict(dict)
        self._patterns: dict[str, dict[str, Pattern]] = defaultdict(dict)
        self._of_subject: dict[str, dict[str, list[Pattern]]] = defaultdict(dict)

    def remove_stream(self, stream: str) -> None:
        super().remove_stream(stream)
        for known in (self._seqs, self._patterns, self._of_subject):
            known.pop(stream, None)

    def publish(
        self,
        subject: str,
        payload: bytes,
        msg_id: str | None,
        expected_last: int | None,
        ttl_s: float | None = None,
    ) -> int:
        owner = self._owners.get(subject)
        if owner is None:
            seq = super().publish(subject, payload, msg_id, expected_last, ttl_s)
            owner = self._owners[subject] = next(
                name
                for name, stream in self._streams.items()
                if any(subject_matches(pattern, subject) for pattern in stream.subjects)
            )
            self._stored(owner, seq)
            return seq
        stream = self._streams[owner]
        before = stream.last_seq
        seq = stream.append(subject, payload, msg_id or "", expected_last, ttl_s, self._clock())
        if seq > before:
            self._stored(owner, seq)
        return seq

    def _stored(self, owner: str, seq: int) -> None:
        message = self._streams[owner].log[seq]
        subject = message.subject
        if subject not in self._seqs[owner]:
            self._note_subject(owner, subject)
        self._seqs[owner][subject].append(seq)
        for pattern in self._of_subject[owner][subject]:
            for reader in pattern.readers:
                reader.give(message)
        self._hear(owner, message)

    def _note_subject(self, owner: str, subject: str) -> None:
        matching = [
            p for p in self._patterns[owner].values() if subject_matches(p.pattern, subject)
        ]
        self._seqs[owner][subject] = []
        self._of_subject[owner][subject] = matching
        for pattern in matching:
            pattern.subjects.append(subject)

    def _pattern(self, stream: str, text: str) -> Pattern:
        pattern = self._patterns[stream].get(text)
        if pattern is None:
            pattern = self._patterns[stream][text] = Pattern(text)
            for subject, matching in self._of_subject[stream].items():
                if subject_matches(text, subject):
                    matching.append(pattern)
                    pattern.subjects.append(subject)
        return pattern

    def log_of(self, stream: str) -> list[Message]:
        """Returns the messages of a stream that are not trimmed, in order."""
        return [message for _, message in sorted(self._streams[stream].log.items())]

    def last_behind(self, stream: str, subject: str, behind: int) -> Message | None:
        """Returns a subject's last message on a replica that lacks the stream's newest messages.

        Args:
            stream: name of the stream.
            subject: the subject.
            behind: number of messages that the replica lacks.
        """
        found = self.stream(stream)
        seqs = self._seqs[stream].get(subject, [])
        known = bisect.bisect_right(seqs, found.last_seq - behind)
        return found.log[seqs[known - 1]] if known else None

    def open_reader(self, stream: str, subjects: list[str], start_seq: int) -> Reader:
        """Returns a reader with all messages stored from `start_seq` on; it gets later ones too."""
        if not self._patterns[stream].keys() >= set(subjects):
            check_patterns(subjects)
        found = self.stream(stream)
        if start_seq > found.last_seq + 1:
            raise stream_went_back(stream, start_seq, found.last_seq)
        reader = Reader(stream, subjects)
        stored: list[int] = []
        for text in subjects:
            pattern = self._pattern(stream, text)
            pattern.readers[reader] = None
            for subject in pattern.subjects:
                seqs = self._seqs[stream][subject]
                stored.extend(seqs[bisect.bisect_left(seqs, start_seq) :])
        stored.sort()
        reader.queue.extend(found.log[seq] for seq in stored if seq in found.log)
        return reader

    def close_reader(self, reader: Reader) -> None:
        """Forget a reader."""
        for text in reader.subjects:
            self._patterns[reader.stream][text].readers.pop(reader, None)

    def rot(self, stream: str, seq: int) -> None:
        """Damages a stored message, so that it cannot be decoded any more."""
        log = self.stream(stream).log
        if seq in log:
            log[seq] = log[seq]._replace(payload=garbled(log[seq].payload))

    def lose(self, stream: str, count: int) -> None:
        """Removes a stream's newest `count` messages, as a new leader that lacks them would."""
        found, kept = self.stream(stream), self._seqs[stream]
        while count and (message := found.log.get(found.last_seq)) is not None:
            seqs = kept[message.subject]
            seqs.pop()
            found._drop(message.seq)
            found._ids.pop(message.msg_id, None)
            found.last_of.pop(message.subject, None)
            if seqs:
                found.last_of[message.subject] = seqs[-1]
            found.last_seq -= 1
            count -= 1
        for pattern in self._patterns[stream].values():
            for reader in pattern.readers:
                reader.queue.clear()
                reader.cut_off = True
                reader.wake()

    def silence(self) -> None:
        """Wake all readers, which then find another server; checkers hear no message of this one."""
        for patterns in self._patterns.values():
            # A set is ordered by addresses, and the same seed would differ each time.
            for reader in dict.fromkeys(
                one for found in patterns.values() for one in found.readers
            ):
                reader.wake()
        self._hear = lambda _stream, _message: None
        self._trimming = lambda _stream, _subject, _below_seq: None

    def owner(self, subject: str) -> str:
        """Returns the stream that stores a subject; the subject has a message."""
        return self._owners[subject]

    def forget(self, msg_id: str) -> None:
        """Forget a message id, as after the duplicate window."""
        for stream in self._streams.values():
            stream._ids.pop(msg_id, None)

    def trim(self, stream: str, subject: str, below_seq: int) -> None:
        """As `Bus.trim`."""
        found, seqs = self.stream(stream), self._seqs[stream].get(subject, [])
        # Below the oldest sequence there is no message to remove, and never will be.
        if not seqs or below_seq > seqs[0]:
            self._trimming(stream, subject, below_seq)
        going = bisect.bisect_left(seqs, min(below_seq, found.last_of.get(subject, 0)))
        for seq in seqs[:going]:
            found._drop(seq)
        del seqs[:going]


def garbled(payload: bytes) -> bytes:
    """Returns a message with its first byte changed, so that msgpack does not read it as a map."""
    return bytes([payload[0] ^ 0x40]) + payload[1:]


class ActorBus:
    """One actor's client of the world's broker."""

    def __init__(self, actor: "Actor") -> None:
        self.actor = actor
        self._readers: dict[Reader, None] = {}

    def _enter(self) -> None:
        """Check that the actor lives, and that the server accepts its credentials.

        Raises:
            AccessDeniedError: the credentials are revoked.
        """
        actor = self.actor
        actor.check()
        if actor.name in actor.world.revoked:
            raise AccessDeniedError(f"{actor.name}: the credentials are revoked")

    def hang_up(self) -> None:
        """Wake the actor's readers, whose connection the server has closed."""
        for reader in self._readers:
            reader.wake()

    @property
    def _broker(self) -> SimBroker:
        return self.actor.world.broker

    async def create_stream(
        self, stream: str, subjects: list[str], limits: StreamLimits, *, first_seq: int = 1
    ) -> None:
        self.actor.check()
        self._broker.create_stream(stream, subjects, limits, first_seq)

    async def remove_stream(self, stream: str) -> None:
        self.actor.check()
        self._broker.remove_stream(stream)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        actor, faults = self.actor, self.actor.faults
        if actor.is_slow:
            await actor.delay()
        else:
            actor.check()
        self._enter()
        broker, again = self._broker, msg_id in self.actor.tried
        actor.tried.add(msg_id)
        payload = self._written(subject, payload) if payload else payload

        def store() -> int:
            return broker.publish(subject, payload, msg_id, expected_last, ttl_s)

        if actor.bus_is_cut() or actor.hit(faults.lost_request, "lost_request"):
            actor.check()
            raise BusUnavailableError(f"{actor.name}: request lost")
        if actor.world.is_full("bus"):
            actor.check()
            raise BusUnavailableError(f"{actor.name}: the server's disk is full")
        if actor.hit(faults.late_request, "late_request"):
            actor.check()
            # The client sends a retry behind this message: no copy comes after the window.
            window_s = 0.9 * actor.world.duplicate_window_s
            actor.later(min(actor.lasting(faults.late_s), window_s), store)
            raise BusUnavailableError(f"{actor.name}: request late")
        swap = msg_id is not None and expected_last is not None
        try:
            seq: int = actor.effect("publish", subject, store)
        except SwapLostError as error:
            if swap and again and actor.hit(faults.false_answer, "false_answer"):
                return error.last or 0
            raise
        if swap and actor.hit(faults.false_answer, "false_answer"):
            raise SwapLostError(subject, expected_last, seq)
        self._rot(subject, seq)
        if msg_id and actor.hit(faults.duplicate, "duplicate"):
            broker.forget(msg_id)
            raise BusUnavailableError(f"{actor.name}: answer lost for long")
        if actor.hit(faults.lost_answer, "lost_answer"):
            raise BusUnavailableError(f"{actor.name}: answer lost")
        return seq

    def _written(self, subject: str, payload: bytes) -> bytes:
        """Returns the bytes that the server stores: as of the sender's release, perhaps damaged."""
        actor = self.actor
        if actor.earlier:
            payload = as_earlier(payload)
        if ".update." in subject and actor.hit(actor.faults.rot_message, "rot_message"):
            payload = garbled(payload)
            actor.world.garbled.add(payload)
        return payload

    def _rot(self, subject: str, seq: int) -> None:
        """Damages a stored record if a fault is drawn; its waiting readers have it already."""
        if ".record." in subject and self.actor.hit(self.actor.faults.rot_record, "rot_record"):
            self._broker.rot(self._broker.owner(subject), seq)
            self.actor.world.damaged = True

    async def last(self, stream: str, subject: str) -> Message | None:
        await self._ask()
        actor = self.actor
        if actor.reads_replicas and actor.hit(actor.faults.stale_read, "stale_read"):
            behind = actor.rng.randint(1, actor.faults.stale_messages)
            return self._broker.last_behind(stream, subject, behind)
        return await MemoryBus(self._broker).last(stream, subject)

    async def last_sequence(self, stream: str) -> int:
        await self._ask()
        return await MemoryBus(self._broker).last_sequence(stream)

    async def filled(self, stream: str) -> Filled:
        return await MemoryBus(self._broker).filled(stream)

    async def trim(self, stream: str, subject: str, below_seq: int) -> None:
        await self._ask()
        name = f"{subject} below {below_seq}"
        self.actor.effect("trim", name, lambda: self._broker.trim(stream, subject, below_seq))
        if self.actor.hit(self.actor.faults.lost_answer, "lost_answer"):
            raise BusUnavailableError(f"{self.actor.name}: answer lost")

    async def _ask(self) -> None:
        actor = self.actor
        await actor.delay()
        self._enter()
        if actor.bus_is_cut() or actor.hit(actor.faults.lost_request, "lost_request"):
            raise BusUnavailableError(f"{actor.name}: request lost")

    async def read(
        self, stream: str, subjects: list[str], start_seq: int
    ) -> AsyncIterator[Message]:
        self._enter()
        broker = self._broker
        reader = broker.open_reader(stream, subjects, start_seq)
        queue, log = reader.queue, broker.stream(stream).log
        # A reader of one subject up to a given message relies on getting each message once.
        again = self.actor.faults.redelivered if len(subjects) > 1 else 0.0
        recent: deque[Message] = deque(maxlen=REDELIVERED)
        position = start_seq
        self._readers[reader] = None
        try:
            while True:
                self._enter()
                if broker is not self._broker or reader.cut_off:
                    now = await self._reconnected()
                    del self._readers[reader]
                    broker.close_reader(reader)
                    reader, broker = now.open_reader(stream, subjects, position), now
                    self._readers[reader] = None
                    queue, log = reader.queue, broker.stream(stream).log
                if not queue:
                    reader.ready = self.actor.world.loop.create_future()
                    await reader.ready
                    reader.ready = None
                    continue
                message = queue.popleft()
                self.actor.world.delivered += 1
                if self.actor.is_slow or self.actor.bus_is_cut():
                    await self._deliver()
                else:
                    self.actor.check()
                position = message.seq + 1
                if message.seq not in log:
                    continue  # It has been trimmed, or was followed by another, meanwhile.
                yield message
                if again:
                    recent.append(message)
                    if self.actor.hit(again, "redelivered"):
                        yield self.actor.rng.choice(recent)
        finally:
            self._readers.pop(reader, None)
            broker.close_reader(reader)

    async def _reconnected(self) -> SimBroker:
        """Waits for the server that replaces the lost one; returns its broker."""
        if self.actor.world.tail_lost:
            await asyncio.sleep(self.actor.rng.uniform(0.0, 2.0))
        while self.actor.world.without_server:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.5)
        self.actor.check()
        return self._broker

    async def _deliver(self) -> None:
        actor = self.actor
        while actor.bus_is_cut():  # noqa: ASYNC110 - virtual time
            # At least a tick: the remaining time may be too short to advance the clock at all.
            await asyncio.sleep(max(actor.bus_cut_until_s - actor.world.loop.now_s, TICK_S))
        await actor.delay()

    async def broadcast(self, subject: str, payload: bytes) -> None:
        actor = self.actor
        actor.check()
        if not actor.bus_is_cut() and not actor.hit(actor.faults.lost_broadcast, "lost_broadcast"):
            self._broker.broadcast(subject, payload)

    async def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        async for item in MemoryBus(self._broker).listen(subject):
            if not self.actor.bus_is_cut():
                await self.actor.delay()
                yield item

    async def close(self) -> None:
        """Nothing to release."""
