"""The aggregator's driver: all IO around `machine.py`.

One `FragmentOwner` for each fragment reads the tape from its position, feeds the machine, and does
what the machine says: fetch, merge, announce, commit. A record of its fragment that it did not
write (another owner's, an operator's rollback) makes it begin anew from there. `LivenessWatch`
tells the machines which learners are heard of, `conductor.py` when the run stops and ends.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple

from diloco.aggregator import instruments, machine, policy
from diloco.aggregator.collector import Collector
from diloco.aggregator.context import Context, commit_record, identity, store_version_object
from diloco.aggregator.decisions import decided
from diloco.aggregator.fragment import FragmentArrays, Payload, read_payload
from diloco.aggregator.machine import Commit, Fetch, Ignored, Merge, OpenRound, ShutOut
from diloco.aggregator.quarantine import quarantine
from diloco.aggregator.recovery import recover
from diloco.common import metrics, names, wire
from diloco.common.bus import Message
from diloco.common.config import RunSettings
from diloco.common.errors import DilocoError, ObjectMissingError, SwapLostError, WireError
from diloco.common.reasons import Reason
from diloco.common.service import cancel, first_of
from diloco.common.tape import decode, decode_as, parse_changed

# Payloads of one fragment that may be in memory before they are merged.
FETCHES = 2
# Events that may wait for a fragment's machine before its tape reader waits for it.
QUEUE = 1024
# Seconds between two samples of messages that are no updates, for each reason.
SAMPLE_S = 1.0


class Recorded(NamedTuple):
    """A record of the fragment is on the tape, ours or another's."""

    stream_seq: int


class Resettled(NamedTuple):
    """Changed settings, with the machine's event of them."""

    settings: RunSettings
    event: machine.Changed


# What the tape and the fetches have for `_serve`, with the payload that it is about.
Item = tuple[machine.Event | Recorded | Resettled, Payload | None]


