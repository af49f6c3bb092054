"""Makes the three streams of a run (tape, bounded stream, leases), with their limits."""

from diloco.common.process.config import BusSection
from diloco.common.protocol import names
from diloco.common.storage.bus import Bus, StreamLimits
from diloco.common.storage.tape import first_sequence


def tape_limits(streams: BusSection) -> StreamLimits:
    """Returns the limits of the tape's stream, which at a size limit refuses new messages."""
    return StreamLimits(
        duplicate_window_s=streams.duplicate_window_s,
        replicas=streams.replicas,
        max_bytes=streams.tape_max_bytes,
        keep_old=streams.tape_max_bytes > 0,
    )


async def make_streams(bus: Bus, run: str, streams: BusSection, epoch: int = 0) -> None:
    """Makes the streams of a run; existing streams stay.

    The tape's first sequence depends on `epoch`, so that each epoch has other sequences.
    """
    tape = tape_limits(streams)
    small = tape._replace(max_bytes=0, keep_old=False)
    ops = small._replace(max_age_s=streams.ops_max_age_s, max_bytes=streams.ops_max_bytes)
    leases = small._replace(last_only=True)
    await bus.create_stream(
        names.tape_stream(run),
        names.tape_subjects(run),
        tape,
        first_seq=first_sequence(epoch),
    )
    await bus.create_stream(names.ops_stream(run), names.ops_subjects(run), ops)
    await bus.create_stream(names.leases_stream(run), names.leases_subjects(run), leases)
