"""The errors of nats-py and of the server as ours: whose fault, and whether to retry."""

import contextlib
from collections.abc import Iterator

import nats.errors
from nats.js.errors import (
    APIError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)

from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    StreamMissingError,
    SubjectUntakenError,
)
from diloco.common.storage.bus.protocol import stream_is_full

WRONG_LAST_SEQUENCE = (10071, 10164)
STREAM_EXISTS = 10058
TOO_MANY_READERS = 10026
_STREAM_NOT_FOUND = 10059
# Without a majority a cluster holds an earlier attempt of a message, neither stored nor lost.
_STILL_IN_PROCESS = 10158
_NO_ROOM = (10023, 10028, 10047)  # of the server, of the account, of its disk
_STREAM_FULL = (10077, "maximum bytes exceeded")


class RefusedError(BusError):
    """The server answered with an error; its number tells which."""

    err_code = 0
    no_message = False


class NoStreamError(RefusedError, StreamMissingError):
    """The server has no stream of that name."""


@contextlib.contextmanager
def vendor_errors(subject: str) -> Iterator[None]:
    """Turn what nats-py raises about `subject` into our errors."""
    try:
        yield
    except nats.errors.Error as error:
        raise ours(error, subject) from error


def ours(error: nats.errors.Error, subject: str) -> BusError:
    """Our error for one of nats-py's, by whose fault it is and whether to retry."""
    text = f"{subject!r}: {error}"
    if isinstance(error, NoStreamResponseError | nats.errors.NoRespondersError):
        return SubjectUntakenError(
            f"{subject!r}: no responders",
            hint="no stream takes this subject, or its leader is being elected; create the run",
        )
    if isinstance(error, APIError) and (error.err_code, error.description) == _STREAM_FULL:
        return stream_is_full(subject)
    if isinstance(error, ServiceUnavailableError) and error.code is None:
        # Nobody heard the request: nats-py makes this of "no responders", without a number.
        return BusUnavailableError(
            f"{subject!r}: no responders",
            hint="the server has no JetStream (nats-server -js), or is reading its configuration",
        )
    passing = isinstance(error, ServiceUnavailableError) or (
        isinstance(error, APIError) and error.err_code == _STILL_IN_PROCESS
    )
    if isinstance(error, APIError) and not passing:
        if error.err_code == _STREAM_NOT_FOUND:
            return NoStreamError(text, hint="create the run first, or use the server it is on")
        refused = RefusedError(text, hint=_hint(error.err_code))
        refused.err_code = error.err_code or 0
        # A direct get says only 404; from the leader it is 10037, where 10059 is 'no stream'.
        refused.no_message = isinstance(error, NotFoundError) and error.err_code in {None, 10037}
        return refused
    if isinstance(error, nats.errors.MaxPayloadError):
        return BusError(f"{subject!r}: the message is larger than the server takes")
    if isinstance(error, nats.errors.BadSubjectError | nats.errors.BadHeaderError):
        return BusError(text)
    return BusUnavailableError(text)


def _hint(err_code: int | None) -> str | None:
    """The advice for an error code of the server's, where there is one."""
    if err_code in _NO_ROOM:
        return "the server's disk, or its limit for streams, is full: runbooks/disk-full.md"
    if err_code == TOO_MANY_READERS:
        return (
            "the stream has as many readers as server or account allow, and each process is one: "
            "raise the number in the server's configuration (docs/operations.md, Large fleets)"
        )
    return None
