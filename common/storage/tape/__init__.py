"""The run's tape: its decoder, its reader, and look-ups of parts of a run.

- `messages.py`: decodes messages to typed bodies, checks each body against its subject, and limits
  the length of messages about updates.
- `reader.py`: reads a whole tape, message by message.
- `run.py`: a run's context, specification and settings, and the records of its fragments.
- `words.py`: the words of records, and the answers to one learner.
- `positions.py`: the data positions at which learners of earlier epochs continue.
"""

from diloco.common.protocol.sequences import begins_tape, first_sequence, place_on_tape, same_tape
from diloco.common.storage.store.protocol import get_object, lost_for_good
from diloco.common.storage.tape.messages import check_length, decode, decode_as
from diloco.common.storage.tape.positions import (
    by_learner,
    entries,
    read_positions,
    store_positions,
)
from diloco.common.storage.tape.reader import (
    Entry,
    Extent,
    InvalidMessage,
    Item,
    Unreadable,
    messages_of,
    read_item,
    read_message,
    read_tape,
)
from diloco.common.storage.tape.run import (
    Recorded,
    RunContext,
    await_specification,
    changed_settings,
    check_epoch,
    check_record,
    data_position,
    data_reached,
    earlier_positions,
    effective_settings,
    first_message,
    has_ended,
    last_record,
    load_specification,
    may_be_merged,
    messages_up_to,
    note_not_held,
    note_reached,
    parse_changed,
    publish_once,
    read_record,
    record_digest,
    records_of,
    settings_at,
)
from diloco.common.storage.tape.words import RecordedWord, last_word, read_answer, read_word
