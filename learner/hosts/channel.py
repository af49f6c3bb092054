"""Connections between the hosts of a learner: how they meet, frames, and what a lost one means."""

import asyncio
import os
import secrets
import sys
import threading
from typing import Final

import numpy as np

from diloco.common import log
from diloco.common.errors import DilocoError, HostLostError, WireError
from diloco.common.reasons import Reason
from diloco.learner.hosts.messages import FRAME_BYTES, LENGTH, HostMessage, unframe

_ADDRESS_BYTES: Final = 256
_SECRET_BYTES: Final = 32
# A process that a lost host keeps in a collective is ended after so long.
HANGING_S: Final = 10.0
# How long the hosts of a learner may take to find each other.
MEET_S: Final = 300.0


def exchange_secret(address: str) -> tuple[str, str]:
    """What host 0 says of itself, on every host: its address and a secret. A collective of JAX.

    Args:
        address: where host 0 listens; of the others' it does not matter.

    Raises:
        HostLostError: one of them is gone.
    """
    import jax
    from jax.experimental import multihost_utils

    secret = secrets.token_hex(_SECRET_BYTES)
    text = f"{address} {secret}".encode().ljust(_ADDRESS_BYTES)
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

    For whoever runs the training loop: who only holds a connection reports the loss.

    Args:
        status: its exit status.
        within_s: so long it may still end by itself.
        why: what it says then, if nobody could say so before.
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
        WireError: it is none of this release's.
        EOFError, OSError: the connection has ended.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > FRAME_BYTES:
        raise WireError(Reason.OVERSIZE, f"a host of this learner sends {length} bytes")
    return unframe(await reader.readexactly(length))
