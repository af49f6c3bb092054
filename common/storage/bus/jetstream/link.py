"""One connection to a server, from its opening until it is lost or closed.

Turns the errors of nats-py and of the server into this project's errors.
"""

import asyncio
import contextlib
import math
import random
import ssl
import urllib.parse
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import (
    APIError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)

from diloco.common.process.credentials import load_credentials
from diloco.common.process.tasks import cancel
from diloco.common.protocol.errors import (
    AccessDeniedError,
    BusError,
    BusUnavailableError,
    ConfigError,
    StreamMissingError,
    SubjectUntakenError,
)
from diloco.common.storage.bus.protocol import LISTEN_BACKLOG, stream_is_full

WRONG_LAST_SEQUENCE = (10071, 10164)
STREAM_EXISTS = 10058
TOO_MANY_READERS = 10026
_STREAM_NOT_FOUND = 10059
# A cluster without a majority has not decided yet on an earlier attempt to store the message.
_STILL_IN_PROCESS = 10158
_NO_ROOM = (10002, 10023, 10028, 10047)  # of the server, of the account, of its disk
# The account has no room for a message: its limit is that of the tape, if the tape has none.
_ACCOUNT_FULL = 10002
_STREAM_FULL = (10077, "maximum bytes exceeded")


class RefusedError(BusError):
    """The server answered with an error.

    Attributes:
        err_code: the server's number of the error; 0: none.
        no_message: True if the error says that no message was found.
    """

    err_code = 0
    no_message = False


class NoStreamError(RefusedError, StreamMissingError):
    """The server has no stream of that name."""


@contextlib.contextmanager
def vendor_errors(subject: str) -> Iterator[None]:
    """Turns nats-py's errors about `subject` into this project's errors."""
    try:
        yield
    except nats.errors.Error as error:
        raise as_bus_error(error, subject) from error


def as_bus_error(error: nats.errors.Error, subject: str) -> BusError:
    """Returns this project's error for an error of nats-py that a request on `subject` raised."""
    text = f"{subject!r}: {error}"
    if isinstance(error, NoStreamResponseError | nats.errors.NoRespondersError):
        return SubjectUntakenError(
            f"{subject!r}: no responders",
            hint="no stream takes this subject, or its leader is being elected; create the run",
        )
    if isinstance(error, APIError) and (error.err_code, error.description) == _STREAM_FULL:
        return stream_is_full(subject)
    if isinstance(error, ServiceUnavailableError) and error.code is None:
        # nats-py's error for "no responders", without a number: nobody received the request.
        return BusUnavailableError(
            f"{subject!r}: no responders",
            hint="the server has no JetStream (nats-server -js), or is reading its configuration",
        )
    passing = isinstance(error, ServiceUnavailableError) or (
        isinstance(error, APIError) and error.err_code in {_STILL_IN_PROCESS, _ACCOUNT_FULL}
    )
    if isinstance(error, APIError) and not passing:
        if error.err_code == _STREAM_NOT_FOUND:
            return NoStreamError(text, hint="create the run first, or use the server it is on")
        refused = RefusedError(text, hint=_hint(error.err_code))
        refused.err_code = error.err_code or 0
        # A direct get answers only 404; the leader answers 10037, or 10059 for "no stream".
        refused.no_message = isinstance(error, NotFoundError) and error.err_code in {None, 10037}
        return refused
    if isinstance(error, nats.errors.MaxPayloadError):
        return BusError(f"{subject!r}: the message is larger than the server takes")
    if isinstance(error, nats.errors.BadSubjectError | nats.errors.BadHeaderError):
        return BusError(text)
    err_code = error.err_code if isinstance(error, APIError) else None
    return BusUnavailableError(text, hint=_hint(err_code))


def _hint(err_code: int | None) -> str | None:
    """Returns the advice for an error code of the server; None if there is no advice."""
    if err_code in _NO_ROOM:
        return "the server's disk, or its limit for streams, is full: runbooks/disk-full.md"
    if err_code == TOO_MANY_READERS:
        return (
            "the stream has as many readers as server or account allow, and a learner has about "
            "five: raise the number in the server's configuration (docs/operations.md, Large "
            "fleets)"
        )
    return None


_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 5.0


