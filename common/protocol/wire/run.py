"""All messages except manifests and records: specification, joins, settings, heartbeats, ..."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from diloco.common.protocol.wire.encoding import (
    LONG_WORD_BYTES,
    WORD_BYTES,
    Body,
    CheckpointName,
    Count,
    Digest,
    Figures,
    FiguresOfSlices,
    Loss,
    Name,
    NestedRecord,
    ObjectName,
    Passage,
    Positive,
    Rate,
    Seconds,
    Several,
    SliceCount,
    Text,
)
from diloco.common.protocol.wire.manifests_and_records import ObjectRef, Record


class DataPosition(NestedRecord):
    """The position at which a learner continues to read its data."""

    learner: Name = Field(description="the learner")
    position: Count = Field(description="in batches")


class Positions(Body):
    """The learners' data positions, if there are too many for the specification.

    Stored as the object `{run}/positions/{epoch}-{digest}`, on no stream; at most 64 MiB.
    """

    kind: ClassVar[str] = "positions"
    limit_bytes: ClassVar[int] = 64 << 20
    run: Name = Field(description="the run")
    data_positions: Several[DataPosition] = Field(description="one for each learner")


class Specification(Body):
    """The specification of a run: the tape's first message.

    Sequence numbers in a specification are those of the tape that the specification begins.
    """

    kind: ClassVar[str] = "spec"
    run: Name = Field(description="the run")
    epoch: Count = Field(description="0; one more each time the run is resumed on a new tape")
    positions: dict[Name, Count] = Field(
        description="where data resumes, in batches, for learners of earlier epochs; empty if"
        " there are more than 4096"
    )
    layout: Digest = Field(description="of the layout object")
    settings: dict[str, Any] = Field(
        description="sections `run`, `task`, `sync`, `outer`, `staleness`, `quorum`, `bounds` of"
        " the configuration, every key"
    )
    constants: ObjectName | None = Field(
        description="object with the index of the leaves that are not synchronized"
    )
    created_at_s: Seconds = Field(description="when")
    positions_object: ObjectRef | None = Field(
        description="object with the `Positions` of more than 4096 learners"
    )


class LearnerSlices(NestedRecord):
    """The slices of a learner in one life: groups of hosts with a whole copy of the model each.

    The numbers hold for the whole life, since another set of slices begins another life.
    """

    present: SliceCount = Field(description="slices that train in this life; at least `least`")
    given: SliceCount = Field(description="slices that the learner has, present or not")
    least: SliceCount = Field(
        description="fewest slices with which it trains: `learner.min_slices`"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "LearnerSlices":
        if not self.least <= self.present <= self.given:
            raise ValueError(
                f"{self.present} of {self.given} slices cannot train where {self.least} are the"
                " fewest"
            )
        return self


# The platform of a join that an aggregator writes, to end the life of a silent learner.
NOT_A_LEARNER = "not a learner"
# So many names fit into a join; a learner that holds more modules holds all.
MOST_HELD_MODULES = 128


class Join(Body):
    """A learner begins an incarnation (a life), numbered by this message's stream sequence."""

    kind: ClassVar[str] = "join"
    limit_bytes: ClassVar[int] = WORD_BYTES
    run: Name = Field(description="the run")
    learner: Name = Field(description="the learner, as in the subject")
    layout: Digest = Field(description="the layout that the learner computed from its task")
    host: Text = Field(description="for people")
    release: Text = Field(default="", description="release of the program that sends it")
    lock: Text = Field(
        default="",
        description="xxh3-128 of the lines `name==version` of the required packages that the sender"
        " has installed",
    )
    platform: Text = Field(
        default="",
        description="the platform it trains on, for people; `not a learner`: an aggregator sends"
        " this to end a silent life",
    )
    before: Text = Field(
        default="",
        description="the error that ended the learner's life before this one, from its last"
        " heartbeat; empty: unknown",
    )
    slices: LearnerSlices | None = Field(
        default=None, description="slices that train, of a learner that has several; else null"
    )
    holds: Annotated[tuple[Name, ...], Field(max_length=MOST_HELD_MODULES)] = Field(
        default=(), description="the modules whose fragments it trains and sends; empty: all"
    )


