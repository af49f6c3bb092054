"""The messages of a run: typed, frozen, decoded and checked once on receipt, and then trusted.

A message is one msgpack map with `schema`, `kind` and the fields of one of these classes;
docs/protocol.md is generated from them. Decoding is strict: a missing, unknown or wrong-typed
field, a non-finite float or anything beyond the limits raises `WireError` with a stable reason.
Decoding never creates an object whose class the data names. Its memory is proportional to the
message's length, whatever lengths the message claims.
"""

from diloco.common.protocol.wire.encoding import (
    GREATEST,
    GREATEST_S,
    MAX_AXES,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_SHARDS,
    MAX_SLICES,
    MESSAGE_BYTES,
    METRIC_NAME,
    MOST_HELD_OUT_SLICES,
    MOST_METRICS,
    RECORD_BYTES,
    SCHEMA,
    SLICE_NAME,
    WHOLE,
    Body,
    Count,
    Digest,
    Name,
    NestedRecord,
    ObjectName,
    Positive,
    PowerOfTwo,
    Seconds,
    T,
    Text,
    decode,
    encode,
    note,
)
from diloco.common.protocol.wire.manifests_and_records import (
    Allowance,
    Credit,
    Input,
    Manifest,
    Mark,
    MemberState,
    ObjectRef,
    Observation,
    PolicyState,
    Record,
    RecordPointer,
    Rejected,
    Shard,
    Slice,
    Totals,
    decode_record,
)
from diloco.common.protocol.wire.run import (
    LEARNER_STATES,
    NOT_A_LEARNER,
    Checkpoint,
    CheckpointFile,
    Claim,
    DataPosition,
    End,
    Heartbeat,
    Join,
    Lease,
    Leave,
    Positions,
    Quarantine,
    Rejection,
    RoundOpen,
    Score,
    Settings,
    Specification,
    Stop,
)
