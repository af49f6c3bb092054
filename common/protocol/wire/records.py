"""Learners' manifests, and the records that answer them, with the aggregator's state after each."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from diloco.common.protocol.quantization import Codec
from diloco.common.protocol.wire.encoding import parse, unpack
from diloco.common.protocol.wire.fields import (
    MAX_AXES,
    MAX_SHARDS,
    MAX_SLICES,
    MESSAGE_BYTES,
    Body,
    Count,
    Digest,
    Loss,
    Measure,
    Name,
    NestedRecord,
    ObjectName,
    Positive,
    PowerOfTwo,
    Seconds,
    Several,
    Text,
)


class Slice(NestedRecord):
    """Blocks `start` + Σ i_k × `strides_k` of a fragment, for all 0 ≤ i_k < `shape_k`.

    The blocks are a box of a tensor's rows and columns, in row-major order. A contiguous range is
    `{start, [length], [1]}`. The blocks ascend strictly: the stride of an axis longer than 1 is
    greater than the distance between the first and the last block of the axes after it.
    """

    start: Count = Field(description="first block")
    shape: Annotated[Several[Positive], Field(min_length=1, max_length=MAX_AXES)] = Field(
        description="blocks along each axis; 1 to 4 axes"
    )
    strides: Annotated[Several[Positive], Field(min_length=1, max_length=MAX_AXES)] = Field(
        description="of each axis, in blocks; as many as axes"
    )


class Shard(NestedRecord):
    """One object of an update: whole blocks of the fragment's vector.

    A block has `sync.block` elements; the slices list the blocks in the order of the object. The
    slices of a shard ascend and do not interleave: each begins after the last block before it.
    """

    name: ObjectName = Field(description="name of the object")
    size_bytes: Positive = Field(description="of the object")
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(description="of the object")
    slices: Annotated[Several[Slice], Field(min_length=1, max_length=MAX_SLICES)] = Field(
        description="blocks of the fragment's vector that it holds, in ascending order; 1 to 4096"
    )


class Manifest(Body):
    """Announces one update: one outer gradient of one fragment from one learner.

    It is published after every shard is stored. Readers drop a message without decoding it if it is
    longer than the fragment's longest possible manifest: one with a shard and a slice for each
    block, and the greatest length in each field.
    """

    kind: ClassVar[str] = "update"
    run: Name = Field(description="the run")
    learner: Name = Field(description="the learner, as in the subject")
    epoch: Count = Field(description="of the tape that gave the incarnation")
    incarnation: Positive = Field(description="the life")
    seq: Positive = Field(
        description="1, 2, 3 ... in each incarnation and fragment; the next only once this one is"
        " resolved"
    )
    fragment: Count = Field(description="the fragment, as in the subject")
    base_version: Count = Field(description="version whose view the outer gradient is anchored on")
    base_digest: Digest = Field(description="of that view, as its record says")
    held_digest: Digest | None = Field(
        default=None,
        description="of the view that the learner really holds as that version, computed of what"
        " lies on its devices every `sync.check_interval_versions`; nil: not computed for this one",
    )
    layout: Digest = Field(description="the run's")
    codec: Codec = Field(description="the run's `sync.codec`")
    shards: Annotated[Several[Shard], Field(min_length=1, max_length=MAX_SHARDS)] = Field(
        description="1 to 4096, in any order; together they hold each block of the fragment once,"
        " in at most 8192 slices; none is longer than `sync.shard_elements` cuts them"
    )
    tokens: Positive = Field(description="units of work that the update covers")
    steps: Positive = Field(description="inner steps that it covers")
    position: Count = Field(
        description="data position after those steps, in batches of this learner"
    )
    local_step: Count = Field(
        description="inner steps of this learner: of this life, and of those before as far as its"
        " checkpoint reached"
    )
    loss: Loss = Field(description="mean training loss over the steps that it covers")
    step_time_s: Seconds = Field(description="moving average of the time of an inner step")
    encode_s: Seconds = Field(description="from dispatch to the shards' bytes")
    upload_s: Seconds = Field(description="from the bytes to the last shard stored")
    attempt: Count = Field(
        description="0, and one more each time the same update is announced again"
    )
    final: bool = Field(description="the learner sends no other update of this fragment")


class ObjectRef(NestedRecord):
    """An object that the aggregator stored."""

    name: ObjectName = Field(description="name of the object")
    size_bytes: Positive = Field(description="of the object")
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(description="of the object")


# An update credited with less than it claims, but not by this factor, may be honest: its machine
# was busy before, or the other learners' machines are busy now.
FAR_LESS = 2.0


class Input(NestedRecord):
    """One merged update, with all that is needed to merge it again."""

    learner: Name = Field(description="whose")
    incarnation: Positive = Field(description="of which life")
    seq: Positive = Field(description="the manifest's")
    stream_seq: Positive = Field(description="of the manifest in the stream")
    codec: str = Field(description="the manifest's")
    shards: Several[Shard] = Field(description="the manifest's")
    weight: float = Field(description="of its credited tokens and steps: tokens² / steps")
    staleness: Count = Field(description="version being built on less base version")
    discount: float = Field(description="S(staleness)")
    clip: float = Field(description="factor that its norm was shortened by; 1 for none")
    norm: float = Field(description="L2 norm of the update as it came")
    tokens: Positive = Field(description="the manifest's")
    steps: Positive = Field(description="the manifest's")
    loss: float = Field(description="the manifest's")
    final: bool = Field(description="the manifest's")
    coefficients: bytes = Field(
        description="bfloat16 per segment, little endian: what code × scale was multiplied by"
    )
    weight_unit: PowerOfTwo = Field(
        description="k: `coefficients` hold weight / 2^k. Not less than that of the input before:"
        " if it is more, the sum so far is divided by 2 to the power of the difference"
    )
    steps_credited: Positive = Field(description="the steps that it counts for")
    tokens_credited: Positive = Field(description="likewise, of its tokens")
    announced_at_s: float = Field(
        description="when the server stored the manifest; its version was made when the server"
        " stored this record"
    )

    @property
    def less_for(self) -> tuple[str, ...]:
        """The measures in which the update is credited with far less than it claims."""
        # The tokens of uncredited steps are no sign that the tokens themselves were capped.
        left = max(1, self.tokens * self.steps_credited // self.steps)
        found = {
            "steps": self.steps_credited * FAR_LESS < self.steps,
            "weight": self.tokens_credited * FAR_LESS < left,
            "norm": self.clip < 1,
        }
        return tuple(what for what, so in found.items() if so)


class Rejected(NestedRecord):
    """One well-formed update that was not merged, and the reason."""

    learner: Name = Field(description="whose")
    incarnation: Positive = Field(description="of which life")
    seq: Positive = Field(description="the manifest's")
    stream_seq: Positive = Field(description="of the manifest in the stream")
    tokens: Positive = Field(description="the manifest's")
    steps: Positive = Field(description="the manifest's")
    reason: Text = Field(description="a reason of rejection")
    detail: Text = Field(description="a sentence for people")


class Observation(NestedRecord):
    """An input of the fragment's state machine that is not on the tape, in order of arrival."""

    what: str = Field(
        description="of an update: `fetched`, `failed`, `broke` (adding it failed); of a learner:"
        " `live`, `dead`; of the round: `timer`, `cut` (the leader's answer), `made` (the version"
        " is made), `committed` (the record before stands); `tick`: the time when a message of the"
        " tape was read; `resumed`: the machine began from the record before"
    )
    at_s: float = Field(description="when")
    after_seq: Count = Field(
        description="highest stream sequence that the machine had taken before"
    )
    learner: str = Field(description="the learner that it is about; empty where it is about none")
    incarnation: Count = Field(description="its life; 0 where `learner` is empty")
    seq: Count = Field(
        description="of the update, for `fetched`, `failed` and `broke`; for `cut` the stream"
        " sequence of the fragment's last update; else 0"
    )
    value: float = Field(
        description="the update's norm for `fetched`, the number of the rules for `resumed`; else 0"
    )


