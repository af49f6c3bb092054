"""The NATS backend of the bus, over one connection."""

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from nats.js import api

from diloco.common.process import log
from diloco.common.process.config import BusSection
from diloco.common.process.credentials import OWN_API, Credentials, Role, load_credentials
from diloco.common.process.retry import Runtime
from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    ConfigError,
    StreamMissingError,
    SwapLostError,
)
from diloco.common.protocol.wire import GREATEST
from diloco.common.storage.bus.jetstream.connection import (
    MOST_READERS,
    Connection,
    message_of,
    publish_headers,
    states_stored_time,
    store,
    stream_info,
    stream_names,
)
from diloco.common.storage.bus.jetstream.imported import (
    fill,
    imported_to,
    mark_imported,
)
from diloco.common.storage.bus.jetstream.link import (
    CALL_TIMEOUT_S,
    STREAM_EXISTS,
    TOO_MANY_READERS,
    WRONG_LAST_SEQUENCE,
    Address,
    Backoff,
    Link,
    RefusedError,
    check_address,
    listen_on,
)
from diloco.common.storage.bus.jetstream.pull_consumer import Cursor, Cursors
from diloco.common.storage.bus.jetstream.stream_and_consumer_config import (
    settings_of,
    stream_config,
)
from diloco.common.storage.bus.protocol import (
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
    stream_settings,
)

_BROADCAST_BACKLOG_BYTES = 1 << 20
_LAST_SEQUENCE = re.compile(r"wrong last sequence: (\d+)")


