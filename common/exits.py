"""Exit statuses: what the end of a process means, for scripts, systemd and people. Pure.

One table for all daemons and commands; `errors.py` gives each error its status. From 64 on they
are those of sysexits.h, where one fits: no shell and no signal gives these (126 and more).
"""

from enum import IntEnum
from typing import Self


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
