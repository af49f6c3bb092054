"""Checks the data positions of updates, and that every update is answered once.

A learner takes one batch a step, in order: an update of n steps at position p covers the batches
from p - n to p. A new life resumes after the batches of all earlier lives; or it goes on with what
the life before had not sent, of each fragment exactly where that one's updates end. On a trimmed
tape each fragment is checked from its oldest record on. That record's position and marks tell which
updates were answered before.
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common.protocol import wire
from diloco.common.storage.tape import same_tape
from diloco.judge.oracle.compare_with_previous import resolved
from diloco.judge.oracle.finding import Violation


@dataclass
class Unanswered:
    """An update that no record has answered yet; fields are those of its first announcement.

    Attributes:
        stream_seq: stream sequence of its manifest.
        due: True if no record's position may pass this update. It is False if the update was
            announced while an earlier one of its life had no verdict: then an owner may ignore it
            until it is announced again.
        shut_out: True if its sender was quarantined: the update may have been dropped unread.
    """

    stream_seq: int
    tokens: int
    due: bool
    shut_out: bool


class _Life(NamedTuple):
    learner: str
    incarnation: int
    fragment: int

    def update(self, seq: int) -> str:
        """Returns the name of an update of this life, for people."""
        return f"update {self.incarnation}-{seq} of {self.learner} to fragment {self.fragment}"


@dataclass
class _Sent:
    """The updates of one fragment that one life of a learner has sent.

    Attributes:
        seq: number of its newest update, whose `position` and `base_version` follow.
        merged_version: the version that merged the newest update, if the tape is trimmed the
            earliest that can have; 0 if none has.
        answered: number of the newest update that a record answers.
        covered: the position up to which batches are sent; a leave may state more than updates do.
        unanswered: by number, the updates without a verdict.
    """

    seq: int = 0
    position: int = 0
    base_version: int = 0
    merged_version: int = 0
    answered: int = 0
    covered: int = 0
    unanswered: dict[int, Unanswered] = field(default_factory=dict)


@dataclass
class _LearnerData:
    """The data positions of a learner.

    Attributes:
        incarnation: its newest life.
        holds: the modules that this life holds; empty: all.
        least: the least position at which that life may begin.
        most: the greatest, if messages of earlier lives that came late are counted too.
        said: the greatest position that a life stated while it was the newest.
        late: the greatest position that a life stated after a newer one had joined.
        of_fragment: the greatest position that the newest life of its time stated of a fragment;
            the key None: of all fragments.
        reached: `of_fragment` when the newest life joined.
        base_versions: by fragment, the base version of the newest update that set `of_fragment`.
        begins: least and most position at which each of its lives may have begun anew.
        left: stream sequence and position of the newest life's leave; None: it has not left.
    """

    incarnation: int = 0
    holds: tuple[str, ...] = ()
    least: int = 0
    most: int = 0
    said: int = 0
    late: int = 0
    left: tuple[int, int] | None = None
    of_fragment: dict[int | None, int] = field(default_factory=dict)
    reached: dict[int | None, int] = field(default_factory=dict)
    base_versions: dict[int, int] = field(default_factory=dict)
    begins: set[tuple[int, int]] = field(default_factory=set)

    def goes_on_at(self, fragment: int, start: int, *, let_go: bool) -> bool:
        """True if unsent work of earlier lives may begin at `start`.

        It begins where the fragment's updates end; or, if a life that began anew has sent none,
        where that life began; or behind that, where a life let go of its work (`let_go`).
        """
        reached = max(self.reached.get(fragment, 0), self.reached.get(None, 0))
        anew = any(least <= start <= most for least, most in self.begins)
        return start == reached or (start > reached and (anew or let_go))

    def join(self, incarnation: int, holds: tuple[str, ...] = ()) -> None:
        """Begins a life, which may resume from `said` on."""
        self.incarnation, self.holds, self.left = incarnation, holds, None
        self.reached = dict(self.of_fragment)
        self.least, self.most = self.said, max(self.said, self.late)
        self.begins.add((self.least, self.most))


class Data:
    """Checks the data positions and verdicts of all learners' updates.

    Args:
        specification: the tape's first message.
        earlier: by learner, the data position at which the tape begins.
        overwritten: fragments whose versions overwrite a learner's unsent work.
        blend: the share that a learner keeps of its steps after an update, when it adopts the
            version that merged the update.
    """

    def __init__(
        self,
        specification: wire.Specification,
        earlier: Mapping[str, int],
        overwritten: Collection[int] = (),
        blend: float = 1.0,
    ) -> None:
        self._overwritten, self._blend = overwritten, blend
        self._learners: dict[str, _LearnerData] = defaultdict(_LearnerData)
        for name, position in earlier.items():
            learner = self._learners[name]
            learner.said = learner.of_fragment[None] = position
        self._epoch = specification.epoch
        self._sent: dict[_Life, _Sent] = defaultdict(_Sent)
        # By fragment, the updates that came in turn, until a position passes them.
        self._due: dict[int, deque[tuple[int, _Life, int]]] = defaultdict(deque)
        # Versions of each fragment's rollbacks.
        self._floors: dict[int, list[int]] = defaultdict(list)
        # Fragments of which a record came.
        self._begun: set[int] = set()
        self._shut_out: set[str] = set()
        self._whole_from = 1

    def missing_before(self, seq: int) -> None:
        """Notes that messages before stream sequence `seq` are missing, possibly manifests."""
        self._whole_from = seq

    def in_flight(self) -> Iterator[tuple[str, Unanswered]]:
        """Yields name and state of each unanswered update, except those announced out of turn."""
        for life, sent in self._sent.items():
            for seq, waiting in sent.unanswered.items():
                if waiting.due:
                    yield life.update(seq), waiting

    def take(self, body: wire.Body, seq: int) -> Iterator[Violation]:
        """Takes a join, leave, claim, manifest or quarantine at stream sequence `seq`.

        Messages of lives of another tape are ignored.
        """
        match body:
            case wire.Join():
                self._learners[body.learner].join(seq, body.holds)
            case wire.Leave() if same_tape(body.incarnation, seq):
                self._leave(body, seq)
            case wire.Claim(what="end") if same_tape(body.incarnation, seq):
                # Unsent work before that position may be in a snapshot.
                self._say(body.learner, body.incarnation, body.position, ())
            case wire.Manifest() if body.epoch == self._epoch:
                yield from self._manifest(body, seq)
            case wire.Quarantine():
                (self._shut_out.add if body.active else self._shut_out.discard)(body.learner)

    def _leave(self, leave: wire.Leave, seq: int) -> None:
        learner = self._learners[leave.learner]
        if not leave.fragments and leave.incarnation == learner.incarnation:
            learner.left = learner.left or (seq, leave.position)
        for fragment in leave.fragments:
            sent = self._sent[_Life(leave.learner, leave.incarnation, fragment)]
            sent.covered = max(sent.covered, leave.position)
        about = leave.fragments or (None,)
        self._say(leave.learner, leave.incarnation, leave.position, about)

    def _say(
        self, name: str, incarnation: int, position: int, fragments: Collection[int | None]
    ) -> None:
        learner = self._learners[name]
        if incarnation >= learner.incarnation:
            learner.said = max(learner.said, position)
            for fragment in fragments:
                before = learner.of_fragment.get(fragment, 0)
                learner.of_fragment[fragment] = max(before, position)
        else:
            # The update will not be merged. Newer lives may or may not have counted its position.
            learner.late = max(learner.late, position)
            learner.most = max(learner.most, position)

    def _manifest(self, manifest: wire.Manifest, seq: int) -> Iterator[Violation]:
        life = _Life(manifest.learner, manifest.incarnation, manifest.fragment)
        sent, learner = self._sent[life], self._learners[manifest.learner]
        if manifest.seq <= sent.seq:
            # Announced again, or behind a later one: aggregators ignore updates that are not next.
            if sent.answered < manifest.seq and manifest.seq not in sent.unanswered:
                sent.unanswered[manifest.seq] = Unanswered(
                    seq, manifest.tokens, due=False, shut_out=life.learner in self._shut_out
                )
            return
        if learner.incarnation < manifest.incarnation < self._whole_from:
            learner.join(manifest.incarnation)  # Its join is trimmed.
        if manifest.incarnation == learner.incarnation:
            yield from self._check_data(manifest, seq, sent, learner)
        # If it is not higher, the record at which the trimmed tape begins has answered it.
        if manifest.seq > sent.answered:
            # The updates before it may be trimmed, and had no verdict yet.
            in_turn = self._whole_from == 1 or sent.seq or manifest.seq == sent.answered + 1
            due = bool(in_turn) and not sent.unanswered
            waiting = Unanswered(seq, manifest.tokens, due, life.learner in self._shut_out)
            sent.unanswered[manifest.seq] = waiting
            if waiting.due:
                self._due[manifest.fragment].append((seq, life, manifest.seq))
        sent.seq, sent.position = manifest.seq, manifest.position
        sent.covered = max(sent.covered, manifest.position)
        sent.base_version = manifest.base_version
        sent.merged_version = 0 if manifest.seq > sent.answered else manifest.base_version + 1
        if manifest.incarnation >= learner.incarnation:
            learner.base_versions[manifest.fragment] = manifest.base_version
        self._say(manifest.learner, manifest.incarnation, manifest.position, (manifest.fragment,))

    def _check_data(
        self, manifest: wire.Manifest, seq: int, sent: _Sent, learner: _LearnerData
    ) -> Iterator[Violation]:
        about = f"learner {manifest.learner} fragment {manifest.fragment}"
        # The life's first updates may be trimmed, or the records that say what it could drop.
        trimmed = self._whole_from > 1
        begins = trimmed and not sent.seq
        if manifest.seq != sent.seq + 1 and not begins:
            yield Violation("data", seq, about, "seq", sent.seq + 1, manifest.seq)
        start = manifest.position - manifest.steps
        least, most = self._bounds(manifest, sent, learner)
        if trimmed and not (sent.seq and manifest.fragment in self._begun):
            most = math.inf
        # The update at whose end the unsent work begins may be trimmed.
        unknown = trimmed and manifest.fragment not in learner.reached
        before = learner.base_versions.get(manifest.fragment, -1)
        let_go = self._rolled_back(manifest, before)
        goes_on = not sent.seq and (
            unknown or learner.goes_on_at(manifest.fragment, start, let_go=let_go)
        )
        if not (least <= start <= most or goes_on):
            yield Violation("data", seq, about, "position less steps", (least, most), start)
        if manifest.base_version < sent.base_version:
            yield Violation(
                "data", seq, about, "base_version", sent.base_version, manifest.base_version
            )

    def _bounds(
        self, manifest: wire.Manifest, sent: _Sent, learner: _LearnerData
    ) -> tuple[int, float]:
        """Returns the least and greatest position at which an update's steps may begin.

        Both are the end of the update before it, unless the learner may have dropped unsent work:
        by rollback, overwrite or blend.
        """
        floors = self._floors[manifest.fragment]
        if not sent.seq:
            # The life may have begun from a version before the rollback, read from a stale replica.
            may = floors or manifest.fragment in self._overwritten
            return learner.least, math.inf if may else learner.most
        let_go = self._rolled_back(manifest, sent.base_version)
        if manifest.fragment in self._overwritten:
            let_go = manifest.base_version > sent.base_version
        if let_go:
            return sent.position, math.inf
        # A version adopted since has merged the update before this one, so a share of the steps
        # after it was dropped. The tape does not tell how many steps there were then.
        if manifest.fragment not in self._overwritten and (
            0 < sent.merged_version <= manifest.base_version
        ):
            since = manifest.position - sent.position
            return sent.position, sent.position + math.ceil((1 - self._blend) * since)
        return sent.position, sent.position

    def _rolled_back(self, manifest: wire.Manifest, before: int) -> bool:
        """True if a rollback lies between version `before` and an update's base version."""
        floors = self._floors[manifest.fragment]
        return any(before < floor <= manifest.base_version for floor in floors)

    def begin(self, record: wire.Record) -> None:
        """Starts at a fragment's oldest record, or at the first one after an unreadable record."""
        self._begun.add(record.fragment)
        for mark in record.policy.marks:
            # A life whose manifests are trimmed, too: it may announce its last update again.
            life = _Life(mark.learner, mark.incarnation, record.fragment)
            self._sent[life].answered = mark.seq
        due = []
        for life, sent in self._sent.items():
            if life.fragment != record.fragment:
                continue
            if sent.seq <= sent.answered:
                sent.merged_version = sent.base_version + 1
            sent.unanswered = {
                seq: waiting
                for seq, waiting in sent.unanswered.items()
                if seq > sent.answered and waiting.stream_seq >= record.position
            }
            for seq, waiting in [*sent.unanswered.items()][:1]:
                waiting.due = seq == sent.answered + 1
                if waiting.due:
                    due.append((waiting.stream_seq, life, seq))
        self._due[record.fragment] = deque(sorted(due))
        if record.policy.floor:
            self._floors[record.fragment] = [record.policy.floor]

    def resolve(self, record: wire.Record, seq: int, *, followed: bool) -> Iterator[Violation]:
        """Checks that each update that a record answers was sent, and had no answer before.

        Unless `followed`, it also checks that the record's position passes no update without a
        verdict. If the record's decisions were recomputed (`followed`), that is checked there.
        """
        for taken in resolved(record):
            life = _Life(taken.learner, taken.incarnation, record.fragment)
            sent = self._sent[life]
            trimmed = taken.stream_seq < self._whole_from and taken.seq > sent.answered
            if sent.unanswered.pop(taken.seq, None) is None and not trimmed:
                about = life.update(taken.seq)
                yield Violation("once", seq, about, "", "sent, and not answered", "answered")
            sent.answered = max(sent.answered, taken.seq)
            if isinstance(taken, wire.Input) and sent.seq == taken.seq:
                sent.merged_version = record.version
        if record.what == "restore":
            self._floors[record.fragment].append(record.version)
        due = self._due[record.fragment]
        while due and due[0][0] < record.position:
            _, life, number = due.popleft()
            waiting = self._sent[life].unanswered.get(number)
            if waiting is None:
                continue
            waiting.due = False
            if not (followed or waiting.shut_out):
                about = f"fragment {record.fragment} version {record.version}"
                left = f"it leaves {life.update(number)} behind"
                yield Violation("position", seq, about, "position", waiting.stream_seq, left)

    def unfinished(self, modules: Sequence[str], stop_seq: int, seq: int) -> Iterator[Violation]:
        """Yields violations for the work that an ended run leaves open.

        Every update must be answered, and a learner present to the end must have sent all its work.

        Args:
            modules: the module of each fragment; a learner works on those of modules that it holds.
            stop_seq: stream sequence of the stop.
            seq: stream sequence of the end.
        """
        for update, waiting in self.in_flight():
            if not waiting.shut_out and waiting.stream_seq < seq:
                yield Violation("once", seq, update, "", "an answer", "none")
        for name, learner in self._learners.items():
            # A learner without a leave was overtaken by the end, or cut off, and could not send;
            # one that joined before the tape's beginning is not fully known.
            if learner.left is None or learner.incarnation < self._whole_from:
                continue
            left_seq, position = learner.left
            held = learner.holds or modules
            for fragment, module in enumerate(modules if stop_seq < left_seq < seq else ()):
                if module not in held:
                    continue
                covered = self._sent[_Life(name, learner.incarnation, fragment)].covered
                if covered != position:
                    about = f"learner {name} fragment {fragment}"
                    yield Violation("data", left_seq, about, "position", position, covered)
