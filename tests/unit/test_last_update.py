"""The last update before a round's cut is told once the tape is read up to it."""

import asyncio

import structlog
from runlab import Lab

from diloco.aggregator.owner.tenure import LastUpdate
from diloco.common.process.tasks import Tasks


def test_a_cut_is_told_once_the_tape_is_read_up_to_it(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        read_seq = await lab.join("a")
        await lab.announce(lab.upload("a"))
        last_seq = await lab.bus.last_sequence(lab.context.tape)
        told: list[int] = []

        async def answer(seq: int) -> None:
            told.append(seq)

        tasks = Tasks()
        last = LastUpdate(lab.context, 0, read_seq, answer, tasks, structlog.get_logger())
        last.ask()

        async def answered() -> bool:
            return last._wanted == last_seq or bool(told)

        await lab.until(answered, "the leader's answer")
        await last.passed(last_seq - 1)
        assert told == []
        await last.passed(last_seq)
        # Once, however much is read after it.
        await last.passed(last_seq + 1)
        assert told == [last_seq]
        await tasks.stop()

    run_async(scenario())


def test_where_no_update_was_announced_nothing_is_waited_for(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def answer(seq: int) -> None:
            told.set_result(seq)

        tasks = Tasks()
        LastUpdate(lab.context, 0, 1, answer, tasks, structlog.get_logger()).ask()
        assert await told == 0
        await tasks.stop()

    run_async(scenario())