class Mark(NestedRecord):
    """The newest answered update of an incarnation: each update up to `seq` is merged or rejected.

    A learner reads here whether its update was answered.
    """

    learner: Name = Field(description="whose")
    incarnation: Positive = Field(description="of which life")
    seq: Count = Field(description="every update up to this one is resolved")
    stream_seq: Count = Field(description="of that update's manifest in the stream")


class MemberState(NestedRecord):
    """The state of one learner in the state machine of one fragment."""

    learner: Name = Field(description="who")
    incarnation: Positive = Field(description="its newest life")
    live: bool = Field(description="rounds wait for it")
    left: bool = Field(description="it ended on purpose")
    final: bool = Field(description="its last update of this fragment is announced")
    step_time_s: Seconds = Field(description="moving average of what its updates claim")
    weight: float = Field(description="moving average of its updates' weights")
    heard_at_s: float = Field(description="when its last update, or its first join, was stored")
    offences: Count = Field(
        description="how many more of its updates were rejected for what they are than were merged"
    )
    tokens_per_step: Measure = Field(
        description="moving average of what its updates claim; 0: none did"
    )
    read_at_s: float = Field(
        description="when its last update, or its first join, was read; 0: unknown"
    )
    speed: Measure = Field(
        description="steps a second that it takes, by its own word as far as it is believed: the"
        " greatest of its last updates, a quarter of which is forgotten with each; 0: unknown",
    )
    unused_s: Seconds = Field(
        description="time that its last update, as credited, can have done without: it counts for"
        " the next"
    )
    norm: float = Field(
        description="norm per credited step of its update merged last, as merged; 0: none was",
    )
    missed: Count = Field(
        description="rounds in which others had work, since one had work of it; at most 3: then"
        " rounds do not wait for it",
    )


