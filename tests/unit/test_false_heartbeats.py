"""Heartbeats are a learner's word of itself: any figure may be false, and nobody else is the worse."""

import asyncio
import io
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
from rich.console import Console
from runlab import RUN, Lab
from test_false_health import ask, beat, said, say

from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.storage.tape import decode_as
from diloco.run.learner_history import LearnerHistory
from diloco.run.state import RunStatus
from diloco.run.timeseries import read_time_series
from diloco.run.watch import Watch
from diloco.show.page import html_sections
from diloco.show.page.following import LiveRun
from diloco.show.page.lanes import make_lanes
from diloco.show.page.numbers import Shown
from diloco.show.page.summary import facts, metrics
from diloco.show.status.screen import picture
from diloco.show.trackers.follow import Points, Tracker

LIAR, HONEST = "liar", "well"
GREATEST = (1 << 63) - 1
# What the wire takes of each figure, at its worst.
WORST: dict[str, dict[str, Any]] = {
    "greatest": {
        "local_step": GREATEST, "global_step": GREATEST, "tokens": GREATEST, "loss": 1e308,
        "tokens_per_s": 1e15, "step_time_s": 1e12, "stall_s": 1e12, "data_s": 1e12, "run_s": 1e-300,
        "bytes_up": GREATEST, "bytes_down": GREATEST, "updates_sent": GREATEST,
        "metrics": {f"m{index}": -1e308 for index in range(64)},
    },
    "least": {
        "local_step": 0, "global_step": 0, "tokens": 0, "loss": -1e308, "tokens_per_s": 5e-324,
        "step_time_s": 0.0, "stall_s": 5e-324, "data_s": 0.0, "run_s": 5e-324, "bytes_up": 0,
        "bytes_down": 0, "updates_sent": 0,
    },
    "words": {"state": "[red]left[/] island-a " * 80, "trouble": "well is to be revoked " * 80},
}  # fmt: skip
REFUSED: dict[str, dict[str, Any]] = {
    "no number": {"loss": math.nan}, "no end": {"tokens_per_s": math.inf}, "below": {"tokens": -1},
    "a step of the end of time": {"step_time_s": 1e308}, "too much": {"tokens_per_s": 1e308},
    "beyond": {"bytes_down": 1 << 63}, "no figure": {"metrics": {"m": math.nan}},
    "another's name": {"learner": HONEST}, "no life": {"incarnation": 0},
    "many figures": {"metrics": {f"m{index}": 0.0 for index in range(65)}},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_heartbeat_says_is_no_heartbeat(case: str) -> None:
    fields = beat(LIAR, 5).model_dump() | REFUSED[case]
    payload = msgpack.packb(fields | {"schema": wire.SCHEMA, "kind": "heartbeat"})
    with pytest.raises(WireError):
        decode_as(wire.Heartbeat, names.heartbeat(RUN, LIAR), payload)


async def both(**fields: Any) -> Lab:
    """A run of an honest learner and one that says this of itself; its life is its own by default."""
    lab = Lab()
    await lab.create()
    async with lab.aggregating():
        for name in (HONEST, LIAR):
            await lab.join(name)
            await lab.send(name)
    await say(lab, names.heartbeat(RUN, HONEST), beat(HONEST, lab.lives[HONEST]))
    lie = beat(LIAR, fields.pop("incarnation", lab.lives[LIAR]), **fields)
    await say(lab, names.heartbeat(RUN, LIAR), lie)
    return lab


def shown_of(status: RunStatus) -> str:
    json.dumps(asdict(status), allow_nan=False)
    console = Console(file=io.StringIO(), width=200)
    console.print(picture(status))
    return console.file.getvalue()


@pytest.mark.parametrize("case", WORST)
def test_whoever_looks_at_the_run_sees_it_whatever_one_learner_says(case: str) -> None:
    async def work() -> tuple[RunStatus, Shown, dict[str, str]]:
        lab = await both(**WORST[case])
        page = LiveRun(lab.context, 0.0, goes_on=False)
        following = asyncio.ensure_future(page.follow())
        while (status := await page.status()) is None:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)
        await cancel(following)
        shown = page.shown()
        parts = html_sections.now(status, page.series) | html_sections.figures(shown)
        parts["learners"] = html_sections.Learners(shown, status)(0, "")
        series = await read_time_series(lab.context, 0.0)
        return status, Shown(series, make_lanes(series)), parts

    status, shown, parts = ask(work())
    assert HONEST in shown_of(status)
    assert HONEST in parts["learners"]
    assert max(map(len, parts.values())) < 200_000
    assert [one for one in status.alerts if one.about == f"learner {HONEST}"] == []
    (well,) = [one for one in status.learners if one.name == HONEST]
    assert (well.state, well.loss, well.tokens_per_s) == ("training", 1.0, 10.0)
    assert facts(shown)
    metrics(shown)
    assert {severity for severity, _ in said(status.findings, f"learner {HONEST}")} == {"ok"}
    for _, sentence in said(status.findings, f"learner {LIAR}"):
        # A sentence of its own making is told as its own, and is not long.
        assert len(sentence) < 700
        if "well is to be revoked" in sentence:
            assert sentence.startswith("says: ")


