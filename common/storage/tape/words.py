"""Reads records as readers of versions do: their words, and the answers to one learner.

The word of a record is on the tape, whether the record is there too or in an object. So the cost
of following a run's versions does not grow with the number of its learners.
"""

from typing import NamedTuple

from diloco.common.protocol import wire
from diloco.common.protocol.errors import IntegrityError, ObjectRangeError
from diloco.common.storage.bus import Message
from diloco.common.storage.tape.messages import decode
from diloco.common.storage.tape.run import RunContext, check_record, last_record_message


class RecordedWord(NamedTuple):
    """The word of a record on the tape.

    Attributes:
        word: the record's word.
        record_seq: the record's stream sequence.
        on_tape: the message: the record itself, or the pointer to the object that has it.
    """

    word: wire.RecordWord
    record_seq: int
    on_tape: wire.Record | wire.RecordPointer


def read_word(context: RunContext, message: Message) -> RecordedWord:
    """Returns the word in a message on a record's subject; reads no object.

    Raises:
        WireError: the message is no record, or names another run or fragment than its subject.
        IntegrityError: the record is of another layout.
        NewTapeError: the record is of another epoch.
    """
    found = decode(message.subject, message.payload)
    assert isinstance(found, wire.Record | wire.RecordPointer)
    word = found.word if isinstance(found, wire.RecordPointer) else wire.word_of(found)
    check_record(context, word)
    return RecordedWord(word, message.seq, found)


async def last_word(context: RunContext, fragment: int) -> RecordedWord:
    """Returns the word of a fragment's newest record.

    Raises:
        RunIncompleteError: the fragment has no record: creating the run has not finished.
        WireError, IntegrityError, NewTapeError: as `read_word`.
    """
    return read_word(context, await last_record_message(context, fragment))


async def read_answer(
    context: RunContext, told: RecordedWord, learner: str, incarnation: int
) -> wire.Answer:
    """Returns a record's answer to the updates of one incarnation of a learner.

    Of a record in an object, only the range with this learner's answers is read.

    Raises:
        ObjectMissingError: the object is gone, which is harmless if newer records follow.
        IntegrityError: the range is damaged.
    """
    if isinstance(told.on_tape, wire.Record):
        return wire.answers_of(told.on_tape).get((learner, incarnation), wire.Answer())
    name, span = told.on_tape.body.name, wire.answers_range(told.on_tape, learner)
    try:
        data = await context.runtime.call(context.store.get_range, name, *span)
    except ObjectRangeError as error:
        raise IntegrityError(f"{name} has no answers at {span}: {error.message}") from error
    return wire.answer_in(told.on_tape, data, learner, incarnation)
