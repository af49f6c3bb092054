"""Leases: which aggregator owns which fragment, in a NATS bucket whose keys have a time to live.

The bucket has a key for each fragment, which is its owner's lease, and a key for each aggregator
process, which shows that the process is live and under which terms it owns fragments. A process is
identified by a random id, the field `life` of its leases.

Any number of aggregators divide a run's fragments among them. If an aggregator lets its leases
expire, the others take over its fragments. A lease only avoids wasted work: two owners
are kept apart by the compare-and-swap on the fragment's records.

Rules:
- The server sends no message when a key expires. So every aggregator follows the bucket's stream,
  and tries to acquire each lease that was not renewed for its time to live. The server decides: it
  accepts an acquisition only if the key does not exist.
- If a renewal is refused because the key has expired, the key is acquired again; only another
  aggregator's key means that the fragment is lost. After an outage of the bus for all aggregators,
  each keeps its fragments.
- A fragment that a live aggregator is pinned to is left to that aggregator.
- An aggregator releases a fragment that it has failed at, and never acquires it again, as another
  aggregator may succeed. Once all refuse a fragment, the fragment gets no more versions.
- If the object store does not answer an aggregator for half a lease's time to live, the aggregator
  publishes in its own key that it is cut off, and the other aggregators probe the store too. If the
  store answers at least one of them, the cut-off aggregator releases the fragments that the others
  may serve, and counts as absent until the store answers it. Otherwise no fragment changes owners.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import NamedTuple

from diloco.aggregator.context import Context, put_proof
from diloco.aggregator.core.ownership_division import AggregatorTerms, Pinned, divide
from diloco.common.process.tasks import first_of
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusUnavailableError,
    DilocoError,
    ObjectMissingError,
    StoreError,
    SwapLostError,
    WireError,
)
from diloco.common.storage.tape import decode_as

# Seconds between two checks for fragments to acquire or release.
LOOK_S = 0.5
# Seconds without a stored lease after which to warn: longer than a leader's election.
SILENT_S = 8.0
# Seconds to read the others' leases before the first check.
SETTLE_S = 0.3
# The time to live of a released key: the fragment is free at once, so the key need not stay.
RELEASED_S = 1.0
# Seconds to try to release leases if the bus does not answer.
FAREWELL_S = 2.0


class _LastMessage(NamedTuple):
    """The newest message under a key of the bucket.

    Attributes:
        lease: the decoded message.
        revision: the message's stream sequence.
        heard_at_s: when this process received the message, by `_now_s`.
    """

    lease: wire.Lease
    revision: int
    heard_at_s: float


def _now_s() -> float:
    """Returns the event loop's monotonic time in seconds, of which only differences are used."""
    return asyncio.get_running_loop().time()


