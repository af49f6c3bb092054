"""Learners' manifests, and the records that answer manifests, with the aggregator's state."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from diloco.common.protocol.codecs import Codec
from diloco.common.protocol.wire.encoding import (
    MAX_AXES,
    MAX_SHARDS,
    MAX_SLICES,
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
        description="distance between neighbours along each axis, in blocks"
    )


class Shard(NestedRecord):
    """One object of an update: whole blocks of the fragment's vector.

    A block has `sync.block` elements; the slices list the blocks in the order of the object. The
    slices of a shard ascend and do not interleave: each begins after the last block before it.
    """

    name: ObjectName = Field(description="name of the object")
    size_bytes: Positive = Field(description="size of the object")
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(description="its checksum")
    slices: Annotated[Several[Slice], Field(min_length=1, max_length=MAX_SLICES)] = Field(
        description="blocks of the fragment's vector that it holds, in ascending order; 1 to 4096"
    )


class Manifest(Body):
    """Announces one update: one outer gradient of one fragment from one learner.

    A learner publishes a manifest after all shards of the update are stored. Readers drop a message
    undecoded if it is longer than the fragment's longest possible manifest: one with a shard and a
    slice for each block, and the greatest length in each field.
    """

    kind: ClassVar[str] = "update"
    run: Name = Field(description="the run")
    learner: Name = Field(description="the learner, as in the subject")
    epoch: Count = Field(
        description="epoch of the tape whose join message has the incarnation as its sequence"
    )
    incarnation: Positive = Field(
        description="the learner's incarnation: sequence of its join message"
    )
    seq: Positive = Field(
        description="number of the update: 1, 2, 3 ... in each incarnation and fragment; the next"
        " follows only once this one is resolved"
    )
    fragment: Count = Field(description="the fragment, as in the subject")
    base_version: Count = Field(description="version whose view the outer gradient is anchored on")
    base_digest: Digest = Field(description="digest of that view, from its record")
    held_digest: Digest | None = Field(
        default=None,
        description="digest of that version's view as the learner's devices hold it, computed every"
        " `sync.check_interval_versions`; nil: not computed for this update",
    )
    layout: Digest = Field(description="digest of the run's layout")
    codec: Codec = Field(description="the run's `sync.codec`")
    shards: Annotated[Several[Shard], Field(min_length=1, max_length=MAX_SHARDS)] = Field(
        description="1 to 4096, in any order; together they hold each block of the fragment once,"
        " in at most 8192 slices; none has more than `sync.shard_elements` elements"
    )
    tokens: Positive = Field(description="tokens that the update covers")
    steps: Positive = Field(description="inner steps that the update covers")
    position: Count = Field(
        description="data position after those steps, in batches of this learner"
    )
    local_step: Count = Field(
        description="inner steps of this learner: of this life, and of those before as far as its"
        " checkpoint reached"
    )
    loss: Loss = Field(description="mean training loss over the steps that the update covers")
    step_time_s: Seconds = Field(description="moving average of the time of an inner step")
    encode_s: Seconds = Field(description="time from the start of encoding to the shards' bytes")
    upload_s: Seconds = Field(
        description="time from the shards' bytes until the last one is stored"
    )
    attempt: Count = Field(
        description="0, and one more each time the same update is announced again"
    )
    final: bool = Field(description="the learner sends no other update of this fragment")


class ObjectRef(NestedRecord):
    """An object that the aggregator stored."""

    name: ObjectName = Field(description="name of the object")
    size_bytes: Positive = Field(description="size of the object")
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(description="its checksum")


# An update credited with less than it claims, but not by this factor, may be honest: its machine
# was busy before, or the other learners' machines are busy now.
FAR_LESS = 2.0


class Input(NestedRecord):
    """One merged update, with all that is needed to merge it again."""

    learner: Name = Field(description="the learner whose update it is")
    incarnation: Positive = Field(description="incarnation of the learner")
    seq: Positive = Field(description="number of the update, from its manifest")
    stream_seq: Positive = Field(description="stream sequence of its manifest")
    codec: str = Field(description="as in the manifest")
    shards: Several[Shard] = Field(description="as in the manifest")
    weight: float = Field(description="weight in the merge: credited tokens² / credited steps")
    staleness: Count = Field(description="version that the round builds on, minus `base_version`")
    discount: float = Field(description="S(staleness)")
    clip: float = Field(
        description="factor that the update was multiplied by to bound its norm; 1: not clipped"
    )
    norm: float = Field(description="L2 norm of the update before clipping")
    tokens: Positive = Field(description="as in the manifest")
    steps: Positive = Field(description="as in the manifest")
    loss: float = Field(description="as in the manifest")
    final: bool = Field(description="as in the manifest")
    coefficients: bytes = Field(
        description="bfloat16 per segment, little endian: the factor of code × scale in the sum"
    )
    weight_unit: PowerOfTwo = Field(
        description="k: `coefficients` hold weight / 2^k. It is never less than that of the input"
        " before; if it is more, the sum so far is divided by 2 to the power of the difference"
    )
    steps_credited: Positive = Field(description="inner steps that the update is credited with")
    tokens_credited: Positive = Field(description="tokens that the update is credited with")
    announced_at_s: float = Field(
        description="when the server stored the manifest. When the server stored this record its"
        " version was made"
    )

    @property
    def less_for(self) -> tuple[str, ...]:
        """The measures in which the update counts far less than claimed: "steps", "weight", "norm".

        A "norm" counts less if the update was clipped.
        """
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

    learner: Name = Field(description="the learner whose update it is")
    incarnation: Positive = Field(description="incarnation of the learner")
    seq: Positive = Field(description="number of the update, from its manifest")
    stream_seq: Positive = Field(description="stream sequence of its manifest")
    tokens: Positive = Field(description="as in the manifest")
    steps: Positive = Field(description="as in the manifest")
    reason: Text = Field(description="a reason of rejection")
    detail: Text = Field(description="a sentence for people")


class Observation(NestedRecord):
    """An input of the fragment's state machine that no message of the tape contains."""

    what: str = Field(
        description="on an update: `fetched`, `failed`, `broke` (adding it to the sum failed); on a"
        " learner: `live`, `dead`; on the round: `timer`, `cut` (the leader's answer), `made` (its"
        " version is made), `committed` (the record before this one stands); `tick`: a message of"
        " the tape was read; `resumed`: the machine began from the record before this one"
    )
    at_s: float = Field(description="when")
    after_seq: Count = Field(
        description="highest stream sequence that the machine had read by then"
    )
    learner: str = Field(description="the learner concerned; empty: none")
    incarnation: Count = Field(description="incarnation of the learner; 0 where `learner` is empty")
    seq: Count = Field(
        description="of the update, for `fetched`, `failed` and `broke`; for `cut` the stream"
        " sequence of the fragment's last update; else 0"
    )
    value: float = Field(
        description="the update's norm for `fetched`, the number of the rules for `resumed`; else 0"
    )


