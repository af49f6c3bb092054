"""Publishes by compare-and-swap, so that of two aggregators one alone makes a version."""

import contextlib

from diloco.aggregator.context import Context, resumed_since
from diloco.common.protocol import names
from diloco.common.protocol.errors import (
    BusUnavailableError,
    IdTakenError,
    RunMissingError,
    SwapLostError,
)
from diloco.common.storage.tape import load_specification


async def check_tape(context: Context) -> None:
    """Refuse to publish the first message of a subject on a tape of another epoch.

    Later messages of a subject are safe, since no two tapes share sequences.

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
    """Publish by compare-and-swap and know whether it is ours that stands; returns its sequence.

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
        SwapLostError: another message stands where ours was to be, or has its id.
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
        except IdTakenError as error:
            # The id stands in the record: only another attempt, from the start, has another.
            raise SwapLostError(subject, expected) from error
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
