"""Publishes by compare-and-swap, so that only one of two aggregators commits a version."""

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
    """Raises if the bus has the tape of another epoch; called before a subject's first message.

    A subject's later messages need no check, since no two tapes share the sequences to compare.

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
    """Publishes a message by compare-and-swap, with retries; returns its stream sequence.

    A lost answer leaves open whether the message was stored, and a cluster may acknowledge a stale
    swap as a duplicate. So in doubt the subject's last message is read and compared.

    Args:
        context: the aggregator's context.
        subject: the message's subject.
        payload: the message's bytes.
        attempt_id: the message's id.
        expected: sequence of the subject's last message; 0 if it has none.
        base_id: id of that last message, compared first, since servers that have lost acknowledged
            messages give the sequence to another message; '' for no comparison.

    Raises:
        RunMismatchError: the run was resumed on a newer tape.
        SwapLostError: another message was stored instead, or already has the id `attempt_id`.
    """
    doubt = False

    async def look() -> int | None:
        """Returns our message's sequence if it is the last one; None if the expected one is.

        Raises:
            SwapLostError: the subject's last message is neither ours nor the expected one.
        """
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
            # The record contains the id, so only a whole new attempt can use another.
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
