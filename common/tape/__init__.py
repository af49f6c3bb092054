"""The run's tape: its messages decoded, its reader, what a run's parts look up on it.

- `messages.py`: the decoder, typed, each body checked against its subject.
- `reader.py`: a whole tape, message by message.
- `run.py`: the run's context, specification and settings.
- `records.py`: the records of a fragment.
- `objects.py`: the objects that messages name.
- `positions.py`: where the data of earlier epochs' learners goes on.
- `sequences.py`: which sequence numbers an epoch's tape has.
- `file.py`: a tape in one file.
"""

from diloco.common.tape.file import is_tape_file, read_tape_file, tape_file_run, write_tape_file
from diloco.common.tape.messages import decode, decode_as
from diloco.common.tape.objects import get_object, lost_for_good
from diloco.common.tape.positions import by_learner, entries, read_positions, store_positions
from diloco.common.tape.reader import (
    Entry,
    Extent,
    Garbage,
    Item,
    Unreadable,
    messages_of,
    read_item,
    read_message,
    read_tape,
)
from diloco.common.tape.records import (
    Recorded,
    check_record,
    last_record,
    read_record,
    record_digest,
    records_of,
)
from diloco.common.tape.run import (
    RunContext,
    changed_settings,
    data_position,
    data_reached,
    effective_settings,
    has_ended,
    load_specification,
    parse_changed,
    settings_at,
)
from diloco.common.tape.sequences import begins_tape, first_sequence, place_on_tape, same_tape

__all__ = [
    "Entry",
    "Extent",
    "Garbage",
    "Item",
    "Recorded",
    "RunContext",
    "Unreadable",
    "begins_tape",
    "by_learner",
    "changed_settings",
    "check_record",
    "data_position",
    "data_reached",
    "decode",
    "decode_as",
    "effective_settings",
    "entries",
    "first_sequence",
    "get_object",
    "has_ended",
    "is_tape_file",
    "last_record",
    "load_specification",
    "lost_for_good",
    "messages_of",
    "parse_changed",
    "place_on_tape",
    "read_item",
    "read_message",
    "read_positions",
    "read_record",
    "read_tape",
    "read_tape_file",
    "record_digest",
    "records_of",
    "same_tape",
    "settings_at",
    "store_positions",
    "tape_file_run",
    "write_tape_file",
]