class Address(NamedTuple):
    """The servers' URL and the client's credentials.

    Attributes:
        url: one server or several, joined by ','.
        name: the client's name in the server's monitoring.
        credentials: the credentials file; None: no credentials.
        inbox_prefix: first tokens of the subjects of answers.
        api: the prefix of JetStream's API subjects, such as "$JS.API".
        tls_ca: file with the certificates that sign the servers'; None: the system's.
    """

    url: str
    name: str
    credentials: Path | None
    inbox_prefix: str
    api: str
    tls_ca: Path | None

    def tls(self) -> ssl.SSLContext | None:
        """Returns the TLS context that verifies the server; None if TLS is not asked for.

        Raises:
            OSError: the file `tls_ca` cannot be read, or has no certificates.
        """
        if self.tls_ca is None and not self.url.startswith("tls://"):
            return None
        return ssl.create_default_context(cafile=self.tls_ca)

    def identity(self) -> dict[str, Any]:
        """Reads the credentials file; returns the arguments with them for nats-py's `connect`.

        Raises:
            ConfigError: the file cannot be used.
        """
        if self.credentials is None:
            return {}
        own = load_credentials(self.credentials)
        if own is None:
            return {"user_credentials": str(self.credentials)}
        return {"nkeys_seed_str": own.seed}

    def shown(self) -> str:
        """Returns the URL without user names and passwords."""
        return shown(self.url)


class Backoff:
    """Growing pauses between attempts, with jitter so that clients reconnect at different times."""

    def __init__(self) -> None:
        self._next_s = _PAUSE_MIN_S
        self._rng = random.Random()  # noqa: S311 - jitter, no secret

    async def wait(self, at_most_s: float = math.inf) -> None:
        """Sleeps for the next pause, at most `at_most_s` seconds."""
        pause_s = self._next_s * self._rng.uniform(0.5, 1.5)
        self._next_s = min(self._next_s * 2, _PAUSE_MAX_S)
        await asyncio.sleep(min(pause_s, at_most_s))

    def reset_after(self, good_s: float) -> None:
        """Begins with short pauses again if `good_s`, seconds without a fault, exceed any pause."""
        if good_s > _PAUSE_MAX_S:
            self._next_s = _PAUSE_MIN_S


def shown(url: str) -> str:
    """Returns a URL without user names and passwords."""
    return ",".join(part.rpartition("@")[2].rpartition("/")[2] for part in url.split(","))


def check_url(url: str) -> None:
    """Refuses text that is not a URL of NATS servers.

    Raises:
        ConfigError: the text is not a URL of NATS servers, or its port is out of range.
    """
    if not all(_is_server(part) for part in url.split(",")):
        raise ConfigError(f"{shown(url)!r} is not a NATS URL", hint="write nats://host:4222")


def _is_server(part: str) -> bool:
    try:
        parsed = urllib.parse.urlsplit(part)
        return parsed.scheme in {"nats", "tls"} and bool(parsed.hostname) and parsed.port != 0
    except ValueError:  # no port, or no address
        return False


def check_address(address: Address) -> None:
    """Refuses an address that cannot work, as far as its text and files show.

    Raises:
        ConfigError: the URL is not one of NATS servers, or the certificates cannot be used.
    """
    check_url(address.url)
    try:
        address.tls()
    except OSError as error:
        raise ConfigError(
            f"cannot use the certificates in {str(address.tls_ca)!r}: {error}",
            hint="bus.tls_ca is a PEM file with the certificate of the server's authority",
        ) from error


CALL_TIMEOUT_S = 5.0
_CLOSE_S = 2.0


class _Client(Client):
    """nats-py's client, which reads a server's refusal before it writes on into a broken TLS pipe.

    This client also survives headers and subjects that a sender has malformed: unreadable headers
    become None, and bytes of a subject that are no text become replacement characters. nats-py
    would drop the connection, so that one stored message would end every connection that reads the
    message.
    """

    async def _process_headers(self, headers: Any) -> dict[str, str] | None:
        """Returns the headers of a message; None if they cannot be parsed."""
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except Exception:  # noqa: BLE001 - whatever a sender's bytes may raise
            return None
        return found

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        """Builds a message for the application; replaces a subject's bytes that are no text."""
        text = subject.decode(errors="replace").encode()
        message: Msg = super()._build_message(sid, text, reply, data, headers)
        return message

    def _connect_command(self) -> bytes:
        """Returns CONNECT and PING as one command, so that nats-py reads before it writes again."""
        transport: Any = self._transport

        def connect_and_ping(data: bytes) -> None:
            transport.write = leave_out
            type(transport).write(transport, data)

        def leave_out(_ping: bytes) -> None:
            del transport.write

        transport.write = connect_and_ping
        command: bytes = super()._connect_command()
        return command + b"PING\r\n"