class FragmentOwner:
    """Makes the versions of one fragment, for as long as `own` runs.

    Args:
        context: the aggregator's.
        fragment: its index.
        still_ours: asked when somebody else has committed a record of the fragment.
    """

    def __init__(
        self, context: Context, fragment: int, still_ours: Callable[[int], Awaitable[bool]]
    ) -> None:
        self.context = context
        self._still_ours = still_ours
        self.fragment = fragment
        self.state: machine.State | None = None
        self._logger = context.logger.bind(fragment=fragment)
        self._metrics = context.metrics
        self._queue: asyncio.Queue[Item | None] = asyncio.Queue(QUEUE)
        self._fetching = asyncio.Semaphore(FETCHES)
        self._fetches: set[asyncio.Task[None]] = set()
        self._sampled_at_s: dict[str, float] = {}
        self._unseen: Counter[str] = Counter()
        self._broken: asyncio.Future[None]
        self._arrays: FragmentArrays
        self._newest: wire.Record
        self._settle(context.settings)
        self._collector = Collector(context, fragment, lambda: self.state)

    async def own(self) -> bool:
        """Recover from the tape and make versions; whenever another commits first, recover.

        Returns once the run has ended and every update stored before its end has its record;
        or, with False, once the fragment is somebody else's.

        Raises:
            IntegrityError: what is stored does not give the recorded digests.
        """
        while True:
            try:
                await self._recover()
                self._broken = asyncio.get_running_loop().create_future()
                await first_of(
                    self._read_tape(),
                    self._serve(),
                    self._break_with_fetches(),
                    self._collector.work(),
                )
            except SwapLostError as lost:
                if not await self._still_ours(self.fragment):
                    return False
                self._logger.warning("overtaken", expected=lost.expected)
            else:
                return True
            finally:
                self.state = None
                await cancel(*self._fetches)

    @property
    def newest(self) -> wire.Record:
        """The record that the fragment stands at; only with a `state`."""
        return self._newest

    @property
    def queued(self) -> int:
        """Events that wait for the machine."""
        return self._queue.qsize()

    def tell(self, event: machine.Liveness) -> None:
        """Give the machine a liveness change; dropped while its queue is full, and told again."""
        if not self._queue.full():
            self._queue.put_nowait((event, None))

    def _settle(self, settings: RunSettings) -> None:
        """From now on these are the run's settings."""
        context = self.context
        self.settings = settings
        self.rules = policy.fragment_rules(settings, context.layout, self.fragment, context.epoch)

    async def _recover(self) -> None:
        context, runtime = self.context, self.context.runtime
        began_s = runtime.clock()
        recovered = await runtime.retry(
            "recovery",
            lambda: recover(context, self.fragment),
            logger=self._logger,
        )
        self._arrays = recovered.arrays
        self._newest = recovered.record
        self._settle(recovered.settings)
        self._queue = asyncio.Queue(QUEUE)
        self._fetching = asyncio.Semaphore(FETCHES)
        self.state = machine.resume(recovered.record, recovered.record_seq, runtime.clock())
        self._metrics.add(metrics.RECOVERIES)
        self._metrics.add(metrics.MERGED_AGAIN, recovered.merged_again)
        self._logger.info(
            "recovered",
            version=recovered.record.version,
            merged_again=recovered.merged_again,
            position=recovered.record.position,
            took_s=round(runtime.clock() - began_s, 3),
        )

    # The tape

    async def _read_tape(self) -> None:
        run, fragment = self.context.run, self.fragment
        subjects = [
            names.join(run, "*"),
            names.leave(run, "*"),
            names.update(run, "*", fragment),
            names.record(run, fragment),
            names.settings(run),
            names.quarantine(run, "*"),
            names.stop(run),
            names.end(run),
        ]
        messages = self.context.bus.read(names.tape_stream(run), subjects, self._newest.position)
        async for message in messages:
            if message.subject == names.end(run):
                await self._queue.put(None)
                continue
            try:
                event = self._decode(message)
            except WireError as error:
                await self._sample(message.subject, error.reason, error.message)
                continue
            if event is not None:
                await self._queue.put((event, None))

    def _decode(self, message: Message) -> machine.Event | Recorded | Resettled | None:
        """What a message of the tape is for `_serve`; None if it is not for this fragment.

        Raises:
            WireError: as `decode_event`.
        """
        if message.subject == names.record(self.context.run, self.fragment):
            return Recorded(message.seq)
        if message.subject == names.settings(self.context.run):
            settings = parse_changed(self.context.settings, message)
            return Resettled(settings, machine.Changed(message.time_s, message.seq))
        return decode_event(message, self.fragment)

    async def _sample(self, subject: str, reason: str, detail: str) -> None:
        """Count what is no update, and show people one of a kind now and then."""
        self._metrics.add(metrics.IGNORED, 1, reason)
        now_s = self.context.runtime.clock()
        self._unseen[reason] += 1
        if now_s - self._sampled_at_s.get(reason, 0.0) < SAMPLE_S:
            return
        self._sampled_at_s[reason] = now_s
        count = self._unseen.pop(reason)
        self._logger.warning("ignored", subject=subject, reason=reason, detail=detail, count=count)
        learner = names.subject_learner(subject) or "operator"
        sample = wire.Rejection(
            fragment=self.fragment,
            learner=learner,
            incarnation=0,
            seq=0,
            reason=reason,
            detail=detail,
        )
        await self._show_rejection(sample)

    async def _show_rejection(self, rejection: wire.Rejection) -> None:
        """A copy for people; the record has the verdict, so a lost copy is only logged."""
        subject = names.rejected(self.context.run, rejection.learner)
        try:
            await self.context.bus.publish(subject, wire.encode(rejection))
        except DilocoError as error:
            self._logger.warning("rejection_not_shown", error=error.message)

    # The machine

    async def _serve(self) -> None:
        while (item := await self._next_item()) is not None:
            event, payload = item
            if isinstance(event, Recorded):
                self._check_ours(event.stream_seq)
            elif isinstance(event, Resettled):
                await self._change(event)
            else:
                await self._take(event, payload)
            if payload is not None:
                self._fetching.release()
        assert self.state is not None
        if not self.state.final:
            # Another aggregator has committed what ended the run: see what it left to answer.
            raise self._overtaken(self.state)

    def _check_ours(self, record_seq: int) -> None:
        """Refuse to go on from a state that is not the newest record's."""
        assert self.state is not None
        if record_seq > self.state.record_seq:
            raise self._overtaken(self.state)

    def _overtaken(self, state: machine.State) -> SwapLostError:
        subject = names.record(self.context.run, self.fragment)
        return SwapLostError(subject, state.record_seq)

    async def _change(self, change: Resettled) -> None:
        assert self.state is not None
        if change.event.stream_seq > self.state.settings_seq:
            self._settle(change.settings)
            self._arrays.settings = change.settings
            self._logger.info("settings", settings_seq=change.event.stream_seq)
        await self._take(change.event, None)

    async def _next_item(self) -> Item | None:
        """The next event; a deadline that has passed comes first, however many others wait."""
        assert self.state is not None
        due_s = machine.deadline(self.rules, self.state)
        if due_s is None:
            return await self._queue.get()
        clock = self.context.runtime.clock
        if clock() < due_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s - clock()):
                    return await self._queue.get()
        return machine.Timer(max(due_s, clock())), None

    async def _take(self, event: machine.Event, payload: Payload | None) -> None:
        assert self.state is not None
        self.state, effects = machine.step(self.rules, self.state, event)
        for effect in effects:
            await self._perform(effect, payload)

    async def _perform(self, effect: machine.Effect, payload: Payload | None) -> None:
        match effect:
            case Fetch():
                task = asyncio.ensure_future(self._fetch(effect))
                self._fetches.add(task)
                task.add_done_callback(self._fetched)
            case OpenRound():
                await self._open_round(effect.version)
            case Merge():
                assert payload is not None
                await self.context.runtime.call(self._arrays.merge, payload, effect.admitted)
            case Ignored():
                subject = names.update(self.context.run, effect.manifest.learner, self.fragment)
                await self._sample(subject, effect.reason, f"seq {effect.manifest.seq}")
            case Commit():
                await self._commit(effect)
            case ShutOut():
                await self._shut_out(effect)

    async def _shut_out(self, effect: ShutOut) -> None:
        """Tell everybody; each fragment's machine hears of it from the tape, this one too."""
        context = self.context
        self._logger.warning(
            "quarantined",
            learner=effect.learner,
            reason=effect.reason,
            runbook="runbooks/quarantined-learner.md",
        )
        await context.runtime.retry(
            "quarantine",
            lambda: quarantine(context, effect.learner, active=True, reason=effect.reason),
            logger=self._logger,
        )

    async def _open_round(self, version: int) -> None:
        await self.context.runtime.call(self._arrays.open_round)
        message = wire.RoundOpen(fragment=self.fragment, version=version)
        subject = names.round_open(self.context.run, self.fragment)
        await self.context.bus.broadcast(subject, wire.encode(message))

    async def _fetch(self, fetch: Fetch) -> None:
        """Read and verify an update; its payload waits in the queue until the machine's word."""
        await self._fetching.acquire()
        runtime = self.context.runtime
        event: machine.Event
        payload: Payload | None = None
        try:
            payload = await runtime.retry(
                "reading shards",
                lambda: runtime.call(
                    read_payload, self.context.store, fetch.manifest, self._arrays.grid
                ),
                logger=self._logger,
            )
            event = machine.Fetched(runtime.clock(), fetch.update, payload.norm)
            received = sum(shard.size_bytes for shard in fetch.manifest.shards)
            self._metrics.add(metrics.RECEIVED, received)
        except ObjectMissingError as error:
            event = machine.Failed(runtime.clock(), fetch.update, Reason.MISSING, error.message)
        except WireError as error:
            event = machine.Failed(runtime.clock(), fetch.update, error.reason, error.message)
        if payload is None:
            self._fetching.release()
        await self._queue.put((event, payload))

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetches.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._broken.done():
            self._broken.set_exception(error)

    async def _break_with_fetches(self) -> None:
        """Raise what a fetch raised that is neither a passing fault nor the sender's."""
        await self._broken

    # The commit

    async def _commit(self, commit: Commit) -> None:
        """Store the objects, publish the record by compare-and-swap, tell the machine."""
        runtime = self.context.runtime
        record = await self._draft(commit)
        with self._timing("publish"):
            record_seq = await commit_record(self.context, record)
        instruments.count_record(self._metrics, self._newest, record)
        # Later records must cite this one where it could only say "this".
        self._newest = record.model_copy(update={"outer_seq": record.outer_seq or record_seq})
        committed = machine.Committed(runtime.clock(), record_seq, record.view_digest)
        self._logger.info(
            "committed",
            what=record.what,
            version=record.version,
            record_seq=record_seq,
            learners=[taken.learner for taken in record.inputs],
            updates=[f"{taken.incarnation}-{taken.seq}" for taken in record.inputs],
            staleness=[taken.staleness for taken in record.inputs],
            rejected=[f"{taken.learner}:{taken.reason}" for taken in record.rejected],
            reason=record.reason,
            took_s=round(committed.at_s - commit.at_s, 4),
        )
        for rejected in record.rejected:
            await self._show_rejection(_rejection(record.fragment, rejected))
        await self._take(committed, None)
        if record.what == "version" and record.snapshot_version == record.version:
            self._collector.wake()

    def _timing(self, part: str) -> contextlib.AbstractContextManager[None]:
        return instruments.timing(self._metrics, self.context.runtime.clock, part)

    async def _draft(self, commit: Commit) -> wire.Record:
        """The record of `commit`, with its objects stored."""
        previous = self._newest
        fields: dict[str, Any] = {
            **decided(self.rules, commit),
            "base_digest": previous.view_digest,
            "restored_version": None,
            "inputs": (),
            "factors": b"",
            "delta": None,
            "merged_at_s": commit.at_s,
            "aggregator": self.context.name,
            "attempt_id": identity(self.context),
        }
        if commit.what == "version":
            fields |= await self._make_version(commit.state)
        fields["totals"] = _totals(previous.totals, fields["inputs"], fields["rejected"])
        return previous.model_copy(update=fields)

    async def _make_version(self, state: machine.State) -> dict[str, Any]:
        """Close the round on the arrays, store what it made, and say so in fields of the record."""
        settings, previous, runtime = self.settings, self._newest, self.context.runtime
        version = state.version + 1
        part = machine.share(state) if settings.outer.participation else 1.0
        with self._timing("merge"):
            made = await runtime.call(self._arrays.close_round, state.admitted, part)
        merged_at_s = runtime.clock()
        with self._timing("store"):
            delta = await self._store(version, "delta", made.delta)
            snapshot = await self._store_snapshot(version)
        fields: dict[str, Any] = {
            "merged_at_s": merged_at_s,
            "inputs": made.inputs,
            "factors": made.factors,
            "learning_rate": made.learning_rate,
            "momentum": made.momentum,
            "delta": delta,
            "deltas": (*previous.deltas, delta),
            "view_digest": made.view_digest,
            "outer_digest": made.outer_digest,
        }
        return fields | snapshot

    async def _store_snapshot(self, version: int) -> dict[str, Any]:
        """Store view and outer state, every so many versions; the record's fields of them."""
        if version % self.settings.sync.snapshot_every:
            return {}
        runtime = self.context.runtime
        view = await runtime.call(self._arrays.view_bytes)
        outer = await runtime.call(self._arrays.outer_bytes)
        return {
            "snapshot": await self._store(version, "view", view),
            "outer": await self._store(version, "outer", outer),
            "snapshot_version": version,
            "outer_version": version,
            "deltas": (),
            "outer_seq": 0,
        }

    async def _store(self, version: int, what: str, data: bytes) -> wire.ObjectRef:
        return await store_version_object(
            self.context, self.fragment, version, what, data, self._logger
        )


