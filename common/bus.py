"""The message bus: streams with compare-and-swap, and messages that are not kept.

Rules of every backend:
- A stream is an ordered log; sequence numbers start at 1 and never repeat.
- `publish` returns once the message is durable. With the same `msg_id` again (within the
  stream's duplicate window) it stores nothing and returns the first one's sequence.
- `expected_last` is the sequence of the subject's last message, 0 for none: compare-and-swap.
- `read` yields every matching message from a sequence on, in order, exactly once per call, and
  then waits for new ones; it survives lost connections by itself.
- `broadcast` reaches whoever listens now, at most once, and is kept nowhere.
Subjects use NATS's grammar: tokens joined by '.', '*' matches one token, a last '>' the rest.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol


class Message(NamedTuple):
    """One message of a stream."""

    subject: str
    seq: int
    time_s: float  # when the stream stored it, seconds since the epoch
    payload: bytes
    msg_id: str  # '' if it was published without one


class StreamLimits(NamedTuple):
    """What a stream keeps; 0 means no limit. The tape has none: only garbage collection trims it."""

    max_age_s: float = 0.0
    max_bytes: int = 0
    max_message_bytes: int = 1 << 20
    duplicate_window_s: float = 120.0
    replicas: int = 1


class Bus(Protocol):
    """What the daemons need of a bus; see the module's rules."""

    async def create_stream(self, stream: str, subjects: list[str], limits: StreamLimits) -> None:
        """Create `stream`; the same again is no error.

        Raises:
            BusError: it exists with other settings (both are named).
        """

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
    ) -> int:
        """Append a message to the stream that owns `subject`; its sequence.

        Raises:
            SwapLostError: the subject's last message is not `expected_last`.
            BusUnavailableError: no answer; the message may or may not have been stored.
            BusError: refused for good (no such stream, too large, not permitted).
        """

    async def last(self, stream: str, subject: str) -> Message | None:
        """The last message of `subject` (no wildcards), or None."""

    async def last_sequence(self, stream: str) -> int:
        """Sequence of the stream's last message; 0 if it is empty."""

    def read(self, stream: str, subjects: list[str], start_seq: int) -> AsyncIterator[Message]:
        """Messages of `subjects` from `start_seq` (1 is the first) on, then new ones, for ever."""

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Tell whoever listens; never raises for want of a connection or a listener."""

    def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """(subject, payload) of every broadcast that matches `subject` from now on."""

    async def close(self) -> None:
        """Release the connection."""
