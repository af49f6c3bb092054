"""One fragment's records, each judged against the one before it and the tape between them."""

from bisect import bisect_left
from collections.abc import Iterator

from diloco.common.process.config import RunSettings, settings_of
from diloco.common.protocol import wire
from diloco.common.protocol.layout import Layout
from diloco.common.storage.tape import Entry, InvalidMessage
from diloco.judge.oracle import compare_with_previous
from diloco.judge.oracle.apply_messages import concerns, hear
from diloco.judge.oracle.apply_observations import watch
from diloco.judge.oracle.finding import Violation
from diloco.judge.oracle.life import Close, OwnerLife, RuleBreach, begin
from diloco.judge.oracle.rounds import recorded, time_up_s

# The number of these rules; a record states in `policy.rules` which its owner followed.
RULES = 5.0
# After this many observations an owner must make a record.
OBSERVATIONS, MOST_OBSERVATIONS = 1 << 13, 1 << 15


class Chain:
    """A fragment's records, as far as the oracle has followed them.

    Args:
        layout: the run's layout.
        created: the specification's settings.
        settings: by stream sequence, the settings of later messages; the caller adds to it.
        fragment: its index.
        epoch: epoch of the tape.
        follow: recompute decisions. Else a record is judged by the one before it and by the
            announcements, which takes a fraction of the time.

    Attributes:
        late_s: the most seconds by which a timer may be late; None: no limit, since a process that
            is paused decides nothing, and no message tells for how long it was.
        base: the newest record; `base_seq` is its stream sequence. None if there is none, or if the
            record after it is unreadable.
        final_seqs: stream sequences of its records from its last version on.
        followed: number of records whose decision was recomputed.
        unknown: (stream sequence of the record before, reason) of each record whose decision could
            not be recomputed.
    """

    def __init__(
        self,
        layout: Layout,
        created: RunSettings,
        settings: dict[int, RunSettings],
        fragment: int,
        *,
        epoch: int = 0,
        follow: bool = True,
    ) -> None:
        self.fragment = fragment
        self.late_s: float | None = None
        self.base: wire.Record | None = None
        self.base_seq = 0
        self.final_seqs: list[int] = []
        self.followed = 0
        self.unknown: list[tuple[int, str]] = []
        self._layout = layout
        self._created = created
        self._settings = settings
        self._life: OwnerLife | None = None
        self._heard: list[Entry | InvalidMessage] = []
        self._next_seq = 1
        self._whole_from = 1
        self._epoch, self._follows = epoch, follow
        self._stopped = False
        self._versions: dict[int, compare_with_previous.Contents] = {}
        # A message that cannot be decoded may be a subject's last one too.
        self._garbled: set[int] = set()

    def hear(self, entry: Entry) -> None:
        """Takes the tape's next message; ignores it if it does not concern the fragment."""
        self._stopped = self._stopped or isinstance(entry.body, wire.Stop)
        if concerns(entry, self.fragment):
            self._heard.append(entry)

    def pass_over(self, message: InvalidMessage) -> None:
        """Takes the tape's next message, which breaks the protocol."""
        self._garbled.add(message.seq)
        if concerns(message, self.fragment):
            self._heard.append(message)

    def missing_before(self, seq: int) -> None:
        """Notes that the tape lacks messages before sequence `seq`, if it has no record there.

        Garbage collection takes a fragment's messages only from before its oldest record.
        """
        if self.base is None:
            self._whole_from = seq

    def lose(self, seq: int) -> None:
        """Takes a record at `seq` that cannot be read: judging restarts with the next record."""
        self.base, self._life, self._whole_from = None, None, seq + 1

    def judge(self, record: wire.Record, seq: int) -> list[Violation]:
        """Returns the violations of the fragment's next record, which has stream sequence `seq`."""
        breaches = list(self._judge(record, seq))
        about = f"fragment {self.fragment} version {record.version}"
        if breaches:
            self._life = None
        self.base, self.base_seq = record, seq
        self.final_seqs = [*self.final_seqs, seq] if record.final else []
        if record.what != "verdict":
            self._versions[record.version] = compare_with_previous.contents(record)
        self._heard = self._heard[self._index(record.position) :]
        return [Violation(b.rule, seq, about, b.field, b.expected, b.found) for b in breaches]

    def _judge(self, record: wire.Record, seq: int) -> Iterator[RuleBreach]:
        base = self.base
        settings = self._settings_at(record.policy.settings_seq)
        yield from compare_with_previous.names(record)
        if base is None:
            yield from self._first(record, seq)
            return
        if settings is None and record.policy.settings_seq >= self._whole_from:
            yield RuleBreach("settings", "settings_seq", "settings", record.policy.settings_seq)
        yield from compare_with_previous.link(base, self.base_seq, record)
        if record.position > seq:
            yield RuleBreach("position", "position", f"at most {seq}", record.position)
        if record.final and not self._stopped:
            yield RuleBreach("stop", "final", "a stop before it", "none")
        yield from compare_with_previous.answers(record, self._announced, self._whole_from)
        if record.what == "restore":
            self._life = None
            yield from compare_with_previous.restore(base, self._versions, record)
            return
        yield from compare_with_previous.sums(base, record)
        yield from compare_with_previous.clock(settings, base, record)
        yield from compare_with_previous.objects(settings, base, self.base_seq, record)
        if self._follows:
            yield from self._decision(base, record)

    def _first(self, record: wire.Record, seq: int) -> Iterator[RuleBreach]:
        """Checks a record that has none before it on the tape; `seq` is its stream sequence."""
        found = (record.epoch, record.layout)
        if found != (self._epoch, self._layout.digest):
            yield RuleBreach("chain", "epoch, layout", (self._epoch, self._layout.digest), found)
        if record.base_seq >= self._whole_from:
            yield RuleBreach("chain", "base_seq", "a record that the tape has", record.base_seq)
        elif not record.base_seq:
            expected = ("restored", 1) if record.epoch else ("version", 1)
            begins = (record.what, record.position)
            if begins != expected or (not record.epoch and record.version):
                yield RuleBreach("chain", "what", expected, (*begins, record.version))
            if not record.epoch and record.global_step:
                yield RuleBreach("clock", "global_step", 0, record.global_step)
        if self._whole_from > 1:
            self._whole_from = seq

    def _announced(self, seq: int) -> tuple[wire.Manifest, float] | None:
        """Returns the manifest at `seq`, and when it was stored.

        None: there is no manifest of the fragment at `seq`, or the record before answers it.
        """
        at = self._index(seq)
        entry = self._heard[at] if at < len(self._heard) else None
        body = entry.body if isinstance(entry, Entry) and entry.seq == seq else None
        return (body, entry.time_s) if entry and isinstance(body, wire.Manifest) else None

    def _settings_at(self, seq: int) -> RunSettings | None:
        settings = self._settings.get(seq) if seq else self._created
        return settings and settings_of(settings, self._layout, self.fragment)

    # A decision

    def _decision(self, base: wire.Record, record: wire.Record) -> Iterator[RuleBreach]:
        why = self._follow(base, record)
        if why or self._life is None:
            self.unknown.append((record.base_seq, why))
            self._life = None
            return
        life, close = self._life, self._life.due
        yield from life.breaches
        life.breaches = []
        if close is None:
            state = (life.phase, sorted(life.announcers()), sorted(life.memory.waited_for()))
            yield RuleBreach("round", "what", f"nothing yet: {state}", (record.what, record.reason))
            return
        yield from compare_with_previous.decision(life, close, record)
        recorded(life, close)
        life.view_digest = record.view_digest
        yield from compare_with_previous.remembered(life, record)
        self.followed += 1

    def _follow(self, base: wire.Record, record: wire.Record) -> str:
        """Advances the owner's state to this record; returns why that is impossible, or ""."""
        if record.policy.rules != RULES:
            return "another release decided it, by other rules"
        for count, seen in enumerate(record.observations, 1):
            if seen.what == "resumed":
                why = self._begin(base, seen)
                if why:
                    return why
                continue
            if self._life is None:
                why = self._go_on(base, seen)
                if why:
                    return why
            if not self._observe(seen, record, count):
                return ""
        if self._life is None:
            return "the record does not say how its maker began"
        self._hear_until(self._life, record.policy.seen_seq)
        return ""

    def _observe(self, seen: wire.Observation, record: wire.Record, count: int) -> bool:
        """Applies one observation; returns False if the record was due before that observation.

        `count` is the observation's number in the record, from 1.
        """
        life = self._life
        assert life is not None
        self._hear_until(life, seen.after_seq)
        if life.due is not None:
            life.breach("round", "closed_at_s", life.due, f"went on: {seen.what} {seen.at_s}")
            return False
        if seen.after_seq != life.read_seq:
            life.breach("observation", "after_seq", life.read_seq, seen.after_seq)
        self._check_time(life, seen)
        watch(life, seen, record)
        self._check_cut(life, seen)
        enough = min(max(OBSERVATIONS, 2 * len(life.memory.members)), MOST_OBSERVATIONS)
        if count >= enough and not life.storing and life.due is None:
            life.due = Close("verdict", "observations", life.final, seen.at_s)
        return True

    def _begin(self, base: wire.Record, seen: wire.Observation) -> str:
        """Begins an owner's life from the record before; returns why that is impossible, or ""."""
        settings = self._settings_at(base.policy.settings_seq)
        if base.position < self._whole_from or settings is None:
            return "the tape is trimmed before it"
        self._life = begin(self._layout, settings, base, seen.at_s)
        self._next_seq = base.position
        return ""

    def _go_on(self, base: wire.Record, seen: wire.Observation) -> str:
        """Continues an owner's life from the record before; returns why that is impossible, or "".

        It is possible only if no update was waiting at that record.
        """
        if base.position <= base.policy.seen_seq:
            return "updates were waiting when the record before was made"
        settings = self._settings_at(base.policy.settings_seq)
        if base.policy.stopping_at_s or base.position < self._whole_from or settings is None:
            return "the tape is trimmed before it, or the run had stopped"
        if base.what == "verdict" and base.policy.closed_at_s >= base.opened_at_s:
            return "the record does not say how its maker began"
        if seen.after_seq != base.policy.seen_seq:
            return "the record does not say when its maker received the messages before"
        life = begin(self._layout, settings, base, max(seen.at_s, base.policy.closed_at_s))
        life.began_at_s, life.now_s = 0.0, seen.at_s
        life.opened_at_s, life.quorum_at_s = base.opened_at_s, base.quorum_at_s
        life.storing = "version" if seen.what == "made" else "verdict"
        self._life, self._next_seq = life, base.position
        return ""

    def _index(self, seq: int) -> int:
        return bisect_left(self._heard, seq, key=lambda entry: entry.seq)

    def _hear_until(self, life: OwnerLife, seq: int) -> None:
        """Applies the tape's messages up to `seq` to the owner, or until a record is due."""
        at = self._index(self._next_seq)
        while at < len(self._heard) and self._heard[at].seq <= seq and life.due is None:
            entry = self._heard[at]
            hear(life, self._created, entry)
            self._next_seq, at = entry.seq + 1, at + 1

    # Times and cuts

    def _check_time(self, life: OwnerLife, seen: wire.Observation) -> None:
        due_s = time_up_s(life)
        if due_s is None or self.late_s is None:
            return
        # The event that made the timer earlier came no earlier than the last event.
        due_s = max(due_s, life.now_s)
        if seen.at_s > due_s + self.late_s:
            life.breach("overdue", seen.what, f"by {due_s}", seen.at_s)

    def _check_cut(self, life: OwnerLife, seen: wire.Observation) -> None:
        """Checks the stream sequence that the leader gave for the fragment's last update.

        It must be that of an update, and not an older one than the newest that had been read when
        the leader was asked. An update that was read since then may be newer.
        """
        if seen.what != "cut" or seen.seq < self._whole_from:
            return
        manifests = [
            e.seq for e in self._heard if isinstance(e, Entry) and isinstance(e.body, wire.Manifest)
        ]
        read = [seq for seq in manifests if seq <= life.asked_seq]
        if read and seen.seq < read[-1]:
            life.breach("cut", "seq", f"at least {read[-1]}", seen.seq)
        known = seen.seq in manifests or seen.seq in self._garbled
        if manifests and manifests[0] <= seen.seq and not known:
            life.breach("cut", "seq", "an update of the fragment", seen.seq)
