"""Exit statuses: one for each error, in one table, which shells and systemd can tell apart."""

import diloco.common.storage.bus.jetstream.link
from diloco.common.protocol.errors import (
    AccessDeniedError,
    ConfigError,
    DilocoError,
    DivergedError,
    Exit,
    NewTapeError,
    RunMissingError,
    StoreUnavailableError,
    TaskError,
    final,
    status_of,
)


def every_error(base: type[DilocoError] = DilocoError) -> set[type[DilocoError]]:
    """All errors that this process has loaded."""
    assert diloco.common.storage.bus.jetstream.link.NoStreamError
    below = (every_error(one) for one in base.__subclasses__())
    return {base}.union(*below)


def test_statuses_are_apart_from_those_of_shells_signals_and_each_other():
    assert len({int(status) for status in Exit}) == len(Exit)
    for status in Exit:
        assert status in (0, 1, 2) or 64 <= status <= 78, status
        assert status.text


def test_every_error_has_a_status_and_none_is_taken_for_a_good_end():
    for error in every_error():
        assert isinstance(error.status, Exit), error
        assert error.status is not Exit.ENDED, error


def test_what_passes_is_worth_a_restart():
    """A fault that is waited out within a process allows a restart after the process ends."""
    for error in every_error():
        if error.retry:
            assert error.status.restart, error


def test_after_what_a_restart_is_no_use():
    assert [status.name for status in final()] == [
        "CONFIG", "TASK", "OVER", "SUPERSEDED", "MISMATCH", "SHUT_OUT",
    ]  # fmt: skip
    for error in (ConfigError, TaskError, AccessDeniedError):
        assert error.status in final()
    # A machine may come up before its run is created, or with parameters that a restart replaces.
    for error in (RunMissingError, NewTapeError, DivergedError, StoreUnavailableError):
        assert error.status not in final()


def test_what_is_no_error_of_ours_is_a_bug():
    assert status_of(ValueError("bug")) == Exit.FAILED
    assert status_of(ConfigError("file")) == Exit.CONFIG