def decode_event(message: Message, fragment: int) -> machine.Event | None:
    """The machine's event in a message of the tape; None if it is not for this fragment.

    Raises:
        WireError: it cannot be decoded, or speaks for somebody else than its subject.
    """
    parsed = names.parse_subject(message.subject)
    if parsed is not None and parsed.kind == "stop":
        # By its subject alone, as all daemons take it: a run that nobody could stop is worse.
        return machine.Stopped(message.time_s, message.seq)
    body = decode(message.subject, message.payload)
    return event_of(body, message.seq, message.time_s, fragment)


def event_of(body: wire.Body, seq: int, stored_at_s: float, fragment: int) -> machine.Event | None:
    """The machine's event in what a message of the tape says; None if it has none of it."""
    match body:
        case wire.Quarantine() as word:
            return machine.Quarantined(stored_at_s, seq, word.learner, word.active)
        case wire.Join() as join:
            return machine.Joined(stored_at_s, seq, join.learner)
        case wire.Leave() as leave if not leave.fragments:
            return machine.Departed(stored_at_s, seq, leave.learner, leave.incarnation)
        case wire.Leave() as leave if fragment in leave.fragments:
            return machine.Finished(stored_at_s, seq, leave.learner, leave.incarnation)
        case wire.Manifest() as manifest if manifest.fragment == fragment:
            return machine.Announced(stored_at_s, seq, manifest)
        case wire.Stop():
            return machine.Stopped(stored_at_s, seq)
    return None


