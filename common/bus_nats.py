"""The bus on NATS JetStream; the only file that imports nats.

Rules:
- nats-py's own reconnecting is off. A `_Link` is one connection, used until it is lost; then a
  task makes a new one, for ever, with backoff and jitter. So nothing waits in a client's buffer
  to be sent long after its caller gave up, and a connection that the server closed for good
  (nats-py would stay closed) comes back as well, with credentials read anew.
- A call that gets no answer in `CALL_TIMEOUT_S`, or whose link is lost, raises
  `BusUnavailableError`; nothing here repeats a publish.
- A reader keeps its position itself. Whatever happens to its consumer, it makes a new one at the
  last delivered sequence + 1; the consumer's own numbering shows a gap within one.
- The server reports a missing permission beside the call, which then times out: `_Link` remembers
  what was denied, and the time-out becomes a `BusError` with the subject.

- A reader of one subject names it in the subject of its request for a consumer, and so does `last`
  with `direct_reads`: there the server can see what is asked for, and refuse it.

Permissions a client needs: publish on its own subjects; `<api>.STREAM.INFO.<stream>` and
`<api>.STREAM.MSG.GET.<stream>` (or `<api>.DIRECT.GET.<stream>.<subject>` with `direct_reads`);
`<api>.CONSUMER.CREATE.<stream>.*.<subject>` for each subject it reads alone, without the subject
to read several in one order; `<api>.CONSUMER.{MSG.NEXT,DELETE}.<stream>.*`; subscribe on
`<inbox_prefix>.>`. `<api>` is `$JS.API`, or what the credentials say. `diloco/auth/permissions.py`
grants this.
"""

import asyncio
import contextlib
import json
import math
import random
import re
import secrets
import ssl
import urllib.parse
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from diloco.common.bus import (
    LISTEN_BACKLOG,
    Filled,
    Message,
    StreamLimits,
    check_limits,
    check_patterns,
    check_settings,
    check_subject,
    check_ttl,
    stream_exists,
    stream_is_full,
    stream_settings,
    stream_went_back,
)
from diloco.common.credentials import OWN_API, Credentials, load_credentials
from diloco.common.errors import (
    BusError,
    BusUnavailableError,
    ConfigError,
    StreamMissingError,
    SwapLostError,
)

CALL_TIMEOUT_S = 5.0
_DIAL_TIMEOUT_S = 10.0
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 5.0
_PULL_BATCH = 256
_PULL_BYTES = 8 << 20  # what a reader holds at most; a pull ends early rather than exceed it
_PULL_EXPIRES_S = 5.0
_HEARTBEAT_S = 1.5
_SILENCE_S = 4.0  # without a heartbeat for so long, the consumer or the server is gone
_CONSUMER_IDLE_S = 30.0  # after so long without a pull the server drops a consumer
_BROADCAST_BACKLOG_BYTES = 1 << 20
_WRONG_LAST_SEQUENCE = (10071, 10164)
_LAST_SEQUENCE = re.compile(r"wrong last sequence: (\d+)")
_STREAM_EXISTS = 10058
_STREAM_NOT_FOUND = 10059
# Without a majority a cluster holds an earlier attempt of a message, neither stored nor lost.
_STILL_IN_PROCESS = 10158
_STREAM_FULL = (10077, "maximum bytes exceeded")
# Headers of a message that was imported: when it was stored at first, and its message id.
_STORED_AT, _EXPORTED_ID = "Diloco-Stored-At", "Diloco-Msg-Id"
_RESTORED_AT_ONCE = 256
_PULL_ENDED = {"Batch Completed", "Message Size Exceeds MaxBytes"}

T = TypeVar("T")


class _Address(NamedTuple):
    """How to reach the servers and who we are."""

    url: str
    name: str
    credentials: Path | None
    inbox_prefix: str
    api: str
    tls_ca: Path | None

    def tls(self) -> ssl.SSLContext | None:
        """What the server's certificate is checked with; None if the URL and file ask for none."""
        if self.tls_ca is None and not self.url.startswith("tls://"):
            return None
        return ssl.create_default_context(cafile=self.tls_ca)

    def identity(self) -> dict[str, Any]:
        """Arguments of nats-py's `connect` that prove who we are, read anew."""
        if self.credentials is None:
            return {}
        own = load_credentials(self.credentials)
        if own is None:
            return {"user_credentials": str(self.credentials)}
        return {"nkeys_seed_str": own.seed}

    def shown(self) -> str:
        """The URL without user names and passwords."""
        return ",".join(part.rpartition("@")[2].rpartition("/")[2] for part in self.url.split(","))


