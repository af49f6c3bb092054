"""Faults of single operations of a simulated process: their probabilities and durations."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The probability of each fault of an operation; `*_s` are mean durations in seconds.

    Attributes:
        delay: an operation, a delivery or an answer takes `delay_s` longer.
        lost_request: a request to the bus has no effect, and its sender gets an error.
        lost_answer: a request to the bus takes effect, and its sender gets an error.
        late_request: the sender gets an error, and the request takes effect `late_s` later, as if
            it had waited in the client's buffer.
        duplicate: a message is stored, and its sender gets an error after the duplicate window, so
            that a retry stores the message a second time.
        redelivered: a reader gets a message for a second time.
        lost_broadcast: no process receives a broadcast.
        stale_read: a learner's `last` is answered by a replica that lacks up to `stale_messages`
            of the newest messages; other processes ask the stream's leader.
        false_answer: a cluster answers a compare-and-swap wrongly: "refused" for a message that it
            has stored, or "stored" for a retry that it refuses.
        rot: a learner's shard is damaged as soon as it is stored.
        rot_version: an object of a version is damaged as soon as an aggregator has stored it.
        rot_message: a learner's manifest is stored so that it cannot be decoded.
        rot_record: a record on the tape is damaged, after its present readers have received it.
        store_refused: the store does not carry out a call, and the caller gets an error.
        store_lost_answer: the store carries out a call, and the caller gets an error.
        store_slow: a call of the store takes `slow_s` longer.
        host_loss: a learner of several hosts loses one host while they store an update.
        removed: a shard is removed by its sender after an aggregator has read it, unless the
            aggregators keep it.
        interleaved: a step of a garbage collector takes so long that the tape grows meanwhile.
        late_object: processes other than the writer do not see an object for `visible_s` after it
            was stored.
    """

    delay: float = 0.0
    delay_s: float = 0.05
    lost_request: float = 0.0
    lost_answer: float = 0.0
    late_request: float = 0.0
    late_s: float = 3.0
    duplicate: float = 0.0
    redelivered: float = 0.0
    lost_broadcast: float = 0.0
    stale_read: float = 0.0
    stale_messages: int = 20
    false_answer: float = 0.0
    rot: float = 0.0
    rot_version: float = 0.0
    rot_message: float = 0.0
    rot_record: float = 0.0
    store_refused: float = 0.0
    store_lost_answer: float = 0.0
    store_slow: float = 0.0
    slow_s: float = 2.0
    host_loss: float = 0.0
    removed: float = 0.0
    interleaved: float = 0.0
    late_object: float = 0.0
    visible_s: float = 1.0


CALM = Faults()
