"""What all parts of one aggregator process share, and the two ways it writes.

Objects go to names that hold their content; messages that commit go by compare-and-swap.
"""

from dataclasses import dataclass, field

from diloco.aggregator.arrays.arithmetic import PRODUCTION, Arithmetic
from diloco.common import log, metrics, names, shards, wire
from diloco.common.config import GcSection
from diloco.common.errors import BusUnavailableError, SwapLostError
from diloco.common.health import Health
from diloco.common.metrics import Metrics
from diloco.common.tape import RunContext


@dataclass(frozen=True, kw_only=True)
class Context(RunContext):
    """What all parts of one aggregator process share; `name` stands in its records."""

    name: str
    gc: GcSection = field(default_factory=GcSection)
    arithmetic: Arithmetic = PRODUCTION
    metrics: Metrics = field(default_factory=Metrics)
    health: Health = field(default_factory=Health)


def identity(context: Context) -> str:
    """128 random bits in hex: tells one attempt to commit from every other."""
    return f"{context.runtime.rng.getrandbits(128):032x}"


async def store_version_object(
    context: Context, fragment: int, version: int, what: str, data: bytes, logger: log.Logger
) -> wire.ObjectRef:
    """Store an object of a version under a name that holds its content; retried for ever."""
    name = names.version_object(context.run, fragment, version, what, shards.digest(data))
    await context.runtime.retry(
        f"storing {what}",
        lambda: context.runtime.call(context.store.put, name, data),
        logger=logger,
    )
    context.metrics.add(metrics.STORED, len(data))
    return wire.ObjectRef(name=name, size_bytes=len(data), crc32c=shards.crc32c(data))


async def commit_record(context: Context, record: wire.Record) -> int:
    """Publish a record on top of the one it names as its base; its sequence.

    The body of a large one goes into an object, named after a version that is not committed
    yet: such an object cannot be taken for garbage before the record stands.

    Raises:
        SwapLostError: another record stands where this one was to be.
    """
    payload = wire.encode(record)
    if len(payload) > wire.RECORD_BYTES:
        version = record.version + (record.what == "verdict")
        body = await store_version_object(
            context, record.fragment, version, "record", payload, context.logger
        )
        pointer = wire.RecordPointer(
            fragment=record.fragment, body=body, attempt_id=record.attempt_id
        )
        payload = wire.encode(pointer)
    subject = names.record(context.run, record.fragment)
    return await swap(context, subject, payload, record.attempt_id, record.base_seq)


async def swap(
    context: Context, subject: str, payload: bytes, attempt_id: str, expected: int
) -> int:
    """Publish by compare-and-swap and know whether it is ours that stands; its sequence.

    A lost answer leaves it open whether the message was stored, and a cluster may acknowledge a
    stale swap as a duplicate: after any doubt the subject's last message is read and compared.

    Raises:
        SwapLostError: another message stands where ours was to be.
    """
    doubt = False

    async def look() -> int | None:
        """The sequence of ours if it stands; None if nothing new does."""
        last = await context.bus.last(context.tape, subject)
        if last is not None and last.msg_id == attempt_id:
            return last.seq
        if (last.seq if last else 0) != expected:
            raise SwapLostError(subject, expected)
        return None

    async def attempt() -> int:
        nonlocal doubt
        if doubt and (standing := await look()) is not None:
            return standing
        try:
            seq = await context.bus.publish(
                subject, payload, msg_id=attempt_id, expected_last=expected
            )
        except (SwapLostError, BusUnavailableError) as error:
            doubt = True
            if isinstance(error, SwapLostError) and (standing := await look()) is not None:
                return standing
            raise
        if not doubt:
            return seq
        standing = await look()
        if standing is None:
            raise SwapLostError(subject, expected)
        return standing

    return await context.runtime.retry("publishing", attempt, logger=context.logger)
