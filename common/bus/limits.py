"""What every backend refuses, and in which words."""

from diloco.common.bus.protocol import StreamLimits
from diloco.common.errors import BusError, BusUnavailableError


def stream_exists(stream: str) -> BusError:
    """The error of restoring a stream where there is one."""
    return BusError(
        f"stream {stream!r} exists already",
        hint="a tape is imported into a server that does not have it",
    )


def stream_went_back(stream: str, start_seq: int, last: int) -> BusError:
    """The error of a reader whose position lies beyond the end of the stream."""
    return BusError(
        f"stream {stream!r} ends at {last}, but sequence {start_seq - 1} was seen earlier",
        hint="the server lost acknowledged messages (a power cut without sync_interval: always?) "
        "or the stream was recreated; restore it, or start a new run",
    )


def stream_is_full(subject: str) -> BusUnavailableError:
    """The error of a message that a stream with `keep_old` has no room for."""
    return BusUnavailableError(
        f"the stream of {subject!r} is full",
        hint="nothing is lost, writers wait until there is room: runbooks/tape-full.md",
    )


def check_limits(limits: StreamLimits) -> None:
    """Refuse limits that no server takes.

    Raises:
        BusError: negative ones, no replica, or a duplicate window of none or beyond the age.
    """
    if min(limits) < 0 or limits.replicas < 1:
        raise BusError(f"stream limits must not be negative: {limits}")
    if limits.duplicate_window_s <= 0 or 0 < limits.max_age_s < limits.duplicate_window_s:
        raise BusError(
            f"duplicate_window_s is {limits.duplicate_window_s}: it must be more than 0 "
            f"and within max_age_s ({limits.max_age_s})"
        )


def check_ttl(ttl_s: float | None, *, allowed: bool) -> None:
    """Refuse a time to live that no server takes.

    Raises:
        BusError: less than a second, or in a stream that is not `last_only`.
    """
    if ttl_s is not None and (ttl_s < 1 or not allowed):
        raise BusError(
            f"a message cannot live for {ttl_s} s",
            hint="at least 1 s, and only in a stream of `last_only`",
        )


def stream_settings(subjects: list[str], limits: StreamLimits) -> dict[str, object]:
    """What makes two creations of a stream the same, by name."""
    return {"subjects": sorted(subjects), **limits._asdict()}


def check_settings(stream: str, there: dict[str, object], asked: dict[str, object]) -> None:
    """Compare an existing stream's settings with those asked for.

    Raises:
        BusError: they differ; every difference is named.
    """
    differences = [f"{k} is {there[k]!r}, not {asked[k]!r}" for k in asked if there[k] != asked[k]]
    if differences:
        raise BusError(
            f"stream {stream!r} exists with other settings: {'; '.join(differences)}",
            hint="use the settings it was created with, or another run's name",
        )
