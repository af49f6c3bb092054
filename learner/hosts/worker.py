"""A host other than host 0 (a worker): takes plans and requests from host 0, not from NATS."""

import asyncio
import queue
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from diloco.common.process.tasks import cancel
from diloco.common.protocol.errors import (
    ConfigError,
    Exit,
    HostLostError,
    IntegrityError,
    ObjectMissingError,
    WireError,
)
from diloco.common.protocol.reasons import Reason
from diloco.common.storage.catchup import Change
from diloco.learner.background import Context
from diloco.learner.core.events import (
    Republish,
)
from diloco.learner.core.handover import Boundary, Done, Outgoing, why_left
from diloco.learner.hosts.messages import (
    MEET_S,
    Drop,
    Ending,
    Failure,
    Go,
    Granted,
    Hello,
    HostMessage,
    LeaveAsked,
    Prepare,
    Prepared,
    Turn,
    Uploaded,
    error_of,
    frame,
    host_gone,
    read_message,
)
from diloco.learner.wire.claims import GrantedShares
from diloco.learner.wire.fetch_versions import VersionFetcher
from diloco.learner.wire.publish import Uploader

# Ends of host 0 that may be a fault of its machine: a file, the task's code or data, credentials.
# If they are not, the next host 0 ends in the same way.
_ITS_OWN = (Exit.CONFIG, Exit.TASK, Exit.SHUT_OUT)
M = TypeVar("M", bound=HostMessage)


class HostLink:
    """A worker's connection to host 0.

    Args:
        loop: the event loop.
        reader, writer: the streams of the connection.
        lost: is called on the event loop, with the error, when host 0 has ended with an error or
            the connection has broken: the training thread may then hang in a collective.
        leader: names host 0 in messages: with several slices its number may be another one.
        several: the learner has several slices, which go on without one whose host has a fault.

    Attributes:
        requests: the `Prepare`, `Granted` and `Drop` messages that came, in order; the event loop
            carries them out while the training thread trains.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lost: Callable[[BaseException], None],
        leader: str = "host 0",
        *,
        several: bool = False,
    ) -> None:
        self.requests: asyncio.Queue[Prepare | Granted | Drop] = asyncio.Queue()
        self._loop = loop
        self._writer = writer
        self._lost = lost
        self._leader, self._several = leader, several
        self._inbox: queue.SimpleQueue[HostMessage | BaseException] = queue.SimpleQueue()
        self._ended = False
        self._failed: BaseException | None = None
        self._task = loop.create_task(self._listen(reader))

    def tell(self, message: HostMessage) -> None:
        """Sends a message to host 0; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._writer.write, frame(message))

    def receive(self, kind: type[M]) -> M:
        """Waits for host 0's next message that is not one of `requests`, and returns it.

        Raises:
            HostLostError: host 0 is gone.
            WireError: the message is not of `kind`.
            BaseException: the error given to `fail`, or the error that ended host 0.
        """
        message = self._inbox.get()
        if isinstance(message, BaseException):
            raise message
        if not isinstance(message, kind):
            came = type(message).__name__
            raise WireError(Reason.KIND, f"host 0 sends {came} where {kind.__name__} is due")
        return message

    def fail(self, error: BaseException) -> None:
        """Ends this host's learner with `error`, which the next `receive` or `check` raises."""
        self._failed = error
        self._inbox.put(error)

    def check(self) -> None:
        """Raises the error given to `fail`, if there is one; does not wait for a message.

        Raises:
            BaseException: that error.
        """
        if self._failed is not None:
            raise self._failed

    async def close(self) -> None:
        """Closes the connection."""
        self._ended = True
        await cancel(self._task)
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = await read_message(reader)
                if isinstance(message, Ending):
                    own_fault = self._several and message.status in _ITS_OWN
                    gone = HostLostError(f"{self._leader} has ended: {message.message}")
                    self._end(gone if own_fault else error_of(message))
                    return
                if isinstance(message, Prepare | Granted | Drop):
                    self.requests.put_nowait(message)
                else:
                    # Host 0 may now close the connection before this host's loop ends.
                    ends = isinstance(message, Turn) and message.boundary.then == "end"
                    self._ended = self._ended or ends
                    self._inbox.put(message)
        except (OSError, EOFError):
            if not self._ended:
                self._end(host_gone(self._leader))
        except WireError as error:
            self.fail(error)

    def _end(self, error: BaseException) -> None:
        self._lost(error)
        self.fail(error)


async def connect(
    host: int,
    address: str,
    secret: str,
    lost: Callable[[BaseException], None],
    leader: str = "host 0",
    *,
    several: bool = False,
) -> HostLink:
    """Connects a worker to host 0, and sends its `Hello`.

    Args:
        host: the rank of this host's process.
        address: host 0's address, `host:port`.
        secret: the secret of `exchange_secret`.
        lost: as in `HostLink`.
        leader: as in `HostLink`.
        several: as in `HostLink`.

    Raises:
        OSError: host 0 cannot be reached.
        TimeoutError: host 0 does not accept within `MEET_S` seconds.
    """
    name, _, port = address.rpartition(":")
    async with asyncio.timeout(MEET_S):
        reader, writer = await asyncio.open_connection(name, int(port))
    link = HostLink(asyncio.get_running_loop(), reader, writer, lost, leader, several=several)
    link.tell(Hello(secret=secret, host=host))
    return link