def unjoined_of(life: Callable[[Lab], int]) -> tuple[RunStatus, list[tuple[str, str]]]:
    async def work() -> tuple[RunStatus, list[tuple[str, str]]]:
        lab = Lab()
        await lab.create()
        async with lab.aggregating():
            for name in (HONEST, LIAR):
                await lab.join(name)
                await lab.send(name)
        await say(lab, names.heartbeat(RUN, HONEST), beat(HONEST, lab.lives[HONEST]))
        await say(lab, names.heartbeat(RUN, LIAR), beat(LIAR, life(lab)))
        status = await Watch(lab.context).begin()
        found = [one for one in status.findings if "never joined" in one.sentence]
        assert {*status.unjoined} == {one.about.removeprefix("learner ") for one in found}
        return status, said(found, f"learner {LIAR}")

    result: tuple[RunStatus, list[tuple[str, str]]] = ask(work())
    return result


def test_a_life_that_never_joined_counts_for_nothing() -> None:
    status, found = unjoined_of(lambda _: 10**12)
    assert [one.state for one in status.learners if one.name == LIAR] == ["silent"]
    assert any("never joined" in one.sentence for one in status.alerts)
    assert [severity for severity, _ in found] == ["warning"]
    # On a tape that was read to its end, of one whose number is another message's too.
    _, found = unjoined_of(lambda lab: lab.lives[LIAR] + 1)
    assert [severity for severity, _ in found] == ["warning"]
    status, found = unjoined_of(lambda lab: lab.lives[LIAR])
    assert found == []
    assert [one.state for one in status.learners if one.name == LIAR] == ["training"]


def test_ten_thousand_lives_take_the_memory_of_one() -> None:
    known = LearnerHistory()
    known.hear(beat(LIAR, 1, bytes_down=5, run_s=2.0, stall_s=1.0), 0.0)
    for life in range(2, 10_001):
        known.hear(beat(LIAR, life, bytes_down=1, run_s=2.0, stall_s=1.0), 0.0)
    # One that a newer has superseded goes on, and adds nothing.
    known.hear(beat(LIAR, 7, bytes_down=GREATEST), 0.0)
    assert known.spent == (10_004, 10_000.0, 20_000.0)
    assert sys.getsizeof(known._earlier) < 200


def test_a_step_of_a_learners_making_does_not_end_a_trackers_axis() -> None:
    points = Points()
    points.reached(40)
    assert points.of_heartbeat(beat(LIAR, 5, global_step=GREATEST), 1.0).step == 40
    assert points.of_heartbeat(beat(HONEST, 4, global_step=39), 1.0).step == 39


def test_a_tracker_knows_how_far_the_run_is_before_it_hears_anybody() -> None:
    written: list[Any] = []

    class Sink:
        def write(self, point: Any) -> None:
            written.append(point)

        def close(self) -> None:
            pass

    async def work() -> int:
        lab = await both(global_step=GREATEST)
        await Tracker(lab.context, [Sink()]).follow(once=True)
        return (await lab.newest())[0].global_step

    newest = asyncio.run(asyncio.wait_for(work(), 300))
    assert max(point.step for point in written) <= newest
