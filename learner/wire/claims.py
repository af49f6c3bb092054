"""This learner's shares of the data: claimed on the tape, one ahead of the one that is read.

Rules:
- Who reads the data asks for the holding at a position. The next share is claimed as soon as that
  one is begun, so that nobody waits for it unless the bus is away for longer than a share lasts;
  that counts as waiting for data.
- A claim counts by where it stands on the tape (`common/storage/share_claims.py`), so it is known
  only once it is read back in order.
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
    RunMismatchError,
    SubjectUntakenError,
    WireError,
)
from diloco.common.storage.share_claims import Holding, Holdings, Sizes, declared_sizes, end_of
from diloco.common.storage.tape import decode_as, publish_once
from diloco.learner.background import Background, Context
from diloco.learner.wire.incarnation import Joined, ResumePosition, last_at_leader

# A reader that waits looks so often whether somebody wants it to end.
LOOK_S = 0.1
What = Literal["begin", "claim", "end"]


class GrantedShares:
    """Holdings as they are granted, for the thread that reads data.

    Args:
        context: the learner's.
        check: raises what ends this life.
        ends: whether somebody wants the loop to end.
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
        """Begin to hold shares of epochs that are divided like this."""

    def at(self, position: int) -> Holding | None:
        """The holding that has the batch at a position; waits for it. None: the loop is to end.

        Raises:
            DilocoError: what ends this life meanwhile.
        """
        with self._changed:
            while (found := self._find(position)) is None:
                self._check_life()
                if self._ends():
                    return None
                self._changed.wait(LOOK_S)
                # It waits, but it does not hang.
                self._context.health.turned()
            return found

    def grant(self, holding: Holding, end: int) -> None:
        """Have a holding, which ends before position `end`; from any thread."""
        with self._changed:
            self._granted.append((holding, end))
            self._changed.notify_all()

    def _find(self, position: int) -> Holding | None:
        holds = (one for one, end in self._granted if one.position <= position < end)
        return next(holds, None)


class Claims(GrantedShares):
    """The shares of host 0, which claims them.

    Args:
        context: the learner's.
        ends: whether somebody wants the loop to end.
        life: that the claims are of.
        place: where its data goes on.
        background: has the event loop.
        told: is given each holding, and the position behind it.
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
        # The newest claim that was read.
        self._seq = 0
        self._moved = asyncio.Event()

    def divide(self, sizes: Sizes) -> None:
        """Begin to claim shares of epochs that are divided like this.

        Raises:
            DilocoError: they are divided already.
        """
        if self._sizes is not None:
            raise DilocoError(
                "this learner's data is divided into shares already",
                hint="read it once in each life: `claimed` gives batches as long as the loop runs",
            )
        self._sizes = sizes
        self._background.spawn(first_of(self._follow(), self._hold(sizes)))

    def at(self, position: int) -> Holding | None:
        """As `GrantedShares.at`; the share behind the one that is found is claimed from now on."""
        found = super().at(position)
        if found is not None and self._sizes is not None:
            self._position = end_of(self._sizes, found)
            self._background.loop.call_soon_threadsafe(self._moved.set)
        return found

    async def end(self, position: int) -> None:
        """End this learner's claims at a position, if it ever claimed a share."""
        if self._sizes is not None:
            await self._say(self._sizes, "end", position)

    async def _follow(self) -> None:
        """Read everybody's claims, for ever."""
        context = self._context
        subjects = [names.claim(context.run, "*")]
        async for message in context.bus.read(context.tape, subjects, 1):
            try:
                claim = decode_as(wire.Claim, message.subject, message.payload)
                self._holdings.take(claim, message.seq)
            except WireError as error:
                # To nobody it is a claim.
                context.logger.warning("unreadable", subject=message.subject, reason=error.reason)
            self._seq = message.seq
            self._moved.set()

    async def _hold(self, sizes: Sizes) -> None:
        """Claim a share at the position that is read, and the next one; for ever."""
        learner, granted = self._context.learner, 0
        await self._say(sizes, "begin", self._position)
        self._check(sizes)
        while True:
            held = self._holdings.of(learner)
            for holding in held[granted:]:
                self.grant(holding, end_of(sizes, holding))
                self._told(holding, end_of(sizes, holding))
            granted = len(held)
            behind = self._holdings.next_position(learner)
            if self._holdings.is_over(learner, self._life.incarnation):
                # What it claims now is void; what ends it says why.
                await asyncio.Event().wait()
            if behind <= self._position or not held:
                share, first = self._holdings.choose(learner, sizes)
                await self._say(sizes, "claim", max(behind, self._position), share, first)
            else:
                self._moved.clear()
                await self._moved.wait()

    def _check(self, sizes: Sizes) -> None:
        """Refuse to divide an epoch otherwise than the run does.

        Raises:
            RunMismatchError: its operator, or the tape's first claim, says otherwise.
        """
        theirs = self._holdings.sizes
        if theirs is not None and theirs != sizes:
            raise RunMismatchError(
                f"this learner divides an epoch of its data into {sizes.shares} shares of"
                f" {sizes.batches} batches, the run into {theirs.shares} of {theirs.batches}",
                hint="give all learners the same examples, batch and number of shares",
            )

    async def _publish(self, subject: str, payload: bytes, msg_id: str) -> int:
        """An attempt at publishing a claim.

        Raises:
            AccessDeniedError: these credentials were made before claims were.
            RunMismatchError: the run was.
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
            # There may be no leader now. Where there is one, it takes what the run has a place for.
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
    ) -> None:
        """Publish a claim, and wait until it is read."""
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
