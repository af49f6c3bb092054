"""A learner's update, as it announces it."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from diloco.common.wire.fields import (
    MAX_AXES,
    MAX_SHARDS,
    MAX_SLICES,
    Body,
    Count,
    Digest,
    Loss,
    Name,
    ObjectName,
    Part,
    Positive,
    Seconds,
    Several,
)


class Slice(Part):
    """Blocks `start` + Σ i_k × `strides_k` of a fragment, for all 0 ≤ i_k < `shape_k`.

    In row-major order: a box of a tensor's rows and columns, in blocks. A contiguous range is
    `{start, [length], [1]}`. The blocks ascend strictly: the stride of an axis longer than 1 is
    greater than the distance between the first and the last block of the axes behind it.
    """

    start: Count = Field(description="first block")
    shape: Annotated[Several[Positive], Field(min_length=1, max_length=MAX_AXES)] = Field(
        description="blocks along each axis; 1 to 4 axes"
    )
    strides: Annotated[Several[Positive], Field(min_length=1, max_length=MAX_AXES)] = Field(
        description="of each axis, in blocks; as many as axes"
    )


class Shard(Part):
    """One object of an update: whole blocks of the fragment's vector.

    Blocks of `sync.block` elements, one after the other as its slices name them. The slices of a
    shard ascend and do not interleave: each begins behind the last block of the one before.
    """

    name: ObjectName = Field(description="name of the object")
    size_bytes: Positive = Field(description="of the object")
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)] = Field(description="of the object")
    slices: Annotated[Several[Slice], Field(min_length=1, max_length=MAX_SLICES)] = Field(
        description="blocks of the fragment's vector that it holds, in ascending order; 1 to 4096"
    )


class Manifest(Body):
    """Announces one update: one outer gradient of one fragment from one learner.

    It is published after every shard is stored. Whoever reads it drops one undecoded that is longer
    than any of its fragment can be: with a shard and a slice for each block, and every field as
    long as it gets.
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
    base_digest: Digest = Field(description="of that view")
    layout: Digest = Field(description="the run's")
    codec: Literal["float32", "bfloat16", "int8", "int4"] = Field(
        description="the run's `sync.codec`"
    )
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
    loss: Loss = Field(description="moving average of the training loss")
    step_time_s: Seconds = Field(description="moving average of the time of an inner step")
    encode_s: Seconds = Field(description="from dispatch to the shards' bytes")
    upload_s: Seconds = Field(description="from the bytes to the last shard stored")
    attempt: Count = Field(
        description="0, and one more each time the same update is announced again"
    )
    final: bool = Field(description="the learner sends no other update of this fragment")
