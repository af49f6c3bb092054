"""Which update of a fragment is the last on the tape, once the tape has been read up to it."""

from collections.abc import Awaitable, Callable

from diloco.aggregator.context import Context
from diloco.aggregator.tasks import Tasks
from diloco.common import log, names


class LastUpdate:
    """Asks the stream's leader where a round is cut.

    A replica may be behind, and so may our own reading of the tape: the leader says what there is,
    and the answer waits until the machine has been told of it.

    Args:
        context: the aggregator's.
        fragment: its index.
        read_seq: what is at or below it on the tape needs no reading any more.
        answer: takes the sequence of the last update, 0 if there is none.
        tasks: the tenure's.
        logger: the fragment's.
    """

    def __init__(
        self,
        context: Context,
        fragment: int,
        read_seq: int,
        answer: Callable[[int], Awaitable[None]],
        tasks: Tasks,
        logger: log.Logger,
    ) -> None:
        self._context = context
        self._pattern = names.update(context.run, "*", fragment)
        self._read_seq = read_seq
        self._answer = answer
        self._tasks = tasks
        self._logger = logger
        self._wanted: int | None = None

    def ask(self) -> None:
        """Ask the leader; the answer comes by itself."""
        self._tasks.start(self._ask())

    async def passed(self, stream_seq: int) -> None:
        """The tape was read so far, and the machine has it in its queue."""
        self._read_seq = max(self._read_seq, stream_seq)
        await self._answer_if_read()

    async def _ask(self) -> None:
        context = self._context
        last = await context.runtime.retry(
            "asking for the last update",
            lambda: context.bus.last(context.tape, self._pattern),
            logger=self._logger,
        )
        self._wanted = last.seq if last else 0
        await self._answer_if_read()

    async def _answer_if_read(self) -> None:
        if self._wanted is not None and self._wanted <= self._read_seq:
            seq, self._wanted = self._wanted, None
            await self._answer(seq)