class Leases:
    """Acquires, renews and releases one aggregator's leases of fragments.

    Args:
        context: the aggregator's context.
        ttl_s: time to live of a lease, in seconds.
        pinned: the fragments that this aggregator may own; None for an equal share of all.
    """

    def __init__(self, context: Context, ttl_s: float, pinned: Pinned = None) -> None:
        self._context = context
        self._ttl_s = ttl_s
        self._pinned = pinned
        self._life = context.runtime.new_id()
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
        self._run_ended = False
        # Whether this process publishes that the store does not answer it, and whether it releases
        # fragments for that reason.
        self._cut_off = False
        self._yields = False
        self._stopped: set[int] = set()

    async def hold(
        self,
        take: Callable[[int], None],
        drop: Callable[[Iterable[int]], Awaitable[None]],
    ) -> None:
        """Acquires, renews and releases leases until all of this aggregator's fragments are done.

        Args:
            take: called with each fragment that was acquired, to begin to own it.
            drop: called with fragments that were lost, or before they are released; returns once no
                work on these fragments is in progress.
        """
        await first_of(self._follow(), self._watch_store(), self._keep(take, drop))

    async def still_ours(self, fragment: int) -> bool:
        """Renews all leases; returns True if this process still has the lease of `fragment`."""
        await self._renew()
        return fragment in self._held

    async def done(self, fragment: int) -> None:
        """Publishes that a fragment's work is finished, so that no aggregator acquires it again."""
        await self._context.runtime.retry(
            "giving up a lease", lambda: self._say_done(fragment), logger=self._context.logger
        )

    def run_ended(self) -> None:
        """Notes that the run has ended: fragments that this process refuses are waited for no more.

        Whoever had such a fragment may be gone without a word that it is done.
        """
        self._run_ended = True

    def others_may_serve(self, fragment: int) -> bool:
        """True if another live aggregator may own a fragment."""
        others = self._members(_now_s()).items()
        return any(one.may_serve(fragment) for life, one in others if life != self._life)

    def refuse(self, fragment: int) -> None:
        """Makes the next check release `fragment` for good, so that another aggregator tries it."""
        self._refuses.add(fragment)
        self._publish_terms()

    async def release(self) -> None:
        """Releases all leases, so that other aggregators need not wait until they expire.

        Gives up after `FAREWELL_S` seconds, or if the bus is unreachable; the leases then expire.
        """
        try:
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*(self._give_up(fragment) for fragment in [*self._held]))
                subject = names.aggregator_lease(self._context.run, self._life)
                await self._publish(subject, "released", self._membership)
        except (DilocoError, TimeoutError):
            self._context.logger.info("leases_left", after_s=self._ttl_s)

    # The leases of all aggregators

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
            # A message that is delivered again changes nothing.
            if known is None or known.revision < message.seq:
                self._seen[message.subject] = _LastMessage(lease, message.seq, _now_s())

    def _standing(self, subject: str, now_s: float) -> wire.Lease | None:
        """Returns the valid lease under a key; None if never seen, released or expired."""
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
                lease.cut_off,
            )
            for lease in standing
            if lease is not None
        }
        own = AggregatorTerms(self._pinned, frozenset(self._refuses), self._yields)
        return members | {self._life: own}

    def _publish_terms(self) -> None:
        self._renewed_at_s = -self._ttl_s  # At the next check.

    def _holders(self, now_s: float) -> dict[int, str | None]:
        holders: dict[int, str | None] = {}
        for fragment in range(len(self._context.layout.fragments)):
            lease = self._standing(names.fragment_lease(self._context.run, fragment), now_s)
            if fragment in self._held:
                holders[fragment] = self._life
            elif lease is None:
                holders[fragment] = None
            elif lease.state == "done":
                # Even if this process published it and lost the answer.
                self._done.add(fragment)
            else:
                holders[fragment] = None if lease.life == self._life else lease.life
        return {fragment: life for fragment, life in holders.items() if fragment not in self._done}

    # The leases of this aggregator

    async def _watch_store(self) -> None:
        """Probes the store while this process waits for it, or another aggregator is cut off."""
        retries = self._context.runtime.retries
        while True:
            await asyncio.sleep(min(LOOK_S, self._ttl_s / 5))
            others = self._members(_now_s()).values()
            if retries.waits_for("store") or any(one.cut_off for one in others):
                await self._ask_until_answered()

    async def _ask_until_answered(self) -> None:
        """Probes the store until it answers.

        After half a lease's time to live without an answer, this process publishes that it is cut
        off. Some time later it also releases its fragments to aggregators that the store answers.
        """
        context, began_s = self._context, _now_s()
        with context.runtime.retries.note("an answer of the store") as fault:
            while (error := await self._no_answer()) is not None:
                fault(error)
                waited_s = _now_s() - began_s
                if waited_s > self._ttl_s / 2 and not self._cut_off:
                    self._cut_off = True
                    self._publish_terms()
                    context.logger.warning("cut_off_from_store", fragments=sorted(self._held))
                # By now the others have probed the store too, and have published it if they failed.
                self._yields = waited_s > self._ttl_s + 2 * LOOK_S
                await asyncio.sleep(min(LOOK_S, self._ttl_s / 5))
        if self._cut_off:
            self._cut_off = self._yields = False
            self._publish_terms()
            context.logger.info("store_answers_again")

    async def _no_answer(self) -> StoreError | None:
        """Reads one byte from the store; returns the error, or None if the store answers.

        The read has no time limit here, as it may have to wait for a free thread first.
        """
        context = self._context
        name = names.layout_object(context.run, context.layout.digest)
        try:
            await put_proof(context)
            await context.runtime.call(context.store.get_range, name, 0, 1)
        except ObjectMissingError:
            return None
        except StoreError as error:
            return error
        return None

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
            self._log_stopped(members.values())
            wanted = divide(self._life, members, self._holders(now_s), fragments)
            if wanted.release:
                await drop(wanted.release)
            for fragment in wanted.release:
                await self._give_up(fragment)
            for fragment in wanted.acquire:
                if await self._acquire(fragment):
                    take(fragment)
            await asyncio.sleep(min(LOOK_S, self._ttl_s / 5))

    def _log_stopped(self, members: Collection[AggregatorTerms]) -> None:
        """Logs once each fragment that this and all other live aggregators refuse to serve."""
        stopped = {f for f in self._refuses if not any(one.may_serve(f) for one in members)}
        for fragment in sorted(stopped - self._stopped):
            self._context.logger.error(
                "fragment_stopped", fragment=fragment, hint="runbooks/digest-mismatch.md"
            )
        self._stopped = stopped

    def _finished(self) -> bool:
        mine = range(len(self._context.layout.fragments)) if self._pinned is None else self._pinned
        left = set(mine) - self._done
        return not left or (self._run_ended and left <= self._refuses)

    async def _renew(self) -> None:
        """Renews all leases and this process's own key; forgets leases that others acquired."""
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
            # It has expired, or a renewal's answer was lost; the next renewal is right again.
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
        """Warns if leases are not stored for long: the bus's disk may be full."""
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
                pass  # While the bus is away, nobody else can acquire the lease.
            return
        last = await self._last(subject)
        if last is not None and last.lease.life == self._life:
            self._held[fragment] = last.revision  # Ours: only the answer to a renewal was lost.
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
                return  # The lease expires by itself.

    async def _say_done(self, fragment: int) -> None:
        subject = names.fragment_lease(self._context.run, fragment)
        async with self._renewing:  # or a renewal under way would take it back
            try:
                await self._publish(subject, "done", self._held.get(fragment, 0))
            except SwapLostError:
                # Another owner will find the same; or the answer to a renewal of ours was lost.
                last = await self._last(subject)
                if last is not None and last.lease.life == self._life:
                    with contextlib.suppress(SwapLostError):
                        await self._publish(subject, "done", last.revision)
            self._held.pop(fragment, None)
            self._done.add(fragment)

    async def _last(self, subject: str) -> _LastMessage | None:
        """Returns the last lease under a key; None if there is none, or it cannot be read now."""
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
            cut_off=self._cut_off,
        )
        return await self._context.bus.publish(
            subject, wire.encode(lease), expected_last=expected, ttl_s=ttl_s
        )


class NoLeases:
    """Stands in for `Leases` in an aggregator that owns every fragment without leases."""

    def __init__(self, context: Context) -> None:
        self._fragments = range(len(context.layout.fragments))
        self._left = set(self._fragments)
        self._all_done = asyncio.Event()

    async def hold(
        self, take: Callable[[int], None], _drop: Callable[[Iterable[int]], Awaitable[None]]
    ) -> None:
        """Calls `take` for every fragment; returns once `done` was called for every fragment."""
        for fragment in self._fragments:
            take(fragment)
        await self._all_done.wait()

    async def still_ours(self, _fragment: int) -> bool:
        """Returns True, as there are no leases to lose."""
        return True

    async def done(self, fragment: int) -> None:
        """Notes that a fragment's work is finished; after the last fragment `hold` returns."""
        self._left.discard(fragment)
        if not self._left:
            self._all_done.set()

    def run_ended(self) -> None:
        """Does nothing: no fragment is refused."""

    def others_may_serve(self, _fragment: int) -> bool:
        """Returns False: there are no others."""
        return False

    def refuse(self, _fragment: int) -> None:
        """Does nothing: no other aggregator could take the fragment."""

    async def release(self) -> None:
        """Does nothing: no other aggregator waits for the fragments."""
