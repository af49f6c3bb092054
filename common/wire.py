"""The messages of a run: typed, frozen, decoded once at the border and trusted inside.

A message is one msgpack map with `schema`, `kind` and the fields of one of the classes below;
docs/protocol.md shows each. Decoding is strict: a missing, unknown or wrong-typed field, a
non-finite float or anything beyond the limits raises `WireError` with a stable reason. Nothing
here builds an object from a name in the data. What decoding takes of memory is in proportion to the
message's length, whatever lengths are claimed in it.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.common.errors import WireError
from diloco.common.names import NAME

SCHEMA = 1
# A reader accepts its own schema and the one before; schema 0 was never published. A new schema is
# read by one release and written by the next, so that two releases in a row read each other.
READABLE = frozenset({SCHEMA})
MESSAGE_BYTES = 1 << 20
# A record larger than this keeps its body in an object, so that streams stay small.
RECORD_BYTES = 256 << 10
MAX_ITEMS = 1 << 16
MAX_KEYS = 1 << 12
# Of a shard; and axes of a slice.
MAX_SLICES = 1 << 12
MAX_AXES = 4
GREATEST = (1 << 63) - 1
# Longer than any run, and so small that sums and products of times stay finite.
GREATEST_S = 1e12

Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
ObjectName = Annotated[str, Field(min_length=1, max_length=512)]
Count = Annotated[int, Field(ge=0, le=GREATEST)]
Positive = Annotated[int, Field(ge=1, le=GREATEST)]
CheckpointName = Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{12}$")]
Seconds = Annotated[float, Field(ge=0, le=GREATEST_S)]
Rate = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(max_length=2000)]
Item = TypeVar("Item")
# The first wrong item ends it: an error for each of 65,536 takes 300 MB.
Several = Annotated[tuple[Item, ...], Field(fail_fast=True)]


class Part(BaseModel):
    """A record within a message."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Body(Part):
    """A message; `kind` names it on the wire."""

    kind: ClassVar[str]
    limit_bytes: ClassVar[int] = MESSAGE_BYTES


class Specification(Body):
    """What a run is: the tape's first message.

    `settings` holds the sections of the configuration that all parties must share, as
    `config.RunSettings` gives them; `constants` the object with the leaves nobody trains.
    `epoch` is 0, and one more each time the run is resumed on a new tape: sequence numbers are of
    their epoch. `positions` says where data goes on for learners of the epochs before.
    """

    kind: ClassVar[str] = "spec"
    run: Name
    epoch: Count
    positions: dict[Name, Count]
    layout: Digest
    settings: dict[str, Any]
    constants: ObjectName | None
    created_at_s: Seconds


class Join(Body):
    """A learner begins a life; the message's sequence in the stream is its incarnation."""

    kind: ClassVar[str] = "join"
    run: Name
    learner: Name
    layout: Digest
    host: Text


class Leave(Body):
    """A learner ends a life on purpose: nothing more comes from this incarnation.

    `position` is its data position, in batches, where its next life goes on. With `fragments`
    the life goes on, but sends nothing more of these: it had nothing unsent when the run stopped.
    """

    kind: ClassVar[str] = "leave"
    run: Name
    learner: Name
    incarnation: Positive
    position: Count
    fragments: Several[Count]


class Slice(Part):
    """Blocks start + sum of i_k x strides_k of a fragment, for all 0 <= i_k < shape_k.

    In row-major order, which ascends; see `common/slices.py`.
    """

    start: Count
    shape: Annotated[Several[Positive], Field(min_length=1, max_length=MAX_AXES)]
    strides: Annotated[Several[Positive], Field(min_length=1, max_length=MAX_AXES)]


class Shard(Part):
    """One object of an update: whole blocks of the fragment's vector, in ascending order."""

    name: ObjectName
    size_bytes: Positive
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)]
    slices: Annotated[Several[Slice], Field(min_length=1, max_length=MAX_SLICES)]


