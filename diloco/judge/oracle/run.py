"""The oracle over a whole tape: compares each message with the rules, in order."""

from collections.abc import Iterator, Mapping

from diloco.common.process.config import RunSettings, parse_settings
from diloco.common.protocol import wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.layout import Layout
from diloco.common.storage.tape import (
    Entry,
    InvalidMessage,
    Item,
    Unreadable,
    begins_tape,
    changed_settings,
)
from diloco.judge.oracle import numbers
from diloco.judge.oracle.data import Data
from diloco.judge.oracle.finding import Violation
from diloco.judge.oracle.fragment_walk import Chain
from diloco.judge.oracle.remake import Remaker
from diloco.judge.oracle.shares import Shares


class Oracle:
    """Judges every record of a tape, from the tape alone.

    Args:
        specification: the tape's first message.
        layout: the run's layout.
        remaker: recomputes versions from their objects; None: only records are judged.
        positions: by learner, its data position at the tape's beginning; None: the specification's.
        follow: recompute every decision, as in `Chain`.

    Attributes:
        findings: all violations so far.
        chains: one for each fragment.
        data: data positions and verdicts of all learners' updates.
        shares: claimed and merged shares of the data.
    """

    def __init__(
        self,
        specification: wire.Specification,
        layout: Layout,
        *,
        remaker: Remaker | None = None,
        positions: Mapping[str, int] | None = None,
        follow: bool = True,
    ) -> None:
        created = parse_settings(specification.settings)
        self.findings: list[Violation] = []
        self._created = created
        self._changed: dict[int, RunSettings] = {}
        self.chains = [
            Chain(layout, created, self._changed, index, epoch=specification.epoch, follow=follow)
            for index in range(len(layout.fragments))
        ]
        self._modules = [fragment.module for fragment in layout.fragments]
        earlier = specification.positions if positions is None else positions
        overwritten = [
            fragment.index
            for fragment in layout.fragments
            if fragment.averaged or created.sync.adopt == "overwrite"
        ]
        blend = created.sync.blend if created.sync.adopt == "blend" else 1.0
        self.data = Data(specification, earlier, overwritten, blend)
        self.shares = Shares(created.run)
        self._remaker = remaker
        self._last_seq = 0
        self._stop_seq = self._end_seq = 0
        # The run's clocks at which a stop was due by the messages until then.
        self._due: set[int] = set()

    def take(self, item: Item) -> list[Violation]:
        """Judges the tape's next message; returns its violations."""
        if item.seq != self._last_seq + 1 and (self._last_seq or not begins_tape(item.seq)):
            for chain in self.chains:
                chain.missing_before(item.seq)
            self.data.missing_before(item.seq)
        self._last_seq = item.seq
        found: list[Violation] = []
        if isinstance(item, Entry):
            found = list(self._take(item))
        elif isinstance(item, InvalidMessage):
            for chain in self.chains:
                chain.pass_over(item)
        elif isinstance(item, Unreadable):
            self.chains[item.fragment].lose(item.seq)
            about = f"fragment {item.fragment}"
            found = [Violation("chain", item.seq, about, "", "a record that can be read", item.why)]
        self.findings += found
        return found

    def close(self) -> None:
        """Adds violations for the work that an ended run leaves open; call it at the tape's end."""
        for chain in self.chains:
            if chain.base is None:
                about = f"fragment {chain.fragment}"
                self.findings.append(
                    Violation("chain", self._last_seq, about, "", "records", "none")
                )
        if self._end_seq:
            self.findings += self.data.unfinished(self._modules, self._stop_seq, self._end_seq)

    def _take(self, entry: Entry) -> Iterator[Violation]:
        body, seq = entry.body, entry.seq
        if isinstance(body, wire.Settings):
            self._change(body, seq)
        if isinstance(body, wire.Quarantine):
            yield from self._quarantine(body, seq)
        for chain in self.chains:
            chain.hear(entry)
        match body:
            case wire.Join() | wire.Leave() | wire.Claim() | wire.Manifest() | wire.Quarantine():
                yield from self.data.take(body, seq)
                yield from self.shares.take(body, seq)
            case wire.Record():
                yield from self._record(body, seq)
            case wire.Stop():
                yield from self._stop(body, seq)
            case wire.End():
                yield from self._end(body, seq)
        if isinstance(body, wire.Record | wire.Settings) and self._to_come() == []:
            self._due.add(max(c.base.global_step for c in self.chains if c.base is not None))

    def _change(self, body: wire.Settings, seq: int) -> None:
        try:
            self._changed[seq] = changed_settings(self._created, body)
        except WireError:
            return  # Invalid settings have no effect.

    def _record(self, record: wire.Record, seq: int) -> Iterator[Violation]:
        chain = self.chains[record.fragment]
        base, followed = chain.base, chain.followed
        yield from chain.judge(record, seq)
        if base is None:
            self.data.begin(record)
        else:
            yield from self.data.resolve(record, seq, followed=chain.followed > followed)
        yield from self.shares.resolve(record, seq)
        if self._remaker is not None:
            settings = self._changed.get(record.policy.settings_seq, self._created)
            yield from self._remaker.judge(settings, base, record, seq)

    def _quarantine(self, word: wire.Quarantine, seq: int) -> Iterator[Violation]:
        """Checks that an aggregator quarantines a learner only after enough recorded offences."""
        limit = self._created.bounds.quarantine_offences
        if (
            not word.active
            or word.by.partition(" ")[0] == "operator"
            or any(c.base is None for c in self.chains)
        ):
            return
        counted = [
            member.offences
            for chain in self.chains
            if chain.base is not None
            for member in chain.base.policy.members
            if member.learner == word.learner
        ]
        if not limit or max(counted, default=0) < limit:
            about = f"learner {word.learner}"
            yield Violation("quarantine", seq, about, "offences", f"at least {limit}", counted)

    def _newest_settings(self) -> RunSettings:
        return self._changed[max(self._changed)] if self._changed else self._created

    def _stop(self, stop: wire.Stop, seq: int) -> Iterator[Violation]:
        if self._stop_seq:
            yield Violation("stop", seq, "run", "", "one stop", "another one")
        self._stop_seq = self._stop_seq or seq
        # Any other reason is an early end, which is allowed at any time.
        if stop.reason not in ("steps", "tokens"):
            return
        # A stop and a change of settings are swaps on two subjects, and nothing orders them: a stop
        # that was due may be stored after a change that its sender had not read. The run stops at
        # the length that it had, since a run that has stopped does not go on (ADR 45).
        missing = self._to_come()
        if missing and stop.global_step not in self._due:
            yield Violation("stop", seq, "run", "", "no fragment has a version to come", missing)

    def _to_come(self) -> list[int] | None:
        """Returns the fragments that have a version to come; None if not all have a record."""
        newest = {c.fragment: c.base for c in self.chains if c.base is not None}
        if len(newest) < len(self.chains):
            return None
        settings = self._newest_settings()
        run = settings.run
        tokens = min(record.totals.tokens_credited for record in newest.values())
        if run.tokens and tokens >= run.tokens:
            return []
        return [
            fragment
            for fragment, record in newest.items()
            if numbers.clock_after(settings, fragment, record.global_step) <= run.steps
        ]

    def _end(self, end: wire.End, seq: int) -> Iterator[Violation]:
        if not self._stop_seq:
            yield Violation("end", seq, "run", "", "a stop before it", "none")
        self._end_seq = self._end_seq or seq
        newest = [chain.base for chain in self.chains if chain.base is not None]
        if len(newest) < len(self.chains):
            return
        going_on = [record.fragment for record in newest if not record.final]
        if going_on:
            yield Violation("end", seq, "run", "final", "every fragment", f"not {going_on}")
        versions = tuple(record.version for record in newest)
        if end.versions != versions:
            yield Violation("end", seq, "run", "versions", versions, end.versions)
        # Updates that came too late are answered by one more record, which the end may precede.
        named = dict(enumerate(end.record_seqs))
        for chain in self.chains:
            said = named.get(chain.fragment)
            if chain.final_seqs and said not in chain.final_seqs:
                about = f"fragment {chain.fragment}"
                yield Violation("end", seq, about, "record_seqs", chain.final_seqs, said)