class _Pause:
    """Growing pauses between attempts, with jitter so that a fleet does not come back at once."""

    def __init__(self) -> None:
        self._next_s = _PAUSE_MIN_S

    async def wait(self, at_most_s: float = math.inf) -> None:
        pause_s = self._next_s * random.uniform(0.5, 1.5)  # noqa: S311 - jitter, no secret
        self._next_s = min(self._next_s * 2, _PAUSE_MAX_S)
        await asyncio.sleep(min(pause_s, at_most_s))

    def reset_after(self, good_s: float) -> None:
        """Begin with short pauses again if all was well for longer than the longest pause."""
        if good_s > _PAUSE_MAX_S:
            self._next_s = _PAUSE_MIN_S


class _Client(Client):
    """nats-py's client, which hears a refusal: over TLS it would write on into a broken pipe."""

    def _connect_command(self) -> bytes:
        """CONNECT with the PING that nats-py sends after it, so that it reads before it writes."""
        transport: Any = self._transport

        def connect_and_ping(data: bytes) -> None:
            transport.write = leave_out
            type(transport).write(transport, data)

        def leave_out(_ping: bytes) -> None:
            del transport.write

        transport.write = connect_and_ping
        command: bytes = super()._connect_command()
        return command + b"PING\r\n"


class _Link:
    """One connection, from its making to its loss."""

    def __init__(self, address: _Address) -> None:
        self.lost = asyncio.Event()
        self.client = _Client()
        self.js: JetStreamContext = self.client.jetstream(
            prefix=address.api, timeout=CALL_TIMEOUT_S
        )
        self.api = address.api
        self.queues: set[asyncio.Queue[Msg | None]] = set()  # None tells that the link is lost
        self._address = address
        self._problem: Exception | None = None
        self._denied: deque[tuple[float, str]] = deque(maxlen=64)

    async def open(self, timeout_s: float) -> None:
        """Connect, or fail within `timeout_s` seconds.

        Raises:
            BusUnavailableError: nobody answers there.
            BusError: the server refuses us.
        """
        address = self._address
        try:
            async with asyncio.timeout(timeout_s):
                await self.client.connect(
                    servers=address.url.split(","),
                    name=address.name,
                    tls=address.tls(),
                    inbox_prefix=address.inbox_prefix,
                    error_cb=self._on_error,
                    closed_cb=self._on_closed,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    connect_timeout=5,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    **address.identity(),
                )
        except ConfigError:
            await self.close()
            raise
        except Exception as error:
            await self.close()
            raise self._refusal(error) from error
        except BaseException:
            await self.close()
            raise
        _mark_tls(self.client)
        for task in (self.client._flusher_task, self.client._reading_task):  # noqa: SLF001
            if task is not None:
                task.add_done_callback(_look_at)

    async def close(self) -> None:
        """Send what is queued and close; never takes long, never raises."""
        self._mark_lost()
        # AssertionError: nats-py has one when the client got nowhere near a connection.
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError, AssertionError):
            async with asyncio.timeout(2.0):
                await self.client.close()
        # nats-py fails to close a connection that broke with data unsent; these would wait on.
        for subscription in self.client._subs.values():  # noqa: SLF001
            if subscription._wait_for_msgs_task is not None:  # noqa: SLF001
                subscription._wait_for_msgs_task.cancel()  # noqa: SLF001

    async def wait_lost(self) -> None:
        """Return once the connection is gone."""
        # Closing a half-open connection can hang in nats-py before it tells, hence the polling.
        while not self.lost.is_set() and not self.client.is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.lost.wait()
        self._mark_lost()

    def denial(self, subject: str, since: float) -> BusError | None:
        """The server's word that `subject` (or our inbox) is not permitted, if it gave it."""
        inbox = f'subscription to "{self._address.inbox_prefix.lower()}.'
        for time, text in self._denied:
            if (time >= since and f'"{subject.lower()}"' in text) or inbox in text:
                return BusError(
                    f"not permitted on {subject!r} as {self._address.name!r}: {text}",
                    hint="grant it in the NATS server's permissions, or use other credentials: "
                    "runbooks/permissions.md",
                )
        return None

    def _refusal(self, error: Exception) -> BusError:
        reason = self._problem or error
        text = str(reason) or type(reason).__name__
        if "authorization" in text.lower() or "authentication" in text.lower():
            return BusError(
                f"NATS at {self._address.shown()} refused {self._address.name!r}: {text}",
                hint="check the credentials, and that the server knows them: "
                "runbooks/credentials.md",
            )
        if isinstance(error, ssl.SSLError) or "certificate" in text.lower():
            return BusError(
                f"no trust between {self._address.name!r} and NATS at "
                f"{self._address.shown()}: {text}",
                hint="bus.tls_ca must name the certificate of the authority that signed the "
                "server's, and bus.url a name that stands in it",
            )
        return BusUnavailableError(
            f"no connection to NATS at {self._address.shown()}: {text}",
            hint="check the address and that nats-server runs: runbooks/nats-away.md",
        )

    async def _on_error(self, error: Exception) -> None:
        self._problem = error
        if "permissions violation" in str(error).lower():
            self._denied.append((asyncio.get_running_loop().time(), str(error).lower()))

    async def _on_closed(self) -> None:
        self._mark_lost()

    def _mark_lost(self) -> None:
        self.lost.set()
        for queue in self.queues:
            queue.put_nowait(None)


