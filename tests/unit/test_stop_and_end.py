"""When a run stops: once every fragment has what the newest settings ask for."""

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from runlab import RUN, Lab

from diloco.aggregator import settings
from diloco.aggregator.owner.committer import IgnoredMessages
from diloco.aggregator.owner.recovery import recover
from diloco.aggregator.owner.tenure import Tenure, decode_message
from diloco.aggregator.stop_and_end import Conductor, NewestRecord, stop_reason
from diloco.common.process.config import RunSettings
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.storage.bus import MemoryBus
from diloco.common.storage.tape import effective_settings, messages_up_to

STEPS = 16


@given(st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(1, 300))
def test_a_run_of_tokens_stops_once_every_fragment_has_them(credited, wanted):
    rules = RunSettings.model_validate(
        {"run": {"name": "r", "steps": 1 << 30, "tokens": wanted}, "sync": {"fragments": 4}}
    )
    newest = {
        fragment: NewestRecord(version=1, record_seq=1, global_step=0, tokens=tokens, final=False)
        for fragment, tokens in enumerate(credited)
    }
    enough = all(tokens >= wanted for tokens in credited)
    assert stop_reason(rules, newest) == ("tokens" if enough else None)


class Passed(MemoryBus):
    """Notes up to which message its reader has dealt with the tape."""

    passed_seq = 0

    async def read(self, stream, subjects, start):
        async for message in super().read(stream, subjects, start):
            yield message
            self.passed_seq = message.seq


def test_the_newest_settings_alone_decide_and_decide_at_once(run_async, monkeypatch):
    """Nobody served the run while it was shortened to what it has, and lengthened again."""
    # As if the last records came between an operator's look at them and the change.
    monkeypatch.setattr(settings, "_check_length", looked_before)

    async def scenario() -> None:
        lab = Lab(sections={"run": {"steps": 1 << 30}})
        await lab.create()
        await lab.join("a")
        async with lab.aggregating():
            while (await lab.newest())[0].global_step < STEPS:
                await lab.send("a")
        for steps in (STEPS, 1 << 20):
            await set_steps(lab, steps)
        _, settings_seq = await effective_settings(lab.context)
        bus = Passed(lab.bus.broker)
        conducting = asyncio.create_task(Conductor(replace(lab.context, bus=bus)).conduct())

        async def is_read() -> bool:
            return bus.passed_seq >= settings_seq

        async def is_stopped() -> bool:
            return bool(await lab.on_tape(names.stop(RUN)))

        await lab.until(is_read, "a conductor that knows the tape")
        assert not await is_stopped()
        await set_steps(lab, STEPS)
        await lab.until(is_stopped, "the stop of a run that is complete")
        await cancel(conducting)

    run_async(scenario())


def test_a_run_that_was_lengthened_meanwhile_is_not_stopped(run_async, monkeypatch):
    """The conductor was cut off when the change came, behind the record that it reads now."""
    monkeypatch.setattr(settings, "_check_length", looked_before)

    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        await lab.join("a")
        async with lab.aggregating():
            while (await lab.newest())[0].global_step < STEPS:
                await lab.send("a")
        await set_steps(lab, 1 << 20)
        document = lab.context.settings.model_dump()
        document["run"]["steps"] = STEPS
        conductor = Conductor(replace(lab.context, settings=RunSettings.model_validate(document)))
        record, record_seq = await lab.newest()
        conductor._note(wire.word_of(record), record_seq)
        assert not await conductor._decide()
        assert not await lab.on_tape(names.stop(RUN))
        await set_steps(lab, STEPS)
        assert not await conductor._decide()
        assert not await lab.on_tape(names.stop(RUN))
        conductor._settings = conductor.context.settings
        await conductor._decide()
        assert await lab.on_tape(names.stop(RUN))

    run_async(scenario())


def test_a_fragments_owner_keeps_the_newest_settings_though_it_reads_older_ones(run_async):
    """It reads from its record's position on, behind which both may stand."""

    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        await lab.join("a")
        async with lab.aggregating():
            for rate in (0.25, 0.5):
                await set_value(lab, "outer", "learning_rate", rate)
            while (await lab.send("a")).learning_rate != 0.5:
                pass
        context = lab.context
        recovered = await recover(context, 0)
        ignored = IgnoredMessages(context, 0, context.logger)
        tenure = Tenure(context, recovered, ignored, lambda: None, lambda: False)
        last = await context.bus.last(context.tape, names.settings(RUN))
        rates = []
        async for message in messages_up_to(context, [names.settings(RUN)], last.seq):
            change = decode_message(context, 0, message)
            await tenure._change(change)
            rates.append((change.settings.outer.learning_rate, tenure._arrays.settings.outer))
        assert [(read, kept.learning_rate) for read, kept in rates] == [(0.25, 0.5), (0.5, 0.5)]

    run_async(scenario())


async def looked_before(*_args) -> None:
    pass


async def set_steps(lab: Lab, steps: int) -> None:
    await set_value(lab, "run", "steps", steps)


async def set_value(lab: Lab, section: str, key: str, value: float) -> None:
    now, seq = await effective_settings(lab.context)
    document = now.model_dump()
    document[section][key] = value
    await settings.change_settings(lab.context, RunSettings.model_validate(document), based_on=seq)
