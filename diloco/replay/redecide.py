"""Decides a run again under other rules: the aggregator's state machine in virtual time.

The updates and their times are those of the run's tape: learners do not react. Two things depend on
the machine's own decisions, and are adapted: an update's base becomes the version of this rerun
that was newest when the recorded base was made; and a learner announces an update only once the one
before it has a verdict.

The functions are pure: times come from the tape.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from diloco.aggregator.core import events, machine, memory, rounds
from diloco.aggregator.core.decisions import TapeEvent
from diloco.aggregator.core.events import AskCut, Commit, Effect, Fetch
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules
from diloco.aggregator.core.state import State, awaiting
from diloco.aggregator.core.updates import Resolved, UpdateId
from diloco.common.protocol import wire


class ShardCheck(NamedTuple):
    """The result of reading an update's shards in the recorded run.

    Attributes:
        at_s: when they had been read, in seconds since the epoch.
        norm: the update's norm; None if the shards did not match the manifest.
    """

    at_s: float
    norm: float | None


class RemadeVersion(NamedTuple):
    """A version under the other rules.

    Attributes:
        at_s: when its round closed, in virtual seconds since the epoch.
        commit: the machine's decision, with the admitted updates.
        settings_seq: stream sequence of the settings in force; 0: the specification's.
    """

    at_s: float
    commit: Commit
    settings_seq: int


class RecordCommitted(NamedTuple):
    """The event that the record which is being stored is on the tape."""

    record_seq: int


def redecide(
    chain: Sequence[tuple[int, wire.Record]],
    tape: Iterable[TapeEvent],
    rules_at: Callable[[int], FragmentRules],
) -> list[RemadeVersion]:
    """Returns the versions that a fragment would have had under other rules, in order.

    Args:
        chain: the fragment's (stream sequence, record); the rerun begins from the first record.
        tape: the tape's events for the fragment, in order.
        rules_at: returns the rules that the settings message at a stream sequence puts in force;
            for 0 those of the specification.
    """
    return _Rerun(chain, tape, rules_at).run()


def _digest(version: int) -> str:
    """Returns a made-up digest for the view of a version, which no rerun computes."""
    return f"{version:032x}"


class _Rerun:
    """One fragment's state machine, and its future events."""

    def __init__(
        self,
        chain: Sequence[tuple[int, wire.Record]],
        tape: Iterable[TapeEvent],
        rules_at: Callable[[int], FragmentRules],
    ) -> None:
        (first_seq, first), *later = chain
        records = [record for _, record in later]
        began_s = first.closed_at_s
        self.state: State = memory.resume(first, first_seq, began_s)._replace(
            view_digest=_digest(first.version)
        )
        self._rules_at = rules_at
        self._rules = rules_at(first.policy.settings_seq)
        self._first_version = first.version
        self._now_s = began_s
        self._made: list[RemadeVersion] = []
        # When each version was made, in the recorded run (`_was`) and in this rerun (`_stood`).
        self._was = {record.version: record.closed_at_s for record in (first, *records)}
        self._stood = [(began_s, first.version)]
        self._seen = _seen(records)
        self._fetch_s, self._commit_s = _quickest_fetch(records, tape), _usual_commit(records)
        self._held: dict[str, list[events.Announced]] = {}
        self._coming: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        for heard in tape:
            if heard.stream_seq >= first.position:
                self._expect(heard.event.stored_at_s, heard.event)  # type: ignore[union-attr]
        for record in records:
            if record.what == "restore":
                self._expect(record.closed_at_s, record)
            for told in record.observations:
                if told.what in ("live", "dead"):
                    about = (told.learner, told.incarnation, told.what == "live")
                    self._expect(told.at_s, events.Liveness(told.at_s, *about))

    def run(self) -> list[RemadeVersion]:
        """Processes all events, and the timers due after the last; returns the versions made."""
        while self._coming or self._due_s() is not None:
            at_s = self._coming[0][0] if self._coming else float("inf")
            due_s = self._due_s()
            if due_s is not None and due_s <= at_s:
                self._now_s = max(self._now_s, due_s)
                before = self.state
                self._step(events.Timer(self._now_s))
                if self.state is before and not self._coming:
                    break
                if self.state is before:
                    self._take_next()
                continue
            self._take_next()
        return self._made

    def _due_s(self) -> float | None:
        return rounds.deadline(self._rules, self.state)

    def _expect(self, at_s: float, event: Any) -> None:
        heapq.heappush(self._coming, (at_s, next(self._order), event))

    def _take_next(self) -> None:
        at_s, _, event = heapq.heappop(self._coming)
        self._now_s = max(self._now_s, at_s)
        if isinstance(event, wire.Record):
            self._roll_back(event)
        elif isinstance(event, RecordCommitted):
            self._stored(event)
        elif isinstance(event, events.Announced):
            self._announce(event)
        elif isinstance(event, events.Changed):
            self._rules = self._rules_at(event.stream_seq)
            self._step(event)
        elif isinstance(event, events.Fetched | events.Failed):
            self._step(event._replace(at_s=self._now_s))
        else:
            self._step(event)

    def _roll_back(self, record: wire.Record) -> None:
        """Rolls back as an operator did in the run; the round's merged updates wait again."""
        version = self.state.version + 1
        self._stood.append((self._now_s, version))
        again = awaiting(self.state)._replace(
            version=version,
            floor=version,
            view_digest=_digest(version),
            global_step=record.global_step,
            phase="idle",
            cut=None,
            storing=None,
            rejected=Resolved(),
        )
        self.state, effects = rounds.go_on(self._rules, again, self._now_s)
        self._perform(effects)

    def _announce(self, event: events.Announced) -> None:
        manifest = event.manifest
        if self._is_waiting(manifest):
            self._held.setdefault(manifest.learner, []).append(event)
            return
        base = self._base(manifest.base_version)
        moved = manifest.model_copy(update={"base_version": base, "base_digest": _digest(base)})
        self._step(event._replace(stored_at_s=self._now_s, manifest=moved))

    def _is_waiting(self, manifest: wire.Manifest) -> bool:
        """True if an earlier update of the same learner's life has no verdict yet."""
        taken = [update.manifest for update in self.state.admitted]
        taken += [pending.manifest for pending in self.state.pending.values()]
        return any(
            (other.learner, other.incarnation) == (manifest.learner, manifest.incarnation)
            and other.seq < manifest.seq
            for other in taken
        )

    def _base(self, version: int) -> int:
        """Returns the version of this rerun that was newest when the recorded base was made."""
        at_s = self._was.get(version)
        if at_s is None or version <= self._first_version:
            return version
        return max(known for stood_s, known in self._stood if stood_s <= at_s)

    def _step(self, event: events.Event) -> None:
        before, seen_seq = self.state, self.state.seen_seq
        if isinstance(event, events.FromTape):
            # An update that was held back comes after messages that follow it on the tape.
            before = before._replace(seen_seq=min(seen_seq, event.stream_seq - 1))
        after, effects = machine.step_at(self._rules, before, event, self._now_s)
        self.state = after._replace(seen_seq=max(seen_seq, after.seen_seq))
        self._perform(effects)

    def _perform(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, Fetch):
                self._fetch(effect)
            elif isinstance(effect, AskCut):
                # All announcements up to now have reached the machine: the tape is taken in order.
                self._step(events.CutKnown(self._now_s, self.state.seen_seq))
            elif isinstance(effect, Commit):
                self._commit(effect)

    def _fetch(self, fetch: Fetch) -> None:
        seen = self._seen.get(fetch.update)
        if seen is None:
            return  # Its shards were never read.
        at_s = self._now_s + self._fetch_s
        if seen.norm is None:
            self._expect(at_s, events.Failed(at_s, fetch.update, "missing", "as it was"))
        else:
            self._expect(at_s, events.Fetched(at_s, fetch.update, seen.norm))

    def _commit(self, commit: Commit) -> None:
        self._expect(
            max(self._now_s, commit.at_s) + self._commit_s, RecordCommitted(self.state.record_seq)
        )
        if commit.what == "version":
            version = commit.state.version + 1
            self._made.append(RemadeVersion(commit.at_s, commit, commit.state.settings_seq))
            self._stood.append((commit.at_s, version))
            self._step(events.Made(max(self._now_s, commit.at_s), _digest(version)))

    def _stored(self, stored: RecordCommitted) -> None:
        if self.state.storing is None:
            return  # A rollback came before it.
        self._step(events.Committed(self._now_s, stored.record_seq))
        held, self._held = self._held, {}
        for announced in held.values():
            for event in announced:
                self._expect(self._now_s, event)