class Leave(Body):
    """Ends a learner's life, or only its updates of some fragments.

    If `fragments` is empty, the life (incarnation) ends, and no message of it follows. If not, the
    life continues: the run has stopped, and the learner has sent all updates of these fragments.

    An aggregator publishes a leave (see `by`) to end the life of a learner that was silent for too
    long. A leave of a life that a newer join has superseded shows that two processes had one name.
    """

    kind: ClassVar[str] = "leave"
    limit_bytes: ClassVar[int] = LONG_WORD_BYTES
    run: Name = Field(description="the run")
    learner: Name = Field(description="the learner")
    incarnation: Positive = Field(description="the life")
    position: Count = Field(
        description="data position, in batches, where the learner's next incarnation resumes"
    )
    fragments: Several[Count] = Field(
        description="fragments that the learner sends no more; empty: all, the life ends"
    )
    by: Text = Field(
        default="",
        description="sender: empty: the learner itself; else `aggregator NAME`",
    )


class Claim(Body):
    """Claims a share of the data for a learner, or begins or ends the claims of a life.

    Only claims of the learner's newest life are valid. An epoch of the data is cut into `shares`
    shares: share i of epoch e has the number e × `shares` + i. A claim counts if the share is
    free after all earlier messages of the tape.
    """

    kind: ClassVar[str] = "claim"
    limit_bytes: ClassVar[int] = LONG_WORD_BYTES
    run: Name = Field(description="the run")
    learner: Name = Field(description="the learner, as in the subject")
    incarnation: Positive = Field(description="its life")
    what: Literal["begin", "claim", "end"] = Field(
        description="`begin`: the life takes over the shares of earlier lives; `claim`: it takes a"
        " share; `end`: of its shares, all batches from `position` on become free. The learner"
        " sends it, or an aggregator once the learner is silent"
    )
    shares: Positive = Field(
        description="shares in an epoch, as the run's settings or its first claim say"
    )
    batches: Positive = Field(
        description="batches in a share, as the run's settings or its first claim say"
    )
    share: Count = Field(description="of `claim`: the share's number; else 0")
    first: Count = Field(description="of `claim`: the first free batch of the share; else 0")
    position: Count = Field(
        description="data position of this learner, in batches: of `claim` where it reads `first`,"
        " of `end` where it stops"
    )
    lost: Several[Count] = Field(
        description="of `begin` and `end`: for each fragment, how many batches before `position`"
        " are in no update, as a crash ended a life; else empty"
    )


class Settings(Body):
    """Changes settings of the run.

    Aggregators apply the new settings from each fragment's next version on, a learner at its next
    step boundary. Only changeable keys may differ from the specification's.
    """

    kind: ClassVar[str] = "settings"
    run: Name = Field(description="the run")
    settings: dict[str, Any] = Field(description="all settings, as in the specification")
    changed: Several[Text] = Field(description="the changed settings, for people")
    by: Text = Field(description="who changed them: `operator USER@MACHINE`")


class Quarantine(Body):
    """Quarantines a learner in all fragments, or releases it.

    A fragment's aggregator quarantines a learner whose count of offences has reached
    `bounds.quarantine_offences`; an operator releases or quarantines a learner.
    """

    kind: ClassVar[str] = "quarantine"
    run: Name = Field(description="the run")
    learner: Name = Field(description="the learner")
    active: bool = Field(description="true: quarantined; false: released, its offences forgotten")
    reason: Text = Field(description="for people")
    by: Text = Field(description="the aggregator's name, or `operator USER@MACHINE`")


