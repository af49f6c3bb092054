"""Where a run ends on the tape, each owner of a fragment ends there, also one that begins later."""

import asyncio
from dataclasses import replace

import pytest
from runlab import PATIENCE_S, RUN, Lab

from diloco.aggregator.daemon import aggregate
from diloco.common.protocol import names
from diloco.common.storage.bus import MemoryBus

# An owner that begins later has nothing to do but read.
LATER_S = 60.0


class LateBus(MemoryBus):
    """A bus that answers an owner's records after the stop only once `answers` is set.

    It calls `late` between the first of them and the run's end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.run_ended, self.answers = asyncio.Event(), asyncio.Event()
        self.late = no_more

    async def publish(self, subject: str, payload: bytes, **options) -> int:
        seq = await super().publish(subject, payload, **options)
        if subject == names.end(RUN):
            self.run_ended.set()
        stopped = await self.last(names.tape_stream(RUN), names.stop(RUN))
        if stopped and subject == names.record(RUN, 0):
            late, self.late = self.late, no_more
            await late()
            await self.answers.wait()
        return seq


async def no_more() -> None:
    pass


@pytest.mark.parametrize("before_the_end", [True, False])
def test_an_update_behind_the_last_record_keeps_no_later_owner_from_ending(
    run_async, before_the_end
):
    async def scenario() -> None:
        lab = Lab(sections={"run": {"steps": 8}})
        lab.bus = bus = LateBus()
        lab.context = replace(lab.context, bus=bus)
        await lab.create()
        await lab.join("a")

        async def announce() -> None:
            await lab.announce(lab.upload("a"))

        if before_the_end:
            bus.late = announce
        work = asyncio.ensure_future(aggregate(lab.context))
        await announce()
        await bus.run_ended.wait()
        # The owner still waits for the answer to its last record, and reads on meanwhile.
        if not before_the_end:
            await announce()
        await asyncio.sleep(0.1)
        bus.answers.set()
        async with asyncio.timeout(PATIENCE_S):
            await work
        newest, newest_seq = await lab.newest()
        (end,) = await lab.on_tape(names.end(RUN))
        # Its verdict may stand behind the end, with a position that does not.
        assert newest.position <= end
        assert before_the_end == (newest_seq > end)
        async with asyncio.timeout(LATER_S):
            await aggregate(lab.context)

    run_async(scenario())