class NatsBus:
    """A `Bus` over one NATS connection at a time; made by `connect`."""

    def __init__(self, address: _Address, link: _Link, *, direct_reads: bool) -> None:
        self.name = address.name
        self._address = address
        self._direct_reads = direct_reads
        self._link: _Link | None = link
        self._linked = asyncio.Event()
        self._linked.set()
        self._outage: BusError = BusUnavailableError(f"the connection to {address.shown()} is lost")
        self._closed = False
        self._can_see_end = True
        self._keeper = asyncio.create_task(self._keep_linked(link))

    async def create_stream(self, stream: str, subjects: list[str], limits: StreamLimits) -> None:
        """Create `stream`; the same again is no error.

        A stream that keeps what is old, or has no limit on age or size, refuses new messages when
        its limit is reached or the disk is full; others drop their oldest.

        Raises:
            BusError: it exists with other settings (each difference is named), its subjects
                overlap with another stream's, or the server cannot do this.
            BusUnavailableError: no answer.
        """
        check_patterns(subjects)
        check_limits(limits)
        wanted = _stream_config(stream, subjects, limits)
        try:
            await self._call(
                f"{self._address.api}.STREAM.CREATE.{stream}", lambda js: js.add_stream(wanted)
            )
        except _RefusedError as error:
            if error.err_code != _STREAM_EXISTS:
                raise
            info = await self._stream_info(stream)
            check_settings(stream, _settings(info.config), stream_settings(subjects, limits))

    async def streams(self) -> list[str]:
        """The names of all streams, sorted.

        Raises:
            BusUnavailableError: no answer.
            BusError: not permitted.
        """
        found: list[str] = []
        while page := await self._streams_from(len(found)):
            found += page
        return sorted(found)

    async def _streams_from(self, offset: int) -> list[str]:
        """Names from a place in the server's list on, as many as it gives at once."""
        asked = f"{self._address.api}.STREAM.LIST"
        infos = await self._call(asked, lambda js: js.streams_info(offset=offset))
        return [str(info.config.name) for info in infos]

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """Append a message to the stream that owns `subject`; its sequence.

        Never repeats by itself: after `BusUnavailableError` call again with the same `msg_id`.
        After a repeat, `SwapLostError` may mean that the first attempt won: read `last`.

        Raises:
            SwapLostError: the subject's last message is not `expected_last`.
            BusUnavailableError: no answer within `CALL_TIMEOUT_S`, or no stream takes the subject
                now; the message may or may not have been stored.
            BusError: refused for good (too large, not permitted, closed; a time to live below a
                second, or in a stream that is not `last_only`).
        """
        check_subject(subject)
        check_ttl(ttl_s, allowed=True)
        headers: dict[str, str] = {}
        if msg_id is not None:
            headers[api.Header.MSG_ID.value] = msg_id
        if expected_last is not None:
            headers[api.Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value] = str(expected_last)
        if ttl_s is not None:
            headers[api.Header.MSG_TTL.value] = f"{round(ttl_s * 1000)}ms"
        try:
            return await self._store(subject, bytes(payload), headers)
        except _RefusedError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                last = _LAST_SEQUENCE.search(error.message)
                raise SwapLostError(
                    subject, expected_last or 0, None if last is None else int(last[1])
                ) from error
            raise

    async def last(self, stream: str, subject: str) -> Message | None:
        """The last message of `subject`, or of all that match it as a pattern; None if none does.

        It is asked of the stream's leader, so it is never stale; with `direct_reads` (no patterns
        then), of any replica, which may be behind for a moment.

        Raises:
            BusUnavailableError: no answer (with `direct_reads` also: no such stream).
            BusError: no such stream, or not permitted.
        """
        direct = self._direct_reads
        check_subject(subject, wildcards=not direct)
        asked = f"{self._address.api}.{'DIRECT' if direct else 'STREAM.MSG'}.GET.{stream}"
        if direct:
            asked = f"{asked}.{subject}"
        try:
            raw = await self._call(asked, lambda js: js.get_last_msg(stream, subject, direct))
        except _RefusedError as error:
            if error.no_message:
                return None
            raise
        assert raw.time is not None
        return _message(subject, raw.seq or 0, raw.time.timestamp(), raw.data, raw.headers)

    async def last_sequence(self, stream: str) -> int:
        """Sequence of the stream's last message; 0 if it is empty.

        Raises:
            BusUnavailableError: no answer.
            BusError: no such stream, or not permitted.
        """
        return (await self._stream_info(stream)).state.last_seq

    async def filled(self, stream: str) -> Filled:
        """How full a stream is.

        Raises:
            BusUnavailableError: no answer.
            BusError: no such stream, or not permitted.
        """
        info = await self._stream_info(stream)
        return Filled(info.state.bytes, max(info.config.max_bytes or 0, 0))

    async def trim(self, stream: str, subject: str, below_seq: int) -> None:
        """Remove messages of `subject` (no wildcards) below `below_seq`, but never its last one.

        Raises:
            BusUnavailableError: no answer; nothing, some or all was removed: call again.
            BusError: no such stream, or not permitted.
        """
        last = await self.last(stream, subject)
        # Newer messages may come meanwhile, older ones cannot: the last one is safe.
        end = min(below_seq, last.seq) if last is not None else 0
        if end > 1:
            await self._call(
                f"{self._address.api}.STREAM.PURGE.{stream}",
                lambda js: js.purge_stream(stream, seq=end, subject=subject),
            )

    async def restore(
        self,
        stream: str,
        subjects: list[str],
        limits: StreamLimits,
        messages: Iterable[Message],
    ) -> int:
        """Create `stream` with the messages of one that was exported; how many it has now.

        A server gives a message the time of its arrival and the next number: the time it had
        goes into a header, which reading prefers, and gaps are filled and emptied again. Message
        ids too go into a header of our own, since the server would drop those it meets twice.

        Raises:
            BusError: there is such a stream already, or it does not take a message.
            BusUnavailableError: no answer; the stream may be there in part.
        """
        with contextlib.suppress(StreamMissingError):
            await self._stream_info(stream)
            raise stream_exists(stream)
        await self.create_stream(stream, subjects, limits)
        try:
            return await self._fill(stream, _filler(subjects), messages)
        except BaseException:
            with contextlib.suppress(BusError):
                asked = f"{self._address.api}.STREAM.DELETE.{stream}"
                await self._call(asked, lambda js: js.delete_stream(stream))
            raise

    async def _fill(self, stream: str, filler: str, messages: Iterable[Message]) -> int:
        """Give an empty stream these messages under their own numbers; how many."""
        count = last_seq = 0
        batch: list[tuple[int, str, bytes, dict[str, str]]] = []
        for message in messages:
            for seq in range(last_seq + 1, message.seq):
                batch.append((seq, filler, b"", {}))
                if len(batch) >= _RESTORED_AT_ONCE:
                    await self._append(batch)
            headers = {_STORED_AT: repr(message.time_s), _EXPORTED_ID: message.msg_id}
            batch.append((message.seq, message.subject, message.payload, headers))
            count, last_seq = count + 1, message.seq
            if len(batch) >= _RESTORED_AT_ONCE:
                await self._append(batch)
        await self._append(batch)
        if last_seq > count:
            await self._call(
                f"{self._address.api}.STREAM.PURGE.{stream}",
                lambda js: js.purge_stream(stream, subject=filler),
            )
        return count

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        ack = await self._call(
            subject, lambda js: js.publish(subject, payload, headers=headers or None)
        )
        return ack.seq

    async def _append(self, batch: list[tuple[int, str, bytes, dict[str, str]]]) -> None:
        """Publish a batch in its order, and empty it.

        Raises:
            BusError: something else was stored between.
        """
        sent = [self._store(subject, payload, headers) for _, subject, payload, headers in batch]
        for (seq, subject, *_), stored in zip(batch, await asyncio.gather(*sent), strict=True):
            if stored != seq:
                raise BusError(f"a message of {subject!r} got sequence {stored}, not {seq}")
        batch.clear()

    async def read(
        self, stream: str, subjects: list[str], start_seq: int
    ) -> AsyncIterator[Message]:
        """Messages of `subjects` from `start_seq` (1 is the first) on; ends when the bus closes.

        Outlives lost connections, servers and consumers.

        Raises:
            BusError: no such stream, bad or overlapping subjects, not permitted, or the position
                is more than one beyond the stream's end (the server lost messages).
        """
        check_patterns(subjects)
        position, pause = max(start_seq, 1), _Pause()
        cursor: _Cursor | None = None
        try:
            while not self._closed:
                try:
                    if cursor is None:
                        cursor = await self._open_cursor(stream, subjects, position)
                    message = await cursor.next()
                except BusUnavailableError:
                    if cursor is not None:
                        await cursor.close()
                        pause.reset_after(cursor.age_s())
                    cursor = None
                    await self._wait_linked(pause)
                    continue
                position = message.seq + 1
                yield message
        except BusError:
            if not self._closed:
                raise
        finally:
            if cursor is not None:
                await cursor.close()

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Tell whoever listens; dropped when there is no connection or it is congested.

        Raises:
            BusError: `subject` is none.
        """
        check_subject(subject)
        link = self._link
        if link is None or link.client.pending_data_size > _BROADCAST_BACKLOG_BYTES:
            return
        with contextlib.suppress(BusError):
            await self._call(subject, lambda _: link.client.publish(subject, bytes(payload)))

    async def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """(subject, payload) of every broadcast that matches `subject`; ends when the bus closes.

        It hears what reaches the server after the first `anext`, and misses what is sent while
        the connection is down; beyond `LISTEN_BACKLOG` unread messages new ones are dropped.

        Raises:
            BusError: `subject` is no pattern, or not permitted.
        """
        check_subject(subject, wildcards=True)
        pause, loop = _Pause(), asyncio.get_running_loop()
        while not self._closed:
            started = loop.time()
            try:
                async with contextlib.aclosing(_listen_on(self._current(), subject)) as heard:
                    async for message in heard:
                        yield message
            except BusUnavailableError:
                pause.reset_after(loop.time() - started)
                await self._wait_linked(pause)

    async def close(self) -> None:
        """Release the connection; reads and listeners end."""
        self._closed = True
        self._linked.set()
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        if self._link is not None:
            await self._link.close()
            self._link = None

    def _current(self) -> _Link:
        """The link, or why there is none."""
        if self._closed:
            raise BusError("this bus is closed")
        if self._link is None:
            # A new one each time: a raised error collects its traceback.
            raise type(self._outage)(self._outage.message, hint=self._outage.hint)
        return self._link

    async def _keep_linked(self, link: _Link) -> None:
        """Replace the link whenever it is lost."""
        while True:
            await link.wait_lost()
            self._link = None
            self._linked.clear()
            await link.close()
            link = await self._dial()
            self._link = link
            self._linked.set()

    async def _dial(self) -> _Link:
        pause, refusals = _Pause(), 0
        while True:
            await pause.wait()
            link = _Link(self._address)
            try:
                await link.open(_DIAL_TIMEOUT_S)
            except (BusError, ConfigError) as error:
                refusals = 0 if error.retry else refusals + 1
                if refusals != 1:  # While it reloads, a server refuses whom it knows.
                    self._outage = (
                        error
                        if isinstance(error, BusError)
                        else BusError(error.message, hint=error.hint)
                    )
                continue
            self._outage = BusUnavailableError(f"the connection to {self._address.shown()} is lost")
            return link

    async def _wait_linked(self, pause: _Pause) -> None:
        """Wait before another attempt; raise if the server does not want us any more."""
        await pause.wait()
        while not self._linked.is_set():
            if not self._outage.retry:
                self._current()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._linked.wait()

    async def _call(self, subject: str, make: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        """Run one request on the link; its failure as one of our errors."""
        link, since = self._current(), asyncio.get_running_loop().time()
        # A task of its own, because nats-py swallows a cancellation while it waits to flush.
        call = asyncio.ensure_future(make(link.js))
        # Looked at also if we are cancelled just as it fails, or asyncio complains in the log.
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        lost = asyncio.ensure_future(link.lost.wait())
        try:
            await asyncio.wait(
                {call, lost}, timeout=CALL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not call.done():
                raise self._no_answer(link, subject, since)
            return call.result()
        except TimeoutError as error:
            raise self._no_answer(link, subject, since) from error
        except nats.errors.Error as error:
            raise _ours(error, subject) from error
        finally:
            call.cancel()
            lost.cancel()

    def _no_answer(self, link: _Link, subject: str, since: float) -> BusError:
        if link.lost.is_set():
            return BusUnavailableError(f"the connection was lost during a request on {subject!r}")
        return link.denial(subject, since) or BusUnavailableError(
            f"no answer on {subject!r} within {CALL_TIMEOUT_S:g} s",
            hint="the server is slow, cut off, or its cluster elects a leader: "
            "runbooks/nats-node-lost.md",
        )

    async def _stream_info(self, stream: str) -> api.StreamInfo:
        asked = f"{self._address.api}.STREAM.INFO.{stream}"
        return await self._call(asked, lambda js: js.stream_info(stream))

    async def _check_end(self, stream: str, position: int) -> None:
        """Refuse to wait beyond the end: a server would skip all messages up to the position."""
        if position == 1 or not self._can_see_end:
            return
        try:
            last = await self.last_sequence(stream)
        except (BusUnavailableError, _RefusedError):
            raise
        except BusError:
            self._can_see_end = False  # not permitted: then the check is not to be had
            return
        if position > last + 1:
            raise stream_went_back(stream, position, last)

    async def _open_cursor(self, stream: str, subjects: list[str], position: int) -> "_Cursor":
        await self._check_end(stream, position)
        link = self._current()
        consumer = f"{_token(self.name)}-{secrets.token_hex(8)}"
        config = api.ConsumerConfig(
            name=consumer,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=position,
            ack_policy=api.AckPolicy.NONE,
            filter_subject=subjects[0] if len(subjects) == 1 else None,
            filter_subjects=subjects if len(subjects) > 1 else None,
            inactive_threshold=_CONSUMER_IDLE_S,
            mem_storage=True,
            num_replicas=1,
        )
        asked = f"{self._address.api}.CONSUMER.CREATE.{stream}.{consumer}"
        if len(subjects) == 1:
            asked = f"{asked}.{subjects[0]}"
        await self._call(asked, lambda js: js.add_consumer(stream, config))
        return _Cursor(link, stream, consumer, position)


async def connect(
    url: str,
    *,
    name: str,
    credentials: str | None = None,
    tls_ca: str | None = None,
    connect_timeout_s: float = 10.0,
    inbox_prefix: str | None = None,
    direct_reads: bool = False,
) -> NatsBus:
    """Connect to NATS; afterwards the connection is kept up for ever.

    Args:
        url: one server or several, joined by ','; user and password may stand in it.
        name: who this is, in the server's monitoring and in consumers' names.
        credentials: path of a file of `diloco auth`, or of a `.creds` file of NATS's own tools;
            read at every connection.
        tls_ca: path of the certificates that the server's must be signed by; the system's if None.
            Without it, `tls://` asks for TLS, and `nats://` leaves that to the server.
        connect_timeout_s: seconds until the first connection must stand.
        inbox_prefix: first tokens of the subjects that answers come to; if None, as the credentials
            say, or `_INBOX`.
        direct_reads: let any replica answer `last`, for credentials without the right to
            `$JS.API.STREAM.MSG.GET`; those of a learner imply it.

    Raises:
        BusUnavailableError: no server answered in time.
        BusError: the server refused the credentials.
        ConfigError: the URL or the credentials cannot be used.
    """
    own = _own(credentials)
    address = _Address(
        url,
        name,
        None if credentials is None else Path(credentials),
        inbox_prefix or (own.inbox_prefix if own else "_INBOX"),
        own.api_prefix if own else OWN_API,
        None if tls_ca is None else Path(tls_ca),
    )
    _check_address(address)
    loop, pause = asyncio.get_running_loop(), _Pause()
    deadline = loop.time() + connect_timeout_s
    while True:
        link = _Link(address)
        try:
            await link.open(max(deadline - loop.time(), 0.1))
        except BusUnavailableError:
            if loop.time() >= deadline:
                raise
            await pause.wait(deadline - loop.time())
            continue
        return NatsBus(
            address, link, direct_reads=direct_reads or (own is not None and own.direct_reads)
        )


class _Cursor:
    """One pull consumer; every irregularity is a `BusUnavailableError`."""

    def __init__(self, link: _Link, stream: str, consumer: str, position: int) -> None:
        self._link = link
        self._path = f"{stream}.{consumer}"
        self._position = position
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._granted = 0  # messages the server may still send for the pull in progress
        self._delivered = 0
        self._made_at = self._pulled_at = asyncio.get_running_loop().time()
        self._inbox: Subscription | None = None
        link.queues.add(self._queue)

    def age_s(self) -> float:
        """Seconds since it was made."""
        return asyncio.get_running_loop().time() - self._made_at

    async def next(self) -> Message:
        """The next message, however long it takes."""
        while True:
            if self._granted == 0:
                await self._pull()
            raw = await self._take()
            status = (raw.headers or {}).get(api.Header.STATUS.value)
            if status is None:
                return self._accept(raw)
            self._note(status, raw.headers or {})

    async def close(self) -> None:
        """Remove the consumer, if there is still a connection to say so."""
        self._link.queues.discard(self._queue)
        if not self._link.lost.is_set():
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    if self._inbox is not None:
                        await self._inbox.unsubscribe()
                    # Without asking for an answer: the server drops it when idle in any case.
                    await self._link.client.publish(
                        f"{self._link.api}.CONSUMER.DELETE.{self._path}"
                    )

    async def _pull(self) -> None:
        request = {
            "batch": _PULL_BATCH,
            "max_bytes": max(_PULL_BYTES, 2 * self._link.client.max_payload),
            "expires": int(_PULL_EXPIRES_S * 1e9),
            "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
        }
        subject = f"{self._link.api}.CONSUMER.MSG.NEXT.{self._path}"
        client, answered = self._link.client, self._inbox
        self._pulled_at = asyncio.get_running_loop().time()
        with _vendor_errors(subject):
            # An inbox for each pull: across accounts the server keeps a way back to it for as long
            # as somebody listens there.
            inbox = client.new_inbox()
            self._inbox = await client.subscribe(inbox, cb=self._queue.put)
            await client.publish(subject, json.dumps(request).encode(), inbox)
            if answered is not None:
                await answered.unsubscribe()
        self._granted = _PULL_BATCH

    def _note(self, status: str, headers: dict[str, str]) -> None:
        """Take notice of what the server says about a pull."""
        description = headers.get(api.Header.DESCRIPTION.value, "")
        ended = status in {"404", "408"} or description in _PULL_ENDED
        if ended and headers.get("Nats-Pending-Messages") != "0":
            self._granted = 0
        # None pending: it is about the pull before, whose last message has been counted.
        elif not ended and status != "100":
            raise BusUnavailableError(f"consumer {self._path}: {status} {description}")

    async def _take(self) -> Msg:
        if self._link.lost.is_set() and self._queue.empty():
            raise BusUnavailableError("the connection is lost")
        try:
            async with asyncio.timeout(_SILENCE_S):
                raw = await self._queue.get()
        except TimeoutError:
            subject = f"{self._link.api}.CONSUMER.MSG.NEXT.{self._path}"
            denial = self._link.denial(subject, self._pulled_at)
            raise denial or BusUnavailableError(f"consumer {self._path} is silent") from None
        if raw is None:
            raise BusUnavailableError("the connection is lost")
        return raw

    def _accept(self, raw: Msg) -> Message:
        """Check that nothing is missing before `raw`, and take it."""
        seq, consumer_seq, time_ns = _place(raw.reply)
        if consumer_seq != self._delivered + 1 or seq < self._position:
            raise BusUnavailableError(
                f"consumer {self._path} sent number {consumer_seq} after {self._delivered}"
            )
        self._granted -= 1
        self._delivered, self._position = consumer_seq, seq + 1
        # Whole microseconds, as `last` has them, so that both give one message the same time.
        return _message(raw.subject, seq, time_ns // 1000 / 1e6, raw.data, raw.headers)


def _filler(subjects: list[str]) -> str:
    """A subject of the stream that no message has: no name has capitals."""
    for pattern in subjects:
        if {"*", ">"} & {*pattern.split(".")}:
            return pattern.replace("*", "GAP").replace(">", "GAP")
    raise BusError(f"none of the subjects {subjects} has room for what fills gaps")


def _message(
    subject: str, seq: int, time_s: float, data: bytes | None, headers: dict[str, str] | None
) -> Message:
    """A message as it was published, here or where the stream was exported."""
    known = headers or {}
    return Message(
        subject,
        seq,
        float(known.get(_STORED_AT, time_s)),
        data or b"",
        known.get(api.Header.MSG_ID.value) or known.get(_EXPORTED_ID, ""),
    )


class _RefusedError(BusError):
    """The server answered with an error; its number tells which."""

    err_code = 0
    no_message = False


class _NoStreamError(_RefusedError, StreamMissingError):
    """The server has no stream of that name."""


async def _listen_on(link: _Link, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """Broadcasts heard on `link`; BusUnavailableError once it is lost."""
    queue: asyncio.Queue[Msg | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    since = loop.time()

    async def keep(raw: Msg) -> None:
        if queue.qsize() < LISTEN_BACKLOG:
            queue.put_nowait(raw)

    with _vendor_errors(subject):
        subscription = await link.client.subscribe(subject, cb=keep)
    link.queues.add(queue)
    try:
        while not link.lost.is_set():
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    raw = await queue.get()
            except TimeoutError:
                if denial := link.denial(subject, since):
                    raise denial from None
                continue
            if raw is not None:
                yield raw.subject, raw.data
        raise BusUnavailableError("the connection is lost")
    finally:
        link.queues.discard(queue)
        with contextlib.suppress(nats.errors.Error):
            await subscription.unsubscribe()


def _look_at(task: "asyncio.Task[None]") -> None:
    """Take note of how one of nats-py's tasks ended, or asyncio would write a trace of it.

    The loss of its link is noticed elsewhere.
    """
    if not task.cancelled():
        task.exception()


def _mark_tls(client: Client) -> None:
    """Tell asyncio that the stream has become TLS: nats-py does not, and asyncio would warn."""
    transport: Any = client._transport  # noqa: SLF001
    writer = transport._io_writer  # noqa: SLF001
    if writer.get_extra_info("sslcontext") is not None:
        writer.transport.get_protocol()._over_ssl = True  # noqa: SLF001


@contextlib.contextmanager
def _vendor_errors(subject: str) -> Iterator[None]:
    try:
        yield
    except nats.errors.Error as error:
        raise _ours(error, subject) from error


def _ours(error: nats.errors.Error, subject: str) -> BusError:
    """Our error for one of nats-py's, by whose fault it is and whether to retry."""
    text = f"{subject!r}: {error}"
    if isinstance(error, NoStreamResponseError | nats.errors.NoRespondersError):
        return BusUnavailableError(
            f"{subject!r}: no responders",
            hint="no stream takes this subject, or its leader is being elected; create the run",
        )
    if isinstance(error, APIError) and (error.err_code, error.description) == _STREAM_FULL:
        return stream_is_full(subject)
    passing = isinstance(error, APIError) and (
        error.code == 503 or error.err_code == _STILL_IN_PROCESS
    )
    if isinstance(error, APIError) and not passing:
        if error.err_code == _STREAM_NOT_FOUND:
            return _NoStreamError(text, hint="create the run first, or use the server it is on")
        refused = _RefusedError(text)
        refused.err_code = error.err_code or 0
        # A direct get says only 404; from the leader it is 10037, where 10059 is 'no stream'.
        refused.no_message = isinstance(error, NotFoundError) and error.err_code in {None, 10037}
        return refused
    if isinstance(error, nats.errors.MaxPayloadError):
        return BusError(f"{subject!r}: the message is larger than the server takes")
    if isinstance(error, nats.errors.BadSubjectError | nats.errors.BadHeaderError):
        return BusError(text)
    return BusUnavailableError(text)