class Mark(NestedRecord):
    """The newest answered update of an incarnation: each update up to `seq` is merged or rejected.

    A learner reads in a record's marks whether its update was answered.
    """

    learner: Name = Field(description="the learner")
    incarnation: Positive = Field(description="incarnation of the learner")
    seq: Count = Field(description="every update up to this one is resolved")
    stream_seq: Count = Field(description="stream sequence of that update's manifest")


class MemberState(NestedRecord):
    """The state of one learner in the state machine of one fragment."""

    learner: Name = Field(description="the learner")
    incarnation: Positive = Field(description="its newest incarnation")
    live: bool = Field(description="rounds wait for it")
    left: bool = Field(description="it has left the run by itself")
    final: bool = Field(description="its last update of this fragment is announced")
    step_time_s: Seconds = Field(description="moving average of `step_time_s` of its manifests")
    weight: float = Field(description="moving average of its updates' weights")
    heard_at_s: float = Field(description="when its last update, or its first join, was stored")
    offences: Count = Field(
        description="+1 for each update rejected as an offence, -1 for each merged update, never"
        " below 0; a release sets it to 0"
    )
    tokens_per_step: Measure = Field(
        description="moving average of tokens per step of its manifests; 0: unknown"
    )
    read_at_s: float = Field(
        description="when its last update, or its first join, was read; 0: unknown"
    )
    speed: Measure = Field(
        description="inner steps per second, from its manifests as far as they are credited: the"
        " greatest of its last updates, less a quarter with each update; 0: unknown",
    )
    unused_s: Seconds = Field(
        description="time before its last update that the credited steps did not need; it is added"
        " to the time of the next update"
    )
    norm: float = Field(
        description="norm per credited step of its last merged update, after clipping; 0: none",
    )
    missed: Count = Field(
        description="rounds without an update of it since the last round that had one; at most 3,"
        " and then rounds do not wait for it",
    )
    not_holding: Several[Positive] = Field(
        description="its newest incarnations, at most 4, that do not hold the fragment's module",
    )


