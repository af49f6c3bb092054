"""Words of records, and the answers to learners behind a record in its object."""

import pytest
from records import make_input, make_record

from diloco.aggregator.core import memory
from diloco.common.protocol import shards, wire
from diloco.common.protocol.errors import IntegrityError, WireError

DIGEST = "0123456789abcdef" * 2


def fleet(learners: int) -> wire.Record:
    """A record that merges update 7 of every second life; each learner has had two."""
    lives = [(f"learner-{at}", 1000 * life + at + 1) for at in range(learners) for life in (1, 2)]
    marks = [
        wire.Mark(learner=name, incarnation=life, seq=7 - life % 2, stream_seq=9)
        for name, life in lives
    ]
    taken = [make_input(learner=name, incarnation=life, seq=7) for name, life in lives[1::4]]
    policy = memory.beginning().model_copy(update={"marks": tuple(marks)})
    return make_record(inputs=tuple(taken), policy=policy, view_digest=DIGEST)


def stored(record: wire.Record) -> tuple[wire.RecordPointer, bytes]:
    data, answers = wire.with_answers(record, wire.encode(record))
    body = wire.ObjectRef(name="o", size_bytes=len(data), crc32c=shards.crc32c(data))
    word = wire.word_of(record)
    return wire.RecordPointer(word=word, body=body, answers=answers, attempt_id="0"), data


def read(pointer: wire.RecordPointer, data: bytes, learner: str, life: int) -> wire.Answer:
    start, stop = wire.answers_range(pointer, learner)
    assert 0 < start < stop <= len(data)
    return wire.answer_in(pointer, data[start:stop], learner, life)


@pytest.mark.parametrize("learners", [0, 1, 3, 40, 500])
def test_one_range_has_all_that_a_record_answers_to_a_learner(learners):
    record = fleet(learners)
    pointer, data = stored(record)
    answers = wire.answers_of(record)
    assert len(answers) == 2 * learners
    for (learner, life), answer in answers.items():
        assert read(pointer, data, learner, life) == answer
        # Neither another life's answer, nor that of a name which begins alike.
        assert read(pointer, data, learner, life + 500_000) == wire.Answer()
        assert read(pointer, data, f"{learner}-x", life) == wire.Answer()
    assert read(pointer, data, "nobody", 1) == wire.Answer()
    assert {answer.merged_seq for answer in answers.values()} <= {0, 7}
    assert wire.record_in_object(pointer, data) == record


def test_what_a_learner_reads_does_not_grow_with_the_fleet():
    sizes = []
    for learners in (100, 3000):
        pointer, data = stored(fleet(learners))
        start, stop = wire.answers_range(pointer, "learner-7")
        sizes.append((len(data), len(wire.encode(pointer)), stop - start))
    (small, word, part), (large, later_word, later_part) = sizes
    assert large > 25 * small
    assert abs(later_word - word) < 20  # Numbers have more digits.
    # The fullest bucket of more buckets is somewhat fuller.
    assert later_part < 2 * part < 8192
    assert later_word < 2048


def test_names_that_share_a_bucket_do_not_once_the_view_is_another():
    """Nobody can choose names that make one bucket long, as all buckets are as long as that."""
    record, (beside, _) = fleet(1000), stored(fleet(1080))
    liars = [f"liar-{at}" for at in range(30_000)]
    ranges = {name: wire.answers_range(beside, name)[0] - beside.answers.start for name in liars}
    of_one = [name for name in liars if ranges[name] == ranges["liar-0"]][:160]
    marks = tuple(
        wire.Mark(learner=name, incarnation=at + 1, seq=1, stream_seq=1)
        for at, name in enumerate(of_one)
    )
    policy = record.policy.model_copy(update={"marks": (*record.policy.marks, *marks)})
    crowded = record.model_copy(update={"policy": policy})
    (then, _), (now, _) = (
        stored(crowded.model_copy(update={"view_digest": digest}))
        for digest in (DIGEST, DIGEST[::-1])
    )
    assert then.answers.buckets == now.answers.buckets == beside.answers.buckets
    assert then.answers.slots >= len(of_one) == 160
    assert now.answers.slots < 50


@pytest.mark.parametrize("at", [0, 40, 63, -1])
def test_damaged_answers_are_refused(at):
    pointer, data = stored(fleet(5))
    start, stop = wire.answers_range(pointer, "learner-1")
    part = bytearray(data[start:stop])
    part[at] ^= 1
    with pytest.raises(IntegrityError, match="answers to learner 'learner-1' in o are damaged"):
        wire.answer_in(pointer, bytes(part), "learner-1", 1001)


def test_answers_that_are_cut_short_are_refused():
    pointer, _ = stored(fleet(5))
    with pytest.raises(IntegrityError):
        wire.answer_in(pointer, bytes(4), "learner-1", 1001)


def test_a_word_that_is_not_its_records_is_refused():
    pointer, data = stored(fleet(3))
    for field, value in (("version", 9), ("floor", 1), ("final", True), ("view_digest", "0" * 32)):
        word = pointer.word.model_copy(update={field: value})
        with pytest.raises(WireError, match="the word on the tape is not that of the record"):
            wire.record_in_object(pointer.model_copy(update={"word": word}), data)


def test_answers_that_are_not_their_records_are_refused():
    """What a learner reads of an object is what owners, oracle and tools read of it."""
    pointer, data = stored(fleet(3))
    other, answers = wire.with_answers(fleet(4), data[: pointer.answers.start])
    for said, found in (
        (pointer.answers, data + b"\0"),
        (pointer.answers, data[:-1]),
        (answers, other),
        (pointer.answers.model_copy(update={"slots": pointer.answers.slots + 1}), data),
    ):
        with pytest.raises(WireError, match="the answers in o are not those of its record"):
            wire.record_in_object(pointer.model_copy(update={"answers": said}), found)
