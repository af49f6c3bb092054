"""The hosts of one learner, and what they tell each other beside JAX's own traffic.

Host 0 speaks to the run: it reads the tape, decides, and announces updates. The other hosts only
read and write the store. Each has one TCP connection to host 0, made before training; its address
and a secret go round by a collective of JAX, so that nobody else can join in.

    host 0 -> others   begin    what the run is, and where its fragments are
                       go       the life that begins, and where its data goes on
                       plan     what to do at the next boundary (`director.py`)
                       prepare  fetch what leads to a version
    others -> host 0   ready    (prepare) it is on this host's devices, or why it cannot be
                       have     moments of which this host has its part of a checkpoint
                       stored   this host's shards of an update are in the store
                       leave    somebody asked this host to end

A connection that ends before the learner has ended means that a host is gone. Its peers cannot go
on without it: they end, are started again by whoever started them, and the learner comes back
whole. A process that hangs in a collective with a host that is gone is ended by a timer.

    frame: length (4 bytes, big endian), msgpack map with `kind`
"""

import asyncio
import os
import queue
import secrets
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from diloco.common import wire
from diloco.common.errors import HostLostError, IntegrityError, ObjectMissingError, WireError
from diloco.common.reasons import Reason
from diloco.learner import sync
from diloco.learner.adopt import Change
from diloco.learner.director import Plan

_LENGTH: Final = struct.Struct(">I")
_FRAME_BYTES: Final = 64 << 20
_ADDRESS_BYTES: Final = 256
_SECRET_BYTES: Final = 32
# A process that a lost host keeps in a collective is ended after so long.
HANGING_S: Final = 10.0
# How long the hosts of a learner may take to find each other.
MEET_S: Final = 300.0
# What is still to be sent to a host that does not read it is given up after so long.
CLOSE_S: Final = 5.0

Message = dict[str, Any]


def exchange_secret(address: str) -> tuple[str, str]:
    """What host 0 says of itself, on every host: its address and a secret. A collective of JAX.

    Args:
        address: where host 0 listens; of the others' it does not matter.
    """
    from jax.experimental import multihost_utils

    secret = secrets.token_hex(_SECRET_BYTES)
    text = f"{address} {secret}".encode().ljust(_ADDRESS_BYTES)
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    address, secret = np.asarray(told).astype(np.uint8).tobytes().decode().split()
    return address, secret


def end_if_hanging(within_s: float = HANGING_S) -> None:
    """End this process soon, even if it hangs in a collective of JAX or in its shutdown."""
    timer = threading.Timer(within_s, lambda: os._exit(70))
    timer.daemon = True
    timer.start()


# --- Frames


async def _read(reader: asyncio.StreamReader) -> Message:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _FRAME_BYTES:
        raise WireError(Reason.OVERSIZE, f"a host of this learner sends {length} bytes")
    message: Message = msgpack.unpackb(await reader.readexactly(length), use_list=False)
    return message


def _frame(message: Message) -> bytes:
    data: bytes = msgpack.packb(message)
    return _LENGTH.pack(len(data)) + data


def pack_plan(plan: Plan) -> Message:
    """A plan as a message; what only host 0 does is left out."""
    effects: list[Any] = []
    for effect in plan.effects:
        if isinstance(effect, sync.Adopt):
            effects.append(["adopt", list(effect.ready), effect.resolved])
        elif isinstance(effect, sync.Send):
            effects.append(["send", list(effect)])
    return {"kind": "plan", "effects": effects, "rest": list(plan[1:])}


def unpack_plan(message: Message) -> Plan:
    """The plan of a message."""
    effects: list[sync.Effect] = []
    for what, *fields in message["effects"]:
        if what == "adopt":
            effects.append(sync.Adopt(sync.Ready(*fields[0]), fields[1]))
        else:
            effects.append(sync.Send(*fields[0]))
    return Plan(tuple(effects), *message["rest"])


def pack_change(change: Change) -> list[Any]:
    """A change as fields of a message."""
    refs = [None if change.snapshot is None else change.snapshot.model_dump()]
    refs += [ref.model_dump() for ref in change.deltas]
    return [change.fragment, change.record_seq, change.view_digest, refs]


def unpack_change(fields: Sequence[Any]) -> Change:
    """The change of a message."""
    fragment, record_seq, digest, (snapshot, *deltas) = fields
    return Change(
        fragment,
        record_seq,
        digest,
        None if snapshot is None else wire.ObjectRef.model_validate(snapshot),
        tuple(wire.ObjectRef.model_validate(ref) for ref in deltas),
    )


# --- Host 0


