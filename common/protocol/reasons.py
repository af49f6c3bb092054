"""The reasons for which a message or an update is refused, each with its meaning for people.

A message that is not a valid update is counted and dropped. A valid update can be rejected because
of its manifest or because of its objects; a record then states the reason. On the wire reasons are
plain words. A record may hold a word that another release introduced, so readers use `find`.
"""

from enum import StrEnum
from typing import Literal, Self

Stage = Literal["no update", "manifest", "objects"]

_REJECTED = "runbooks/rejected-updates.md"
_LAGGING = "runbooks/lagging-learner.md"
_QUARANTINED = "runbooks/quarantined-learner.md"
_CREDENTIALS = "runbooks/credentials.md"
_UPGRADE = "runbooks/upgrade.md"
_MISMATCH = "runbooks/run-mismatch.md"


class Reason(StrEnum):
    """A reason for a refusal; its value is the word on the wire.

    Attributes:
        stages: the stages of an update's handling at which the reason is given.
        text: the meaning, for people.
        offence: True if the refusal counts towards `bounds.quarantine_offences`; False if the
            sender neither caused the fault nor could know of it, or if the sender is uncertain.
        runbook: the page that says what to do about it.
    """

    stages: tuple[Stage, ...]
    text: str
    offence: bool
    runbook: str

    def __new__(
        cls,
        word: str,
        stages: Stage | tuple[Stage, ...],
        text: str,
        runbook: str = _REJECTED,
        offence: bool = True,
    ) -> Self:
        """Makes a member of the enumeration."""
        made = str.__new__(cls, word)
        made._value_ = word
        made.stages = stages if isinstance(stages, tuple) else (stages,)
        made.text, made.runbook = text, runbook
        made.offence = offence and made.stages != ("no update",)
        return made

    def __repr__(self) -> str:
        """Returns the plain word, so that a record's text does not depend on the reason's type."""
        return repr(self.value)

    # fmt: off
    OVERSIZE = "oversize", ("no update", "objects"), "a message or a shard is larger than it may be"
    UNDECODABLE = "undecodable", "no update", "it is no msgpack map"
    SCHEMA = "schema", "no update", "it is of a schema that this release does not read", _UPGRADE
    KIND = "kind", "no update", "it is of another kind than its subject carries"
    MALFORMED = "malformed", "no update", "a field is missing, unknown or wrong"
    SENDER = (
        "sender", "no update",
        "it names another run, learner or fragment than its subject", _CREDENTIALS,
    )
    IN_FLIGHT = "in_flight", "no update", "the learner's update before it is not resolved yet"
    EPOCH = "epoch", "no update", "it belongs to another tape", _MISMATCH
    RATE = (
        "rate", "no update",
        "more, or longer ones, than bounds.max_updates_per_s; an honest learner announces it again",
        _CREDENTIALS,
    )
    SETTINGS = "settings", "no update", "it changes a setting that no run can change"

    UNKNOWN_INCARNATION = (
        "unknown_incarnation", "manifest", "no join of this incarnation came before it",
    )
    SUPERSEDED = (
        "superseded", "manifest",
        "a newer life of the learner joined before the manifest was stored", _LAGGING, False,
    )
    ENDED = (
        "ended", "manifest", "the fragment's last version is committed", _REJECTED, False,
    )
    QUARANTINED = "quarantined", "manifest", "its sender is quarantined", _QUARANTINED, False
    NOT_HELD = (
        "not_held", "manifest", "its sender's join does not name the fragment's module",
    )
    LAYOUT = "layout", "manifest", "not the run's layout", _MISMATCH
    CODEC = "codec", "manifest", "not the run's codec", _MISMATCH
    SHARDS = (
        "shards", "manifest",
        "slices that do not ascend, leave the fragment or are too many; a block in no shard or two",
    )
    NAME = "name", "manifest", "a shard's name is not one that its update may have"
    SIZE = "size", "manifest", "a shard's size does not fit its codec and blocks"
    FUTURE = "future", "manifest", "based on a version that does not exist yet"
    BASE_DIGEST = "base_digest", "manifest", "based on the newest version, but on another view"
    VIEW = (
        "view", "manifest",
        "the learner holds another view than that of the version it builds on", _LAGGING,
    )
    STALE = "stale", "manifest", "staler than staleness.max_versions", _LAGGING, False
    ROLLED_BACK = (
        "rolled_back", "manifest", "based on a version before the newest rollback", _REJECTED,
        False,
    )

    MISSING = "missing", "objects", "a shard is missing in the store"
    CHECKSUM = "checksum", "objects", "a shard is not what the manifest says"
    UNREADABLE = (
        "unreadable", "objects", "a shard is no plain object: it is encoded, or a link",
    )
    SLOW = (
        "slow", "objects",
        "twice its shards came at less than the least rate allowed, while others' shards were read",
    )
    TRUNCATED = "truncated", "objects", "a shard is shorter than it must be"
    BAD_MAGIC = "bad_magic", "objects", "a shard has no valid header"
    CODEC_MISMATCH = "codec_mismatch", "objects", "a shard's header states another codec"
    BAD_SCALE = "bad_scale", "objects", "a scale that no encoder gives"
    BAD_CODE = "bad_code", "objects", "a code that no encoder gives"
    NON_FINITE = "non_finite", "objects", "a value that is infinite or not a number"
    INTERNAL = (
        "internal", "objects",
        "reading or adding it failed twice for a reason of ours, while others' work passed",
        _REJECTED, False,
    )
    LATE = (
        "late", "objects", "not verified when the run's end could wait no longer", _REJECTED,
        False,
    )
    # fmt: on


_BY_WORD = {reason.value: reason for reason in Reason}


def find(word: str) -> Reason | None:
    """Returns the reason that a record or a message states; None for a word of another release."""
    return _BY_WORD.get(word)


def is_offence(word: str) -> bool:
    """True if a rejection for `word` counts as the sender's offence; True for an unknown word."""
    reason = find(word)
    return reason is None or reason.offence
