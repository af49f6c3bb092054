"""The message bus: streams with compare-and-swap, and broadcasts that are not stored.

`protocol.py` has the rules of every backend; `memory.py` and `jetstream/` are backends. The NATS
backend is imported by its own name, so that nats-py is loaded only when there is a server.
"""

from diloco.common.storage.bus.memory import MemoryBroker, MemoryBus
from diloco.common.storage.bus.protocol import (
    LISTEN_BACKLOG,
    Bus,
    Filled,
    Message,
    StreamLimits,
    check_patterns,
    check_subject,
    stream_went_back,
    subject_matches,
    subjects_overlap,
)
