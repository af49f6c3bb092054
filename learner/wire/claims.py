"""A learner's shares of the data: claimed on the tape, one ahead of the share that is read.

Rules:
- The data's reader asks for the holding at a position. The next share is claimed as soon as that
  holding is begun, so that the reader waits for it only if the bus is unreachable for longer than
  a share lasts; such waiting counts as waiting for data.
- A claim counts by its position on the tape (`common/storage/data_share_allocation.py`), so its
  effect is known only once the claim is read back in order.
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
from diloco.learner.wire.incarnation import Joined, last_at_leader
from diloco.learner.wire.resume_position import ResumePosition

# Seconds after which a waiting reader checks again whether the loop is to end.
LOOK_S = 0.1
What = Literal["begin", "claim", "end"]


class GrantedShares:
    """The holdings that were granted so far, for the thread that reads data.

    Args:
        context: the learner's context.
        check: raises the error that ends this life, if there is one.
        ends: returns whether the loop is to end.
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
        """Sets the sizes of the shares that divide epochs, and begins to claim shares."""

    def at(self, position: int) -> Holding | None:
        """Waits for the holding that has the batch at `position`; None if the loop is to end.

        Raises:
            DilocoError: this life ends while it waits.
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
        """Adds a granted holding, which ends before position `end`; callable from any thread."""
        with self._changed:
            self._granted.append((holding, end))
            self._changed.notify_all()

    def _find(self, position: int) -> Holding | None:
        holds = (one for one, end in self._granted if one.position <= position < end)
        return next(holds, None)


class Claims(GrantedShares):
    """The shares of a learner, which host 0 claims on the tape.

    Args:
        context: the learner's context.
        ends: returns whether the loop is to end.
        life: the life that claims.
        place: the position where the learner's data resumes.
        background: has the event loop.
        told: is called with each holding (a share, from the position where this life reads it),
            and with the position where it ends.
    """

    def __init__(
        self,
        context: Context,
        ends: Callable[[], bool],
        life: Joined,
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
        # The sequence of the newest claim that was read.
        self._seq = 0
        self._moved = asyncio.Event()

    def divide(self, sizes: Sizes) -> None:
        """Begins to claim shares of epochs that are divided into `sizes`.

        Raises:
            DilocoError: the data is divided already.
        """
        if self._sizes is not None:
            raise DilocoError(
                "this learner's data is divided into shares already",
                hint="read it once in each life: `claimed` gives batches as long as the loop runs",
            )
        self._sizes = sizes
        self._background.spawn(first_of(self._follow(), self._hold(sizes)))

    def at(self, position: int) -> Holding | None:
        """Works as `GrantedShares.at`, and begins to claim the share after the returned one."""
        found = super().at(position)
        if found is not None and self._sizes is not None:
            self._position = end_of(self._sizes, found)
            self._background.loop.call_soon_threadsafe(self._moved.set)
        return found

    async def end(self, position: int) -> None:
        """Frees this learner's shares of the data from batch `position` on, if it has any."""
        if self._sizes is not None:
            await self._say(self._sizes, "end", position)

    async def _follow(self) -> None:
        """Reads the claims of all learners; never returns."""
        context = self._context
        subjects = [names.claim(context.run, "*")]
        async for message in context.bus.read(context.tape, subjects, 1):
            try:
                claim = decode_as(wire.Claim, message.subject, message.payload)
                self._holdings.take(claim, message.seq)
            except WireError as error:
                # Every reader ignores it.
                context.logger.warning("unreadable", subject=message.subject, reason=error.reason)
            self._seq = message.seq
            self._moved.set()

    async def _hold(self, sizes: Sizes) -> None:
        """Claims the share at the position that is read, and the next one; never returns."""
        learner, granted = self._context.learner, 0
        self._check_tape(await self._say(sizes, "begin", self._position))
        self._check(sizes)
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
                await self._say(sizes, "claim", max(behind, self._position), share, first)
            else:
                self._moved.clear()
                await self._moved.wait()

    def _check_tape(self, seq: int) -> None:
        """Refuses a tape without this life's join: no claim of such a life ever counts.

        Args:
            seq: the sequence of this life's first claim.

        Raises:
            NewTapeError: the run was resumed on another tape.
            BusError: the server lost the join, with other messages.
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
        """Refuses sizes other than the run's.

        Raises:
            RunMismatchError: the operator, or the tape's first claim, divides an epoch otherwise.
        """
        theirs = self._holdings.sizes
        if theirs is not None and theirs != sizes:
            raise RunMismatchError(
                f"this learner divides an epoch of its data into {sizes.shares} shares of"
                f" {sizes.batches} batches, the run into {theirs.shares} of {theirs.batches}",
                hint="give all learners the same examples, batch and number of shares",
            )

    async def _publish(self, subject: str, payload: bytes, msg_id: str) -> int:
        """Publishes a claim, once; returns its sequence.

        Raises:
            AccessDeniedError: the learner's credentials are of a release without claims.
            RunMismatchError: a release without claims created the run.
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
        """Publishes a claim, waits until it is read back, and returns its sequence."""
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
