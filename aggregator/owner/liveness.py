"""Liveness of learners: tells the state machines who is live, and expires silent learners.

A learner is live while it sends heartbeats, joins or updates. Each join of a learner begins a new
incarnation, which supersedes the one before. If a learner that holds shares of the data is silent
for `aggregator.share_expiry_s`, an aggregator ends the learner's incarnation, to free the shares:
1. The aggregator publishes a join under the learner's name: no update of the silent incarnation
   that is stored later is merged. (A second process under one name ends the first in this way too.)
2. It reads all messages before that join, to find the data position that the learner reached.
3. It publishes a leave with that position, and a claim that ends the learner's shares.

Several aggregators may try at once, since the join uses compare-and-swap. If an aggregator dies
between these steps, the incarnation that its join began is silent too, and expires later. If the
learner comes back, it finds itself superseded, joins again and claims free shares.
"""

import asyncio
import contextlib
from collections.abc import Collection

from diloco.aggregator.compare_and_swap import swap
from diloco.aggregator.context import Context
from diloco.aggregator.core import events
from diloco.aggregator.core.members import LastHeard
from diloco.aggregator.owner.owner import FragmentOwner
from diloco.aggregator.owner.tenure import Tenure
from diloco.common.process import metrics, release
from diloco.common.process.tasks import first_of
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import SwapLostError, WireError
from diloco.common.storage.bus import Message
from diloco.common.storage.data_share_allocation import (
    EXPIRY,
    Holdings,
    declared_sizes,
    lost_batches,
)
from diloco.common.storage.tape import (
    check_length,
    decode,
    decode_as,
    earlier_positions,
    first_sequence,
    may_be_merged,
    messages_up_to,
    note_not_held,
    note_reached,
    publish_once,
    same_tape,
)


class LivenessWatch:
    """Reads heartbeats, and tells the owners' machines which learners are live (`core/members.py`).

    Args:
        context: the aggregator's context.
        owners: the owners of this process's fragments, as a view that stays current.

    Attributes:
        last_heard: when this process received which learner's signs of life.
    """

    def __init__(self, context: Context, owners: Collection[FragmentOwner]) -> None:
        self._context = context
        self._owners = owners
        self.last_heard = LastHeard(context.runtime.clock())

    def _live_s(self) -> float:
        """Returns the seconds of silence after which no owner's settings call a learner live."""
        own = self._context.settings.quorum.liveness_timeout_s
        rules = [owner.tenure.rules for owner in self._owners if owner.tenure is not None]
        return max((each.quorum.liveness_timeout_s for each in rules), default=own)

    async def watch(self) -> None:
        """Reads heartbeats, and sends the machines changes of liveness; never returns."""
        await first_of(self._listen(), self._compare())

    async def _listen(self) -> None:
        context = self._context
        stream = names.ops_stream(context.run)
        start = await context.runtime.retry(
            "heartbeats", lambda: context.bus.last_sequence(stream), logger=context.logger
        )
        subjects = [names.heartbeat(context.run, "*")]
        async for message in context.bus.read(stream, subjects, start + 1):
            try:
                beat = decode_as(wire.Heartbeat, message.subject, message.payload)
            except WireError as error:
                context.metrics.add(metrics.IGNORED, 1, error.reason)
                continue
            if beat.state == "failed":
                continue  # The last heartbeat of a life that has failed is no sign of life.
            now_s = context.runtime.clock()
            self.last_heard.beat(beat.learner, beat.incarnation, now_s, self._live_s())

    async def _compare(self) -> None:
        while True:
            self._context.health.turned()
            self._context.metrics.set(metrics.HEARD_AT, self.last_heard.newest_s)
            await asyncio.sleep(min(1.0, self._live_s() / 4))
            for owner in self._owners:
                if owner.tenure is not None:
                    self._tell(owner.tenure)

    def _tell(self, tenure: Tenure) -> None:
        now_s = self._context.runtime.clock()
        timeout_s = tenure.rules.quorum.liveness_timeout_s
        for name, member in tenure.state.members.items():
            live = self.last_heard.is_live(tenure.fragment, name, member, now_s, timeout_s)
            if live != member.live and not member.left:
                tenure.tell(events.Liveness(now_s, name, member.incarnation, live))


