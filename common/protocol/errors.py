"""The errors of this project, and the exit statuses that they give.

Each says whose fault it is, what was expected, what came, and what to do next; `retry` tells a
caller whether the same call may succeed later, `patience_s` for how long it is worth trying (None:
for ever), and `status` is that of a process which it ends. Exceptions of other libraries become one
of these once, where they enter (`store*.py`, `bus*.py`, `config`, `wire`), and nowhere else.
"""

from enum import IntEnum
from typing import Self

from diloco.common.protocol.reasons import Reason


class Exit(IntEnum):
    """One status.

    Attributes:
        text: what it means.
        restart: whether to start the daemon again is worth it: it may work then, by itself or once
            somebody has repaired what is outside of it. Else nothing changes until an operator
            changes this daemon.
    """

    text: str
    restart: bool

    def __new__(cls, status: int, text: str, restart: bool) -> Self:
        """A member."""
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
    OVER = 72, "the run has ended, and the timer that asked (--until-end) stops", False
    SUPERSEDED = 73, "another process has joined the run under this learner's name", False
    DAMAGED = 74, "stored bytes are gone, or differ from what was recorded", True
    PASSING = 75, "a fault that passes: bus or store were away for long, a host was lost", True
    MISMATCH = 76, "the run has other settings or layout, or messages of a newer release", False
    SHUT_OUT = 77, "the server refuses the credentials: revoked, or not for this", False
    # fmt: on


def find(status: int) -> Exit:
    """The status of this number; FAILED for one of another release."""
    return next((one for one in Exit if one == status), Exit.FAILED)


def final() -> tuple[Exit, ...]:
    """The failures after which a daemon is not to be started again; ENDED is none."""
    return tuple(status for status in Exit if status and not status.restart)


class DilocoError(Exception):
    """Base of every error this project raises on purpose.

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
    """Documents that are to become tokens, or a folder of tokens, are not as they must be."""


class DivergedError(TaskError):
    """Training gave a loss that is no number; the parameters are lost with it."""

    status = Exit.PASSING


class RunMismatchError(DilocoError):
    """A daemon's configuration disagrees with the run it wants to join."""

    status = Exit.MISMATCH


class ParametersError(RunMismatchError, TypeError):
    """A training loop gave back other parameters than it was given."""


class NewTapeError(RunMismatchError):
    """The run was resumed on a new tape since this process began."""

    status = Exit.PASSING


class RunMissingError(RunMismatchError):
    """There is no run of that name on this bus."""

    status = Exit.NO_RUN


class RunIncompleteError(RunMismatchError):
    """A fragment has no record: the run was not created wholly, or a replica is behind."""

    status = Exit.NO_RUN
    retry = True
    patience_s = 10.0


class WireError(DilocoError):
    """Bytes from a peer are not what the protocol says: the sender's fault.

    Args:
        reason: for counters and verdicts.
    """

    status = Exit.MISMATCH

    def __init__(self, reason: Reason, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class IntegrityError(DilocoError):
    """Stored or recomputed bits differ from what was recorded: never retried, always reported."""

    status = Exit.DAMAGED


class ObjectLostError(IntegrityError):
    """An object that a run cannot go on without is gone, unless the store is slow to show it."""

    retry = True
    patience_s = 30.0


class CheckpointError(DilocoError):
    """A learner's checkpoint cannot be used, or cannot be made; training goes on without it."""

    status = Exit.DAMAGED


class SupersededError(DilocoError):
    """Another process has joined the run under this learner's name."""

    status = Exit.SUPERSEDED


class ExpiredError(DilocoError):
    """This learner was silent for too long, and an aggregator has ended its life."""

    status = Exit.PASSING


class HostLostError(DilocoError):
    """A host of this learner is gone; the others cannot train without it."""

    status = Exit.PASSING


class HostFetchError(DilocoError):
    """Another host of this learner cannot read what this one can, unless it is slow to see it."""

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
    """Reading an object took longer than its reader would wait."""


class StoreMissingError(StoreUnavailableError):
    """The folder of the store is not there: not mounted, or no run was created in it."""


class ObjectMissingError(StoreError):
    """No object of that name."""

    status = Exit.DAMAGED


class ObjectUnreadableError(StoreError):
    """The object under a name is no plain one: it is encoded, or a link, a pipe, a device."""

    status = Exit.DAMAGED


class ObjectTooLargeError(StoreError):
    """An object is larger than its reader was told to take; nothing of it was read."""

    status = Exit.DAMAGED


class ObjectRangeError(StoreError):
    """A range of bytes is empty or not within its object; nothing of it was read."""

    status = Exit.DAMAGED


class ObjectExistsError(StoreError):
    """An object of that name exists with other bytes; names are create-only."""

    status = Exit.DAMAGED


class BusError(DilocoError):
    """The message bus failed."""

    status = Exit.REFUSED


class BusUnavailableError(BusError):
    """The bus could not be reached, or did not answer in time; the message may have arrived."""

    status = Exit.PASSING
    retry = True


class SubjectUntakenError(BusUnavailableError):
    """No stream takes messages of this subject: there is none, or it has no leader now."""


class AccessDeniedError(BusError):
    """The server refuses these credentials, or they are not for this request."""

    status = Exit.SHUT_OUT


class StaleReadError(BusError):
    """A replica that is behind has answered; another, or the same one later, knows more."""

    status = Exit.PASSING
    retry = True


class StreamMissingError(BusError):
    """There is no stream of that name: the run was not created, or on another server."""

    status = Exit.NO_RUN


class IdTakenError(BusError):
    """Another's message stands under this one's id, so the server stored nothing.

    Publishing again under a new id may succeed.
    """

    status = Exit.PASSING
    retry = True


class SwapLostError(BusError):
    """The subject's last message is not the expected one: somebody else committed first.

    Args:
        expected: the stream sequence that the publisher believed to be the subject's last.
        last: the one that is, as the stream's leader said; None if it did not say.
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
    """The exit status of a process that an error ends."""
    return error.status if isinstance(error, DilocoError) else Exit.FAILED