class Manifest(Body):
    """Announces one update: one outer gradient of one fragment from one learner.

    Attributes:
        seq: 1, 2, 3 ... per incarnation and fragment; the next only once this one is resolved.
        base_version: version whose view the outer gradient is anchored on.
        tokens: units of work the update covers; `steps` the inner steps.
        epoch: of the tape that gave the incarnation.
        position: data position after those steps, in batches of this learner.
        attempt: 0, and one more each time the same update is announced again.
        final: the learner sends no other update of this fragment.
    """

    kind: ClassVar[str] = "update"
    run: Name
    learner: Name
    epoch: Count
    incarnation: Positive
    seq: Positive
    fragment: Count
    base_version: Count
    base_digest: Digest
    layout: Digest
    codec: Literal["float32", "bfloat16", "int8", "int4"]
    shards: Annotated[Several[Shard], Field(min_length=1, max_length=4096)]
    tokens: Positive
    steps: Positive
    position: Count
    local_step: Count
    loss: float
    step_time_s: Seconds
    encode_s: Seconds
    upload_s: Seconds
    attempt: Count
    final: bool


class ObjectRef(Part):
    """An object of the aggregator's: name, size and checksum."""

    name: ObjectName
    size_bytes: Positive
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)]


class Input(Part):
    """One merged update, with all that re-merging needs.

    Attributes:
        coefficients: bfloat16 [segments], little endian: what each code x scale was multiplied by.
        clip: factor applied to its norm, 1 if none.
    """

    learner: Name
    incarnation: Positive
    seq: Positive
    stream_seq: Positive
    codec: str
    shards: Several[Shard]
    weight: float
    staleness: Count
    discount: float
    clip: float
    norm: float
    tokens: Positive
    steps: Positive
    loss: float
    final: bool
    coefficients: bytes


class Rejected(Part):
    """One well-formed update that was not merged, and why."""

    learner: Name
    incarnation: Positive
    seq: Positive
    stream_seq: Positive
    tokens: Positive
    steps: Positive
    reason: Text
    detail: Text


class Observation(Part):
    """An input of the machine that is not on the tape, in the order it was taken.

    Attributes:
        what: "fetched", "failed", "live", "dead" or "timer"; "committed" when it heard that the
            record before stands; "resumed" when it began from the record before.
        after_seq: highest stream sequence the machine had taken before.
        value: the update's norm for "fetched", else 0.
    """

    what: str
    at_s: float
    after_seq: Count
    learner: str
    incarnation: Count
    seq: Count
    value: float


class Mark(Part):
    """Highest resolved update of an incarnation, and the stream sequence of its manifest."""

    learner: Name
    incarnation: Positive
    seq: Count
    stream_seq: Count


class MemberState(Part):
    """What the machine knows of a learner."""

    learner: Name
    incarnation: Positive
    live: bool
    left: bool
    final: bool
    step_time_s: Seconds
    weight: float
    heard_at_s: float
    offences: Count


class Allowance(Part):
    """How many updates a learner may announce at once, `left` of them at the time `at_s`."""

    learner: Name
    left: float
    at_s: float


class PolicyState(Part):
    """The machine's memory after a record; see `aggregator/core/machine.py`.

    `seen_seq`: highest stream sequence that it comes from; its part from `position` on is met
    again by whoever recovers, and must not count twice. `floor`: the version of the newest
    rollback; what builds on an older one is rejected. `settings_seq`: sequence of the settings
    message in force, 0 for the specification's settings. `quarantined`: learners that are shut
    out. `allowances`: of everybody who announced an update.
    """

    members: Several[MemberState]
    marks: Several[Mark]
    quarantined: Several[Name]
    allowances: Several[Allowance]
    seen_seq: Count
    floor: Count
    settings_seq: Count
    closed_at_s: float
    stopping_at_s: float
    quorum_s: Seconds
    sync_s: Seconds
    norms: Several[float]


class Totals(Part):
    """Sums over all records of a fragment up to and with one."""

    updates_merged: Count
    updates_rejected: Count
    tokens_merged: Count
    tokens_rejected: Count
    steps_merged: Count