class Expiry:
    """Ends the incarnations of silent learners that hold shares of the data.

    Args:
        context: the aggregator's context.
        last_heard: when this process received which learner's signs of life.
    """

    def __init__(self, context: Context, last_heard: LastHeard) -> None:
        self._context = context
        self._last_heard = last_heard
        self._holdings = Holdings(declared_sizes(context.settings))
        self._moved = asyncio.Event()
        # By learner: the newest join by an aggregator, and when this process saw it first.
        self._seen: dict[str, tuple[int, float]] = {}

    async def watch(self) -> None:
        """Expires each learner that holds shares and is silent too long; never returns."""
        await first_of(self._follow(), self._look())

    async def _follow(self) -> None:
        context = self._context
        async for message in context.bus.read(context.tape, [names.claim(context.run, "*")], 1):
            try:
                claim = decode_as(wire.Claim, message.subject, message.payload)
                self._holdings.apply_claim(claim, message.seq)
            except WireError as error:
                context.logger.warning("unreadable", subject=message.subject, reason=error.reason)
            self._moved.set()

    async def _look(self) -> None:
        context, expiry_s = self._context, self._context.share_expiry_s
        while True:
            await asyncio.sleep(max(0.1, min(1.0, expiry_s / 4)))
            for learner in self._holdings.holders():
                life = self._holdings.newest_life(learner)
                if expiry_s and self._last_heard.silent_s(learner, life) >= expiry_s:
                    await context.runtime.retry(
                        "ending a silent life",
                        lambda learner=learner: self._expire(learner),  # type: ignore[misc]
                        logger=context.logger,
                    )

    async def _expire(self, learner: str) -> None:
        context, run, sizes = self._context, self._context.run, self._holdings.sizes
        subject = names.join(run, learner)
        newest = await context.bus.last(context.tape, subject)
        if newest is None or sizes is None:
            return
        if not same_tape(newest.seq, first_sequence(context.epoch)):
            return  # A new tape has replaced ours, and its lives are not ours to end.
        if (
            newest.msg_id.startswith(EXPIRY)
            and self._seen_for_s(learner, newest.seq) < context.share_expiry_s
        ):
            return  # Another aggregator was first and is about to finish, unless it has died.
        # Read before the join is published, as the store may be unreachable.
        earlier = await earlier_positions(context)
        host = f"aggregator {context.name}"
        word = wire.Join(
            run=run,
            learner=learner,
            layout=context.layout.digest,
            host=host,
            release=release.release(),
            lock=release.lock(),
            platform=wire.NOT_A_LEARNER,
            holds=_held(subject, newest),
        )
        try:
            joined = await swap(
                context,
                subject,
                wire.encode(word),
                f"{EXPIRY}{context.runtime.new_id()}",
                newest.seq,
            )
        except SwapLostError:
            return  # The learner is back, or another aggregator was first.
        reached = await reached_before(context, learner, joined, earlier.get(learner, 0))
        note_not_held(context, reached, word.holds)
        position = max(reached.values())
        leave = wire.Leave(
            run=run, learner=learner, incarnation=joined, position=position, fragments=(), by=host
        )
        lost = lost_batches(position, reached, len(context.layout.fragments))
        end = wire.Claim(
            run=run,
            learner=learner,
            incarnation=joined,
            what="end",
            shares=sizes.shares,
            batches=sizes.batches,
            share=0,
            first=0,
            position=position,
            lost=lost,
        )
        await self._publish(names.leave(run, learner), leave)
        await self._publish(names.claim(run, learner), end)
        context.logger.warning("life_expired", learner=learner, position=position, lost=list(lost))
        while self._holdings.newest_life(learner) < joined:
            self._moved.clear()
            await self._moved.wait()

    def _seen_for_s(self, learner: str, joined: int) -> float:
        """Returns the seconds since this process first saw the join at sequence `joined`."""
        now_s = asyncio.get_running_loop().time()
        seen, since_s = self._seen.get(learner, (0, 0.0))
        if seen != joined:
            since_s = now_s
            self._seen[learner] = joined, since_s
        return now_s - since_s

    async def _publish(self, subject: str, body: wire.Body) -> None:
        bus, payload = self._context.bus, wire.encode(body)
        await publish_once(
            self._context,
            f"publishing {body.kind}",
            lambda msg_id: bus.publish(subject, payload, msg_id=msg_id),
        )


def _held(subject: str, join: Message) -> tuple[str, ...]:
    """Returns the modules that the life of a join holds; empty: all, or the join is unreadable."""
    with contextlib.suppress(WireError):
        return decode_as(wire.Join, subject, join.payload).holds
    return ()


async def reached_before(
    context: Context, learner: str, joined: int, earlier: int
) -> dict[int | None, int]:
    """Returns the data positions that a learner reached before a join, by fragment, in batches.

    The key None has the position by leave messages that name no fragment, and by earlier epochs.
    Messages are read in order up to that join, so that none is missing.

    Args:
        context: the aggregator's context.
        learner: the learner's name.
        joined: the join's sequence.
        earlier: the learner's position when this epoch began, in batches.
    """
    run, found = context.run, dict[int | None, int]({None: earlier})
    joins: list[int] = []
    subjects = [
        names.update(run, learner, "*"),
        names.leave(run, learner),
        names.join(run, learner),
    ]
    async for message in messages_up_to(context, subjects, joined):
        with contextlib.suppress(WireError):
            check_length(context.layout, message.subject, len(message.payload))
            said = decode(message.subject, message.payload)
            match said:
                case wire.Join():
                    joins.append(message.seq)
                case wire.Manifest() | wire.Leave() if may_be_merged(
                    context, said, message.seq, joins
                ):
                    note_reached(found, said)
    return found
