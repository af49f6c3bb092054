"""Which data each update covers, and that every update is answered once.

A learner takes one batch a step, in order: an update of so many steps that ends at a position
begins so many before it. A new life goes on behind all that earlier lives have said.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common import wire
from diloco.common.tape import same_tape
from diloco.oracle.finding import Finding


class _Life(NamedTuple):
    learner: str
    incarnation: int
    fragment: int


@dataclass
class _Sent:
    """How far a life has sent a fragment: its newest update, and which have no record yet.

    `merged_version` is the one that has the newest, 0 while none has.
    """

    seq: int = 0
    position: int = 0
    base_version: int = 0
    merged_version: int = 0
    unanswered: set[int] = field(default_factory=set)


@dataclass
class _Learner:
    """A learner's newest life; where its data goes on, at least and, by late messages, at most.

    `said`: how far its lives have said to be, each while it was the newest; `late`: afterwards.
    """

    incarnation: int = 0
    least: int = 0
    most: int = 0
    said: int = 0
    late: int = 0


class Data:
    """Data positions and answers of all learners.

    Args:
        specification: the tape's first message.
        earlier: positions that the tape begins with.
        overwritten: fragments whose versions take the place of what a learner has not sent.
        blend: share that stays of the steps behind an update, where a version has it.
    """

    def __init__(
        self,
        specification: wire.Specification,
        earlier: Mapping[str, int],
        overwritten: Collection[int] = (),
        blend: float = 1.0,
    ) -> None:
        self._overwritten, self._blend = overwritten, blend
        self._learners: dict[str, _Learner] = defaultdict(_Learner)
        for name, position in earlier.items():
            self._learners[name].said = position
        self._epoch = specification.epoch
        self._sent: dict[_Life, _Sent] = defaultdict(_Sent)
        # Versions of each fragment's rollbacks.
        self._floors: dict[int, list[int]] = defaultdict(list)
        self._whole = True

    def missing(self) -> None:
        """The tape lacks messages: what was sent by then is not known."""
        self._whole = False

    def take(self, body: wire.Body, seq: int) -> Iterator[Finding]:
        """A join, a leave or a manifest; of one of another tape's lives nobody has the work."""
        match body:
            case wire.Join():
                learner = self._learners[body.learner]
                learner.incarnation = seq
                learner.least, learner.most = learner.said, max(learner.said, learner.late)
            case wire.Leave() if same_tape(body.incarnation, seq):
                self._say(body.learner, body.incarnation, body.position)
            case wire.Manifest() if body.epoch == self._epoch:
                yield from self._manifest(body, seq)

    def _say(self, name: str, incarnation: int, position: int) -> None:
        learner = self._learners[name]
        if incarnation >= learner.incarnation:
            learner.said = max(learner.said, position)
        else:
            # None of it is merged: newer lives may have gone on behind it or not.
            learner.late = max(learner.late, position)
            learner.most = max(learner.most, position)

    def _manifest(self, manifest: wire.Manifest, seq: int) -> Iterator[Finding]:
        life = _Life(manifest.learner, manifest.incarnation, manifest.fragment)
        sent, learner = self._sent[life], self._learners[manifest.learner]
        if manifest.seq <= sent.seq:
            return  # Announced again.
        if self._whole and manifest.incarnation == learner.incarnation:
            about = f"learner {manifest.learner} fragment {manifest.fragment}"
            if manifest.seq != sent.seq + 1:
                yield Finding("data", seq, about, "seq", sent.seq + 1, manifest.seq)
            start = manifest.position - manifest.steps
            least, most = self._bounds(manifest, sent, learner)
            if not least <= start <= most:
                yield Finding("data", seq, about, "position less steps", (least, most), start)
        sent.seq, sent.position = manifest.seq, manifest.position
        sent.base_version = manifest.base_version
        sent.merged_version = 0
        sent.unanswered.add(manifest.seq)
        self._say(manifest.learner, manifest.incarnation, manifest.position)

    def _bounds(self, manifest: wire.Manifest, sent: _Sent, learner: _Learner) -> tuple[int, float]:
        """Where the data of an update begins: where the one before it ended, if there is one.

        Who adopts a rollback, or a version that overwrites, lets go of what was not sent.
        """
        floors = self._floors[manifest.fragment]
        if not sent.seq:
            # It may have begun from a version before the rollback: a replica gave it an old record.
            may = floors or manifest.fragment in self._overwritten
            return learner.least, math.inf if may else learner.most
        let_go = any(sent.base_version < floor <= manifest.base_version for floor in floors)
        if manifest.fragment in self._overwritten:
            let_go = manifest.base_version > sent.base_version
        if let_go:
            return sent.position, math.inf
        # A version that was adopted since has the update before this one: of the steps behind it
        # a share is let go. How many there were when it came the tape does not say.
        if manifest.fragment not in self._overwritten and (
            0 < sent.merged_version <= manifest.base_version
        ):
            since = manifest.position - sent.position
            return sent.position, sent.position + math.ceil((1 - self._blend) * since)
        return sent.position, sent.position

    def resolve(self, record: wire.Record, seq: int) -> Iterator[Finding]:
        """A record answers updates, each of which was sent and has no answer."""
        for one in record.inputs:
            sent = self._sent[_Life(one.learner, one.incarnation, record.fragment)]
            if sent.seq == one.seq:
                sent.merged_version = record.version
        answered = [(one.learner, one.incarnation, one.seq) for one in record.inputs]
        answered += [(one.learner, one.incarnation, one.seq) for one in record.rejected]
        for learner, incarnation, number in answered:
            unanswered = self._sent[_Life(learner, incarnation, record.fragment)].unanswered
            if number not in unanswered and self._whole:
                about = f"update {incarnation}-{number} of {learner}"
                yield Finding("once", seq, about, "", "sent, and not answered", "answered")
            unanswered.discard(number)
        if record.what == "restore":
            self._floors[record.fragment].append(record.version)