class _LoadedAttempt(NamedTuple):
    """The tensors of a version that an attempt has fetched onto this host's devices."""

    attempt: int
    tensors: Any


class Worker:
    """The source of plans, and the taker of updates, for the training loop of a worker.

    It has the methods of `Boundaries`, and `say` is an `Outbox`.

    Args:
        context: the learner's context; its bus is not used here.
        link: the connection to host 0.
        fetcher: fetches versions onto this host's devices.
        uploader: stores this host's shards of updates.
        spawn: runs a coroutine on the event loop, beside training.
        asked_to_leave: returns whether this host was asked to end.
        go: host 0's message that training begins.
        shares: gets the shares of the data that host 0 has claimed.
    """

    def __init__(
        self,
        context: Context,
        link: HostLink,
        fetcher: VersionFetcher,
        uploader: Uploader,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        asked_to_leave: Callable[[], bool],
        go: Go,
        shares: GrantedShares,
    ) -> None:
        self._context = context
        self._link = link
        self._fetcher = fetcher
        self._uploader = uploader
        self._spawn = spawn
        self._asked = asked_to_leave
        self._go = go
        self._shares = shares
        self._told = False
        self._stopping = False
        self._held: dict[tuple[int, int], _LoadedAttempt] = {}
        self._fetching: dict[int, asyncio.Task[None]] = {}

    # For the training loop

    def first_step(self) -> int:
        """Returns the run's clock (global step) for the step before the first boundary."""
        return self._go.global_step

    def next(self) -> Boundary:
        """Returns the plan of the next boundary, which host 0 made some boundaries ago.

        Raises:
            HostLostError: host 0 is gone.
            DilocoError: the error that ended host 0.
        """
        self._context.health.turned()
        if self._asked() and not self._told:
            self._told = True
            self._link.tell(LeaveAsked())
        boundary = self._link.receive(Turn).boundary
        self._stopping = boundary.stopping
        return boundary

    def why(self) -> str:
        """Returns why the learner leaves, once the last boundary was planned."""
        return why_left(stopping=self._stopping)

    def payload(self, fragment: int, record_seq: int) -> Any:
        """Returns a record's tensors, once; None if the record needs no tensors.

        Host 0 plans an adoption only when all hosts have the tensors.
        """
        held = self._held.pop((fragment, record_seq), None)
        return None if held is None else held.tensors

    def say(self, word: Outgoing | Republish | Done) -> None:
        """Stores this host's shards of an update, beside training.

        Other messages are ignored, since only host 0 sends messages to the run.
        """
        if isinstance(word, Outgoing):
            self._spawn(self._store(word))

    # On the event loop

    async def serve(self) -> None:
        """Carries out host 0's requests while the loop trains; never returns."""
        try:
            while True:
                self._take(await self._link.requests.get())
        finally:
            await cancel(*self._fetching.values())

    def _take(self, request: Prepare | Granted | Drop) -> None:
        if isinstance(request, Granted):
            self._shares.grant(request.holding, request.end)
            return
        attempt = request.attempt
        if isinstance(request, Prepare):
            task = asyncio.ensure_future(self._prepare(attempt, request.change))
            self._fetching[attempt] = task
            task.add_done_callback(lambda task: self._fetched(attempt, task))
            return
        if attempt in self._fetching:
            self._fetching[attempt].cancel()
        for key in [key for key, held in list(self._held.items()) if held.attempt == attempt]:
            del self._held[key]

    def _fetched(self, attempt: int, task: "asyncio.Task[None]") -> None:
        del self._fetching[attempt]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._link.fail(error)

    async def _prepare(self, attempt: int, change: Change) -> None:
        failure = None
        try:
            tensors = await self._context.runtime.retry(
                "reading a version",
                lambda: self._fetcher.fetch(change),
                logger=self._context.logger,
            )
            self._held[change.fragment, change.record_seq] = _LoadedAttempt(attempt, tensors)
        except (ObjectMissingError, IntegrityError) as error:
            failure = Failure(missing=isinstance(error, ObjectMissingError), text=error.message)
        self._link.tell(Prepared(attempt=attempt, failure=failure))

    async def _store(self, outgoing: Outgoing) -> None:
        send = outgoing.send
        try:
            stored = await self._uploader.store(self._go.incarnation, send, outgoing.codes)
            if outgoing.covered is not None:
                await outgoing.covered()
        except Exception as error:
            # Host 0 would wait for this host's part for ever.
            self._link.fail(error)
            raise
        self._link.tell(Uploaded(fragment=send.fragment, seq=send.seq, shards=stored.shards))
        self._context.traffic.updates_sent += 1


def check_same(what: str, here: str, there: str) -> None:
    """Checks that a value is equal on this host and on host 0.

    Args:
        what: the name of the value, for the error.
        here: the value on this host.
        there: the value on host 0.

    Raises:
        ConfigError: the two differ.
    """
    if here != there:
        raise ConfigError(
            f"this host's {what} is {here}, that of host 0 {there}",
            hint="give all hosts of a learner the same configuration and release",
        )
