"""Messages between the hosts of one learner, and how the hosts find each other.

Host 0 directs the other hosts, the workers.

    host 0 -> workers  Begin     number of the run's tape, and the layout
                       Load      objects of the view with which a fragment begins
                       GoOn      the snapshot whose unsent work this life goes on with
                       Go        the learner has joined: incarnation and data position
                       Resume    the checkpoint to resume from
                       Turn      the plan of the next step boundary
                       Prepare   fetch a version onto the devices: an attempt, with a number
                       Granted   a share of the data, and the position where it ends
                       Drop      the attempt failed on a host: free its tensors
                       Ending    host 0 ends with an error: all hosts are to end
    workers -> host 0  Hello     the worker's number, and the secret
                       Have      checkpoints of which this host has its part
                       HaveUnsent  the same of snapshots of unsent work
                       Prepared  the attempt has succeeded on this host, or why it has failed
                       Uploaded  this host's shards of an update are in the store
                       Made      this host's part of a checkpoint is made, or could not be
                       LeaveAsked  this host was asked to end

    frame: length (4 bytes, big endian), msgpack map with `version`, `kind` and the fields by name

All hosts of a learner must run the same release; `version` detects that only some were upgraded.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import struct
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import msgpack
import numpy as np
from pydantic import BaseModel, ValidationError

from diloco.common.process import log
from diloco.common.process.config import service_manager
from diloco.common.process.health import MEETS, tell
from diloco.common.protocol import wire
from diloco.common.protocol.errors import DilocoError, HostLostError, WireError, find
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.wire import NestedRecord
from diloco.common.storage.catchup import Change
from diloco.common.storage.data_share_allocation import Holding
from diloco.learner.core.carry import Carried
from diloco.learner.core.formation import HostReport
from diloco.learner.core.handover import Boundary, CheckpointId

VERSION: Final = 13
LENGTH: Final = struct.Struct(">I")
FRAME_BYTES: Final = 64 << 20


class HostMessage(NestedRecord):
    """A message between hosts; the frame's `kind` is the name of the message's class."""


class Begin(HostMessage):
    """Tells the workers which run they join.

    Attributes:
        epoch: the number of the run's tape, 0 for the first.
        layout: the digest of the run's layout.
        constants: name of the object that lists leaves which are not synchronized; None: there are
            none.
        alike: the settings that must be the same on all hosts, as text.
    """

    epoch: int
    layout: str
    constants: str | None
    alike: str


class Load(HostMessage):
    """Names the objects from which a worker loads the view with which a fragment begins."""

    change: Change


class GoOn(HostMessage):
    """Names the snapshot whose unsent work this life goes on with.

    Attributes:
        snapshot: the snapshot; None: the life begins with nothing.
        found: how the work is taken over, by fragment.
    """

    snapshot: CheckpointId | None
    found: tuple[Carried, ...] = ()


class Go(HostMessage):
    """Tells the workers that the learner has joined the run and training begins.

    Attributes:
        incarnation: the sequence of the learner's join in the stream.
        position: the learner's data position, in batches.
        global_step: the run's clock.
    """

    incarnation: int
    position: int
    global_step: int


class Resume(HostMessage):
    """Names the checkpoint to resume from; None: all hosts take a fresh inner optimizer."""

    checkpoint: CheckpointId | None


class Turn(HostMessage):
    """The plan of a step boundary; a worker ignores effects that only host 0 carries out."""

    boundary: Boundary


class Prepare(HostMessage):
    """Tells the workers to fetch a version's tensors onto their devices.

    Attributes:
        attempt: the attempt's number, which `Prepared` and `Drop` repeat.
        change: the objects to fetch.
    """

    attempt: int
    change: Change


class Granted(HostMessage):
    """Tells the workers a share of the data that the learner has claimed.

    Attributes:
        holding: the share, and the position at which the learner reads it.
        end: the position after the share's last batch.
    """

    holding: Holding
    end: int


class Drop(HostMessage):
    """Tells the workers to free the tensors of an attempt, which will not be adopted."""

    attempt: int


class Ending(HostMessage):
    """Tells the workers to end, with the error that ends host 0.

    Attributes:
        status: the exit status of the process, a value of `Exit`.
        message: the error's message.
        hint: what to do about it; None: no advice.
    """

    status: int
    message: str
    hint: str | None


class Hello(HostMessage):
    """Identifies a worker: the secret of `exchange_secret`, and the rank of its process."""

    secret: str
    host: int


class Have(HostMessage):
    """Lists the checkpoints of which this host can read its part."""

    checkpoints: tuple[CheckpointId, ...]


class HaveUnsent(HostMessage):
    """Lists the snapshots of whose unsent work this host can read its part."""

    snapshots: tuple[CheckpointId, ...]


class Failure(NestedRecord):
    """The reason why a host cannot read a version.

    Attributes:
        missing: True: an object is missing; False: an object is damaged.
        text: the error's message.
    """

    missing: bool
    text: str


class Prepared(HostMessage):
    """Reports the result of an attempt; `failure` is None if it succeeded."""

    attempt: int
    failure: Failure | None


class Uploaded(HostMessage):
    """Reports the shards that this host has stored of the update `seq` of a fragment."""

    fragment: int
    seq: int
    shards: tuple[wire.Shard, ...]


class Made(HostMessage):
    """Reports that this host is done with its part of the checkpoint at `local_step`."""

    local_step: int


class LeaveAsked(HostMessage):
    """Reports that this host was asked to end."""


# --- Between the supervisors of a learner of several slices


class Report(HostMessage):
    """All that one supervisor tells another, several times a second."""

    report: HostReport


class PartAsked(HostMessage):
    """Asks for the parts of checkpoints; the answer is their lengths and bytes, no message."""


_KINDS: Final[dict[str, type[HostMessage]]] = {
    kind.__name__: kind
    for kind in (
        *(Begin, Load, GoOn, Go, Resume, Turn, Prepare, Granted, Drop, Ending),
        *(Hello, Have, HaveUnsent, Prepared, Uploaded, Made, LeaveAsked, Report, PartAsked),
    )
}


def ending_of(error: DilocoError) -> Ending:
    """Returns the `Ending` message for the error that ends host 0."""
    return Ending(status=error.status, message=error.message, hint=error.hint)


def error_of(ending: Ending) -> DilocoError:
    """Returns the error that an `Ending` message carries."""
    error = DilocoError(ending.message, hint=ending.hint)
    error.status = find(ending.status)
    return error


def frame(message: HostMessage) -> bytes:
    """Returns a message's frame: its length, then its msgpack map."""
    kind = type(message).__name__
    data: bytes = msgpack.packb({"version": VERSION, "kind": kind, **_named(message)})
    return LENGTH.pack(len(data)) + data


