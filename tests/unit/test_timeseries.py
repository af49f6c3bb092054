"""The tape as columns: what the history of the same tape says, without its garbage."""

import asyncio

import numpy as np
import pytest
from records import make_input, make_record
from runlab import RUN, Lab

from bench.tapes import Forger
from diloco.aggregator.owner.committer import NOTHING
from diloco.common.process.config import RunSettings
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import Recorded
from diloco.run.history import History, read_history
from diloco.run.observed import Observed
from diloco.run.timeseries import Columns, TimeSeries, read_time_series


def test_a_table_has_columns() -> None:
    table = Columns("a", "b")
    assert (len(table), table["b"].size) == (0, 0)
    table.add(1, 2)
    table.add(3, 4)
    column = table["b"]
    table.add(5, 6)  # A column that was given out does not keep the table from growing.
    assert (column.tolist(), len(table)) == ([2, 4], 3)


def read(lab: Lab) -> TimeSeries:
    return asyncio.run(read_time_series(lab.context, 0.0))


@pytest.fixture
def forged() -> Lab:
    """A run of 60 versions of two fragments: updates are rejected, a learner is killed twice."""
    lab = Lab(fragments=2)

    async def forge() -> None:
        await lab.create()
        forger = Forger(lab.context, ["a", "b", "c"], rejected_one_in=9, killed_one_in=25)
        await forger.forge(60)

    asyncio.run(forge())
    return lab


def test_what_a_learner_claims_is_not_shown_as_merged() -> None:
    taken = make_input(tokens=10**15, tokens_credited=800)
    totals = NOTHING.model_copy(update={"tokens_merged": 10**15, "tokens_credited": 800})
    record = make_record(version=1, inputs=(taken,), totals=totals)
    observed = Observed("lab", 0, RunSettings.model_validate({"run": {"name": "lab", "steps": 9}}))
    observed.note_record(Recorded(record, 2, 0.0))
    shown = observed.run(1.0)
    assert shown.tokens_merged == 800
    assert {one.tokens for one in shown.learners} == {800}


def test_it_says_what_the_history_says(forged: Lab) -> None:
    series = read(forged)
    history: History = asyncio.run(read_history(forged.context))
    inputs = [taken for record in history.all_records() for taken in record.inputs]
    rejected = [taken for record in history.all_records() for taken in record.rejected]
    assert len(series.updates) == len(history.sent())
    assert len(series.inputs) == len(inputs) > 100
    assert len(series.refusals) == len(series.refused) == len(rejected) > 5
    assert sum(series.refusal_reasons.values()) == len(rejected)
    assert series.inputs["tokens"].sum() == sum(taken.tokens_credited for taken in inputs)
    assert series.inputs["staleness"].sum() == sum(taken.staleness for taken in inputs)
    waits_s = [
        history.times_s[seq] - taken.announced_at_s
        for seq, record in history.in_order()
        for taken in record.inputs
    ]
    assert series.inputs["wait_s"].tolist() == pytest.approx(waits_s)
    assert sorted(series.learners) == ["a", "b", "c"]
    assert len(series.lives) == len(history.joins) == 5
    assert series.tokens_merged() == series.inputs["tokens"].sum() / 2
    assert len(series.cosines) > 10
    rounds = series.rounds
    of_round = np.bincount(series.inputs["round"].astype(int))
    assert of_round.tolist() == rounds["inputs"].tolist()


def test_an_update_that_is_announced_again_counts_once(forged: Lab) -> None:
    async def repeat() -> None:
        history = await read_history(forged.context)
        _, manifest = history.manifests[-1]
        again = manifest.model_copy(update={"attempt": 1})
        subject = names.update(RUN, manifest.learner, manifest.fragment)
        await forged.bus.publish(subject, wire.encode(again))

    before = len(read(forged).updates)
    asyncio.run(repeat())
    assert len(read(forged).updates) == before


def test_garbage_is_counted_and_passed_over(forged: Lab) -> None:
    async def spoil() -> None:
        await forged.bus.publish(names.update(RUN, "a", 0), b"\x00rubbish")
        join = wire.Join(run=RUN, learner="b", layout="0" * 32, host="here")
        await forged.bus.publish(names.join(RUN, "a"), wire.encode(join))

    asyncio.run(spoil())
    series = read(forged)
    assert series.garbage == 2
    assert len(series.lives) == 5


def test_words_of_operators_are_events(forged: Lab) -> None:
    async def speak() -> None:
        settings = forged.context.settings.model_dump()
        for subject, body in (
            (names.quarantine(RUN, "a"),
             wire.Quarantine(run=RUN, learner="a", active=True, reason="odd", by="operator")),
            (names.settings(RUN),
             wire.Settings(run=RUN, settings=settings, changed=("sync.block: 8 -> 16",), by="test")),
            (names.stop(RUN), wire.Stop(run=RUN, global_step=24, reason="steps", by="operator ada@hut")),
        ):  # fmt: skip
            await forged.bus.publish(subject, wire.encode(body))

    asyncio.run(speak())
    said = [(event.by, event.what) for event in read(forged).events][-3:]
    assert said == [
        ("operator", "a quarantined: odd"),
        ("test", "settings changed: sync.block: 8 -> 16"),
        ("operator ada@hut", "stop at global step 24 (steps)"),
    ]


def test_a_trimmed_tape_says_so_and_keeps_its_sums(forged: Lab) -> None:
    whole = read(forged)

    async def trim() -> None:
        for fragment in range(2):
            await forged.bus.trim(forged.context.tape, names.record(RUN, fragment), 150)

    asyncio.run(trim())
    series = read(forged)
    assert series.trimmed
    assert not whole.trimmed
    assert len(series.rounds) < len(whole.rounds)
    assert series.tokens_merged() == whole.tokens_merged()


def test_a_run_in_which_nothing_has_happened() -> None:
    lab = Lab()
    asyncio.run(lab.create())
    series = read(lab)
    assert (len(series.updates), len(series.rounds), series.learners) == (0, 0, [])
    assert len(series.versions) == 1
    assert series.begins_s <= series.ends_s
