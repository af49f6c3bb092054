"""The errors of this project, and the exit statuses of the processes that they end.

An error's text says whose fault the error is, what was expected, what came, and what to do next.
`retry` is True if the same call may succeed later, `patience_s` is the number of seconds to keep
trying (None: for ever), and `status` is the exit status. Exceptions of other libraries are turned
into these errors by the packages `store`, `bus`, `config` and `wire`, nowhere else.
"""

from enum import IntEnum
from typing import Self

from diloco.common.protocol.reasons import Reason


class Exit(IntEnum):
    """An exit status of a process.

    Attributes:
        text: the meaning of the status.
        restart: True if starting the daemon again may help, at once or after a fault outside of
            the daemon is repaired; False if an operator must change the daemon itself.
    """

    text: str
    restart: bool

    def __new__(cls, status: int, text: str, restart: bool) -> Self:
        """Makes a member of the enumeration."""
        made = int.__new__(cls, status)
        made._value_ = status
        made.text, made.restart = text, restart
        return made

    # fmt: off
    ENDED = 0, "it did what it was asked: the run has ended, or a signal asked it to stop", False
    FAILED = 1, "a bug, with its trace on stderr; of a check: something is wrong", True
    CONFIG = 2, "a wrong option, file or environment variable", False
    TASK = 65, "the task's code or its data break a rule of tasks", False
    NO_RUN = 66, "there is no such run on this bus, or not yet", True
    REFUSED = 69, "the bus or the store refuses a request, for another reason than who asks", True
    LEFT = 71, "of several slices: a process left at a step boundary, for its supervisor", True
    OVER = 72, "the run has ended, and the timer that asked (--until-end) stops", False
    SUPERSEDED = 73, "another process has joined the run under this learner's name", False
    DAMAGED = 74, "stored bytes are gone, or differ from what was recorded", True
    PASSING = 75, "a transient fault: bus or store unreachable for long, or a host lost", True
    MISMATCH = 76, "the run has other settings or layout, or messages of a newer release", False
    SHUT_OUT = 77, "the server refuses the credentials: revoked, or without this right", False
    # fmt: on


def find(status: int) -> Exit:
    """Returns the `Exit` of a status number; `FAILED` if this release does not know the number."""
    return next((one for one in Exit if one == status), Exit.FAILED)


def final() -> tuple[Exit, ...]:
    """Returns the statuses of failures after which a daemon must not be restarted."""
    return tuple(status for status in Exit if status and not status.restart)


class DilocoError(Exception):
    """Base of all errors that this project raises on purpose.

    Args:
        message: what was expected and what came.
        hint: what to do next; shown on a line of its own.
    """

    retry = False
    patience_s: float | None = None
    status = Exit.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(DilocoError):
    """The operator's configuration or command line is wrong."""

    status = Exit.CONFIG


class TaskError(DilocoError):
    """The user's task breaks a rule of the Task contract."""

    status = Exit.TASK


class DataError(TaskError):
    """The documents to be made into tokens, or a folder of tokens, are malformed."""


class DivergedError(TaskError):
    """The training loss is infinite or NaN, and the parameters are lost with it."""

    status = Exit.PASSING


class RunMismatchError(DilocoError):
    """A daemon's configuration disagrees with the run it wants to join."""

    status = Exit.MISMATCH


class ParametersError(RunMismatchError, TypeError):
    """A training loop returned parameters of other names, shapes or dtypes than it was given."""


class NewTapeError(RunMismatchError):
    """The run was resumed on a new tape since this process began."""

    status = Exit.PASSING


class OtherCheckpointError(RunMismatchError):
    """The run's tape on this bus began with another checkpoint."""


class RunMissingError(RunMismatchError):
    """The bus has no run of that name."""

    status = Exit.NO_RUN


class RunIncompleteError(RunMismatchError):
    """A fragment has no record: creating the run did not finish, or a bus replica lags behind."""

    status = Exit.NO_RUN
    retry = True
    patience_s = 10.0


