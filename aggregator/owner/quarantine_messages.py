"""Quarantines and releases learners, by messages on the tape that all fragments' machines read.

The machine of a fragment counts offences and asks for a quarantine (`core/admission.py`); an
operator releases a learner, or quarantines one. Repeating a message has no further effect.
"""

from diloco.aggregator.context import Context
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import decode_as, last_record


async def quarantine(context: Context, learner: str, *, active: bool, reason: str) -> int:
    """Publishes that a learner is quarantined or released; returns the message's sequence.

    Args:
        context: the process that asks for it.
        learner: the learner.
        active: True to quarantine, False to release.
        reason: a sentence for people.

    Raises:
        BusUnavailableError: the bus is away; repeat.
    """
    word = wire.Quarantine(
        run=context.run, learner=learner, active=active, reason=reason, by=context.name
    )
    subject = names.quarantine(context.run, learner)
    return await context.bus.publish(subject, wire.encode(word), msg_id=context.runtime.new_id())


async def quarantined_learners(context: Context) -> frozenset[str]:
    """Returns the quarantined learners: by the last message on each, else by the newest records.

    The messages stay on their tape for ever; those of earlier tapes are known from records alone.

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
