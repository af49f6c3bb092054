"""Messages between the hosts of one learner: typed, with named fields, of one version.

    host 0 -> workers  Begin     the run's epoch and layout
                       Load      the objects of a fragment's first view
                       Go        the life that begins, and where its data resumes
                       Resume    the checkpoint to resume from
                       Turn      the plan of the next boundary
                       Prepare   bring a version onto the devices: an attempt, with a number
                       Granted   a share of the data, and where it ends
                       Drop      the attempt failed: free its tensors
                       Ending    host 0 ends with this error: so do the others
    workers -> host 0  Hello     the worker's number, and the secret
                       Have      checkpoints of which this host has its part
                       Prepared  the attempt has succeeded here, or why it has not
                       Uploaded  this host's shards of an update are in the store
                       LeaveAsked  this host was asked to end

    frame: length (4 bytes, big endian), msgpack map with `version`, `kind` and the fields by name

All hosts of a learner run one release; `version` detects that only some were upgraded.
"""

import asyncio
import itertools
import os
import secrets
import struct
import sys
import threading
from typing import Any, Final

import msgpack
import numpy as np
from pydantic import BaseModel, ValidationError

from diloco.common.process import log
from diloco.common.protocol import wire
from diloco.common.protocol.errors import DilocoError, HostLostError, WireError, find
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.wire import NestedRecord
from diloco.common.storage.catchup import Change
from diloco.common.storage.data_share_allocation import Holding
from diloco.learner.core.handover import Boundary
from diloco.learner.wire.checkpoint_save_and_restore import CheckpointId

VERSION: Final = 7
LENGTH: Final = struct.Struct(">I")
FRAME_BYTES: Final = 64 << 20


class HostMessage(NestedRecord):
    """A message; the name of its class names it on the wire."""


class Begin(HostMessage):
    """Names the run's epoch and layout; `constants` names the object of untrained leaves."""

    epoch: int
    layout: str
    constants: str | None


class Load(HostMessage):
    """Names the objects from which a worker loads a fragment's first view."""

    change: Change


class Go(HostMessage):
    """Tells the workers that all hosts are ready to train from this point."""

    incarnation: int
    position: int
    global_step: int


class Resume(HostMessage):
    """Names the checkpoint to resume from; None: begin with a fresh inner optimizer."""

    checkpoint: CheckpointId | None


class Turn(HostMessage):
    """The plan of a boundary; some of its effects are for host 0 alone."""

    boundary: Boundary


class Prepare(HostMessage):
    """Tells the workers to bring a version onto their devices."""

    attempt: int
    change: Change


class Granted(HostMessage):
    """Grants part of the learner's data, which ends before position `end`."""

    holding: Holding
    end: int


class Drop(HostMessage):
    """Tells the workers to free the tensors of an attempt, which will not be adopted."""

    attempt: int


class Ending(HostMessage):
    """Ends the learner's life on all hosts with this error; `status` is a code of `Exit`."""

    status: int
    message: str
    hint: str | None


class Hello(HostMessage):
    """Identifies a worker, with the secret of `exchange_secret`, which no other process has."""

    secret: str
    host: int


class Have(HostMessage):
    """Lists checkpoints of which this host has its part, readable."""

    checkpoints: tuple[CheckpointId, ...]


class Failure(NestedRecord):
    """Why a host cannot read a version: an object is missing if `missing`, else damaged."""

    missing: bool
    text: str


class Prepared(HostMessage):
    """Reports the result of an attempt; `failure` is None if it succeeded."""

    attempt: int
    failure: Failure | None


class Uploaded(HostMessage):
    """Reports the shards of an update that this host has stored."""

    fragment: int
    seq: int
    shards: tuple[wire.Shard, ...]


class LeaveAsked(HostMessage):
    """Reports that this host was asked to end."""


_KINDS: Final[dict[str, type[HostMessage]]] = {
    kind.__name__: kind
    for kind in (
        *(Begin, Load, Go, Resume, Turn, Prepare, Granted, Drop, Ending),
        *(Hello, Have, Prepared, Uploaded, LeaveAsked),
    )
}


def ending_of(error: DilocoError) -> Ending:
    """Returns the message for an error that ends host 0."""
    return Ending(status=error.status, message=error.message, hint=error.hint)


def error_of(ending: Ending) -> DilocoError:
    """Returns the error that a message carries."""
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
        version, kind = fields.pop("version"), fields.pop("kind")
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

    A collective cannot replace it: between CPUs the first collective of a group of devices must
    find its peers within 30 s (gloo's fixed limit), whatever the hosts still load or compile.

    Raises:
        HostLostError: a host is gone, or did not call within `within_s`.
    """
    import jax
    from jax._src import distributed  # JAX gives its barrier no public name.

    client = distributed.global_state.client
    if client is None:  # Hosts of a TPU's own network meet without it.
        return
    try:
        client.wait_at_barrier(f"diloco-{next(_MEETINGS)}", int(within_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise host_gone("another host") from error


def meeting_place() -> str | None:
    """Returns the address where this learner's hosts met: host 0's `host:port`, if JAX knows it."""
    from jax._src import distributed  # JAX gives it no public name either.

    return distributed.global_state.coordinator_address


def exchange_secret(address: str) -> tuple[str, str]:
    """Sends host 0's address and a secret to every host, by a collective of JAX.

    Args:
        address: where host 0 listens; the other hosts' value is ignored.

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
    """Ends this process after `within_s`, even if it hangs in JAX's collective or shutdown.

    Only code around the training loop calls this; code that owns a connection raises
    `HostLostError`.

    Args:
        status: the exit status of the process.
        within_s: the time that the process has to end by itself.
        why: the error that is printed when it has not.
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
        hint="all hosts of the learner exit now; start them again together: runbooks/lost-host.md",
    )


async def read_message(reader: asyncio.StreamReader) -> HostMessage:
    """Reads the next message.

    Raises:
        WireError: the bytes are not a message of this release.
        EOFError, OSError: the connection has ended.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > FRAME_BYTES:
        raise WireError(Reason.OVERSIZE, f"a host of this learner sends {length} bytes")
    return unframe(await reader.readexactly(length))
