"""Shutting a learner out, and letting it in again: a word of the tape that every fragment hears.

The machine of a fragment counts offences and asks for it (`effects.Quarantine`); an operator lifts
it, or imposes it. Said twice it means what it means said once.
"""

from diloco.aggregator.context import Context, identity
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import decode_as, last_record


async def quarantine(context: Context, learner: str, *, active: bool, reason: str) -> int:
    """Publish that a learner is quarantined or released; returns the message's sequence.

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


async def quarantined_learners(context: Context) -> frozenset[str]:
    """The quarantined learners: by the last message on each, else by the newest records.

    Words stay on their tape for ever; those of the tapes before it are in the records alone.

    Raises:
        RunMismatchError, IntegrityError: as `last_record`.
    """
    fragments = range(len(context.layout.fragments))
    memories = [(await last_record(context, fragment))[0].policy for fragment in fragments]
    found = {learner for memory in memories for learner in memory.quarantined}
    for learner in {m.learner for memory in memories for m in memory.members} | found:
        last = await context.bus.last(context.tape, names.quarantine(context.run, learner))
        if last is not None:
            found.discard(learner)
            word = decode_as(wire.Quarantine, last.subject, last.payload)
            found |= {learner} if word.active else set()
    return frozenset(found)
