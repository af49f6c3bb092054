"""The run's tape: its messages decoded, its reader, and look-ups of a run's parts.

- `messages.py`: the decoder, typed, each body checked against its subject, and how long a message
  of an update may be.
- `reader.py`: a whole tape, message by message.
- `run.py`: the run's context, specification and settings, and the records of its fragments.
- `positions.py`: where the data of earlier epochs' learners goes on, and which sequence
  numbers an epoch's tape has.
"""

from diloco.common.storage.store.protocol import get_object, lost_for_good
from diloco.common.storage.tape.messages import check_length, decode, decode_as
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
from diloco.common.storage.tape.run import (
    Recorded,
    RunContext,
    await_specification,
    changed_settings,
    check_record,
    data_position,
    data_reached,
    effective_settings,
    first_message,
    has_ended,
    last_record,
    load_specification,
    messages_up_to,
    parse_changed,
    publish_once,
    read_record,
    record_digest,
    records_of,
    settings_at,
)
