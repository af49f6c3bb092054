"""The position at which a learner's data resumes: after all batches that it reported on the tape.

A learner's updates and leaves report its position, and so do the ends of its claims. A life that
leaves unsent work in a snapshot ends its claims behind that work. If the next life cannot go on
with the snapshot, these batches are lost: others may have claimed what follows in their shares.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import AccessDeniedError, WireError
from diloco.common.storage.bus import Message
from diloco.common.storage.data_share_allocation import Holdings, declared_sizes, lost_batches
from diloco.common.storage.tape import data_reached, decode_as, messages_up_to
from diloco.learner.background import Context
from diloco.learner.core.carry import Carried, carried
from diloco.learner.core.events import Start, SyncRules
from diloco.learner.tensors.checkpoint import Facts
from diloco.learner.wire.incarnation import Membership, last_at_leader


class ResumePosition(NamedTuple):
    """The data position of a learner that has joined.

    Attributes:
        position: the number of the batch with which training continues.
        lost: for each fragment, how many batches before `position` are in none of the fragment's
            updates, as after a crash; empty if there are none. Lost batches are not trained again,
            since they may be in updates of other fragments.
        announced: for each fragment, incarnation and number of its newest update on the tape; 0, 0:
            there is none.
    """

    position: int
    lost: tuple[int, ...]
    announced: tuple[tuple[int, int], ...] = ()

    def going_on(self, position: int, found: Sequence[Carried]) -> "ResumePosition":
        """Returns the position of a learner that goes on with the unsent work of a snapshot.

        Args:
            position: the position of the snapshot.
            found: how the snapshot's work is taken over, by fragment.
        """
        lost = tuple(
            position - reached - one.work.steps if one.held else 0
            for reached, one in zip(self._reached(), found, strict=True)
        )
        return self._replace(position=position, lost=lost if any(lost) else ())

    def fits(
        self,
        facts: Facts,
        life: Membership,
        rules: SyncRules,
        starts: Sequence[Start | None],
    ) -> tuple[Carried, ...] | None:
        """Returns how the unsent work of a snapshot is taken over; None if it must not be.

        Only the life before this one may be gone on with, and only if its snapshot has all that it
        announced. Otherwise work could be sent twice.

        Args:
            facts: what the snapshot states.
            life: this learner's join.
            rules: the core's rules.
            starts: the versions with which this life begins.
        """
        if facts.incarnation != life.before or len(facts.unsent) != len(starts):
            return None
        if facts.loss is None:
            return None  # An earlier release made it: an update that has its work needs the loss.
        if facts.position < self.position:
            return None  # The life has ended its claims behind later work.
        announced = [
            seq if incarnation == facts.incarnation else 0 for incarnation, seq in self.announced
        ]
        ended = [reached == facts.position for reached in self._reached()]
        found = carried(rules, facts.unsent, announced, starts, ended)
        if found is None:
            return None
        begins = (facts.position - one.work.steps for one in found)
        sent_already = any(
            begin < reached for begin, reached in zip(begins, self._reached(), strict=True)
        )
        return None if sent_already else found

    def _reached(self) -> tuple[int, ...]:
        """Returns, by fragment, the position up to which batches are in its updates."""
        lost = self.lost or (0,) * len(self.announced)
        return tuple(self.position - batches for batches in lost)


async def place_after_join(context: Context, incarnation: int) -> ResumePosition:
    """Returns the data position of this learner, from the tape; to be called after the join.

    Before the join, an update of an earlier process of the same name could still be stored and
    merged. Updates of that process that are stored after the join are rejected as superseded.

    Args:
        context: the learner's context.
        incarnation: the sequence of the join.
    """
    newest: dict[str, Message | None] = {}

    async def last(subject: str) -> Message | None:
        newest[subject] = await _last(context, subject)
        return newest[subject]

    begins = await _claimed_from(context)
    reached = await data_reached(context, context.learner, last, begins=begins)
    position = max(*reached.values(), begins)
    count = len(context.layout.fragments)
    lost = lost_batches(position, reached, count)
    subjects = (names.update(context.run, context.learner, fragment) for fragment in range(count))
    announced = tuple(_number_of(subject, newest[subject], incarnation) for subject in subjects)
    return ResumePosition(position, lost if any(lost) else (), announced)


async def _claimed_from(context: Context) -> int:
    """Returns the position from which on this learner's shares of the data are its own.

    The leader is not asked for the last claim: a run of an earlier release has no claims, and its
    credentials do not let a learner ask, or read any. `Claims` finds out what a stale answer leaves
    out.
    """
    own = names.claim(context.run, context.learner)
    try:
        newest = await context.runtime.retry(
            "reading the tape", lambda: context.bus.last(context.tape, own), logger=context.logger
        )
    except AccessDeniedError:
        newest = None
    holdings = Holdings(declared_sizes(context.settings))
    if newest is not None:
        subjects = [names.claim(context.run, "*")]
        async for message in messages_up_to(context, subjects, newest.seq):
            with contextlib.suppress(WireError):
                claim = decode_as(wire.Claim, message.subject, message.payload)
                holdings.apply_claim(claim, message.seq)
    return holdings.first_position(context.learner)


def _number_of(subject: str, message: Message | None, incarnation: int) -> tuple[int, int]:
    """Returns incarnation and number of the newest update that was announced before the join.

    Args:
        subject: the subject of a fragment's updates.
        message: its last message; None: there is none.
        incarnation: the sequence of the join.

    Returns:
        The incarnation and the number; 0, 0 if they are not known.
    """
    if message is None:
        return 0, 0
    try:
        manifest = decode_as(wire.Manifest, subject, message.payload)
    except WireError:
        return 0, 0  # Another client with this learner's credentials sent it.
    if message.seq < incarnation:
        return manifest.incarnation, manifest.seq
    # A process that has not ended yet announced it: the aggregator rejects it as superseded.
    return (0, 0) if manifest.attempt else (manifest.incarnation, manifest.seq - 1)


async def _last(context: Context, subject: str) -> Message | None:
    """Returns the last message of one of this learner's subjects; None if there is none.

    If a replica of the stream lags, waits until that message can be read.
    """

    async def attempt() -> Message | None:
        newest_seq = await last_at_leader(context.bus, subject)
        if not newest_seq:
            return None
        found = await context.bus.last(context.tape, subject)
        if found is not None and found.seq >= newest_seq:
            return found
        context.logger.info("stale_read", subject=subject, record_seq=newest_seq)
        messages = context.bus.read(context.tape, [subject], newest_seq)
        async with contextlib.aclosing(messages):  # type: ignore[type-var]
            return await anext(messages)

    return await context.runtime.retry("reading the tape", attempt, logger=context.logger)