class Allowance(NestedRecord):
    """The number of updates of the fragment that a learner may announce at once (a token bucket).

    It grows by `bounds.max_updates_per_s` each second, up to ten seconds' growth. Each message on
    an update's subject, valid or not, takes one for each 4 KiB of its length, at least one; a
    rejected update takes ten. It may fall below zero; below one, messages are not decoded.
    """

    learner: Name = Field(description="who")
    left: float = Field(description="how many")
    at_s: float = Field(description="at this time")


class Credit(NestedRecord):
    """The steps, tokens and weight credited to an update that no record has answered yet."""

    learner: Name = Field(description="whose")
    incarnation: Positive = Field(description="of which life")
    seq: Positive = Field(description="the manifest's")
    steps: Positive = Field(description="at most those that it claims")
    tokens: Positive = Field(description="likewise")
    weight: float = Field(description="that it is merged with")


class PolicyState(NestedRecord):
    """The memory of the fragment's state machine after a record."""

    members: Several[MemberState] = Field(description="the learners")
    marks: Several[Mark] = Field(description="of the last four lives of each learner")
    quarantined: Several[Name] = Field(description="quarantined learners")
    allowances: Several[Allowance] = Field(description="of every learner that announced an update")
    seen_seq: Count = Field(
        description="highest stream sequence that this memory comes from; what lies between"
        " `position` and it is met again after a recovery, and does not count twice"
    )
    floor: Count = Field(
        description="version of the newest rollback: what builds on an older one is rejected"
    )
    settings_seq: Count = Field(
        description="stream sequence of the settings in force; 0: the specification's"
    )
    closed_at_s: float = Field(description="when the last round that made a version closed")
    stopping_at_s: float = Field(description="when the stop was stored; 0: not stopped")
    quorum_s: Seconds = Field(description="moving average: from opening to quorum")
    sync_s: Seconds = Field(description="moving average: from closing to the committed record")
    credits: Several[Credit] = Field(
        description="what the updates that are met again from `position` on count for"
    )
    rules: float = Field(description="number of the rules by which the machine decides; now 4")


class Totals(NestedRecord):
    """Sums over all records of a fragment, up to and including this one."""

    updates_merged: Count = Field(description="updates merged")
    updates_rejected: Count = Field(description="updates rejected")
    tokens_merged: Count = Field(description="their tokens")
    tokens_rejected: Count = Field(description="tokens of the rejected ones")
    steps_merged: Count = Field(description="inner steps of the merged ones")
    tokens_credited: Count = Field(
        description="tokens that the merged ones count for, and `run.tokens` with them"
    )