def _seen(records: Iterable[wire.Record]) -> dict[UpdateId, ShardCheck]:
    found: dict[UpdateId, ShardCheck] = {}
    for record in records:
        for told in record.observations:
            if told.what in ("fetched", "failed"):
                norm = told.value if told.what == "fetched" else None
                update = UpdateId(told.learner, told.incarnation, told.seq)
                found.setdefault(update, ShardCheck(told.at_s, norm))
    return found


def _quickest_fetch(records: Iterable[wire.Record], tape: Iterable[TapeEvent]) -> float:
    """Returns the least seconds from the storing of a manifest to the reading of its shards."""
    seen = _seen(records)
    took_s = [
        seen[update].at_s - event.stored_at_s
        for event in (heard.event for heard in tape)
        if isinstance(event, events.Announced)
        for update in [
            UpdateId(event.manifest.learner, event.manifest.incarnation, event.manifest.seq)
        ]
        if update in seen
    ]
    return max(0.0, min(took_s, default=0.0))


def _usual_commit(records: Sequence[wire.Record]) -> float:
    """Returns the median seconds from the close of a round to the commit of its record."""
    took_s = sorted(
        told.at_s - before.closed_at_s
        for before, record in itertools.pairwise(records)
        for told in record.observations
        if told.what == "committed" and before.what == "version"
    )
    return max(0.0, took_s[len(took_s) // 2]) if took_s else 0.0
