"""Reads a stream through a pull consumer on the server, until the first irregularity.

An irregularity is a gap in the consumer's numbering, an error status, silence, or a lost link; the
caller then opens a new cursor at the next sequence.
"""

import asyncio
import contextlib
import json
import re
import secrets
from collections.abc import Awaitable, Callable
from functools import partial

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api

from diloco.common.process.credentials import Credentials
from diloco.common.protocol.errors import BusError, BusUnavailableError
from diloco.common.storage.bus.jetstream.connection import (
    Connection,
    message_of,
    states_stored_time,
    stream_info,
)
from diloco.common.storage.bus.jetstream.imported import imported_to
from diloco.common.storage.bus.jetstream.link import (
    CALL_TIMEOUT_S,
    Link,
    RefusedError,
    vendor_errors,
)
from diloco.common.storage.bus.jetstream.stream_and_consumer_config import (
    CONSUMER_IDLE_S,
    consumer_config,
)
from diloco.common.storage.bus.protocol import Message, stream_went_back

# Messages per pull: few at first, as many readers need one message; then more each time.
_FIRST_BATCH, _PULL_BATCH = 8, 256
_GROWTH = 4
_PULL_BYTES = 8 << 20  # the most bytes of a pull, which ends early if they are reached
_PULL_EXPIRES_S = 5.0
_HEARTBEAT_S = 1.5
_SILENCE_S = 4.0  # after this long without a heartbeat the consumer or the server is gone
_CONSUMER_EXISTS = 10148
# After this long the server has removed consumers that ended processes left behind.
_OTHERS_S = CONSUMER_IDLE_S + CALL_TIMEOUT_S
_PULL_ENDED = {"Batch Completed", "Message Size Exceeds MaxBytes"}