def _check_address(address: _Address) -> None:
    for part in address.url.split(","):
        parsed = urllib.parse.urlsplit(part)
        if parsed.scheme not in {"nats", "tls"} or not parsed.hostname:
            raise ConfigError(
                f"{address.shown()!r} is not a NATS URL", hint="write nats://host:4222"
            )
    try:
        address.tls()
    except OSError as error:
        raise ConfigError(
            f"cannot use the certificates in {str(address.tls_ca)!r}: {error}",
            hint="bus.tls_ca is a PEM file with the certificate of the server's authority",
        ) from error


def _own(path: str | None) -> Credentials | None:
    """The credentials in a file of ours, if that is what it is."""
    return None if path is None else load_credentials(Path(path))


def _stream_config(stream: str, subjects: list[str], limits: StreamLimits) -> api.StreamConfig:
    bounded = (limits.max_age_s > 0 or limits.max_bytes > 0) and not limits.keep_old
    return api.StreamConfig(
        name=stream,
        subjects=subjects,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD if bounded else api.DiscardPolicy.NEW,
        max_age=limits.max_age_s,
        max_bytes=limits.max_bytes or -1,
        max_msg_size=limits.max_message_bytes or -1,
        duplicate_window=limits.duplicate_window_s,
        num_replicas=limits.replicas,
        allow_direct=True,
        # With these NATS's own tools take it for a bucket of keys and values.
        max_msgs_per_subject=1 if limits.last_only else -1,
        allow_msg_ttl=limits.last_only,
        allow_rollup_hdrs=limits.last_only,
        deny_delete=limits.last_only,
    )


def _settings(config: api.StreamConfig) -> dict[str, object]:
    """An existing stream's settings in the words of `stream_settings`."""
    return stream_settings(
        config.subjects or [],
        StreamLimits(
            max_age_s=config.max_age or 0.0,
            max_bytes=max(config.max_bytes or 0, 0),
            max_message_bytes=max(config.max_msg_size or 0, 0),
            duplicate_window_s=config.duplicate_window,
            replicas=config.num_replicas or 1,
            last_only=config.max_msgs_per_subject == 1,
            keep_old=(config.max_bytes or 0) > 0 and config.discard == api.DiscardPolicy.NEW,
        ),
    )


def _place(reply: str) -> tuple[int, int, int]:
    """(stream sequence, consumer sequence, time in ns) from a delivery's acknowledge subject."""
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7  # newer servers put domain and account before
    return int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 2])


def _token(name: str) -> str:
    """`name` as part of a consumer's name."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64]
