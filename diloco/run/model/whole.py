"""Chooses the records that make one version of the whole model. Pure.

Fragments make their versions at different times, and a rollback leaves them with different version
numbers; but all share the run's clock, the global step. So a whole version consists of a version of
the last fragment, made at global step S, and of the newest version of every other fragment made at
S or before. While H does not change and nothing is rolled back, that is version n of each fragment.
A whole version is complete once no fragment can make another version at S or before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.layout import next_step
from diloco.common.storage.catchup import Adopted

# The most waiting records of a fragment: beyond, the older half is dropped, and a stored view read.
MOST_WAITING = 512
_NOTHING = Adopted(0, -1, "")


class FollowRules(NamedTuple):
    """The fragments and versions that a follower hands out.

    Attributes:
        fragments: indices of the followed fragments, ascending.
        whole: True: one version of all these fragments at once; False: one fragment at a time.
        every: least number of versions between two that are handed out.
        stay_at: the last version to hand out; None: the run's last.
    """

    fragments: tuple[int, ...]
    whole: bool = True
    every: int = 1
    stay_at: int | None = None


def check_rules(rules: FollowRules, fragments: int) -> None:
    """Refuses invalid rules for a run with this number of fragments.

    Raises:
        ConfigError: no fragment is followed, or a rule is out of its range.
    """
    if not rules.fragments or not 0 <= min(rules.fragments) <= max(rules.fragments) < fragments:
        raise ConfigError(f"fragments {rules.fragments}: the run has 0 to {fragments - 1}")
    if rules.every < 1:
        raise ConfigError(f"every={rules.every}: expected at least 1 version")
    if rules.stay_at is not None and rules.stay_at < 0:
        raise ConfigError(f"stay_at={rules.stay_at}: expected a version, 0 or more")


class HeardRecord(NamedTuple):
    """A record as a follower keeps it.

    Attributes:
        record_seq: the record's stream sequence.
        stored_at_s: when the server stored the record, in seconds since the epoch.
        record: the record's word; None: it cannot be read.
    """

    record_seq: int
    stored_at_s: float
    record: wire.RecordWord | None


@dataclass
class FollowedFragment:
    """A fragment of a follower.

    Attributes:
        index: index of the fragment.
        view: the view, float32 [elements]; empty before the first.
        adopted: the record that made the view.
        history: the fragment's records from the adopted one on, the oldest first.
        given: the record whose view was handed out last.
        refused_seq: sequence of the newest record whose view could not be read; 0: none.
    """

    index: int
    view: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    adopted: Adopted = _NOTHING
    history: list[HeardRecord] = field(default_factory=list)
    given: Adopted = _NOTHING
    refused_seq: int = 0

    @property
    def waiting(self) -> list[HeardRecord]:
        """The records after the adopted one."""
        return [one for one in self.history if one.record_seq > self.adopted.record_seq]

    def starts_after(self, other: "FollowedFragment") -> bool:
        """Returns whether this history begins at a greater global step than the other's."""
        own, its = self.history[0].record, other.history[0].record
        return own is not None and its is not None and own.global_step > its.global_step

    def hear(self, heard: HeardRecord) -> None:
        """Adds the next record of the tape; a record that was added before is ignored."""
        if self.history and heard.record_seq <= self.history[-1].record_seq:
            return
        self.history.append(heard)
        if len(self.history) > MOST_WAITING:
            del self.history[1 : MOST_WAITING // 2]

    def adopt(self, newest: HeardRecord, record: wire.RecordWord, view: np.ndarray) -> None:
        """Sets the view, and drops older records than the one that made it.

        Args:
            newest: the record up to which the view is current.
            record: the content of `newest`.
            view: the view, float32 [elements].
        """
        self.view = view
        self.adopted = Adopted(newest.record_seq, record.version, record.view_digest)
        self.history = [one for one in self.history if one.record_seq >= newest.record_seq]


def choose_whole(
    histories: Sequence[Sequence[HeardRecord]],
    settings: RunSettings,
    *,
    ended: bool,
    most: int | None = None,
) -> tuple[HeardRecord, ...] | None:
    """Returns the newest complete whole version: a record of each fragment; None if there is none.

    Args:
        histories: each fragment's records, the oldest first.
        settings: the run's present settings.
        ended: whether the run has ended: then each fragment's newest version is its last.
        most: the greatest allowed version of the last fragment; None: no limit.
    """
    lives = [_since_rollback(one) for one in histories]
    if not all(lives):
        return None
    if ended and most is None:
        return tuple(one[-1] for one in lives)
    reach = float("inf") if ended else min(following(settings, life[-1]) for life in lives)
    for last in reversed(lives[-1]):
        clock, version = _clock(last), _record(last).version
        if clock >= reach or (most is not None and version > most):
            continue
        chosen = [_newest_at(life, clock) for life in lives[:-1]]
        found = tuple(one for one in chosen if one is not None)
        return (*found, last) if len(found) == len(chosen) else None
    return None


def _since_rollback(history: Sequence[HeardRecord]) -> list[HeardRecord]:
    """Returns the readable records from the newest rollback on."""
    life: list[HeardRecord] = []
    for one in history:
        if one.record is None:
            continue
        if one.record.what == "restore":
            life.clear()
        life.append(one)
    return life


def _newest_at(life: Sequence[HeardRecord], clock: int) -> HeardRecord | None:
    return next((one for one in reversed(life) if _clock(one) <= clock), None)


def following(settings: RunSettings, newest: HeardRecord) -> float:
    """Returns the global step of a fragment's next version; infinite if `newest` is its last.

    At the run's last step a fragment may make several versions, of which one is marked as final.
    """
    record = _record(newest)
    clock = next_step(settings.sync.rhythm(record.fragment), record.global_step)
    return float("inf") if record.final else min(clock, settings.run.steps)


def _record(heard: HeardRecord) -> wire.RecordWord:
    assert heard.record is not None
    return heard.record


def _clock(heard: HeardRecord) -> int:
    return _record(heard).global_step