class Checkpoint(Body):
    """A point from which the run can be resumed.

    The message is published before the checkpoint's objects are stored; a garbage collection that
    looks for checkpoints from then on keeps the view and the outer state of the versions that the
    message lists.
    """

    kind: ClassVar[str] = "checkpoint"
    run: Name = Field(description="the run")
    name: CheckpointName = Field(
        description="epoch, and number of the tape's message, of the point: `0000-000000001234`"
    )
    versions: Several[Count] = Field(description="of each fragment")
    record_seqs: Several[Positive] = Field(
        description="stream sequences of the records that made them"
    )
    created_at_s: Seconds = Field(description="when")
    by: Text = Field(description="who made it: an aggregator's name, or `operator USER@MACHINE`")


class CheckpointFile(Body):
    """The state with which a run is resumed: on a new tape, in a new epoch.

    The file is stored as the object `{run}/checkpoint/{name}`, on no stream; at most 64 MiB.
    """

    kind: ClassVar[str] = "checkpoint_file"
    limit_bytes: ClassVar[int] = 64 << 20
    name: CheckpointName = Field(description="name of the checkpoint")
    specification: Specification = Field(
        description="specification of the new epoch, with the learners' data positions"
    )
    settings: dict[str, Any] = Field(description="the settings in force")
    records: Several[Record] = Field(
        description="one for each fragment, of kind `restored`, with snapshot and outer state of"
        " its version"
    )
    created_at_s: Seconds = Field(description="when")
    data_positions: Several[DataPosition] = Field(
        description="data positions of more than 4096 learners; the specification then has none"
    )


class Stop(Body):
    """The stop rule was met; learners send their unsent updates and leave."""

    kind: ClassVar[str] = "stop"
    run: Name = Field(description="the run")
    global_step: Count = Field(description="the run's clock")
    reason: Text = Field(
        description="`steps` or `tokens`; any other text: somebody ended the run early"
    )
    by: Text = Field(description="who stopped it: an aggregator's name, or `operator USER@MACHINE`")


class End(Body):
    """Every fragment's last record is committed; the versions listed are the run's result."""

    kind: ClassVar[str] = "end"
    run: Name = Field(description="the run")
    versions: Several[Count] = Field(description="of each fragment")
    record_seqs: Several[Positive] = Field(
        description="stream sequences of final records of these versions"
    )


class Lease(Body):
    """A lease on a fragment; or, under another key, the sign that an aggregator runs."""

    kind: ClassVar[str] = "lease"
    aggregator: Name = Field(description="for people")
    life: Digest = Field(description="128 random bits: tells one process from every other")
    state: Literal["held", "released", "done"] = Field(
        description="`released`: any aggregator may take it; `done`: no work is left for the"
        " fragment"
    )
    ttl_s: Seconds = Field(
        description="time to live, from when the lease was stored; 0 for `done`, which stays"
    )
    pinned: Several[Count] | None = Field(
        description="the only fragments that this aggregator takes; nil: an equal part of all"
    )
    refuses: Several[Count] = Field(
        description="fragments that this aggregator no longer serves, as it computes other digests"
        " from the stored objects than those recorded"
    )
    cut_off: bool = Field(
        default=False,
        description="the store does not answer this aggregator: it counts as absent while the"
        " store answers another",
    )


class Score(Body):
    """The loss of a global view on held-out data.

    `diloco evaluate` and `diloco local` store a score as an object `{run}/score/...`, on no stream,
    for `diloco report`. Nothing in the run depends on a score.
    """

    kind: ClassVar[str] = "score"
    run: Name = Field(description="the run")
    epoch: Count = Field(description="of the tape")
    versions: Several[Count] = Field(description="of all fragments")
    record_seqs: Several[Positive] = Field(description="sequences of the records that made them")
    global_step: Count = Field(description="greatest global step of those records")
    tokens: Count = Field(description="tokens merged by then, the mean over fragments")
    at_s: Seconds = Field(description="when the newest of those rounds closed")
    loss: float = Field(description="the task's loss on held-out data")
    metrics: Figures = Field(
        default={}, description="further metrics of the task on that data, by name"
    )
    slices: FiguresOfSlices = Field(
        default={}, description="loss and metrics of slices of that data, by their names"
    )
    text: Passage = Field(
        default="",
        description="a text that the model wrote with that view; empty: the task has none",
    )


