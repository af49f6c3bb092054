"""Host 0 of a learner of several hosts: the connections to the other hosts (the workers).

`Coordinator` has the interface of `background.NoOtherHosts`, which a learner of one host uses.
Coroutines run on the background's event loop.

Each call of `prepare` makes an attempt with a new number: workers answer with that number, so that
a failure of one attempt is never taken for a failure of the next. An attempt that has failed is
dropped on every host.
"""

import asyncio
import itertools
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from diloco.common.process.tasks import cancel, within
from diloco.common.protocol import wire
from diloco.common.protocol.errors import (
    DilocoError,
    HostLostError,
    IntegrityError,
    ObjectMissingError,
    WireError,
)
from diloco.common.storage.catchup import Change
from diloco.learner.background import NoOtherHosts, Preparation
from diloco.learner.core.handover import Boundary, CheckpointId
from diloco.learner.hosts.messages import (
    MEET_S,
    Drop,
    Failure,
    Have,
    HaveUnsent,
    Hello,
    HostMessage,
    LeaveAsked,
    Made,
    Prepare,
    Prepared,
    Turn,
    Uploaded,
    ending_of,
    frame,
    host_gone,
    read_message,
)

# Boundaries that are planned ahead, so that a worker has each plan before the step ends.
LOOKAHEAD = 2


class WorkerConnection(NamedTuple):
    """The TCP connection to one worker."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Listener:
    """The TCP socket on which workers connect and identify themselves.

    Args:
        server: the listening server.
        came: gets each new connection, with the worker's `Hello`.
    """

    def __init__(
        self, server: asyncio.Server, came: "asyncio.Queue[tuple[Hello, WorkerConnection]]"
    ) -> None:
        self._server = server
        self._came = came

    @property
    def address(self) -> str:
        """The address on which the socket listens, `host:port`."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def meet(
        self, hosts: int, secret: str, number_of: Callable[[int], int]
    ) -> dict[int, WorkerConnection]:
        """Waits until all workers are connected; then closes the socket.

        Args:
            hosts: the number of the learner's hosts, host 0 included.
            secret: the secret that workers must send.
            number_of: rank of a process -> the number of its host, for messages.

        Returns:
            The connections, by the workers' ranks 1, 2, 3 ...

        Raises:
            HostLostError: a worker did not connect within `MEET_S` seconds.
        """
        found: dict[int, WorkerConnection] = {}
        try:
            async with asyncio.timeout(MEET_S):
                while len(found) < hosts - 1:
                    hello, connection = await self._came.get()
                    known = secrets.compare_digest(hello.secret, secret)
                    if known and hello.host in range(1, hosts) and hello.host not in found:
                        found[hello.host] = connection
                    else:
                        connection.writer.close()
        except TimeoutError:
            for connection in found.values():
                connection.writer.close()
            missing = sorted(number_of(rank) for rank in set(range(1, hosts)) - set(found))
            raise HostLostError(
                f"hosts {missing} of this learner did not connect within {MEET_S:.0f} s",
                hint="see their logs; host 0 must be reachable from them: runbooks/lost-host.md",
            ) from None
        finally:
            self._server.close()
        return found


async def listen(interface: str) -> Listener:
    """Returns a listener for workers, on a free port of the address `interface`."""
    came: asyncio.Queue[tuple[Hello, WorkerConnection]] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await within(MEET_S, read_message(reader))
        except (OSError, EOFError, WireError):
            writer.close()
            return
        if isinstance(hello, Hello):
            came.put_nowait((hello, WorkerConnection(reader, writer)))
        else:
            writer.close()

    return Listener(await asyncio.start_server(accept, interface, 0), came)


class _Answers:
    """The answers of all workers to one message.

    Attributes:
        all: a future whose result is the list of answers, once each of `count` workers has sent
            one.
    """

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self._count = count
        self._found: list[Any] = []
        self.all: asyncio.Future[list[Any]] = loop.create_future()

    def add(self, answer: Any) -> None:
        self._found.append(answer)
        if len(self._found) == self._count and not self.all.done():
            self.all.set_result(self._found)


class _Attempt(Preparation):
    """An attempt to have the learner's other hosts fetch a version's tensors onto their devices."""

    def __init__(self, coordinator: "Coordinator", number: int, answers: _Answers) -> None:
        self._coordinator = coordinator
        self._number = number
        self._answers = answers

    async def ready(self) -> None:
        """Waits until all workers have the tensors on their devices.

        Raises:
            ObjectMissingError: a worker reports that an object is missing.
            IntegrityError: a worker reports that an object is damaged.
        """
        failures: list[Failure | None] = await self._answers.all
        for failure in failures:
            if failure is not None:
                kind = ObjectMissingError if failure.missing else IntegrityError
                raise kind(failure.text)
        self._coordinator.forget(self._number)

    def drop(self) -> None:
        """Tells the workers to free the attempt's tensors, since they will not be adopted."""
        self._coordinator.forget(self._number)
        self._coordinator.write(Drop(attempt=self._number))


