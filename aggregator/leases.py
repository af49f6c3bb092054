"""Leases: which aggregator owns which fragment, in a bucket of keys with a time to live.

Any number of aggregators divide a run's fragments among them; when one is not heard of for the
length of its leases, the others take over what it had. A lease only avoids wasted work: what keeps
two owners apart is the compare-and-swap on the fragment's records.

Rules:
- A key that expires sends no message. So everybody follows the bucket's stream, counts what was
  not renewed for its time to live as free, and lets the server judge: it takes an acquisition only
  when the key is not there.
- A renewal that is refused because the key has expired is an acquisition; only somebody else's
  key means that the fragment is lost. When all were cut off, nobody loses anything.
- Fragments that an aggregator is pinned to are left to it while it lives.
- A fragment that an aggregator has failed at it gives up, and refuses for its life: another one may
  not fail. Once all refuse a fragment, it stands still.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import NamedTuple

from diloco.aggregator.context import Context, identity
from diloco.aggregator.core.fragment_division import AggregatorTerms, Pinned, divide
from diloco.common.process.tasks import first_of
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import BusUnavailableError, DilocoError, SwapLostError, WireError
from diloco.common.storage.tape import decode_as

# How often one looks for fragments to take, at most.
LOOK_S = 0.5
# An aggregator whose leases are not stored for so long warns: longer than a leader's election.
SILENT_S = 8.0
# What others have said is read for so long before the first look.
SETTLE_S = 0.3
# A fragment that is given up is free for all at once; its key need not stay.
RELEASED_S = 1.0
# The longest farewell to a bus that does not answer.
FAREWELL_S = 2.0


class _LastMessage(NamedTuple):
    """The newest message of a key, and when it was heard."""

    lease: wire.Lease
    revision: int
    heard_at_s: float


def _now_s() -> float:
    """A clock that nobody sets: what counts here is how long ago something was."""
    return asyncio.get_running_loop().time()


class Leases:
    """One aggregator's leases.

    Args:
        context: the aggregator's.
        ttl_s: time to live of a lease.
        pinned: the fragments to keep to; None for a share of all.
    """

    def __init__(self, context: Context, ttl_s: float, pinned: Pinned = None) -> None:
        self._context = context
        self._ttl_s = ttl_s
        self._pinned = pinned
        self._life = identity(context)
        self._seen: dict[str, _LastMessage] = {}
        self._held: dict[int, int] = {}
        self._membership = 0
        self._renewed_at_s = 0.0
        self._renewing = asyncio.Lock()
        self._stored_at_s = _now_s()
        self._warned = False
        self._lost: set[int] = set()
        self._done: set[int] = set()
        self._refuses: set[int] = set()
        self._still: set[int] = set()

    async def hold(
        self,
        take: Callable[[int], None],
        drop: Callable[[Iterable[int]], Awaitable[None]],
    ) -> None:
        """Take, keep and give up fragments until all that this aggregator answers for are done.

        Args:
            take: begins to own a fragment.
            drop: ceases to own fragments; returns once nothing of them is under way.
        """
        await first_of(self._follow(), self._keep(take, drop))

    async def still_ours(self, fragment: int) -> bool:
        """Whether the lease of a fragment stands; asked of the server."""
        await self._renew()
        return fragment in self._held

    async def done(self, fragment: int) -> None:
        """Say that nothing of a fragment is left to do; nobody takes it again."""
        await self._context.runtime.retry(
            "giving up a lease", lambda: self._say_done(fragment), logger=self._context.logger
        )

    def refuse(self, fragment: int) -> None:
        """Give up a fragment, and never take it again: others may not fail where this one did."""
        self._refuses.add(fragment)
        self._renewed_at_s = -self._ttl_s  # The next look tells them.

    async def release(self) -> None:
        """Give up everything, so that others need not wait for its end."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*(self._give_up(fragment) for fragment in [*self._held]))
                subject = names.aggregator_lease(self._context.run, self._life)
                await self._publish(subject, "released", self._membership)
        except (DilocoError, TimeoutError):
            self._context.logger.info("leases_left", after_s=self._ttl_s)

    # What others say

    async def _follow(self) -> None:
        run = self._context.run
        messages = self._context.bus.read(names.leases_stream(run), names.leases_subjects(run), 1)
        async for message in messages:
            try:
                lease = decode_as(wire.Lease, message.subject, message.payload)
            except WireError as error:
                self._context.logger.warning(
                    "unreadable", subject=message.subject, reason=error.reason
                )
                continue
            known = self._seen.get(message.subject)
            # What is delivered again has said what it had to say.
            if known is None or known.revision < message.seq:
                self._seen[message.subject] = _LastMessage(lease, message.seq, _now_s())

    def _standing(self, subject: str, now_s: float) -> wire.Lease | None:
        """The lease that a key stands for, unless it has been given up or has expired."""
        seen = self._seen.get(subject)
        if seen is None or seen.lease.state == "released":
            return None
        age_s = now_s - seen.heard_at_s
        return None if seen.lease.state == "held" and age_s > seen.lease.ttl_s else seen.lease

    def _members(self, now_s: float) -> dict[str, AggregatorTerms]:
        prefix = names.aggregator_lease(self._context.run, "")
        standing = [self._standing(key, now_s) for key in self._seen if key.startswith(prefix)]
        members = {
            lease.life: AggregatorTerms(
                None if lease.pinned is None else frozenset(lease.pinned),
                frozenset(lease.refuses),
            )
            for lease in standing
            if lease is not None
        }
        return members | {self._life: AggregatorTerms(self._pinned, frozenset(self._refuses))}

    def _holders(self, now_s: float) -> dict[int, str | None]:
        holders: dict[int, str | None] = {}
        for fragment in range(len(self._context.layout.fragments)):
            lease = self._standing(names.fragment_lease(self._context.run, fragment), now_s)
            if fragment in self._held:
                holders[fragment] = self._life
            elif lease is None:
                holders[fragment] = None
            elif lease.state == "done":
                # Also if this one has said so and lost the answer, and then the fragment.
                self._done.add(fragment)
            else:
                holders[fragment] = None if lease.life == self._life else lease.life
        return {fragment: life for fragment, life in holders.items() if fragment not in self._done}

    # What this one does

    async def _keep(
        self,
        take: Callable[[int], None],
        drop: Callable[[Iterable[int]], Awaitable[None]],
    ) -> None:
        await self._renew()
        await asyncio.sleep(SETTLE_S)
        while not self._finished():
            if _now_s() - self._renewed_at_s > self._ttl_s / 3:
                await self._renew()
            if self._lost:
                lost, self._lost = self._lost, set()
                await drop(lost)
            now_s, fragments = _now_s(), len(self._context.layout.fragments)
            members = self._members(now_s)
            self._tell_of_still(members.values())
            wanted = divide(self._life, members, self._holders(now_s), fragments)
            if wanted.release:
                await drop(wanted.release)
            for fragment in wanted.release:
                await self._give_up(fragment)
            for fragment in wanted.acquire:
                if await self._acquire(fragment):
                    take(fragment)
            await asyncio.sleep(min(LOOK_S, self._ttl_s / 5))

    def _tell_of_still(self, members: Collection[AggregatorTerms]) -> None:
        """Say which fragments all refuse who might serve them, once each time."""
        still = {f for f in self._refuses if not any(one.may_serve(f) for one in members)}
        for fragment in sorted(still - self._still):
            self._context.logger.error(
                "fragment_stopped", fragment=fragment, hint="runbooks/digest-mismatch.md"
            )
        self._still = still

    def _finished(self) -> bool:
        mine = range(len(self._context.layout.fragments)) if self._pinned is None else self._pinned
        return self._done >= set(mine)

    async def _renew(self) -> None:
        """Renew all that is held, and this aggregator's own key; note what is lost."""
        async with self._renewing:
            self._renewed_at_s = _now_s()
            await asyncio.gather(
                self._renew_membership(), *(self._renew_one(f) for f in [*self._held])
            )
            lost = self._lost & self._held.keys()
            for fragment in lost:
                del self._held[fragment]
            if lost:
                self._context.logger.warning("fenced", fragments=sorted(lost))

    async def _renew_membership(self) -> None:
        subject = names.aggregator_lease(self._context.run, self._life)
        try:
            self._membership = await self._publish(subject, "held", self._membership)
        except SwapLostError:
            # It has expired, or the answer of a renewal was lost; the next renewal is right again.
            last = await self._last(subject)
            self._membership = last.revision if last else 0
        except BusUnavailableError as error:
            self._not_stored(error)
        else:
            self._stored()

    def _stored(self) -> None:
        if self._warned:
            self._context.logger.info("renewals_resumed")
        self._stored_at_s, self._warned = _now_s(), False

    def _not_stored(self, error: BusUnavailableError) -> None:
        """While the bus is away nobody can take anything; but its disk may be full for ever."""
        if _now_s() - self._stored_at_s > SILENT_S and not self._warned:
            self._context.logger.warning("renewals_lost", error=error.message)
            self._warned = True

    async def _renew_one(self, fragment: int) -> None:
        subject = names.fragment_lease(self._context.run, fragment)
        for expected in (self._held[fragment], 0):
            try:
                self._held[fragment] = await self._publish(subject, "held", expected)
            except SwapLostError:
                continue
            except BusUnavailableError:
                pass  # While the bus is away nobody can take it either.
            return
        last = await self._last(subject)
        if last is not None and last.lease.life == self._life:
            self._held[fragment] = last.revision  # Ours; the answer of a renewal was lost.
        elif last is not None:
            self._lost.add(fragment)

    async def _acquire(self, fragment: int) -> bool:
        subject = names.fragment_lease(self._context.run, fragment)
        seen = self._seen.get(subject)
        given_up = seen is not None and seen.lease.state == "released"
        for expected in (seen.revision, 0) if seen is not None and given_up else (0,):
            try:
                self._held[fragment] = await self._publish(subject, "held", expected)
            except SwapLostError:
                continue
            except BusUnavailableError:
                return False
            return True
        return False

    async def _give_up(self, fragment: int) -> None:
        async with self._renewing:  # or a renewal under way would take it back
            revision = self._held.pop(fragment, None)
            if revision is None:
                return
            try:
                subject = names.fragment_lease(self._context.run, fragment)
                await self._publish(subject, "released", revision)
            except (SwapLostError, BusUnavailableError):
                return  # It expires by itself.

    async def _say_done(self, fragment: int) -> None:
        subject = names.fragment_lease(self._context.run, fragment)
        async with self._renewing:  # or a renewal under way would take it back
            revision = self._held.get(fragment, 0)
            with contextlib.suppress(SwapLostError):  # Whoever has it now finds out the same.
                await self._publish(subject, "done", revision)
            self._held.pop(fragment, None)
            self._done.add(fragment)

    async def _last(self, subject: str) -> _LastMessage | None:
        """The last lease under a key; None also when nobody can tell now."""
        try:
            last = await self._context.bus.last(names.leases_stream(self._context.run), subject)
            if last is None:
                return None
            return _LastMessage(decode_as(wire.Lease, subject, last.payload), last.seq, 0.0)
        except (BusUnavailableError, WireError):
            return None

    async def _publish(self, subject: str, state: str, expected: int) -> int:
        ttl_s = {"held": self._ttl_s, "released": RELEASED_S, "done": None}[state]
        lease = wire.Lease(
            aggregator=self._context.name,
            life=self._life,
            state=state,  # type: ignore[arg-type]
            ttl_s=ttl_s or 0.0,
            pinned=None if self._pinned is None else tuple(sorted(self._pinned)),
            refuses=tuple(sorted(self._refuses)),
        )
        return await self._context.bus.publish(
            subject, wire.encode(lease), expected_last=expected, ttl_s=ttl_s
        )


class Everything:
    """The stand-in for leases of an aggregator that owns every fragment without asking."""

    def __init__(self, context: Context) -> None:
        self._fragments = range(len(context.layout.fragments))
        self._left = set(self._fragments)
        self._all_done = asyncio.Event()

    async def hold(
        self, take: Callable[[int], None], _drop: Callable[[Iterable[int]], Awaitable[None]]
    ) -> None:
        """Take all fragments; return once they are done."""
        for fragment in self._fragments:
            take(fragment)
        await self._all_done.wait()

    async def still_ours(self, _fragment: int) -> bool:
        """True: a pinned aggregator has no leases to lose."""
        return True

    async def done(self, fragment: int) -> None:
        """Note that nothing is left to do for a fragment; after the last one `hold` returns."""
        self._left.discard(fragment)
        if not self._left:
            self._all_done.set()

    def refuse(self, _fragment: int) -> None:
        """Does nothing: no other aggregator could take the fragment."""

    async def release(self) -> None:
        """Does nothing: no other aggregator waits for the fragments."""