class RoundOpen(Body):
    """Announces an open round: send this fragment now, after at least `sync.min_steps` steps.

    The broadcast may be lost without harm.
    """

    kind: ClassVar[str] = "round"
    fragment: Count = Field(description="the fragment")
    version: Count = Field(description="the version that the round makes")


LEARNER_STATES = ("starting", "training", "paused", "flushing", "leaving", "failed")


class Heartbeat(Body):
    """A learner reports that it is alive, with its progress and health.

    A learner counts as live until it has been silent for `quorum.liveness_timeout_s`.
    """

    kind: ClassVar[str] = "heartbeat"
    limit_bytes: ClassVar[int] = LONG_WORD_BYTES
    learner: Name = Field(description="the learner")
    incarnation: Positive = Field(description="its incarnation")
    local_step: Count = Field(
        description="inner steps of this learner: of this life, and of those before as far as its"
        " checkpoint reached"
    )
    global_step: Count = Field(description="the run's clock, as far as the learner knows it")
    tokens: Count = Field(description="tokens trained in this life")
    loss: Loss | None = Field(description="moving average; null: no step is done yet")
    metrics: Figures = Field(
        default={},
        description="further scalars of the task's loss by name, moving averages; and figures that"
        " the training loop measured on held-out data, as `held_out_...`",
    )
    tokens_per_s: Rate = Field(description="tokens per second, at least 0")
    step_time_s: Seconds = Field(description="moving average")
    stall_s: Seconds = Field(description="time that synchronization took from training")
    data_s: Seconds = Field(
        default=0.0, description="time that training waited for batches; not part of `stall_s`"
    )
    run_s: Seconds = Field(description="time since the life began to train")
    bytes_up: Count = Field(description="bytes of stored shards")
    bytes_down: Count = Field(description="bytes of objects read")
    updates_sent: Count = Field(description="updates sent in this life")
    delay_s: Seconds = Field(
        default=0.0,
        description="mean over the last 16 updates: time from the step boundary that cut an update"
        " to the boundary that adopted the record answering it; 0: none was answered",
    )
    worst_delay_s: Seconds = Field(default=0.0, description="the longest of these times")
    delay_steps: Rate = Field(default=0.0, description="as `delay_s`, in this learner's steps")
    worst_delay_steps: Count = Field(default=0, description="the greatest of these")
    adoption_s: Seconds = Field(
        default=0.0,
        description="mean over the last 16 adopted versions: time from the record to the step"
        " boundary that adopted it; 0: unknown",
    )
    worst_adoption_s: Seconds = Field(default=0.0, description="the longest of these times")
    adoption_steps: Rate = Field(default=0.0, description="as `adoption_s`, in inner steps")
    worst_adoption_steps: Rate = Field(default=0.0, description="the greatest of these")
    now_s: Seconds = Field(default=0.0, description="the sender's clock; 0: not sent")
    state: Text = Field(
        description="`starting`, `training`, `paused`, `flushing`, `leaving`, or `failed`: an"
        " error ends this life, and `trouble` says which"
    )
    trouble: Text = Field(
        default="",
        description="a problem that an operator should look at, though training goes on; empty:"
        " none",
    )


class Rejection(Body):
    """A copy, for people, of a verdict on an update, or of why a message could not be decoded."""

    kind: ClassVar[str] = "rejected"
    fragment: int = Field(description="the fragment")
    learner: str = Field(description="from the subject")
    incarnation: Count = Field(description="its life; 0 where unknown")
    seq: Count = Field(description="of the update; 0 where unknown")
    reason: Text = Field(description="one of the reasons")
    detail: Text = Field(description="a sentence for people")