class Coordinator(NoOtherHosts):
    """The other hosts of a learner (the workers), to which host 0 sends messages.

    Args:
        loop: the event loop.
        connections: the connections to all workers, by rank.
        lost: is called on the loop, with the error, when a worker is gone or sends an invalid
            message: the learner must end.
        number_of: rank of a process -> the number of its host, for messages.

    Attributes:
        hosts: the number of the learner's hosts, host 0 included.
    """

    lookahead = LOOKAHEAD

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connections: Mapping[int, WorkerConnection],
        lost: Callable[[BaseException], None],
        number_of: Callable[[int], int],
    ) -> None:
        self.hosts = len(connections) + 1
        self._loop = loop
        self._connections = connections
        self._lost = lost
        self._leave_asked = False
        self._ended = False
        self._numbers = itertools.count(1)
        self._attempts: dict[int, _Answers] = {}
        self._stored: defaultdict[tuple[int, int], _Answers] = defaultdict(self._answers)
        self._have, self._have_unsent = self._answers(), self._answers()
        self._made = 0, 0  # The newest checkpoint's step, and how many workers are done with it.
        self._tasks = [
            loop.create_task(self._listen_to(number_of(rank), connection.reader))
            for rank, connection in connections.items()
        ]

    def asked_to_leave(self) -> bool:
        """True if a worker was asked to end."""
        return self._leave_asked

    def say(self, message: HostMessage) -> None:
        """Sends a message to all workers; may be called from any thread."""
        self._loop.call_soon_threadsafe(self.write, message)

    def tell(self, boundary: Boundary) -> None:
        """Sends the plan of a step boundary to all workers; may be called from any thread.

        After the plan of the last boundary, a worker that disconnects is no error.
        """
        if boundary.then == "end":
            self._loop.call_soon_threadsafe(self._let_go)
        self.say(Turn(boundary=boundary))

    def give_up(self, error: DilocoError) -> None:
        """Sends all workers the error that ends host 0, so that they end; from any thread."""
        self._loop.call_soon_threadsafe(self._let_go)
        self.say(ending_of(error))

    def write(self, message: HostMessage) -> None:
        """Sends a message to all workers; must be called on the event loop."""
        data = frame(message)
        for connection in self._connections.values():
            connection.writer.write(data)

    def prepare(self, change: Change) -> _Attempt:
        """Asks all workers to fetch a version's tensors; must be called on the event loop.

        Args:
            change: the objects to fetch.

        Returns:
            The attempt, whose `ready` waits for the workers.
        """
        number = next(self._numbers)
        answers = self._attempts[number] = self._answers()
        self.write(Prepare(attempt=number, change=change))
        return _Attempt(self, number, answers)

    def forget(self, attempt: int) -> None:
        """Drops the answers to an attempt, also answers that come later."""
        self._attempts.pop(attempt, None)

    async def stored(self, fragment: int, seq: int) -> tuple[wire.Shard, ...]:
        """Waits until all workers have stored their shards of an update; returns the shards.

        Args:
            fragment: the update's fragment.
            seq: the update's number.
        """
        found = await self._stored[fragment, seq].all
        del self._stored[fragment, seq]
        return tuple(shard for part in found for shard in part)

    async def checkpoints(self) -> list[set[CheckpointId]]:
        """Waits until all workers have sent a `Have`; returns each worker's checkpoints."""
        return [set(found) for found in await self._have.all]

    async def snapshots(self) -> list[set[CheckpointId]]:
        """Waits until all workers have sent a `HaveUnsent`; returns each worker's snapshots."""
        return [set(found) for found in await self._have_unsent.all]

    def made(self, local_step: int) -> bool:
        """True if all workers are done with their parts of the checkpoint at `local_step`."""
        step, workers = self._made
        return step == local_step and workers >= self.hosts - 1

    async def close(self) -> None:
        """Closes all connections."""
        self._ended = True
        for connection in self._connections.values():
            connection.writer.close()
        await cancel(*self._tasks)

    def _let_go(self) -> None:
        self._ended = True

    def _answers(self) -> _Answers:
        return _Answers(self.hosts - 1, self._loop)

    async def _listen_to(self, host: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(await read_message(reader))
        except (OSError, EOFError):
            if not self._ended:
                self._lost(host_gone(f"host {host}"))
        except WireError as error:
            self._lost(error)

    def _take(self, message: HostMessage) -> None:
        match message:
            case Prepared(attempt=attempt, failure=failure):
                if attempt in self._attempts:  # else it was dropped meanwhile
                    self._attempts[attempt].add(failure)
            case Uploaded(fragment=fragment, seq=seq, shards=shards):
                self._stored[fragment, seq].add(shards)
            case Have(checkpoints=found):
                self._have.add(found)
            case HaveUnsent(snapshots=found):
                self._have_unsent.add(found)
            case Made(local_step=step):
                newest, workers = self._made
                self._made = step, 1 + (workers if step == newest else 0)
            case LeaveAsked():
                self._leave_asked = True
