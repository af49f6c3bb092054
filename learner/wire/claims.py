"""Claims a learner's shares of the data on the tape, one share ahead of the share that is read.

Each epoch of the data is divided into shares. A *holding* is a share, or the rest of one, that a
learner has claimed, with the learner's data position at which it begins
(`common/storage/data_share_allocation.py`).

Rules:
- The data's reader asks for the holding at a position. The next share is claimed as soon as the
  reader has begun a holding. So the reader waits for a share only if NATS is unreachable for longer
  than a share lasts; such waiting counts as waiting for data.
- Of two claims of a share, the one with the lower sequence in the stream counts. So the effect of a
  claim is known only after the claims before it are read.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Literal

from diloco.common.process.tasks import first_of
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    AccessDeniedError,
    DilocoError,
    NewTapeError,
    ReadFurtherError,
    RunMismatchError,
    SubjectUntakenError,
    WireError,
)
from diloco.common.protocol.sequences import same_tape
from diloco.common.storage.bus import stream_went_back
from diloco.common.storage.data_share_allocation import (
    Holding,
    Holdings,
    Sizes,
    declared_sizes,
    end_of,
)
from diloco.common.storage.tape import decode_as, publish_once
from diloco.learner.background import Background, Context
from diloco.learner.wire.incarnation import Membership, last_at_leader
from diloco.learner.wire.resume_position import ResumePosition

# A reader that waits for a share checks after so many seconds whether the loop is to end.
LOOK_S = 0.1
What = Literal["begin", "claim", "end"]


class GrantedShares:
    """The shares that this learner has claimed so far; the thread that reads data waits here.

    It is a `Holder` of the task's data. On host 0 the subclass `Claims` adds the shares; on other
    hosts the messages of host 0 do.

    Args:
        context: the learner's context.
        check: raises the error that ends this learner, if there is one.
        ends: returns whether the training loop is to end.

    Attributes:
        epoch: the number of the run's tape, 0 for the first.
    """

    def __init__(
        self, context: Context, check: Callable[[], None], ends: Callable[[], bool]
    ) -> None:
        self.epoch = context.epoch
        self._context = context
        self._check_life = check
        self._ends = ends
        self._granted: list[tuple[Holding, int]] = []
        self._changed = threading.Condition()

    def divide(self, sizes: Sizes) -> None:
        """Does nothing, since only host 0 claims shares; `Claims.divide` begins to claim."""

    def at(self, position: int) -> Holding | None:
        """Waits for the holding with batch number `position`; None if the loop is to end.

        Raises:
            DilocoError: an error has ended this learner meanwhile.
        """
        with self._changed:
            while (found := self._find(position)) is None:
                self._check_life()
                if self._ends():
                    return None
                self._changed.wait(LOOK_S)
                # A loop that waits for data is not hanging.
                self._context.health.turned()
            return found

    def grant(self, holding: Holding, end: int) -> None:
        """Adds a holding, whose batches end before position `end`; callable from any thread."""
        with self._changed:
            self._granted.append((holding, end))
            self._changed.notify_all()

    def _find(self, position: int) -> Holding | None:
        holds = (one for one, end in self._granted if one.position <= position < end)
        return next(holds, None)


class Claims(GrantedShares):
    """The shares of a learner, on host 0, which claims them on the tape.

    Args:
        context: the learner's context.
        ends: returns whether the training loop is to end.
        life: the learner's join, whose incarnation the claims carry.
        place: the position at which the learner's data resumes.
        background: runs the coroutines that read and publish claims.
        told: is called with each holding that this learner has, and the position where it ends.
    """

    def __init__(
        self,
        context: Context,
        ends: Callable[[], bool],
        life: Membership,
        place: ResumePosition,
        *,
        background: Background,
        told: Callable[[Holding, int], None],
    ) -> None:
        super().__init__(context, background.check, ends)
        self._life = life
        self._place = place
        self._position = place.position
        self._background = background
        self._told = told
        self._holdings = Holdings(declared_sizes(context.settings))
        self._sizes: Sizes | None = None
        # The sequence of the last claim that was read, of any learner.
        self._seq = 0
        self._moved = asyncio.Event()

    def divide(self, sizes: Sizes) -> None:
        """Begins to claim shares.

        Args:
            sizes: the number of shares in an epoch, and of batches in a share.

        Raises:
            DilocoError: this method was called before.
        """
        if self._sizes is not None:
            raise DilocoError(
                "this learner's data is divided into shares already",
                hint="read it once in each life: `claimed` gives batches as long as the loop runs",
            )
        self._sizes = sizes
        self._background.spawn(first_of(self._follow(), self._hold(sizes)))

    def at(self, position: int) -> Holding | None:
        """Waits for the holding with batch number `position`; None if the loop is to end.

        Also begins to claim the share that is read after the returned holding.

        Raises:
            DilocoError: an error has ended this learner meanwhile.
        """
        found = super().at(position)
        if found is not None and self._sizes is not None:
            self._position = end_of(self._sizes, found)
            self._background.loop.call_soon_threadsafe(self._moved.set)
        return found

    async def end(self, position: int) -> None:
        """Publishes that this learner reads no more, so that others can claim the rest.

        Does nothing if the learner claims no shares.

        Args:
            position: the learner's data position; batches from that one on become free.
        """
        if self._sizes is not None:
            await self._say(self._sizes, "end", position)

    async def _follow(self) -> None:
        """Reads the claims of all learners; never returns."""
        context = self._context
        subjects = [names.claim(context.run, "*")]
        async for message in context.bus.read(context.tape, subjects, 1):
            try:
                claim = decode_as(wire.Claim, message.subject, message.payload)
                self._holdings.apply_claim(claim, message.seq)
            except WireError as error:
                # Every reader ignores it.
                context.logger.warning("unreadable", subject=message.subject, reason=error.reason)
            self._seq = message.seq
            self._moved.set()

    async def _hold(self, sizes: Sizes) -> None:
        """Claims shares, so that one share is held ahead of the reader's; never returns."""
        learner, granted = self._context.learner, 0
        self._check_tape(await self._say(sizes, "begin", self._position))
        self._check(sizes)
        self._check_place()
        while True:
            held = self._holdings.of(learner)
            for holding in held[granted:]:
                self.grant(holding, end_of(sizes, holding))
                self._told(holding, end_of(sizes, holding))
            granted = len(held)
            behind = self._holdings.next_position(learner)
            if self._holdings.is_over(learner, self._life.incarnation):
                # Further claims are void; `end_when_superseded` ends this life and says why.
                await asyncio.Event().wait()
            if behind <= self._position or not held:
                share, first = self._holdings.choose(learner, sizes)
                at = max(behind, self._position)
                # On a tape that the run was resumed on, no claim of this life would count.
                self._check_tape(await self._say(sizes, "claim", at, share, first))
            else:
                self._moved.clear()
                await self._moved.wait()

    def _check_tape(self, seq: int) -> None:
        """Checks that this learner's join is on the tape; without it no claim counts.

        Args:
            seq: the sequence of a claim of this learner.

        Raises:
            NewTapeError: the run was resumed on another tape since the join.
            BusError: the server has lost the join and other messages.
        """
        context, joined_seq = self._context, self._life.incarnation
        if not same_tape(joined_seq, seq):
            raise NewTapeError(
                f"run {context.run!r} was resumed on a new tape, and this process joined before",
                hint="start this process again",
            )
        if seq <= joined_seq:
            raise stream_went_back(context.tape, joined_seq + 1, seq)

    def _check(self, sizes: Sizes) -> None:
        """Checks that this learner divides an epoch as the run does.

        Raises:
            RunMismatchError: the run's settings, or the tape's first claim, have other sizes.
        """
        theirs = self._holdings.sizes
        if theirs is not None and theirs != sizes:
            raise RunMismatchError(
                f"this learner divides an epoch of its data into {sizes.shares} shares of"
                f" {sizes.batches} batches, the run into {theirs.shares} of {theirs.batches}",
                hint="give all learners the same examples, batch and number of shares",
            )

    def _check_place(self) -> None:
        """Checks that this life's data begins where, or after, its learner's claims do.

        After this life's first message no other process can change these.

        Raises:
            ReadFurtherError: batches from this life's position on are in shares that its learner
                has given up; this life would wait for them for ever.
        """
        first = self._holdings.first_position(self._context.learner)
        if first > self._position:
            raise ReadFurtherError(
                f"an earlier process of learner {self._context.learner!r} has read its data up to"
                f" batch {first}, and said so after this one, which begins at {self._position}, had"
                " joined",
                hint="start this process again; let no two processes have one learner's name",
            )

    async def _publish(self, subject: str, payload: bytes, msg_id: str) -> int:
        """Publishes a claim under the message id `msg_id`; returns the claim's sequence.

        Raises:
            AccessDeniedError: the learner's credentials were made by a release without claims.
            RunMismatchError: the run was created by a release without claims.
        """
        bus, context = self._context.bus, self._context
        try:
            return await bus.publish(subject, payload, msg_id=msg_id)
        except AccessDeniedError as error:
            raise AccessDeniedError(
                "these credentials do not let this learner claim shares of the data:"
                f" {error.message}",
                hint="make all of the run's credentials once more, with `diloco auth`, and restart"
                " the server with them; or divide the data by name: GrainData(...) without"
                " `shares`",
            ) from error
        except SubjectUntakenError:
            # The stream may have no leader now. With one, it takes claims, if the run has them.
            await last_at_leader(bus, names.join(context.run, context.learner))
        try:
            return await bus.publish(subject, payload, msg_id=msg_id)
        except SubjectUntakenError as error:
            raise RunMismatchError(
                f"run {context.run!r} has no place for claims of shares of the data: an earlier"
                " release created it",
                hint="recreate the run, from its newest version if you like (diloco run create"
                " --from); or divide the data by name: GrainData(...) without `shares`",
            ) from error

    async def _say(
        self, sizes: Sizes, what: What, position: int, share: int = 0, first: int = 0
    ) -> int:
        """Publishes a claim, waits until `_follow` has read it, and returns its sequence.

        Args:
            sizes: the number of shares in an epoch, and of batches in a share.
            what: "begin": this learner begins to claim; "claim": it claims a share; "end": it reads
                no more.
            position: the learner's data position.
            share: the number of the claimed share.
            first: the first batch that the learner reads of that share.
        """
        context, life = self._context, self._life
        word = wire.Claim(
            run=context.run,
            learner=context.learner,
            incarnation=life.incarnation,
            what=what,
            shares=sizes.shares,
            batches=sizes.batches,
            share=share,
            first=first,
            position=position,
            lost=self._place.lost if what == "begin" else (),
        )
        subject, payload = names.claim(context.run, context.learner), wire.encode(word)
        seq = await publish_once(
            context, "publishing claim", lambda msg_id: self._publish(subject, payload, msg_id)
        )
        while self._seq < seq:
            self._moved.clear()
            await self._moved.wait()
        return seq