class Record(Body):
    """Commits a version of a fragment, or verdicts alone. Its compare-and-swap is the commit.

    Attributes:
        what: "version"; "verdict" when there was nothing to publish; "restore" for a rollback,
            the next version with the contents of an earlier one; "restored" for the first record
            of an epoch after the first one.
        version: of the view after this record.
        restored_version: whose contents a restore repeats; None for the others.
        base_seq: sequence of the fragment's record before this one, 0 if there is none.
        base_digest: view before this record ("" for version 0).
        factors: float32 [segments], little endian: what the accumulated sum was multiplied by.
        learning_rate, momentum: of this outer step.
        delta: new view less the old one; None for version 0 and verdicts.
        snapshot: newest stored view, of version `snapshot_version`; `deltas` lead from it here.
        outer: newest stored outer state, of version `outer_version`, committed by the record
            `outer_seq` (0: this one).
        view_digest, outer_digest: xxh3-128 after this record.
        position: lowest stream sequence not yet resolved: a new owner reads from here.
        final: no version of this fragment follows.
        closed_at_s: when the round closed; `opened_at_s`, `quorum_at_s` before it.
        merged_at_s: when the outer step was taken; storing and publishing follow.
    """

    kind: ClassVar[str] = "record"
    limit_bytes: ClassVar[int] = 64 << 20
    what: Literal["version", "verdict", "restore", "restored"]
    run: Name
    epoch: Count
    fragment: Count
    version: Count
    restored_version: Count | None
    base_seq: Count
    base_digest: str
    layout: Digest
    global_step: Count
    inputs: Several[Input]
    rejected: Several[Rejected]
    reason: Text
    factors: bytes
    learning_rate: float
    momentum: float
    delta: ObjectRef | None
    snapshot: ObjectRef
    snapshot_version: Count
    deltas: Several[ObjectRef]
    outer: ObjectRef
    outer_version: Count
    outer_seq: Count
    view_digest: Digest
    outer_digest: Digest
    position: Positive
    totals: Totals
    observations: Several[Observation]
    policy: PolicyState
    final: bool
    opened_at_s: float
    quorum_at_s: float
    closed_at_s: float
    merged_at_s: float
    aggregator: str
    attempt_id: str


class RecordPointer(Body):
    """Stands on the tape for a record whose body is in an object."""

    kind: ClassVar[str] = "record_pointer"
    fragment: Count
    body: ObjectRef
    attempt_id: str


class Settings(Body):
    """The run's settings from each fragment's next version on; see `config.CHANGEABLE`.

    `settings` is the whole, as in the specification; `changed` names what is new, for people.
    """

    kind: ClassVar[str] = "settings"
    run: Name
    settings: dict[str, Any]
    changed: Several[Text]


class Quarantine(Body):
    """Shuts a learner out: its updates are rejected; or lets it in again (`active` false).

    Attributes:
        reason: for people.
        by: the aggregator that counted its offences, or "operator".
    """

    kind: ClassVar[str] = "quarantine"
    run: Name
    learner: Name
    active: bool
    reason: Text
    by: Text


class Checkpoint(Body):
    """A point of the tape from which the run can be resumed; published before its objects.

    `versions` of all fragments, and the sequences of the records that made them. Garbage
    collection keeps view and outer state of these versions.
    """

    kind: ClassVar[str] = "checkpoint"
    run: Name
    name: CheckpointName
    versions: Several[Count]
    record_seqs: Several[Positive]
    created_at_s: Seconds


class CheckpointFile(Body):
    """All that a new epoch begins from; the body of a checkpoint's object, on no stream.

    `records` are the newest of each fragment at the checkpoint, with view and outer state of
    that very version; `settings` what was in force.
    """

    kind: ClassVar[str] = "checkpoint_file"
    limit_bytes: ClassVar[int] = 64 << 20
    name: CheckpointName
    specification: Specification
    settings: dict[str, Any]
    records: Several[Record]
    created_at_s: Seconds


class Stop(Body):
    """The stop rule was met; learners send what is unsent and leave."""

    kind: ClassVar[str] = "stop"
    run: Name
    global_step: Count
    reason: Text


class End(Body):
    """Every fragment's last record is committed; the versions are the run's result."""

    kind: ClassVar[str] = "end"
    run: Name
    versions: Several[Count]
    record_seqs: Several[Positive]


