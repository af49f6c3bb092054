"""Chooses the records that make one version of the whole model. Pure.

Fragments make their versions at different moments, and a rollback leaves them with different
numbers. They share the run's clock. So a whole version consists of a version of the last fragment,
at a clock S, and of every other fragment's newest version at S or before: version n of each, while
H stays and nothing is rolled back. It is whole once no fragment can make another by S.
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
    """The fragments and versions to hand out.

    Attributes:
        fragments: indexes of the followed fragments, ascending.
        whole: one version of them all at once; else one fragment at a time.
        every: least number of versions between two that are handed out.
        stay_at: the last version to hand out; None: the run's last.
    """

    fragments: tuple[int, ...]
    whole: bool = True
    every: int = 1
    stay_at: int | None = None


def check_rules(rules: FollowRules, fragments: int) -> None:
    """Refuses invalid rules.

    Raises:
        ConfigError: nothing is followed, or an option is out of its range.
    """
    if not rules.fragments or not 0 <= min(rules.fragments) <= max(rules.fragments) < fragments:
        raise ConfigError(f"fragments {rules.fragments}: the run has 0 to {fragments - 1}")
    if rules.every < 1:
        raise ConfigError(f"every={rules.every}: expected at least 1 version")
    if rules.stay_at is not None and rules.stay_at < 0:
        raise ConfigError(f"stay_at={rules.stay_at}: expected a version, 0 or more")


class HeardRecord(NamedTuple):
    """A record as a follower keeps it; `record` is None if it cannot be read.

    Attributes:
        record_seq: its stream sequence.
        stored_at_s: when the tape stored it, seconds since the epoch.
        record: the fields that lead to a view.
    """

    record_seq: int
    stored_at_s: float
    record: wire.Record | None


@dataclass
class FollowedFragment:
    """One fragment: its view, its records from the adopted one on, and the version handed out."""

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
        """True if this fragment's oldest record is later, by the run's clock, than the other's."""
        own, its = self.history[0].record, other.history[0].record
        return own is not None and its is not None and own.global_step > its.global_step

    def hear(self, heard: HeardRecord) -> None:
        """Adds the next record of the tape; one that was added before is ignored."""
        if self.history and heard.record_seq <= self.history[-1].record_seq:
            return
        self.history.append(heard)
        if len(self.history) > MOST_WAITING:
            del self.history[1 : MOST_WAITING // 2]

    def adopt(self, newest: HeardRecord, record: wire.Record, view: np.ndarray) -> None:
        """Adopts the view of one of the fragment's records."""
        self.view = view
        self.adopted = Adopted(newest.record_seq, record.version, record.view_digest)
        self.history = [one for one in self.history if one.record_seq >= newest.record_seq]


def slim(record: wire.Record) -> wire.Record:
    """Returns a record without its entries on learners, which grow with the fleet."""
    policy = record.policy.model_copy(
        update={"members": (), "marks": (), "quarantined": (), "allowances": (), "credits": ()}
    )
    less = {"inputs": (), "rejected": (), "observations": (), "policy": policy}
    return record.model_copy(update=less)


def choose_whole(
    histories: Sequence[Sequence[HeardRecord]],
    settings: RunSettings,
    *,
    ended: bool,
    most: int | None = None,
) -> tuple[HeardRecord, ...] | None:
    """Chooses the newest whole version: a record of each history, in order; None if there is none.

    Args:
        histories: each fragment's records, oldest first.
        settings: the run's settings now.
        ended: the run has ended: the newest version of each fragment is its last.
        most: the greatest allowed version of the last fragment.
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
    """Returns the run's clock at a fragment's next version; infinite if there is none.

    At the run's last step a fragment may have several versions, until one is its final one.
    """
    record = _record(newest)
    clock = next_step(settings.sync.rhythm(record.fragment), record.global_step)
    return float("inf") if record.final else min(clock, settings.run.steps)


def _record(heard: HeardRecord) -> wire.Record:
    assert heard.record is not None
    return heard.record


def _clock(heard: HeardRecord) -> int:
    return _record(heard).global_step