class Crew:
    """The other hosts, as host 0 sees them; coroutines run on the event loop of the background.

    Args:
        hosts: how many there are, this one included.
        loop: the event loop.
        lost: told, on the loop, what ends this life.
    """

    def __init__(
        self, hosts: int, loop: asyncio.AbstractEventLoop, lost: Callable[[BaseException], None]
    ) -> None:
        self.hosts = hosts
        self.asked_to_leave = False
        self._loop = loop
        self._lost = lost
        self._secret = ""
        self._secret_known = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._complete = asyncio.Event()
        self._ended = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: defaultdict[tuple[int, int], _Answers] = defaultdict(self._answers)
        self._stored: defaultdict[tuple[int, int], _Answers] = defaultdict(self._answers)
        self._have = self._answers()

    def _answers(self) -> "_Answers":
        return _Answers(self.hosts - 1, self._loop)

    async def listen(self, interface: str) -> str:
        """Begin to listen; the address."""
        self._server = await asyncio.start_server(self._accept, interface, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def meet(self, secret: str) -> None:
        """Wait until all hosts are connected.

        Raises:
            HostLostError: one did not come.
        """
        self._secret = secret
        self._secret_known.set()
        try:
            await asyncio.wait_for(self._complete.wait(), MEET_S)
        except TimeoutError:
            missing = sorted(set(range(1, self.hosts)) - set(self._writers))
            raise HostLostError(
                f"hosts {missing} of this learner did not connect within {MEET_S:.0f} s",
                hint="see their logs; host 0 must be reachable from them: runbooks/lost-host.md",
            ) from None

    async def checkpoints(self) -> list[set[tuple[int, int]]]:
        """Wait until all other hosts have said of which moments they have checkpoints."""
        return [set(moments) for moments in await self._have.all]

    def tell(self, message: Message) -> None:
        """Send a message to all other hosts; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._write, _frame(message))

    def tell_plan(self, plan: Plan) -> None:
        """Send a plan to all other hosts; after the last one, they may go."""
        if plan.then == "end":
            self._loop.call_soon_threadsafe(self._let_go)
        self.tell(pack_plan(plan))

    async def prepare(self, change: Change) -> None:
        """Wait until all other hosts have a change on their devices.

        Raises:
            ObjectMissingError, IntegrityError: as one of them says.
        """
        self._write(_frame({"kind": "prepare", "change": pack_change(change)}))
        key = (change.fragment, change.record_seq)
        for why in await self._ready[key].all:
            if why is not None:
                kind, text = why
                raise (IntegrityError if kind == "integrity" else ObjectMissingError)(text)
        del self._ready[key]

    async def stored(self, fragment: int, seq: int) -> tuple[wire.Shard, ...]:
        """Wait until all other hosts have stored their shards of an update; the shards."""
        found = await self._stored[fragment, seq].all
        del self._stored[fragment, seq]
        return tuple(wire.Shard.model_validate(shard) for part in found for shard in part)

    async def close(self) -> None:
        """End all connections."""
        self._ended = True
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()
        # Their readers end by that. They are not cancelled: asyncio's streams complain of it.
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    def _let_go(self) -> None:
        self._ended = True

    def _write(self, frame: bytes) -> None:
        for writer in self._writers.values():
            writer.write(frame)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await asyncio.wait_for(_read(reader), MEET_S)
            secret, host = str(hello["secret"]), int(hello["host"])
        except (OSError, EOFError, ValueError, TypeError, KeyError, WireError):
            writer.close()
            return
        await self._secret_known.wait()
        if not secrets.compare_digest(secret, self._secret) or host not in range(1, self.hosts):
            writer.close()
            return
        self._writers[host] = writer
        if len(self._writers) == self.hosts - 1:
            self._complete.set()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        await self._listen_to(host, reader)

    async def _listen_to(self, host: int, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(await _read(reader))
        except (OSError, EOFError):
            if not self._ended:
                self._lost(_gone(f"host {host}"))

    def _take(self, message: Message) -> None:
        match message["kind"]:
            case "ready":
                self._ready[message["of"]].add(message["why"])
            case "stored":
                self._stored[message["of"]].add(message["shards"])
            case "have":
                self._have.add(message["moments"])
            case "leave":
                self.asked_to_leave = True


class _Answers:
    """What all other hosts answer to one thing."""

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self._count = count
        self._found: list[Any] = []
        self.all: asyncio.Future[list[Any]] = loop.create_future()

    def add(self, answer: Any) -> None:
        self._found.append(answer)
        if len(self._found) == self._count and not self.all.done():
            self.all.set_result(self._found)


def _gone(who: str) -> HostLostError:
    end_if_hanging()
    return HostLostError(
        f"{who} of this learner is gone",
        hint="all hosts of the learner exit now; start them again together: runbooks/lost-host.md",
    )


# --- The other hosts


class Link:
    """Host 0, as another host sees it.

    Args:
        host: this host's number.
        loop: the event loop of the background.
        asked_for: given, on the loop, each change that host 0 wants prepared.
    """

    def __init__(
        self,
        host: int,
        loop: asyncio.AbstractEventLoop,
        asked_for: Callable[[Change], None] = lambda _change: None,
    ) -> None:
        self.host = host
        self.asked_for = asked_for
        self._loop = loop
        self._writer: asyncio.StreamWriter | None = None
        self._inbox: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    async def connect(self, address: str, secret: str) -> None:
        """Connect to host 0."""
        host, _, port = address.rpartition(":")
        reader, self._writer = await asyncio.wait_for(
            asyncio.open_connection(host, int(port)), MEET_S
        )
        self.tell({"kind": "hello", "secret": secret, "host": self.host})
        self._task = asyncio.ensure_future(self._listen(reader))

    def tell(self, message: Message) -> None:
        """Send a message to host 0; may be called from any thread."""
        assert self._writer is not None
        self._loop.call_soon_threadsafe(self._writer.write, _frame(message))

    def receive(self, kind: str) -> Message:
        """The next message of host 0 that is no "prepare"; waits for it.

        Raises:
            HostLostError: host 0 is gone.
        """
        message = self._inbox.get()
        if isinstance(message, BaseException):
            raise message
        if message["kind"] != kind:
            raise WireError(Reason.KIND, f"{message['kind']!r} came, not {kind!r}")
        if kind == "plan" and message["rest"][0] == "end":
            self._ended = True
        return message

    def fail(self, error: BaseException) -> None:
        """End this life, at the training loop's next look."""
        self._inbox.put(error)

    async def close(self) -> None:
        """End the connection."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = await _read(reader)
                if message["kind"] == "prepare":
                    self.asked_for(unpack_change(message["change"]))
                else:
                    self._inbox.put(message)
        except (OSError, EOFError):
            if not self._ended:
                self._inbox.put(_gone("host 0"))