class Lease(Body):
    """Who owns a fragment; or, under a key of its own, that an aggregator is there.

    Attributes:
        aggregator: name, for people; `life` tells one process from every other.
        state: "held"; "released" for whoever takes it; "done": the fragment's last record is
            committed and nothing is left to answer.
        ttl_s: it holds for so long after it was stored.
        pinned: the fragments that this aggregator keeps to, nil if it takes its share of all.
    """

    kind: ClassVar[str] = "lease"
    aggregator: Name
    life: Digest
    state: Literal["held", "released", "done"]
    ttl_s: Seconds
    pinned: Several[Count] | None


class Score(Body):
    """The loss of a global view on held-out data; the body of an object, on no stream.

    Attributes:
        versions: of all fragments; `record_seqs` are the sequences of their records.
        tokens: merged by then, on the mean over fragments.
        at_s: when the newest of those records was stored.
    """

    kind: ClassVar[str] = "score"
    run: Name
    epoch: Count
    versions: Several[Count]
    record_seqs: Several[Positive]
    global_step: Count
    tokens: Count
    at_s: Seconds
    loss: float


class RoundOpen(Body):
    """A round is open: whoever has work for this fragment may send it now."""

    kind: ClassVar[str] = "round"
    fragment: Count
    version: Count


class Heartbeat(Body):
    """A learner is alive, and how it fares."""

    kind: ClassVar[str] = "heartbeat"
    learner: Name
    incarnation: Positive
    local_step: Count
    global_step: Count
    tokens: Count
    loss: float
    tokens_per_s: Rate
    step_time_s: Seconds
    stall_s: Seconds
    run_s: Seconds
    bytes_up: Count
    bytes_down: Count
    updates_sent: Count
    state: Text


class Rejection(Body):
    """Copy for people of a verdict, or a sample of what could not be decoded."""

    kind: ClassVar[str] = "rejected"
    fragment: int
    learner: str
    incarnation: Count
    seq: Count
    reason: Text
    detail: Text


T = TypeVar("T", bound=Body)


def encode(body: Body) -> bytes:
    """The message's bytes."""
    fields = body.model_dump()
    fields["schema"] = SCHEMA
    fields["kind"] = body.kind
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def decode(expected: type[T], payload: bytes) -> T:
    """The message in `payload`, which must be of the kind `expected`.

    Raises:
        WireError: reason "oversize", "undecodable", "schema", "kind" or "malformed".
    """
    return _parse(expected, _unpack(payload, expected.limit_bytes))


def _parse(expected: type[T], fields: dict[str, Any]) -> T:
    if fields.pop("kind", None) != expected.kind:
        raise WireError("kind", f"expected a message of kind {expected.kind!r}")
    try:
        return expected.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise WireError(
            "malformed", f"{expected.kind} message: field {where!r}: {first['msg'][:200]}"
        ) from error


def decode_record(payload: bytes) -> "Record | RecordPointer":
    """A record, or the pointer that stands for one.

    Raises:
        WireError: as `decode`.
    """
    fields = _unpack(payload, MESSAGE_BYTES)
    if fields.get("kind") == RecordPointer.kind:
        return _parse(RecordPointer, fields)
    return _parse(Record, fields)


def _unpack(payload: bytes, limit_bytes: int) -> dict[str, Any]:
    if len(payload) > limit_bytes:
        raise WireError("oversize", f"message of {len(payload)} bytes, at most {limit_bytes}")
    limits = {"max_array_len": MAX_ITEMS, "max_map_len": MAX_KEYS, "max_ext_len": 0}
    try:
        # An array takes its memory when its length is read: see first that its items are there.
        look = msgpack.Unpacker(max_buffer_size=max(1, len(payload)), **limits)
        look.feed(payload)
        look.skip()
        fields = msgpack.unpackb(payload, use_list=False, strict_map_key=True, **limits)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        why = str(error) or type(error).__name__
        raise WireError("undecodable", f"not a msgpack message: {why}"[:300]) from error
    if not isinstance(fields, dict):
        raise WireError("undecodable", f"expected a map, got {type(fields).__name__}")
    schema = fields.pop("schema", None)
    if type(schema) is not int or schema not in READABLE:
        raise WireError(
            "schema",
            f"message of schema {str(schema)[:40]}; this program reads {sorted(READABLE)}",
            hint="upgrade the older side: docs/operations.md, Upgrading",
        )
    return fields
