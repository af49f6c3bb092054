"""The run's tape: its messages decoded, its reader, and look-ups of a run's parts.

- `messages.py`: the decoder, typed, each body checked against its subject.
- `lengths.py`: how long an update's message may be.
- `reader.py`: a whole tape, message by message.
- `run.py`: the run's context, specification and settings.
- `records.py`: the records of a fragment.
- `objects.py`: the objects that messages name.
- `positions.py`: where the data of earlier epochs' learners goes on.
- `sequences.py`: which sequence numbers an epoch's tape has.
"""

from diloco.common.storage.tape.lengths import check_length
from diloco.common.storage.tape.messages import decode, decode_as
from diloco.common.storage.tape.objects import get_object, lost_for_good
from diloco.common.storage.tape.positions import (
    begins_tape,
    by_learner,
    entries,
    first_sequence,
    place_on_tape,
    read_positions,
    same_tape,
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
from diloco.common.storage.tape.records import (
    Recorded,
    check_record,
    last_record,
    read_record,
    record_digest,
    records_of,
)
from diloco.common.storage.tape.run import (
    RunContext,
    changed_settings,
    data_position,
    data_reached,
    effective_settings,
    first_message,
    has_ended,
    load_specification,
    messages_up_to,
    parse_changed,
    publish_once,
    settings_at,
)
