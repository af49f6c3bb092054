"""Where a run ends on the tape, each owner of a fragment ends there, also one that begins later."""

import asyncio
from dataclasses import replace

from runlab import PATIENCE_S, RUN, Lab

from diloco.aggregator.daemon import aggregate
from diloco.common.protocol import names
from diloco.common.storage.bus import MemoryBus


class LateBus(MemoryBus):
    """A bus that answers an owner's last record only once `answers` is set."""

    def __init__(self, run_ended: asyncio.Event, answers: asyncio.Event) -> None:
        super().__init__()
        self.run_ended, self.answers = run_ended, answers

    async def publish(self, subject: str, payload: bytes, **options) -> int:
        seq = await super().publish(subject, payload, **options)
        if subject == names.end(RUN):
            self.run_ended.set()
        stopped = await self.last(names.tape_stream(RUN), names.stop(RUN))
        if stopped and subject == names.record(RUN, 0):
            await self.answers.wait()
        return seq


def test_an_update_behind_the_end_keeps_no_later_owner_from_ending(run_async):
    async def scenario() -> None:
        lab = Lab(sections={"run": {"steps": 8}})
        lab.bus = LateBus(asyncio.Event(), asyncio.Event())
        lab.context = replace(lab.context, bus=lab.bus)
        await lab.create()
        await lab.join("a")
        work = asyncio.ensure_future(aggregate(lab.context))
        await lab.announce(lab.upload("a"))
        await lab.bus.run_ended.wait()
        # The owner still waits for the answer to its last record, and reads on meanwhile.
        await lab.announce(lab.upload("a"))
        await asyncio.sleep(0.1)
        lab.bus.answers.set()
        async with asyncio.timeout(PATIENCE_S):
            await work
            newest, _ = await lab.newest()
            (end,) = await lab.on_tape(names.end(RUN))
            assert newest.position <= end
            await aggregate(lab.context)

    run_async(scenario())
