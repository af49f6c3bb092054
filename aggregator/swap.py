"""Commits by compare-and-swap: of several that publish on top of one message, one stands."""

import contextlib

from diloco.aggregator.context import Context, resumed_since, store_version_object
from diloco.common import names, wire
from diloco.common.errors import BusUnavailableError, RunMissingError, SwapLostError
from diloco.common.tape import load_specification


async def commit_record(context: Context, record: wire.Record, base_id: str = "") -> int:
    """Publish a record on top of the one it names as its base; its sequence.

    The body of a large one goes into an object, named after a version that is not committed
    yet: such an object cannot be taken for garbage before the record stands.

    Args:
        context: the aggregator's.
        record: to be published.
        base_id: attempt id of its base, for whoever has known the base for long.

    Raises:
        SwapLostError: another record stands where this one was to be.
    """
    payload = wire.encode(record)
    if len(payload) > context.record_bytes:
        version = record.version + (record.what == "verdict")
        body = await store_version_object(
            context, record.fragment, version, "record", payload, context.logger
        )
        pointer = wire.RecordPointer(
            fragment=record.fragment, body=body, attempt_id=record.attempt_id
        )
        payload = wire.encode(pointer)
    subject = names.record(context.run, record.fragment)
    return await swap(context, subject, payload, record.attempt_id, record.base_seq, base_id)


async def check_tape(context: Context) -> None:
    """Refuse to begin a subject on another tape than one's own.

    What follows a message is safe, since no two tapes share sequences; what follows none is not.

    Raises:
        RunMismatchError: the run was resumed on a newer tape.
    """
    with contextlib.suppress(RunMissingError):
        epoch = (await load_specification(context.bus, context.run)).epoch
        if epoch != context.epoch:
            raise resumed_since(context, epoch)


async def swap(
    context: Context,
    subject: str,
    payload: bytes,
    attempt_id: str,
    expected: int,
    base_id: str = "",
) -> int:
    """Publish by compare-and-swap and know whether it is ours that stands; its sequence.

    A lost answer leaves it open whether the message was stored, and a cluster may acknowledge a
    stale swap as a duplicate: after any doubt the subject's last message is read and compared.

    Args:
        context: the aggregator's.
        subject: of the message.
        payload: of the message.
        attempt_id: its message id.
        expected: sequence of the subject's last message; 0 for none.
        base_id: message id of that message, to be compared first: servers that lost what they had
            acknowledged give its sequence to another.

    Raises:
        RunMismatchError: a newer tape has come in the place of this process's.
        SwapLostError: another message stands where ours was to be.
    """
    doubt = False

    async def look() -> int | None:
        """The sequence of ours if it stands; None if nothing new does."""
        last = await context.bus.last(context.tape, subject)
        if last is not None and last.msg_id == attempt_id:
            return last.seq
        if (last.seq if last else 0) != expected or (base_id and last and last.msg_id != base_id):
            raise SwapLostError(subject, expected)
        return None

    async def attempt() -> int:
        nonlocal doubt
        if not expected and subject != names.spec(context.run):
            await check_tape(context)
        if (doubt or base_id) and (standing := await look()) is not None:
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
