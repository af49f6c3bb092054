"""Messages beside the tape: nothing is lost with them."""

from typing import ClassVar, Literal

from pydantic import Field

from diloco.common.wire.fields import (
    LONG_WORD_BYTES,
    Body,
    Count,
    Digest,
    Figures,
    Loss,
    Name,
    Passage,
    Positive,
    Rate,
    Seconds,
    Several,
    Text,
)


class Lease(Body):
    """Who owns a fragment; or, under a key of its own, that an aggregator is there."""

    kind: ClassVar[str] = "lease"
    aggregator: Name = Field(description="for people")
    life: Digest = Field(description="128 random bits: tells one process from every other")
    state: Literal["held", "released", "done"] = Field(
        description="`released`: for whoever takes it; `done`: nothing of the fragment is left to"
        " do"
    )
    ttl_s: Seconds = Field(
        description="time to live, counted from when it was stored; 0 for `done`, which stays"
    )
    pinned: Several[Count] | None = Field(
        description="the fragments that this aggregator keeps to; nil: it takes its share"
    )


class Score(Body):
    """The loss of a global view on held-out data.

    The body of an object `{run}/score/...`, on no stream, kept by `diloco evaluate` and `diloco
    local` for `diloco report`. Nothing in the run depends on it.
    """

    kind: ClassVar[str] = "score"
    run: Name = Field(description="the run")
    epoch: Count = Field(description="of the tape")
    versions: Several[Count] = Field(description="of all fragments")
    record_seqs: Several[Positive] = Field(description="sequences of the records that made them")
    global_step: Count = Field(description="the greatest of those records")
    tokens: Count = Field(description="merged by then, on average over fragments")
    at_s: Seconds = Field(description="when the newest of the rounds closed")
    loss: float = Field(description="the task's, on held-out data")
    metrics: Figures = Field(default={}, description="what else the task measures there, by name")
    text: Passage = Field(default="", description="what that view wrote; empty: its task cannot")


class RoundOpen(Body):
    """A round is open: send this fragment now, with at least `sync.min_steps` steps.

    It may be lost without harm.
    """

    kind: ClassVar[str] = "round"
    fragment: Count = Field(description="the fragment")
    version: Count = Field(description="the version that the round makes")


LEARNER_STATES = ("starting", "training", "paused", "flushing", "leaving", "failed")


class Heartbeat(Body):
    """A learner is alive, and how it fares.

    It counts as live until it has been silent for `quorum.liveness_timeout_s`.
    """

    kind: ClassVar[str] = "heartbeat"
    limit_bytes: ClassVar[int] = LONG_WORD_BYTES
    learner: Name = Field(description="who")
    incarnation: Positive = Field(description="its life")
    local_step: Count = Field(
        description="inner steps of this learner: of this life, and of those before as far as its"
        " checkpoint reached"
    )
    global_step: Count = Field(description="the run's clock, as far as it can tell")
    tokens: Count = Field(description="of this life")
    loss: Loss = Field(description="moving average")
    metrics: Figures = Field(
        default={},
        description="further scalars of its loss by name, moving averages; and what its loop has"
        " measured on held-out data, as `held_out_...`",
    )
    tokens_per_s: Rate = Field(description="tokens per second, at least 0")
    step_time_s: Seconds = Field(description="moving average")
    stall_s: Seconds = Field(description="time that synchronization took from training")
    data_s: Seconds = Field(
        default=0.0, description="time that training waited for its batches; no part of `stall_s`"
    )
    run_s: Seconds = Field(description="time since the life began to train")
    bytes_up: Count = Field(description="stored shards")
    bytes_down: Count = Field(description="read objects")
    updates_sent: Count = Field(description="of this life")
    state: Text = Field(
        description="`starting`, `training`, `paused`, `flushing`, `leaving`, or `failed`: the last"
        " word of a life that an error ends; `trouble` says which"
    )
    trouble: Text = Field(
        default="", description="what somebody should look at although it trains; empty if nothing"
    )


class Rejection(Body):
    """Copy for people of a verdict, or a sample of what could not be decoded."""

    kind: ClassVar[str] = "rejected"
    fragment: int = Field(description="the fragment")
    learner: str = Field(description="from the subject")
    incarnation: Count = Field(description="its life; 0 where unknown")
    seq: Count = Field(description="of the update; 0 where unknown")
    reason: Text = Field(description="one of the reasons")
    detail: Text = Field(description="a sentence for people")