class Record(Body):
    """Commits a version of a fragment, or verdicts alone, by a compare-and-swap on the tape."""

    kind: ClassVar[str] = "record"
    limit_bytes: ClassVar[int] = 64 << 20
    what: Literal["version", "verdict", "restore", "restored"] = Field(
        description="`verdict`: updates were rejected and there was nothing to publish;"
        " `restore`: a rollback; `restored`: the first record of an epoch after the"
        " first"
    )
    run: Name = Field(description="the run")
    epoch: Count = Field(description="of the tape: all sequences here are of it")
    fragment: Count = Field(description="the fragment")
    version: Count = Field(description="of the view after this record")
    restored_version: Count | None = Field(
        description="the version whose contents a `restore` repeats; nil for others"
    )
    base_seq: Count = Field(
        description="stream sequence of the fragment's record before this one; 0 for the first"
    )
    base_digest: str = Field(description="digest of the view before; empty for the first")
    layout: Digest = Field(description="the run's")
    global_step: Count = Field(
        description="the run's clock: 0 at version 0, the fragment's offset at version 1, H more"
        " at each next one, at most `run.steps`; a rollback sets it back"
    )
    inputs: Several[Input] = Field(description="merged updates, in the order they were added")
    rejected: Several[Rejected] = Field(description="updates that were not merged")
    reason: Text = Field(
        description="why the round closed: `created`, `complete`, `grace`, `deadline`, `final`,"
        " `rejections`, `observations` (8192 are waiting for a record), `rollback`,"
        " `resumed`"
    )
    factors: bytes = Field(
        description="float32 per segment, little endian: what the sum was multiplied by"
    )
    learning_rate: float = Field(description="of this outer step")
    momentum: float = Field(description="of this outer step")
    delta: ObjectRef | None = Field(
        description="new view less the old one; nil for all but later versions"
    )
    snapshot: ObjectRef = Field(description="newest stored view")
    snapshot_version: Count = Field(description="its version")
    deltas: Several[ObjectRef] = Field(
        description="lead from the snapshot to this version, in order"
    )
    outer: ObjectRef = Field(description="newest stored outer state")
    outer_version: Count = Field(description="its version")
    outer_seq: Count = Field(
        description="stream sequence of the record that committed it; 0: this one"
    )
    view_digest: Digest = Field(description="of the view after this record")
    outer_digest: Digest = Field(
        description="of master parameters and outer-optimizer state after it"
    )
    position: Positive = Field(
        description="lowest stream sequence that is not resolved: a new owner reads from here"
    )
    totals: Totals = Field(description="sums over all records of the fragment up to this one")
    observations: Several[Observation] = Field(
        description="inputs of the machine that are not on the tape"
    )
    policy: PolicyState = Field(description="the machine's memory after this record")
    final: bool = Field(description="no version of this fragment follows")
    opened_at_s: float = Field(description="when the round opened")
    quorum_at_s: float = Field(description="when it had its quorum; 0: never")
    closed_at_s: float = Field(description="when it closed")
    merged_at_s: float = Field(
        description="when its outer step was taken; storing the objects and publishing follow;"
        " `closed_at_s` where nothing was merged"
    )
    aggregator: str = Field(description="who made the record")
    attempt_id: str = Field(description="equal to the message id: tells whose record stands")
    previous: str = Field(
        description="digest of the fragment's record before this one (base_seq): xxh3-128 of its"
        " fields in the order of this table, without outer_seq, as msgpack; empty for the first",
    )
    release: str = Field(description="release of its maker")
    lock: str = Field(
        description="xxh3-128 of the lines `name==version` of the packages that its maker had"
        " installed of those that it requires",
    )
    kept: bytes = Field(
        description="of a round that was merged by centered clipping: float32 per segment, little"
        " endian: what of the merge before stays in this one",
    )
    radii: bytes = Field(
        description="likewise: the radius of each segment for the next round, float32 per segment;"
        " 0: none is known",
    )


class RecordPointer(Body):
    """Stands on the tape for a record of more than 256 KiB, whose body is in an object."""

    kind: ClassVar[str] = "record_pointer"
    fragment: Count = Field(description="the fragment")
    body: ObjectRef = Field(description="the record's message, whole")
    attempt_id: str = Field(description="the record's")


def decode_record(payload: bytes) -> Record | RecordPointer:
    """Decodes a record, or the pointer that stands for a record.

    Raises:
        WireError: as `decode`.
    """
    fields = unpack(payload, MESSAGE_BYTES)
    if fields.get("kind") == RecordPointer.kind:
        return parse(RecordPointer, fields)
    return parse(Record, fields)