class Cursor:
    """Reads from one pull consumer.

    Args:
        connection: the connection to the servers.
        link: the link over which the consumer was made.
        stream: the stream's name.
        consumer: the consumer's name.
        position: the lowest sequence to read.
        release: called once the consumer's name is free again.
    """

    def __init__(
        self,
        connection: Connection,
        link: Link,
        stream: str,
        consumer: str,
        position: int,
        release: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._release = release
        self._stream = stream
        self._imported_to: int | None = None
        self._link = link
        self._path = f"{stream}.{consumer}"
        self._position = position
        self._queue: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._batch = _FIRST_BATCH
        self._granted = 0  # messages the server may still send for the pull in progress
        self._delivered = 0
        self._made_at = self._pulled_at = asyncio.get_running_loop().time()
        self._inbox: Subscription | None = None
        link.queues.add(self._queue)

    def age_s(self) -> float:
        """Returns the seconds since the cursor was made."""
        return asyncio.get_running_loop().time() - self._made_at

    async def next(self) -> Message:
        """Waits for the next message without a time limit, and returns the message.

        Raises:
            BusUnavailableError: the consumer or the link is lost, or a message is missing.
            BusError: reading is not permitted.
        """
        while True:
            if self._granted == 0:
                await self._pull()
            raw = await self._take()
            # Only deliveries have a reply subject, for their acknowledgement; status messages have
            # none. By headers alone a sender's message could pass for one and stop its readers.
            if raw.reply:
                return await self._accept(raw)
            headers = raw.headers or {}
            self._note(headers.get(api.Header.STATUS.value, ""), headers)

    async def close(self) -> None:
        """Removes the consumer if the link is not lost, and frees its name."""
        self._link.queues.discard(self._queue)
        if not self._link.lost.is_set():
            with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    if self._inbox is not None:
                        await self._inbox.unsubscribe()
                    # Not waiting for an answer, as the server removes idle consumers in any case.
                    await self._link.client.publish(
                        f"{self._link.api}.CONSUMER.DELETE.{self._path}"
                    )
        self._release()

    async def _pull(self) -> None:
        request = {
            "batch": self._batch,
            "max_bytes": max(_PULL_BYTES, 2 * self._link.client.max_payload),
            "expires": int(_PULL_EXPIRES_S * 1e9),
            "idle_heartbeat": int(_HEARTBEAT_S * 1e9),
        }
        subject = f"{self._link.api}.CONSUMER.MSG.NEXT.{self._path}"
        client, answered = self._link.client, self._inbox
        self._pulled_at = asyncio.get_running_loop().time()
        with vendor_errors(subject):
            # A new inbox for each pull: across accounts the server keeps a reply route for as
            # long as somebody subscribes to the inbox.
            inbox = client.new_inbox()
            self._inbox = await client.subscribe(inbox, cb=self._queue.put)
            await client.publish(subject, json.dumps(request).encode(), inbox)
            if answered is not None:
                await answered.unsubscribe()
        self._granted = self._batch
        self._batch = min(_GROWTH * self._batch, _PULL_BATCH)

    def _note(self, status: str, headers: dict[str, str]) -> None:
        """Handles a status message of the server about a pull.

        Raises:
            BusUnavailableError: the status is neither a heartbeat nor the end of a pull.
        """
        description = headers.get(api.Header.DESCRIPTION.value, "")
        ended = status in {"404", "408"} or description in _PULL_ENDED
        if ended and headers.get("Nats-Pending-Messages") != "0":
            self._granted = 0
        # If none is pending, the status is about the pull before, which is complete already.
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

    async def _accept(self, raw: Msg) -> Message:
        """Checks that no message is missing before `raw`; returns `raw` as a `Message`.

        Raises:
            BusUnavailableError: a message is missing.
        """
        if self._imported_to is None and states_stored_time(raw.headers):
            self._imported_to = await imported_to(self._connection, self._stream)
        seq, consumer_seq, time_ns = _place(raw.reply)
        if consumer_seq != self._delivered + 1 or seq < self._position:
            raise BusUnavailableError(
                f"consumer {self._path} sent number {consumer_seq} after {self._delivered}"
            )
        self._granted -= 1
        self._delivered, self._position = consumer_seq, seq + 1
        # Whole microseconds, as in `last`, so that both report the same time of a message.
        time_s = time_ns // 1000 / 1e6
        return message_of(raw.subject, seq, time_s, raw.data, raw.headers, self._imported_to or 0)


class Cursors:
    """Makes the cursors of one bus.

    Args:
        connection: the connection to the servers.
        own: the credentials that prescribe the consumers' names; None: any names.
    """

    def __init__(self, connection: Connection, own: Credentials | None) -> None:
        self._connection = connection
        self._own = own
        self._can_see_end = True
        self._held: set[str] = set()
        self._freed = asyncio.Event()

    async def open(self, stream: str, subjects: list[str], position: int) -> Cursor:
        """Opens a cursor at the first message of `subjects` from sequence `position` on.

        Raises:
            BusError: there is no such stream, reading is not permitted, `position` is more than one
                beyond the end, or other processes use all consumers that the credentials allow.
            BusUnavailableError: no answer.
        """
        await self._check_end(stream, position)
        link = self._connection.current()
        names = self._own.consumer_names(subjects) if self._own else ()
        if not names:
            consumer = f"{_token(self._connection.address.name)}-{secrets.token_hex(8)}"
            names = (consumer,)
        elif self._own is not None and self._own.role == "reader":
            # In random order, so that processes that share the names seldom ask for taken ones.
            names = tuple(secrets.SystemRandom().sample(names, len(names)))
        given_up_s = asyncio.get_running_loop().time() + _OTHERS_S
        while True:
            for name in [one for one in names if f"{stream}.{one}" not in self._held]:
                if await self._create(stream, name, subjects, position):
                    return Cursor(
                        self._connection,
                        link,
                        stream,
                        name,
                        position,
                        partial(self._let_go, f"{stream}.{name}"),
                    )
            await self._make_room(stream, names, given_up_s)

    async def remove(self, stream: str, prefix: str) -> int:
        """Removes all consumers of a stream whose names begin with `prefix`; returns their number.

        Raises:
            BusUnavailableError: no answer.
        """
        path, found = self._connection.address.api, list[str]()

        def next_page(js: JetStreamContext) -> Awaitable[list[api.ConsumerInfo]]:
            page: Awaitable[list[api.ConsumerInfo]] = js.consumers_info(stream, offset=len(found))
            return page

        while page := await self._connection.call(f"{path}.CONSUMER.LIST.{stream}", next_page):
            found += [str(one.name) for one in page]
        removed = [name for name in found if name.startswith(prefix)]
        for name in removed:
            with contextlib.suppress(RefusedError):  # it has ended meanwhile
                await self._delete(stream, name)
        return len(removed)

    async def _delete(self, stream: str, name: str) -> None:
        asked = f"{self._connection.address.api}.CONSUMER.DELETE.{stream}.{name}"
        await self._connection.call(asked, lambda js: js.delete_consumer(stream, name))

    async def _create(self, stream: str, name: str, subjects: list[str], position: int) -> bool:
        """Makes a consumer; returns False if a consumer of that name exists already."""
        api_prefix, path = self._connection.address.api, f"{stream}.{name}"
        asked = f"{api_prefix}.CONSUMER.CREATE.{path}"
        # Permissions to read all subjects name consumers without subjects.
        if len(subjects) == 1 and (self._own is None or self._own.direct_reads):
            asked = f"{asked}.{subjects[0]}"
        config = consumer_config(name, subjects, position).as_dict()
        # "create" is missing in nats-py's request, so the server would change an existing consumer.
        body = json.dumps({"stream_name": stream, "config": config, "action": "create"}).encode()
        self._held.add(path)
        try:
            await self._connection.call(
                asked,
                lambda js: js._api_request(asked, body, timeout=CALL_TIMEOUT_S),  # noqa: SLF001
            )
        except RefusedError as error:
            self._let_go(path)
            if error.err_code == _CONSUMER_EXISTS:
                return False
            raise
        except BaseException:
            self._let_go(path)
            raise
        return True

    def _let_go(self, path: str) -> None:
        self._held.discard(path)
        self._freed.set()
        self._freed = asyncio.Event()

    async def _make_room(self, stream: str, names: tuple[str, ...], given_up_s: float) -> None:
        """Waits for a free consumer name, or deletes a consumer that an earlier life left behind.

        Raises:
            BusError: a reader found no free name until the event loop's time `given_up_s`.
        """
        assert self._own is not None
        others = [name for name in names if f"{stream}.{name}" not in self._held]
        if not others:
            await self._freed.wait()
        elif self._own.role == "learner":
            with contextlib.suppress(RefusedError):  # somebody was quicker
                await self._delete(stream, others[0])
        elif asyncio.get_running_loop().time() < given_up_s:
            await asyncio.sleep(1.0)
        else:
            raise BusError(
                f"too many processes read {stream!r} with the credentials of reader "
                f"{self._own.identity!r}, which are for {self._own.processes} processes",
                hint="end some, or make a reader for more: diloco auth add-reader --processes",
            )

    async def _check_end(self, stream: str, position: int) -> None:
        """Refuses a position more than one beyond the end: a server would skip the messages before.

        Raises:
            BusError: the position is too high.
        """
        if position == 1 or not self._can_see_end:
            return
        try:
            last = (await stream_info(self._connection, stream)).state.last_seq
        except (BusUnavailableError, RefusedError):
            raise
        except BusError:
            self._can_see_end = False  # not permitted to these credentials: read without the check
            return
        if position > last + 1:
            raise stream_went_back(stream, position, last)


def _place(reply: str) -> tuple[int, int, int]:
    """Returns stream sequence, consumer sequence and time in ns from a delivery's reply subject."""
    tokens = reply.split(".")
    first = 5 if len(tokens) == 9 else 7  # newer servers put domain and account before
    return int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 2])


def _token(name: str) -> str:
    """Returns `name` as a part of a consumer's name, unsuitable characters replaced by '-'."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64]
