"""Faults of single operations of a simulated process: their probabilities and durations."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often single operations go wrong: probabilities, and mean durations in seconds.

    Attributes:
        delay: of an operation, a delivery or an answer that takes `delay_s`.
        lost_request: nothing happens, and an error comes.
        lost_answer: it happens, and an error comes.
        late_request: an error comes, and it happens `late_s` later: it lay in a client's buffer.
        duplicate: it happens, and an error comes after the duplicate window has passed, so that
            sending it again stores it twice.
        redelivered: a reader gets a message again that it had.
        lost_broadcast: nobody hears it.
        stale_read: a learner's `last` is answered by a replica that is up to `stale_messages`
            behind; others ask the stream's leader.
        false_answer: of a compare-and-swap, as of a cluster: one that was stored is answered as
            refused, and one that is refused, though it was tried before, as stored.
        rot: a learner's shard is damaged as soon as it is stored.
        rot_version: what an aggregator stores of a version is.
        rot_message: a learner's manifest cannot be decoded once it is stored.
        rot_record: a record cannot be, soon after it was read by those who wait for it.
        store_refused, store_lost_answer: as for requests, of the store.
        store_slow: a call takes `slow_s`.
        host_loss: a learner of several hosts loses one while they store an update.
        removed: a shard that an aggregator has read is removed by its sender, unless it is kept.
        interleaved: what a collector awaits takes so long that the tape moves meanwhile.
        late_object: `get` of others misses an object for `visible_s` after `put` returned.
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
