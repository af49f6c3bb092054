"""Words of records: what readers of versions need of a record that names a whole fleet.

A record names every learner that its fragment ever knew. A large record is therefore an object, and
a `RecordPointer` stands for it on the tape. The pointer contains the record's *word*, whose size
does not depend on the fleet. Behind the record, the object has a table of the answers to learners'
updates (`AnswerTable`), so that a learner reads its own answers with one range.
"""

import struct
from collections import defaultdict
from collections.abc import Iterable
from typing import ClassVar, Final, NamedTuple

from pydantic import Field

from diloco.common.protocol import shards
from diloco.common.protocol.errors import IntegrityError, WireError
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.wire.encoding import (
    MESSAGE_BYTES,
    Body,
    Count,
    Digest,
    Name,
    NestedRecord,
    Positive,
    Several,
    decode,
    parse,
    unpack,
)
from diloco.common.protocol.wire.manifests_and_records import (
    ObjectRef,
    Record,
    RecordWhat,
    Totals,
)

# Nobody can choose names that share a bucket, as the view's digest is not known beforehand.
_SLOT: Final = struct.Struct("<40sQQQ")
_CHECKSUM_BYTES: Final = 4
# Mean number of used slots in a bucket: a table has at most some three times as many slots.
_MEAN_SLOTS: Final = 16


class RecordWord(NestedRecord):
    """What readers of versions need of a record; each field but `floor` is the record's."""

    what: RecordWhat = Field(description="as in the record, like all fields but `floor`")
    run: Name = Field(description="the run")
    epoch: Count = Field(description="epoch of the tape")
    fragment: Count = Field(description="the fragment")
    version: Count = Field(description="version of the view after the record")
    base_seq: Count = Field(description="stream sequence of the fragment's record before it")
    base_digest: str = Field(description="digest of the view before it")
    layout: Digest = Field(description="the run's")
    global_step: Count = Field(description="the run's clock")
    delta: ObjectRef | None = Field(description="the new view minus the old one")
    snapshot: ObjectRef = Field(description="newest stored view")
    snapshot_version: Count = Field(description="its version")
    deltas: Several[ObjectRef] = Field(description="deltas from the snapshot to this version")
    view_digest: Digest = Field(description="digest of the view after the record")
    totals: Totals = Field(description="sums over all records of the fragment")
    final: bool = Field(description="no version of this fragment follows")
    closed_at_s: float = Field(description="when the round closed")
    floor: Count = Field(description="that of the record's `policy`")


AnyRecord = RecordWord | Record


class AnswerTable(NestedRecord):
    """The table of answers to learners' updates, behind a record in its object.

    The table has buckets of equal length, one after another, and the answers to a learner are in
    the bucket xxh3-128(view digest + name) mod `buckets`. A bucket has slots of 64 bytes, unused
    ones all zeros, then their crc32c. A slot has the learner's name in 40 bytes, filled up with
    zeros, the incarnation, the seq up to which its updates are merged or rejected, and the greatest
    seq that the record merges; 0: none. Numbers are little endian, of 8 bytes, the checksum of 4.
    """

    start: Positive = Field(description="its first byte in the object: the length of the record")
    buckets: Positive = Field(description="number of buckets")
    slots: Count = Field(description="slots of 64 bytes in each bucket")


class RecordPointer(Body):
    """Stands on the tape for a record of more than 64 KiB, which is in an object."""

    kind: ClassVar[str] = "record_pointer"
    word: RecordWord = Field(description="what readers of versions need of the record")
    body: ObjectRef = Field(description="the object: the record's message, then the table")
    answers: AnswerTable = Field(description="where the object has the answers to each learner")
    attempt_id: str = Field(description="the record's")


class Answer(NamedTuple):
    """A record's answer to one incarnation of a learner; in both fields 0 stands for none.

    Attributes:
        resolved_seq: every update up to this number is merged or rejected.
        merged_seq: the greatest number of an update that this record merges.
    """

    resolved_seq: int = 0
    merged_seq: int = 0


Key = tuple[str, int]


