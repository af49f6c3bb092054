"""Messages between the hosts of one learner: typed, with named fields, of one version.

    host 0 -> workers  Begin     what the run is
                       Load      where a fragment's first view is
                       Go        the life that begins, and where its data goes on
                       Resume    the checkpoint to go on from
                       Turn      what to do at the next boundary
                       Prepare   bring a version onto the devices: an attempt, with a number
                       Granted   a share of the data, and where it ends
                       Drop      the attempt came to nothing: free what there is of it
                       Ending    host 0 ends here, and why: so do the others
    workers -> host 0  Hello     who I am
                       Have      checkpoints of which this host has its part
                       Prepared  the attempt has succeeded here, or why it has not
                       Uploaded  this host's shards of an update are in the store
                       LeaveAsked  somebody asked this host to end

    frame: length (4 bytes, big endian), msgpack map with `version`, `kind` and the fields by name

All hosts of a learner run one release; `version` is there to say so to whoever upgraded only some.
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
from diloco.common.storage.share_claims import Holding
from diloco.learner.core.boundary import Boundary
from diloco.learner.wire.recovery import CheckpointId

VERSION: Final = 7
LENGTH: Final = struct.Struct(">I")
FRAME_BYTES: Final = 64 << 20


class HostMessage(NestedRecord):
    """A message; the name of its class names it on the wire."""


class Begin(HostMessage):
    """The run; `constants` names the object with the leaves nobody trains."""

    epoch: int
    layout: str
    constants: str | None


class Load(HostMessage):
    """Names the change that leads to a fragment's first view."""

    change: Change


class Go(HostMessage):
    """Host 0 says that all hosts are ready to train from this point."""

    incarnation: int
    position: int
    global_step: int


class Resume(HostMessage):
    """`checkpoint` is the one to go on from, None to begin anew."""

    checkpoint: CheckpointId | None


class Turn(HostMessage):
    """A boundary; some of its effects are for host 0 alone."""

    boundary: Boundary


class Prepare(HostMessage):
    """Bring a version onto the devices."""

    attempt: int
    change: Change


class Granted(HostMessage):
    """Part of the learner's data, which ends before position `end`."""

    holding: Holding
    end: int


class Drop(HostMessage):
    """The tensors of an attempt will not be adopted: free them."""

    attempt: int


class Ending(HostMessage):
    """The error that ends this learner's life, on all hosts alike; `status` as of `Exit`."""

    status: int
    message: str
    hint: str | None


class Hello(HostMessage):
    """A worker, and the secret that it has from the collective."""

    secret: str
    host: int


class Have(HostMessage):
    """Checkpoints of which this host has its part, readable."""

    checkpoints: tuple[CheckpointId, ...]


class Failure(NestedRecord):
    """Why a host cannot read a version: an object is `missing`, or else damaged."""

    missing: bool
    text: str


class Prepared(HostMessage):
    """The result of an attempt."""

    attempt: int
    failure: Failure | None


class Uploaded(HostMessage):
    """Shards of an update that are in the store."""

    fragment: int
    seq: int
    shards: tuple[wire.Shard, ...]


class LeaveAsked(HostMessage):
    """Somebody asked this host to end."""


_KINDS: Final[dict[str, type[HostMessage]]] = {
    kind.__name__: kind
    for kind in (
        *(Begin, Load, Go, Resume, Turn, Prepare, Granted, Drop, Ending),
        *(Hello, Have, Prepared, Uploaded, LeaveAsked),
    )
}


def ending_of(error: DilocoError) -> Ending:
    """An error that ends host 0 as a message."""
    return Ending(status=error.status, message=error.message, hint=error.hint)


def error_of(ending: Ending) -> DilocoError:
    """The error of a message."""
    error = DilocoError(ending.message, hint=ending.hint)
    error.status = find(ending.status)
    return error


def frame(message: HostMessage) -> bytes:
    """A message as it goes over the connection."""
    kind = type(message).__name__
    data: bytes = msgpack.packb({"version": VERSION, "kind": kind, **_named(message)})
    return LENGTH.pack(len(data)) + data


def unframe(data: bytes) -> HostMessage:
    """The message in a frame, behind its length.

    Raises:
        WireError: the bytes are not a message of this release.
    """
    try:
        fields: dict[str, Any] = msgpack.unpackb(data, use_list=False)
        version, kind = fields.pop("version"), fields.pop("kind")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WireError(
            Reason.MALFORMED, f"a host of this learner sends no message: {error}"
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
    """Messages, parts and named tuples as maps of their fields, so that order means nothing."""
    if isinstance(value, BaseModel):
        return {name: _named(getattr(value, name)) for name in type(value).model_fields}
    if hasattr(value, "_asdict"):
        return {name: _named(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple):
        return [_named(item) for item in value]
    return value


_ADDRESS_BYTES: Final = 256
_SECRET_BYTES: Final = 32
# A process that a lost host keeps in a collective is ended after so long.
HANGING_S: Final = 10.0
# How long the hosts of a learner may take to find each other.
MEET_S: Final = 300.0
_MEETINGS: Final = itertools.count(1)


def wait_for_hosts(within_s: float = MEET_S) -> None:
    """Wait until all hosts of this learner have called this equally often.

    A collective does not replace it: between CPUs the first one of a group of devices must find
    its peers within 30 s (gloo's limit, which nothing sets), whatever they still load or compile.

    Raises:
        HostLostError: a host is gone, or did not come in time.
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
    """Address where this learner's hosts met: host 0's `host:port`, if JAX knows it."""
    from jax._src import distributed  # JAX gives it no public name either.

    return distributed.global_state.coordinator_address


def exchange_secret(address: str) -> tuple[str, str]:
    """Send host 0's address and a secret to every host. A collective of JAX.

    Args:
        address: where host 0 listens; of the others' it does not matter.

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
    """End this process soon, even if it hangs in a collective of JAX or in its shutdown.

    Only what runs the training loop calls it; what holds a connection raises `HostLostError`.

    Args:
        status: the exit status of the process.
        within_s: the time that it has to end by itself.
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
    """The error of a connection that ended."""
    return HostLostError(
        f"{who} of this learner is gone",
        hint="all hosts of the learner exit now; start them again together: runbooks/lost-host.md",
    )


async def read_message(reader: asyncio.StreamReader) -> HostMessage:
    """The next message.

    Raises:
        WireError: the bytes are not a message of this release.
        EOFError, OSError: the connection has ended.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > FRAME_BYTES:
        raise WireError(Reason.OVERSIZE, f"a host of this learner sends {length} bytes")
    return unframe(await reader.readexactly(length))
