"""A bundle as a read-only bus."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from diloco.common.protocol import names
from diloco.common.protocol.errors import BusError, StreamMissingError
from diloco.common.storage.bundle.reader import Bundle, StreamIndex
from diloco.common.storage.bus import Filled, Message, check_subject, subject_matches

# The number of messages that `read` yields before it lets other tasks run.
TURN = 256


class BundleBus:
    """Serves the streams of a bundle, read-only.

    Args:
        bundle: the open bundle; the caller closes it.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        run = bundle.run
        self._logs = {names.tape_stream(run): bundle.tape, names.ops_stream(run): bundle.ops}

    def _stream_index(self, stream: str) -> StreamIndex:
        if stream not in self._logs:
            raise StreamMissingError(f"{str(self._bundle.path)!r} has no stream {stream!r}")
        return self._logs[stream]

    async def _refuse(self, *_args: Any, **_named: Any) -> Any:
        """Refuses any operation that would change a stream.

        Raises:
            BusError: always.
        """
        raise BusError(
            f"{str(self._bundle.path)!r} is a file: its streams take nothing and lose nothing",
            hint="for a run that can be changed, put its tape on a server: diloco restore",
        )

    create_stream = remove_stream = publish = trim = restore = _refuse

    async def streams(self) -> list[str]:
        """Implements `Bus.streams`."""
        return sorted(self._logs)

    async def last(self, stream: str, subject: str) -> Message | None:
        """Implements `Bus.last`."""
        check_subject(subject, wildcards=True)
        stream_index = self._stream_index(stream)
        at = stream_index.last(_matching(stream_index, [subject]))
        return None if at is None else self._bundle.message(at)

    async def last_sequence(self, stream: str) -> int:
        """Implements `Bus.last_sequence`."""
        seqs = self._stream_index(stream).seqs
        return seqs[-1] if seqs else 0

    async def filled(self, stream: str) -> Filled:
        """Implements `Bus.filled`: the whole file's size; a file has no limit."""
        self._stream_index(stream)
        return Filled(self._bundle.path.stat().st_size, 0)

    async def read(
        self, stream: str, subjects: list[str], start_seq: int
    ) -> AsyncIterator[Message]:
        """Implements `Bus.read`; after the last message it waits for ever."""
        stream_index = self._stream_index(stream)
        for count, at in enumerate(stream_index.rows(_matching(stream_index, subjects), start_seq)):
            if count % TURN == 0:
                await asyncio.sleep(0)
            yield self._bundle.message(at)
        await asyncio.Event().wait()

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Does nothing: a file has no listeners."""

    async def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """Waits for ever, as nothing is broadcast to a file."""
        await asyncio.Event().wait()
        yield subject, b""

    async def close(self) -> None:
        """Does nothing, as whoever opened the bundle closes it."""


def _matching(stream_index: StreamIndex, patterns: list[str]) -> set[int]:
    if not any("*" in pattern or ">" in pattern for pattern in patterns):
        return {index for pattern in patterns for index in stream_index.ids(pattern)}
    return {
        index
        for index, subject in enumerate(stream_index.subjects)
        if any(subject_matches(pattern, subject) for pattern in patterns)
    }
