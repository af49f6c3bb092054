"""Shutting a learner out, and letting it in again: a word of the tape that every fragment hears.

The machine of a fragment counts offences and asks for it (`machine.ShutOut`); an operator lifts it,
or imposes it. Said twice it means what it means said once.
"""

from aggregator.context import Context, identity
from common import names, wire


async def quarantine(context: Context, learner: str, *, active: bool, reason: str) -> int:
    """Say it on the tape; its sequence.

    Args:
        context: who says it.
        learner: about whom.
        active: shut out, or else let in again.
        reason: for people.

    Raises:
        BusUnavailableError: the bus is away; repeat.
    """
    word = wire.Quarantine(
        run=context.run, learner=learner, active=active, reason=reason, by=context.name
    )
    subject = names.quarantine(context.run, learner)
    return await context.bus.publish(subject, wire.encode(word), msg_id=identity(context))