class WireError(DilocoError):
    """Bytes from a peer break the protocol; the sender is at fault.

    Args:
        reason: the protocol's word for the fault, used in counters and verdicts.
    """

    status = Exit.MISMATCH

    def __init__(self, reason: Reason, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class IntegrityError(DilocoError):
    """Stored or recomputed bits differ from the recorded ones; never retried, always reported."""

    status = Exit.DAMAGED


class ObjectLostError(IntegrityError):
    """An object without which the run cannot go on is missing; retried, as stores may lag."""

    retry = True
    patience_s = 30.0


class CheckpointError(DilocoError):
    """A learner's checkpoint cannot be used, or cannot be written; training goes on without it."""

    status = Exit.DAMAGED


class NoSnapshotError(CheckpointError):
    """A checkpoint has no unsent work, as those have that are made when a learner ends."""


class SupersededError(DilocoError):
    """Another process has joined the run under this learner's name."""

    status = Exit.SUPERSEDED


class ExpiredError(DilocoError):
    """This learner was silent for too long, so an aggregator has ended its incarnation."""

    status = Exit.PASSING


class ReadFurtherError(DilocoError):
    """An earlier process of this learner ended its claims of data after this one had joined."""

    status = Exit.PASSING


class HostLostError(DilocoError):
    """A host of this learner is gone; the learner's other hosts cannot train without it."""

    status = Exit.PASSING


class HostFetchError(DilocoError):
    """Another host of this learner cannot read an object that this host can read.

    The call is retried, as the store may show the object to the other host later.
    """

    status = Exit.PASSING
    retry = True
    patience_s = 30.0


class StoreError(DilocoError):
    """The object store failed."""

    status = Exit.REFUSED


class StoreUnavailableError(StoreError):
    """The store could not be reached or had a transient fault."""

    status = Exit.PASSING
    retry = True


class StoreSlowError(StoreUnavailableError):
    """Reading an object took longer than the time limit that the reader gave."""


class StoreMissingError(StoreUnavailableError):
    """The store's folder does not exist, or is empty: not mounted, or no run was created in it."""


class ObjectMissingError(StoreError):
    """The store has no object of that name."""

    status = Exit.DAMAGED


class ObjectUnreadableError(StoreError):
    """The name belongs to no plain object, but to an encoded one, a link, a pipe or a device."""

    status = Exit.DAMAGED


class ObjectTooLargeError(StoreError):
    """An object is larger than the reader's limit; none of its bytes was read."""

    status = Exit.DAMAGED


class ObjectRangeError(StoreError):
    """A byte range is empty or lies outside of its object; none of its bytes was read."""

    status = Exit.DAMAGED


class ObjectExistsError(StoreError):
    """An object of that name exists with other bytes; objects are never overwritten."""

    status = Exit.DAMAGED


class BusError(DilocoError):
    """The message bus failed."""

    status = Exit.REFUSED


class BusUnavailableError(BusError):
    """The bus was unreachable or gave no answer in time; a message may have been stored."""

    status = Exit.PASSING
    retry = True


class SubjectUntakenError(BusUnavailableError):
    """No stream accepts messages of this subject: there is none, or it has no leader now."""


class AccessDeniedError(BusError):
    """The server refuses these credentials, or they do not permit this request."""

    status = Exit.SHUT_OUT


class StaleReadError(BusError):
    """The answer came from a replica that lags behind; retrying may reach a newer state."""

    status = Exit.PASSING
    retry = True


class StreamMissingError(BusError):
    """The server has no stream of that name: the run does not exist, or is on another server."""

    status = Exit.NO_RUN


class IdTakenError(BusError):
    """The server stored nothing, because another message has this message's id.

    Publishing again under a new id may succeed.
    """

    status = Exit.PASSING
    retry = True


class SwapLostError(BusError):
    """The compare-and-swap failed: somebody else published on the subject first.

    Args:
        subject: the subject of the publication.
        expected: the stream sequence that the publisher believed to be the subject's last.
        last: the real last sequence, as the stream's leader says; None if the leader gave none.
    """

    status = Exit.PASSING

    def __init__(self, subject: str, expected: int, last: int | None = None) -> None:
        super().__init__(
            f"compare-and-swap on {subject!r} lost: its last message is not sequence {expected}"
        )
        self.subject = subject
        self.expected = expected
        self.last = last


def status_of(error: BaseException) -> int:
    """Returns the exit status of a process that `error` ends."""
    return error.status if isinstance(error, DilocoError) else Exit.FAILED