def _rejection(fragment: int, rejected: wire.Rejected) -> wire.Rejection:
    return wire.Rejection(
        fragment=fragment,
        learner=rejected.learner,
        incarnation=rejected.incarnation,
        seq=rejected.seq,
        reason=rejected.reason,
        detail=rejected.detail,
    )


def _totals(
    before: wire.Totals, inputs: tuple[wire.Input, ...], rejected: tuple[wire.Rejected, ...]
) -> wire.Totals:
    """The sums with one more record; claims that add up to nonsense stop at the greatest count."""
    sums = {
        "updates_merged": before.updates_merged + len(inputs),
        "updates_rejected": before.updates_rejected + len(rejected),
        "tokens_merged": before.tokens_merged + sum(taken.tokens for taken in inputs),
        "tokens_rejected": before.tokens_rejected + sum(taken.tokens for taken in rejected),
        "steps_merged": before.steps_merged + sum(taken.steps for taken in inputs),
    }
    return wire.Totals(**{name: min(count, wire.GREATEST) for name, count in sums.items()})


class LivenessWatch:
    """Tells the owners' machines which learners are heard of.

    A learner is dead once it was silent for `quorum.live_s` while another was heard: when nobody
    is heard it is the bus that is silent, and nobody is taken for dead.
    """

    def __init__(self, context: Context, owners: Collection[FragmentOwner]) -> None:
        self._context = context
        self._owners = owners
        self._heard_at_s: dict[str, float] = {}
        self._newest_s = context.runtime.clock()

    def _live_s(self) -> float:
        """The longest silence of a live learner; owners follow changed settings one by one."""
        own = self._context.settings.quorum.live_s
        return max((owner.rules.quorum.live_s for owner in self._owners), default=own)

    async def watch(self) -> None:
        """Read heartbeats and compare, for ever."""
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
            self._hear(beat.learner, context.runtime.clock())

    def _hear(self, learner: str, now_s: float) -> None:
        if now_s - self._newest_s > self._live_s():
            # After a silence of all, everybody has as long again to be heard.
            self._heard_at_s = dict.fromkeys(self._heard_at_s, now_s)
        self._newest_s = self._heard_at_s[learner] = now_s

    async def _compare(self) -> None:
        while True:
            self._context.health.turned()
            await asyncio.sleep(min(1.0, self._live_s() / 4))
            for owner in self._owners:
                if owner.state is not None:
                    self._tell(owner, owner.state)

    def _tell(self, owner: FragmentOwner, state: machine.State) -> None:
        now_s = self._context.runtime.clock()
        for name, member in state.members.items():
            # One that was never heard of counts from its join, or from our own beginning.
            heard_at_s = max(self._heard_at_s.setdefault(name, now_s), member.heard_at_s)
            live = self._newest_s - heard_at_s < owner.rules.quorum.live_s
            if live != member.live and not member.left:
                owner.tell(machine.Liveness(now_s, name, member.incarnation, live))
