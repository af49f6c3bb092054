"""A kept file as a bus: it gives what it holds, and takes nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from diloco.common import names
from diloco.common.bus import Filled, Message, StreamLimits, check_subject, subject_matches
from diloco.common.errors import BusError, StreamMissingError
from diloco.common.kept.index import Kept, Log

# Messages given between two turns of the event loop.
TURN = 256


class KeptBus:
    """The streams of a kept file.

    Args:
        kept: the file; who opened it closes it.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        run = kept.run
        self._logs = {names.tape_stream(run): kept.tape, names.ops_stream(run): kept.ops}

    def _log(self, stream: str) -> Log:
        if stream not in self._logs:
            raise StreamMissingError(f"{str(self._kept.path)!r} has no stream {stream!r}")
        return self._logs[stream]

    def _refused(self, what: str) -> BusError:
        return BusError(
            f"{str(self._kept.path)!r} is a file: {what}",
            hint="for a run that can be changed, import its tape on a server: diloco tape import",
        )

    async def create_stream(
        self, stream: str, subjects: list[str], limits: StreamLimits, *, first_seq: int = 1
    ) -> None:
        """Refused.

        Raises:
            BusError: always.
        """
        raise self._refused(f"no stream {stream!r} can be made in it")

    async def streams(self) -> list[str]:
        """The names of all streams, sorted."""
        return sorted(self._logs)

    async def remove_stream(self, stream: str) -> None:
        """Refused.

        Raises:
            BusError: always.
        """
        raise self._refused(f"no stream {stream!r} can be removed from it")

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
        ttl_s: float | None = None,
    ) -> int:
        """Refused.

        Raises:
            BusError: always.
        """
        raise self._refused(f"it takes no message on {subject!r}")

    async def last(self, stream: str, subject: str) -> Message | None:
        """The last message of `subject`, or of all that match it as a pattern; None if none does.

        Raises:
            StreamMissingError: there is no such stream.
        """
        check_subject(subject, wildcards=True)
        log = self._log(stream)
        at = log.last(_matching(log, [subject]))
        return None if at is None else self._kept.message(at)

    async def last_sequence(self, stream: str) -> int:
        """Sequence of the stream's last message; 0 if it is empty.

        Raises:
            StreamMissingError: there is no such stream.
        """
        seqs = self._log(stream).seqs
        return seqs[-1] if seqs else 0

    async def filled(self, stream: str) -> Filled:
        """A file is never full.

        Raises:
            StreamMissingError: there is no such stream.
        """
        self._log(stream)
        return Filled(self._kept.path.stat().st_size, 0)

    async def trim(self, stream: str, subject: str, below_seq: int) -> None:
        """Refused.

        Raises:
            BusError: always.
        """
        raise self._refused(f"nothing of stream {stream!r} can be removed")

    async def restore(
        self,
        stream: str,
        subjects: list[str],
        limits: StreamLimits,
        messages: Iterable[Message],
    ) -> int:
        """Refused.

        Raises:
            BusError: always.
        """
        raise self._refused(f"no stream {stream!r} can be made in it")

    async def read(
        self, stream: str, subjects: list[str], start_seq: int
    ) -> AsyncIterator[Message]:
        """Messages of `subjects` from `start_seq` (1 is the first) on; then it waits for ever.

        Raises:
            StreamMissingError: there is no such stream.
        """
        log = self._log(stream)
        for count, at in enumerate(log.rows(_matching(log, subjects), start_seq)):
            if count % TURN == 0:
                await asyncio.sleep(0)
            yield self._kept.message(at)
        await asyncio.Event().wait()

    async def broadcast(self, subject: str, payload: bytes) -> None:
        """Nobody listens."""

    async def listen(self, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """Nobody speaks."""
        await asyncio.Event().wait()
        yield subject, b""

    async def close(self) -> None:
        """Who opened the file closes it."""


def _matching(log: Log, patterns: list[str]) -> set[int]:
    if not any("*" in pattern or ">" in pattern for pattern in patterns):
        return {index for pattern in patterns for index in log.ids(pattern)}
    return {
        index
        for index, subject in enumerate(log.subjects)
        if any(subject_matches(pattern, subject) for pattern in patterns)
    }