class Link:
    """One connection, from its opening until it is lost or closed.

    Attributes:
        lost: set once the connection is lost or closed.
        client: nats-py's client.
        js: nats-py's JetStream context of that client.
        api: the prefix of JetStream's API subjects.
        queues: queues that get None when the link is lost.
        waiting: functions that are called when the link is lost.
    """

    def __init__(self, address: Address) -> None:
        self.lost = asyncio.Event()
        self.client = _Client()
        self.js: JetStreamContext = self.client.jetstream(
            prefix=address.api, timeout=CALL_TIMEOUT_S
        )
        self.api = address.api
        self.queues: set[asyncio.Queue[Msg | None]] = set()  # None is put when the link is lost
        self.waiting: set[Callable[[], None]] = set()  # called when the link is lost
        self._address = address
        self._problem: Exception | None = None
        self._denied: deque[tuple[float, str]] = deque(maxlen=64)

    async def open(self, timeout_s: float) -> None:
        """Connects, or fails within `timeout_s` seconds.

        Raises:
            BusUnavailableError: no server answers at the address.
            BusError: the server refuses this client.
            ConfigError: the credentials file cannot be used.
        """
        try:
            await self._connect(timeout_s)
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

    async def _connect(self, timeout_s: float) -> None:
        address = self._address
        # A separate task, as nats-py may swallow a cancellation while it connects.
        connecting = asyncio.ensure_future(
            self.client.connect(
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
        )
        try:
            done, _ = await asyncio.wait({connecting}, timeout=timeout_s)
            if not done:
                raise TimeoutError
            connecting.result()
        finally:
            await cancel(connecting)

    async def close(self) -> None:
        """Sends queued data and closes the connection, within a few seconds; never raises."""
        self._mark_lost()
        # nats-py raises AssertionError if the client never reached a connection. A separate task,
        # as nats-py may swallow a cancellation, and then wait on for a peer that is gone.
        closing = asyncio.ensure_future(self._close_client())
        closing.add_done_callback(_look_at)
        try:
            await asyncio.wait({closing}, timeout=_CLOSE_S)
        finally:
            closing.cancel()
        # nats-py leaves these tasks waiting if the connection broke with data unsent.
        for subscription in self.client._subs.values():  # noqa: SLF001
            if subscription._wait_for_msgs_task is not None:  # noqa: SLF001
                subscription._wait_for_msgs_task.cancel()  # noqa: SLF001

    async def _close_client(self) -> None:
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError, AssertionError):
            await self.client.close()

    async def wait_lost(self) -> None:
        """Returns once the connection is lost."""
        # nats-py can hang while it closes a half-open connection, before it reports; hence polling.
        while not self.lost.is_set() and not self.client.is_closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.lost.wait()
        self._mark_lost()

    def denial(self, subject: str, since: float) -> BusError | None:
        """Returns an error if the server has denied `subject` or this client's inbox; else None.

        Denials of `subject` before `since`, a time of the event loop, do not count.
        """
        inbox = f'subscription to "{self._address.inbox_prefix.lower()}.'
        for time, text in self._denied:
            if (time >= since and f'"{subject.lower()}"' in text) or inbox in text:
                return AccessDeniedError(
                    f"not permitted on {subject!r} as {self._address.name!r}: {text}",
                    hint="grant it in the NATS server's permissions, or use other credentials: "
                    "runbooks/permissions.md",
                )
        return None

    def _refusal(self, error: Exception) -> BusError:
        reason = self._problem or error
        text = str(reason) or type(reason).__name__
        # A server or a client that is slow says nothing of the credentials.
        late = "authentication timeout" in text.lower()
        refused = "authorization" in text.lower() or "authentication" in text.lower()
        if refused and not late:
            return AccessDeniedError(
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
        if "maximum account" in text.lower():
            return BusUnavailableError(
                f"NATS at {self._address.shown()} has as many connections of "
                f"{self._address.name!r} as its credentials allow",
                hint="end a process, or make a reader for more: diloco auth add-reader --processes",
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
        for end in self.waiting:
            end()


def _look_at(task: "asyncio.Task[None]") -> None:
    """Reads the result of a task of nats-py, as asyncio would log an error that nobody has read.

    `Link.wait_lost` notices the loss of the link.
    """
    if not task.cancelled():
        task.exception()


def _mark_tls(client: Client) -> None:
    """Tells asyncio that the stream uses TLS, as nats-py does not; asyncio would warn otherwise."""
    transport: Any = client._transport  # noqa: SLF001
    writer = transport._io_writer  # noqa: SLF001
    if writer.get_extra_info("sslcontext") is not None:
        writer.transport.get_protocol()._over_ssl = True  # noqa: SLF001


async def listen_on(link: Link, subject: str) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yields (subject, payload) of broadcasts that match `subject` and arrive on `link`.

    Raises:
        BusUnavailableError: the link is lost.
        BusError: the server does not permit listening to `subject`.
    """
    queue: asyncio.Queue[Msg | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    since = loop.time()

    async def keep(raw: Msg) -> None:
        if queue.qsize() < LISTEN_BACKLOG:
            queue.put_nowait(raw)

    with vendor_errors(subject):
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
