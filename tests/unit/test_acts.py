"""Acts of operators on a run: longer, paused, ended, each on the tape with their name."""

import asyncio

import pytest
from runlab import RUN, Lab

from diloco.aggregator.rollback import find_versions
from diloco.aggregator.settings import change_settings, check_change, end_run
from diloco.common.process.config import RunSettings
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError, RunMismatchError
from diloco.common.storage.tape import Entry, effective_settings, load_specification, read_tape
from diloco.judge.oracle import Oracle
from diloco.run.history import act_of

SHORT = {"run": {"name": RUN, "steps": 16}}


def play(story, **sections) -> Lab:
    """A lab after a story."""

    async def run() -> Lab:
        lab = Lab(sections=sections or SHORT, enabled=False)
        await lab.create()
        await story(lab)
        return lab

    return asyncio.run(asyncio.wait_for(run(), 300))


async def changed(lab: Lab, **run: object) -> list[str]:
    now, _ = await effective_settings(lab.context)
    document = now.model_dump()
    document["run"] |= run
    return await change_settings(lab.context, RunSettings.model_validate(document))


def acts(lab: Lab) -> list[tuple[str, str]]:
    """Returns (operator, act) of each act on the tape."""

    async def read() -> list[tuple[str, str]]:
        items = [item async for item in read_tape(lab.context)]
        found = [act_of(item.body, 0.0) for item in items if isinstance(item, Entry)]
        return [(act.by, act.what) for act in found if act is not None and act.by]

    return asyncio.run(read())


def judged(lab: Lab) -> list[str]:
    """Returns the oracle's findings on the tape."""

    async def read() -> list[str]:
        specification = await load_specification(lab.bus, RUN)
        oracle = Oracle(specification, lab.context.layout)
        async for item in read_tape(lab.context):
            oracle.take(item)
        return [finding.sentence for finding in oracle.findings]

    return asyncio.run(read())


def test_a_run_is_made_longer_while_it_goes_on_and_stops_at_its_new_end() -> None:
    async def story(lab: Lab) -> None:
        async with lab.aggregating():
            await lab.join("a")
            await lab.send("a")
            assert await changed(lab, steps=32) == ["run.steps: 16 -> 32"]
            record = await lab.send_many("a", 3)
            assert record.global_step == 32

            async def stopped() -> bool:
                return bool(await lab.on_tape(names.stop(RUN)))

            await lab.until(stopped, "the run stops at its new end")

    lab = play(story)
    assert acts(lab)[0] == ("aggregator", "settings changed: run.steps: 16 -> 32")
    assert acts(lab)[1] == ("aggregator", "stop at global step 32 (steps)")
    assert judged(lab) == []


def test_a_run_that_is_made_as_short_as_it_is_stops_without_another_record() -> None:
    async def story(lab: Lab) -> None:
        async with lab.aggregating():
            await lab.join("a")
            await lab.send_many("a", 2)
            with pytest.raises(ConfigError, match="goes to step 24"):
                await changed(lab, steps=17)
            assert await changed(lab, steps=24)
            assert (await lab.send("a")).global_step == 24

            async def stopped() -> bool:
                return bool(await lab.on_tape(names.stop(RUN)))

            await lab.until(stopped, "the run stops")

    assert judged(play(story, run={"name": RUN, "steps": 1000})) == []


def test_a_run_is_ended_early_and_does_not_go_on() -> None:
    async def story(lab: Lab) -> None:
        async with lab.aggregating():
            await lab.join("a")
            await lab.send("a")
            assert await end_run(lab.context, "operator") == 8
            now, _ = await effective_settings(lab.context)
            looked_at = check_change(lab.context, now, now)  # what a preview asks first
            for refused in (end_run(lab.context, "operator"), changed(lab, steps=99), looked_at):
                with pytest.raises(RunMismatchError, match="has stopped"):
                    await refused

    lab = play(story)
    assert acts(lab)[0] == ("aggregator", "stop at global step 8 (operator)")
    assert judged(lab) == []


def test_a_version_that_was_not_made_yet_is_no_old_one() -> None:
    async def story(lab: Lab) -> None:
        with pytest.raises(ConfigError, match="which has 0 to 0") as caught:
            await find_versions(lab.context, {0: 99})
        assert caught.value.hint == "choose a version of these"

    play(story)


def test_a_pause_is_told_by_its_name() -> None:
    async def story(lab: Lab) -> None:
        await changed(lab, paused=True)
        await changed(lab, paused=False)
        await changed(lab, paused=True, steps=32)

    assert [what for _, what in acts(play(story))] == [
        "paused",
        "continued",
        "settings changed: run.steps: 16 -> 32; run.paused: False -> True",
    ]


def test_what_another_operator_has_changed_meanwhile_is_not_changed_back() -> None:
    async def two(lab: Lab) -> None:
        mine, seq = await effective_settings(lab.context)
        assert await changed(lab, steps=32) == ["run.steps: 16 -> 32"]
        document = mine.model_dump()
        document["run"] |= {"paused": True}
        with pytest.raises(RunMismatchError, match="another operator"):
            await change_settings(lab.context, RunSettings.model_validate(document), based_on=seq)
        now, _ = await effective_settings(lab.context)
        assert (now.run.steps, now.run.paused) == (32, False)

    play(two)
