"""The message bus: streams with compare-and-swap, and messages that are not kept.

`protocol.py` has the rules of every backend; `memory.py` and `jetstream/` are backends. NATS's is
imported by its own name, so that nats-py is loaded only where there is a server.
"""

from diloco.common.bus.limits import (
    check_limits,
    check_settings,
    check_ttl,
    stream_exists,
    stream_is_full,
    stream_settings,
    stream_went_back,
)
from diloco.common.bus.memory import MemoryBroker, MemoryBus
from diloco.common.bus.protocol import LISTEN_BACKLOG, Bus, Filled, Message, StreamLimits
from diloco.common.bus.subjects import (
    check_patterns,
    check_subject,
    subject_matches,
    subjects_overlap,
)

__all__ = [
    "LISTEN_BACKLOG",
    "Bus",
    "Filled",
    "MemoryBroker",
    "MemoryBus",
    "Message",
    "StreamLimits",
    "check_limits",
    "check_patterns",
    "check_settings",
    "check_subject",
    "check_ttl",
    "stream_exists",
    "stream_is_full",
    "stream_settings",
    "stream_went_back",
    "subject_matches",
    "subjects_overlap",
]