def decode_record(payload: bytes) -> Record | RecordPointer:
    """Decodes a record, or the pointer that stands on the tape for a large record.

    Raises:
        WireError: as `encoding.decode`.
    """
    fields = unpack(payload, MESSAGE_BYTES)
    if fields.get("kind") == RecordPointer.kind:
        return parse(RecordPointer, fields)
    return parse(Record, fields)


def word_of(record: AnyRecord) -> RecordWord:
    """Returns the word of a record; a word is returned as it is."""
    if isinstance(record, RecordWord):
        return record
    fields = {name: getattr(record, name) for name in RecordWord.model_fields if name != "floor"}
    return RecordWord(**fields, floor=record.policy.floor)


def answers_of(record: Record) -> dict[Key, Answer]:
    """Returns (learner, incarnation) -> the record's answer to it."""
    found = {(mark.learner, mark.incarnation): Answer(mark.seq) for mark in record.policy.marks}
    for taken in record.inputs:
        key = taken.learner, taken.incarnation
        known = found.get(key, Answer())
        found[key] = known._replace(merged_seq=max(known.merged_seq, taken.seq))
    return found


def with_answers(record: Record, payload: bytes) -> tuple[bytes, AnswerTable]:
    """Returns the bytes of a record's object, and where they have the table of answers.

    Args:
        record: the record.
        payload: the record's message.
    """
    answers = answers_of(record)
    count = max(1, len(answers) // _MEAN_SLOTS)
    slots: defaultdict[int, list[bytes]] = defaultdict(list)
    for (learner, incarnation), answer in answers.items():
        slot = _SLOT.pack(learner.encode(), incarnation, *answer)
        slots[_bucket(record.view_digest, learner, count)].append(slot)
    most = max(map(len, slots.values()), default=0)
    size = most * _SLOT.size
    buckets = (b"".join(slots[number]).ljust(size, b"\0") for number in range(count))
    table = AnswerTable(start=len(payload), buckets=count, slots=most)
    return b"".join((payload, *_checked(buckets))), table


def _checked(parts: Iterable[bytes]) -> Iterable[bytes]:
    for part in parts:
        yield part
        yield shards.crc32c(part).to_bytes(_CHECKSUM_BYTES, "little")


def _bucket(view_digest: str, learner: str, buckets: int) -> int:
    return int(shards.digest(f"{view_digest}{learner}".encode()), 16) % buckets


def record_in_object(pointer: RecordPointer, data: bytes) -> Record:
    """Returns the record in an object's bytes, after a comparison with all that stands beside it.

    Raises:
        WireError: the bytes have no record, or the pointer's word, or the table of answers, is not
            that of the record.
    """
    payload = data[: pointer.answers.start]
    record = decode(Record, payload)
    if word_of(record) != pointer.word:
        raise WireError(
            Reason.MALFORMED,
            f"the word on the tape is not that of the record in {pointer.body.name}",
        )
    if with_answers(record, payload) != (data, pointer.answers):
        raise WireError(
            Reason.MALFORMED, f"the answers in {pointer.body.name} are not those of its record"
        )
    return record


def answers_range(pointer: RecordPointer, learner: str) -> tuple[int, int]:
    """Returns the range [start, stop) of an object's bytes with the answers to a learner."""
    table = pointer.answers
    size = table.slots * _SLOT.size + _CHECKSUM_BYTES
    start = table.start + size * _bucket(pointer.word.view_digest, learner, table.buckets)
    return start, start + size


def answer_in(pointer: RecordPointer, data: bytes, learner: str, incarnation: int) -> Answer:
    """Returns the answer to a learner from the bytes of the range that `answers_range` returned.

    Raises:
        IntegrityError: the bytes are damaged.
    """
    slots, told = data[:-_CHECKSUM_BYTES], int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
    if len(slots) != pointer.answers.slots * _SLOT.size or shards.crc32c(slots) != told:
        raise IntegrityError(
            f"the answers to learner {learner!r} in {pointer.body.name} are damaged",
            hint="runbooks/missing-object.md",
        )
    name = learner.encode().ljust(40, b"\0")
    for found, life, *answer in _SLOT.iter_unpack(slots):
        if (found, life) == (name, incarnation):
            return Answer(*answer)
    return Answer()