class Allowance(NestedRecord):
    """The number of updates of the fragment that a learner may announce at once (a token bucket).

    The number grows by `bounds.max_updates_per_s` each second, up to ten seconds' growth. Each
    message on an update's subject, valid or not, takes one for each 4 KiB of its length, at least
    one; a rejected update takes ten. The number may fall below zero; below one, messages are not
    decoded.
    """

    learner: Name = Field(description="the learner")
    left: float = Field(description="updates that it may still announce")
    at_s: float = Field(description="the time for which `left` holds")


class Credit(NestedRecord):
    """The steps, tokens and weight credited to an update that no record has answered yet."""

    learner: Name = Field(description="the learner whose update it is")
    incarnation: Positive = Field(description="incarnation of the learner")
    seq: Positive = Field(description="number of the update, from its manifest")
    steps: Positive = Field(description="credited inner steps, at most those of the manifest")
    tokens: Positive = Field(description="credited tokens, at most those of the manifest")
    weight: float = Field(description="weight in the merge")


class PolicyState(NestedRecord):
    """The state of the aggregator's state machine for one fragment, after a record."""

    members: Several[MemberState] = Field(description="the learners")
    marks: Several[Mark] = Field(description="marks of the last four incarnations of each learner")
    quarantined: Several[Name] = Field(description="quarantined learners")
    allowances: Several[Allowance] = Field(
        description="allowances of all learners that have announced an update"
    )
    seen_seq: Count = Field(
        description="highest stream sequence that this memory counts. A new owner reads the"
        " messages from `position` up to it once more, and does not count them again"
    )
    floor: Count = Field(
        description="version of the newest rollback: updates with an older base version are"
        " rejected"
    )
    settings_seq: Count = Field(
        description="stream sequence of the settings in force; 0: the specification's"
    )
    closed_at_s: float = Field(description="when the last round that made a version closed")
    stopping_at_s: float = Field(description="when the stop was stored; 0: not stopped")
    quorum_s: Seconds = Field(description="moving average: from opening to quorum")
    sync_s: Seconds = Field(description="moving average: from closing to the committed record")
    credits: Several[Credit] = Field(
        description="credits of the updates that a new owner reads again, from `position` on"
    )
    rules: float = Field(description="number of the rules that the machine follows; now 5")


class Totals(NestedRecord):
    """Sums over all records of a fragment, up to and including this one."""

    updates_merged: Count = Field(description="updates merged")
    updates_rejected: Count = Field(description="updates rejected")
    tokens_merged: Count = Field(description="tokens of the merged updates")
    tokens_rejected: Count = Field(description="tokens of the rejected updates")
    steps_merged: Count = Field(description="inner steps of the merged updates")
    tokens_credited: Count = Field(
        description="tokens credited to the merged updates; `run.tokens` is compared with this sum"
    )