def unframe(data: bytes) -> HostMessage:
    """Returns the message in a frame, given without its length.

    Raises:
        WireError: the bytes are not a message of this release.
    """
    try:
        fields: dict[str, Any] = msgpack.unpackb(data, use_list=False)
        version, kind = fields.pop("version"), str(fields.pop("kind"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WireError(
            Reason.MALFORMED, f"a host of this learner sends an invalid message: {error}"
        ) from error
    if version != VERSION or kind not in _KINDS:
        raise WireError(
            Reason.SCHEMA,
            f"a host of this learner sends {kind!r} of version {version}, this one knows "
            f"version {VERSION}",
            hint="give all hosts of a learner the same release",
        )
    try:
        return _KINDS[kind].model_validate(fields)
    except ValidationError as error:
        raise WireError(Reason.MALFORMED, f"{kind} of another host: {error}") from error


def _named(value: Any) -> Any:
    """Turns messages, nested records and named tuples into maps of their fields."""
    if isinstance(value, BaseModel):
        return {name: _named(getattr(value, name)) for name in type(value).model_fields}
    if hasattr(value, "_asdict"):
        return {name: _named(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_named(item) for item in value]
    return value


_ADDRESS_BYTES: Final = 256
_SECRET_BYTES: Final = 32
# Seconds until a process that hangs in a collective with a lost host is ended.
HANGING_S: Final = 10.0
# Seconds that the hosts of a learner may take to find each other.
MEET_S: Final = 300.0
_MEETINGS: Final = itertools.count(1)


def wait_for_hosts(within_s: float = MEET_S) -> None:
    """Waits until all hosts of this learner have called this function equally often.

    A collective cannot replace this barrier: between CPUs the first collective of a group of
    devices fails unless all hosts start it within 30 s (gloo's fixed limit), and hosts may differ
    by more than that in what they load and compile. Without JAX's distributed client, as on a TPU's
    own network, the function returns at once.

    Args:
        within_s: the most seconds to wait.

    Raises:
        HostLostError: a host is gone, or has not called within `within_s`.
    """
    import jax
    from jax._src import distributed  # JAX gives its barrier no public name.

    client = distributed.global_state.client
    if client is None:  # Hosts of a TPU's own network meet without it.
        return
    try:
        with meeting():
            client.wait_at_barrier(f"diloco-{next(_MEETINGS)}", int(within_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise host_gone("another host") from error


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Tells a supervisor that this process waits for those of other hosts while the block runs.

    After a block that fails the word stands: the process gave the others up.
    """
    manager = service_manager()
    tell(manager, **{MEETS: "1"})
    yield
    tell(manager, **{MEETS: "0"})


def meeting_place() -> str | None:
    """Returns the address of JAX's coordinator on host 0, `host:port`; None if JAX has none."""
    from jax._src import distributed  # JAX gives it no public name either.

    return distributed.global_state.coordinator_address


def exchange_secret(address: str) -> tuple[str, str]:
    """Sends an address and a secret from host 0 to every host, by a collective of JAX.

    Args:
        address: the address on which host 0 listens; ignored on other hosts.

    Returns:
        (host 0's address, the secret), equal on all hosts.

    Raises:
        HostLostError: a host is gone.
    """
    import jax
    from jax.experimental import multihost_utils

    secret = secrets.token_hex(_SECRET_BYTES)
    text = f"{address} {secret}".encode().ljust(_ADDRESS_BYTES)
    wait_for_hosts()
    try:
        told = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    except jax.errors.JaxRuntimeError as error:
        raise host_gone("another host") from error
    address, secret = np.asarray(told).astype(np.uint8).tobytes().decode().split()
    return address, secret


def end_if_hanging(
    status: int = HostLostError.status,
    within_s: float = HANGING_S,
    why: BaseException | None = None,
) -> threading.Timer:
    """Starts a timer that ends this process, even if it hangs in a collective or JAX's shutdown.

    Only code around the training loop calls this function; code that reads a connection raises
    `HostLostError`.

    Args:
        status: the exit status of the process.
        within_s: seconds that the process has to end by itself.
        why: the error to print when the timer ends the process.

    Returns:
        The timer, which can be cancelled.
    """

    def end() -> None:
        if isinstance(why, DilocoError):
            hint = f"\nhint: {why.hint}" if why.hint else ""
            text = log.errors(f"error: {why.message}{hint}")
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - the last words
        os._exit(status)

    timer = threading.Timer(within_s, end)
    timer.daemon = True
    timer.start()
    return timer


def host_gone(who: str) -> HostLostError:
    """Returns the error for a connection that ended; `who` names the host."""
    return HostLostError(
        f"{who} of this learner is gone",
        hint="all its processes exit, and continue once all are started, or without a lost slice:"
        " runbooks/lost-host.md",
    )


async def read_message(reader: asyncio.StreamReader) -> HostMessage:
    """Reads the next frame of a connection, and returns its message.

    Raises:
        WireError: the bytes are not a message of this release, or too many.
        EOFError, OSError: the connection has ended.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > FRAME_BYTES:
        raise WireError(Reason.OVERSIZE, f"a host of this learner sends {length} bytes")
    return unframe(await reader.readexactly(length))