class NatsBus:
    """A `Bus` on NATS JetStream; `connect` makes one.

    Attributes:
        name: the client's name in the server's monitoring.
    """

    def __init__(
        self, address: Address, link: Link, own: Credentials | None, *, direct_reads: bool
    ) -> None:
        self.name = address.name
        self._api = address.api
        self._direct_reads = direct_reads
        self._connection = Connection(address, link)
        self._cursors = Cursors(self._connection, own)

    async def create_stream(
        self, stream: str, subjects: list[str], limits: StreamLimits, *, first_seq: int = 1
    ) -> None:
        """Implements `Bus.create_stream`.

        A stream with `keep_old`, or without a limit on age or size, refuses new messages when its
        limit is reached or the disk is full; other streams drop their oldest messages.
        """
        check_patterns(subjects)
        check_limits(limits)
        try:
            try:
                await self._add_stream(
                    stream_config(stream, subjects, limits, first_seq, MOST_READERS)
                )
            except RefusedError as error:
                if error.err_code != TOO_MANY_READERS:
                    raise
                # The account allows fewer readers: leave the number to the server.
                await self._add_stream(stream_config(stream, subjects, limits, first_seq, -1))
        except RefusedError as error:
            if error.err_code != STREAM_EXISTS:
                raise
            info = await stream_info(self._connection, stream)
            check_settings(stream, settings_of(info.config), stream_settings(subjects, limits))

    async def _add_stream(self, wanted: api.StreamConfig) -> None:
        await self._connection.call(
            f"{self._api}.STREAM.CREATE.{wanted.name}", lambda js: js.add_stream(wanted)
        )

    async def streams(self) -> list[str]:
        """Implements `Bus.streams`."""
        return sorted(await stream_names(self._connection))

    async def remove_stream(self, stream: str) -> None:
        """Implements `Bus.remove_stream`."""
        subject = f"{self._api}.STREAM.DELETE.{stream}"
        with contextlib.suppress(StreamMissingError):
            await self._connection.call(subject, lambda js: js.delete_stream(stream))

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """Implements `Bus.publish`; waits at most `CALL_TIMEOUT_S` for an answer.

        A failed attempt is not repeated: after `BusUnavailableError` call this method again with
        the same `msg_id`. `SwapLostError` may then mean that the first call had stored the message:
        check with `last`.
        """
        check_subject(subject)
        check_ttl(ttl_s, allowed=True)
        try:
            ack = await store(
                self._connection,
                subject,
                bytes(payload),
                publish_headers(msg_id, expected_last, ttl_s),
            )
        except RefusedError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                last = _LAST_SEQUENCE.search(error.message)
                raise SwapLostError(
                    subject, expected_last or 0, None if last is None else int(last[1])
                ) from error
            raise
        if ack.duplicate and not await self._same_message_stored(
            ack.stream, subject, ack.seq, payload
        ):
            raise id_taken(subject, ack.seq)
        return ack.seq

    async def _same_message_stored(
        self, stream: str, subject: str, seq: int, payload: bytes
    ) -> bool:
        """True if the message at `seq` of `stream` has this subject and this payload.

        Raises:
            BusUnavailableError: no answer.
        """
        try:
            await self.publish(subject, b"", expected_last=GREATEST)
        except SwapLostError as refused:
            # The leader's refusal states the subject's last sequence, so the read below ends.
            if refused.last is not None and refused.last < seq:
                return False
        try:
            async with (
                asyncio.timeout(CALL_TIMEOUT_S),
                contextlib.aclosing(self.read(stream, [subject], seq)) as messages,  # type: ignore[type-var]
            ):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration) as error:
            raise BusUnavailableError(f"sequence {seq} of {stream!r} cannot be read") from error
        return first.seq == seq and first.payload == payload

    async def last(self, stream: str, subject: str) -> Message | None:
        """Implements `Bus.last`; the stream's leader answers.

        With `direct_reads` any replica answers; then `subject` must not be a pattern, and the
        result is None also if there is no such stream.
        """
        direct = self._direct_reads
        check_subject(subject, wildcards=not direct)
        asked = f"{self._api}.{'DIRECT' if direct else 'STREAM.MSG'}.GET.{stream}"
        if direct:
            asked = f"{asked}.{subject}"
        try:
            raw = await self._connection.call(
                asked, lambda js: js.get_last_msg(stream, subject, direct)
            )
        except RefusedError as error:
            if error.no_message:
                return None
            raise
        assert raw.time is not None
        known = (
            await imported_to(self._connection, stream) if states_stored_time(raw.headers) else 0
        )
        time_s = raw.time.timestamp()
        return message_of(subject, raw.seq or 0, time_s, raw.data, raw.headers, known)

    async def last_sequence(self, stream: str) -> int:
        """Implements `Bus.last_sequence`."""
        return (await stream_info(self._connection, stream)).state.last_seq

    async def filled(self, stream: str) -> Filled:
        """Implements `Bus.filled`."""
        info = await stream_info(self._connection, stream)
        return Filled(
            info.state.bytes,
            max(info.config.max_bytes or 0, 0),
            info.state.consumer_count,
            max(info.config.max_consumers or 0, 0),
        )

    async def remove_readers(self, stream: str, prefix: str) -> int:
        """Removes all consumers of `stream` whose names begin with `prefix`; returns their number.

        Raises:
            BusUnavailableError: no answer.
        """
        return await self._cursors.remove(stream, prefix)

    async def trim(self, stream: str, subject: str, below_seq: int) -> None:
        """Implements `Bus.trim`."""
        check_subject(subject)
        last = await self.last(stream, subject)
        # Only newer messages can come meanwhile, so the subject's last message stays.
        end = min(below_seq, last.seq) if last is not None else 0
        if end > 1:
            await self._connection.call(
                f"{self._api}.STREAM.PURGE.{stream}",
                lambda js: js.purge_stream(stream, seq=end, subject=subject),
            )

    async def restore(
        self,
        stream: str,
        subjects: list[str],
        limits: StreamLimits,
        messages: Iterable[Message],
    ) -> int:
        """Implements `Bus.restore`.

        A server gives each message a new time and the next sequence. So the exported time goes into
        a header, which readers prefer, and gaps are filled with messages that are then removed. The
        message id goes into a header of this project, since a server would drop messages with
        repeated ids.
        """
        with contextlib.suppress(StreamMissingError):
            await stream_info(self._connection, stream)
            raise stream_exists(stream)
        known = iter(messages)
        first = list(itertools.islice(known, 1))
        first_seq = first[0].seq if first else 1
        await self.create_stream(stream, subjects, limits, first_seq=first_seq)
        try:
            messages = itertools.chain(first, known)
            count = await fill(self._connection, stream, subjects, messages, first_seq)
            made = await stream_info(self._connection, stream)
            await mark_imported(self._connection, made.config, made.state.last_seq)
        except BaseException:
            with contextlib.suppress(BusError):
                asked = f"{self._api}.STREAM.DELETE.{stream}"
                await self._connection.call(asked, lambda js: js.delete_stream(stream))
            raise
        return count

    async def read(
        self, stream: str, subjects: list[str], start_seq: int
    ) -> AsyncIterator[Message]:
        """Implements `Bus.read`; reconnects and makes new consumers; ends when the bus closes."""
        check_patterns(subjects)
        position, backoff = max(start_seq, 1), Backoff()
        cursor: Cursor | None = None
        try:
            while not self._connection.closed:
                try:
                    if cursor is None:
                        cursor = await self._cursors.open(stream, subjects, position)
                    message = await cursor.next()
                except BusUnavailableError:
                    if cursor is not None:
                        await cursor.close()
                        backoff.reset_after(cursor.age_s())
                    cursor = None
                    await self._connection.wait_linked(backoff)
                    continue
                position = message.seq + 1
                yield message
        except BusError:
            if not self._connection.closed:
                raise
        finally:
            if cursor is not None:
                await cursor.close()

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Implements `Bus.broadcast`; drops the message if more than 1 MiB is unsent already."""
        check_subject(subject)
        link = self._connection.link
        if link is None or link.client.pending_data_size > _BROADCAST_BACKLOG_BYTES:
            return
        with contextlib.suppress(BusError):
            await self._connection.call(
                subject, lambda _: link.client.publish(subject, bytes(payload))
            )

    async def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """Implements `Bus.listen`; ends when the bus closes.

        Yields broadcasts that reach the server after the first `anext`. Broadcasts sent while the
        connection is down are missed; beyond `LISTEN_BACKLOG` unread messages, new messages are
        dropped.
        """
        check_subject(subject, wildcards=True)
        backoff, loop = Backoff(), asyncio.get_running_loop()
        while not self._connection.closed:
            started = loop.time()
            try:
                async with contextlib.aclosing(
                    listen_on(self._connection.current(), subject)
                ) as heard:
                    async for message in heard:
                        yield message
            except BusUnavailableError:
                backoff.reset_after(loop.time() - started)
                await self._connection.wait_linked(backoff)

    async def close(self) -> None:
        """Releases the connection; reads and listeners end."""
        await self._connection.close()


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
    """Connects to NATS; the bus that it returns reconnects by itself until it is closed.

    Args:
        url: one server or several, joined by ','; it may contain user and password.
        name: the client's name in the server's monitoring and in consumers' names.
        credentials: path of a file of `diloco auth`, or of a `.creds` file of NATS's own tools;
            read at every connection.
        tls_ca: path of the certificates (PEM) of the authority that signed the server's. If None,
            the system's authorities are trusted; `tls://` then asks for TLS, and `nats://` leaves
            the choice to the server.
        connect_timeout_s: time limit for the first connection, in seconds.
        inbox_prefix: first tokens of the subjects of answers; if None, the prefix that the
            credentials name, or `_INBOX`.
        direct_reads: let any replica answer `last`, for credentials without the right to
            `$JS.API.STREAM.MSG.GET`; always so with a learner's credentials.

    Raises:
        BusUnavailableError: no server answered in time.
        BusError: the server refused the credentials.
        ConfigError: the URL or the credentials cannot be used.
    """
    own = None if credentials is None else load_credentials(Path(credentials))
    address = Address(
        url,
        name,
        None if credentials is None else Path(credentials),
        inbox_prefix or (own.inbox_prefix if own else "_INBOX"),
        own.api_prefix if own else OWN_API,
        None if tls_ca is None else Path(tls_ca),
    )
    check_address(address)
    loop, backoff = asyncio.get_running_loop(), Backoff()
    deadline = loop.time() + connect_timeout_s
    while True:
        link = Link(address)
        try:
            await link.open(max(deadline - loop.time(), 0.1))
        except BusUnavailableError:
            if loop.time() >= deadline:
                raise
            await backoff.wait(deadline - loop.time())
            continue
        fenced = direct_reads or (own is not None and own.direct_reads)
        return NatsBus(address, link, own, direct_reads=fenced)


ATTEMPT_S = 5.0


async def connect_or_wait(
    section: BusSection, role: Role, name: str, runtime: Runtime, logger: log.Logger
) -> NatsBus:
    """Connects to NATS as a learner or an aggregator; tries again until a server answers.

    Args:
        section: the servers' URL and the credentials.
        role: the daemon's role.
        name: the daemon's name.
        runtime: retries the attempts.
        logger: the log.

    Raises:
        BusError: the server refused the credentials.
        ConfigError: the URL or the credentials cannot be used, or are those of another role or
            learner.
    """
    _check_owner(section, role, name, logger)

    async def attempt() -> NatsBus:
        return await connect(
            section.url,
            name=name,
            credentials=section.credentials,
            tls_ca=section.tls_ca,
            connect_timeout_s=ATTEMPT_S,
        )

    return await runtime.retry("connecting to NATS", attempt, logger=logger)


def _check_owner(section: BusSection, role: Role, name: str, logger: log.Logger) -> None:
    """Refuses credentials of another role or learner, before they are used.

    With an aggregator's credentials a learner could join, which would supersede the life of the
    learner of that name, but could not send updates. An operator's credentials permit everything:
    the daemon logs a warning and uses them.

    Raises:
        ConfigError: the credentials are those of another role or learner.
    """
    own = None if section.credentials is None else load_credentials(Path(section.credentials))
    if own is None:
        return
    if own.role == "operator":
        logger.warning("operators_credentials", path=section.credentials, instead_of=role)
    # No subject contains an aggregator's name, so its credentials may be for another name.
    elif own.role != role or (role == "learner" and own.identity != name):
        raise ConfigError(
            f"{section.credentials!r} has the credentials of {own.role} {own.identity!r}, not "
            f"those of {role} {name!r}",
            hint=f"name the file that `diloco auth add-{role}` made for {name!r}, in "
            "bus.credentials or DILOCO_BUS_CREDENTIALS: runbooks/credentials.md",
        )