RecordWhat = Literal["version", "verdict", "restore", "restored"]


class Record(Body):
    """Commits a version of a fragment, or verdicts alone, by a compare-and-swap on the tape."""

    kind: ClassVar[str] = "record"
    limit_bytes: ClassVar[int] = 64 << 20
    what: RecordWhat = Field(
        description="`verdict`: updates were rejected and there was nothing to publish;"
        " `restore`: a rollback; `restored`: the first record of an epoch after the"
        " first"
    )
    run: Name = Field(description="the run")
    epoch: Count = Field(description="epoch of the tape that the sequences in this record are of")
    fragment: Count = Field(description="the fragment")
    version: Count = Field(description="version of the view after this record")
    restored_version: Count | None = Field(
        description="the version whose contents a `restore` repeats; nil for others"
    )
    base_seq: Count = Field(
        description="stream sequence of the fragment's record before this one; 0 for the first"
    )
    base_digest: str = Field(
        description="digest of the view before this record; empty for the first"
    )
    layout: Digest = Field(description="the run's")
    global_step: Count = Field(
        description="the run's clock: 0 at version 0, the fragment's offset at version 1, H more"
        " at each next one, at most `run.steps`; a rollback sets it back"
    )
    inputs: Several[Input] = Field(description="merged updates, in the order they were added")
    rejected: Several[Rejected] = Field(description="updates that were not merged")
    reason: Text = Field(
        description="why the round closed: `created`, `complete`, `grace`, `deadline`, `final`,"
        " `rejections`, `observations` (so many are waiting for a record: 8192, or twice the"
        " fragment's learners if that is more, at most 32768), `rollback`, `resumed`"
    )
    factors: bytes = Field(
        description="float32 per segment, little endian: the factor of the sum of the inputs"
    )
    learning_rate: float = Field(description="outer learning rate of this step")
    momentum: float = Field(description="outer momentum of this step")
    delta: ObjectRef | None = Field(
        description="the new view minus the old one; nil at version 0 and where no view changes"
    )
    snapshot: ObjectRef = Field(description="newest stored view")
    snapshot_version: Count = Field(description="its version")
    deltas: Several[ObjectRef] = Field(
        description="deltas from the snapshot to this version, in order"
    )
    outer: ObjectRef = Field(description="newest stored outer state")
    outer_version: Count = Field(description="its version")
    outer_seq: Count = Field(
        description="stream sequence of the record that committed the outer state; 0: this record"
    )
    view_digest: Digest = Field(description="digest of the view after this record")
    outer_digest: Digest = Field(
        description="digest of master parameters and outer-optimizer state after this record"
    )
    position: Positive = Field(
        description="lowest stream sequence of an update that is not resolved: a new owner reads"
        " from here"
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
        description="when its outer step was taken, before objects are stored and the record is"
        " published; `closed_at_s` where nothing was merged"
    )
    aggregator: str = Field(description="name of the aggregator that made the record")
    attempt_id: str = Field(
        description="equal to the message id: by it an aggregator finds whether the record on the"
        " tape is its own"
    )
    previous: str = Field(
        description="digest of the fragment's record before this one (base_seq): xxh3-128 of its"
        " fields in the order of this table, without outer_seq, as msgpack; empty for the first",
    )
    release: str = Field(description="release of the aggregator that made the record")
    lock: str = Field(
        description="xxh3-128 of the lines `name==version` of the required packages that this"
        " aggregator has installed",
    )
    kept: bytes = Field(
        description="after centered clipping: float32 per segment, little endian: the share of the"
        " merge before that stays in this one",
    )
    radii: bytes = Field(
        description="after centered clipping: float32 per segment: the radius for the next round;"
        " 0: unknown",
    )
