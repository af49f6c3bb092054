"""Quarantines and releases learners, by messages on the tape that all fragments' machines read.

A fragment's state machine counts a learner's offences and asks for the quarantine
(`core/admission_and_credit.py`). An operator releases a learner, or quarantines a learner by
command. Repeating a message has no further effect.
"""

from diloco.aggregator.context import Context
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import decode_as, last_record


async def quarantine(context: Context, learner: str, *, active: bool, reason: str) -> int:
    """Publishes that a learner is quarantined or released; returns the message's stream sequence.

    Args:
        context: the context of the publishing process.
        learner: the learner's name.
        active: True to quarantine, False to release.
        reason: a sentence for operators.

    Raises:
        BusUnavailableError: the bus is unreachable; the caller may repeat the call.
    """
    word = wire.Quarantine(
        run=context.run, learner=learner, active=active, reason=reason, by=context.name
    )
    subject = names.quarantine(context.run, learner)
    return await context.bus.publish(subject, wire.encode(word), msg_id=context.runtime.new_id())


async def quarantined_learners(context: Context) -> frozenset[str]:
    """Returns the names of the quarantined learners.

    A learner's last quarantine message on the tape decides; it is never trimmed. For a learner
    without such a message the fragments' newest records decide, which carry quarantines over from
    earlier tapes.

    Raises:
        RunMismatchError, IntegrityError: a fragment's newest record cannot be read.
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
