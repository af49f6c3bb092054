"""Decisions made again, under the same rules and under others, of a run within this process."""

import asyncio

import numpy as np
import pytest
from runlab import RUN, Lab

from diloco.aggregator.rollback import find_versions, roll_back
from diloco.aggregator.settings import change_settings
from diloco.common.protocol import names, shards
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.tape import effective_settings
from diloco.judge.audit import ObjectsReport
from diloco.judge.remake_and_compare import remake
from diloco.replay import whatif
from diloco.replay.decide import decide
from diloco.replay.verify_run import VerifyProgress, chains, verify
from diloco.run.history import History, read_history

WHOLE = {"enabled": False}


def play(story, *, fragments: int = 1, **gc) -> tuple[Lab, History]:
    """A lab's run by a story, and its history after it."""

    async def run() -> tuple[Lab, History]:
        lab = Lab(fragments=fragments, **(gc or WHOLE))
        await lab.create()
        await story(lab)
        return lab, await read_history(lab.context)

    return asyncio.run(asyncio.wait_for(run(), 300))


async def eventful(lab: Lab) -> None:
    """Two learners, differently sharded, a damaged update, a new aggregator, a rollback ..."""
    lab.scattered.add("b")
    async with lab.aggregating():
        for learner in ("a", "b"):
            await lab.join(learner)
        await lab.send_many("a", 4)
        manifest = lab.upload("b")
        lab.damage(manifest.shards[0])
        await lab.announce(manifest)
        await lab.answered(manifest)
        await lab.send_many("b", 2)
    async with lab.aggregating():
        await lab.send_many("a", 3)
        settings, _ = await effective_settings(lab.context)
        outer = settings.outer.model_copy(update={"learning_rate": 0.25})
        await change_settings(lab.context, settings.model_copy(update={"outer": outer}))
        await lab.send_many("b", 3)
        targets = await find_versions(lab.context, {0: 5})
        await roll_back(lab.context, targets)
        await lab.send_many("a", 3)


def outcomes(history: History, fragment: int = 0) -> list[str]:
    return [made.outcome for made in decide(history, fragment, history.records[fragment])]


def test_every_decision_comes_out_again():
    _, history = play(eventful)
    found = outcomes(history)
    assert set(found) == {"same"}
    assert len(found) == sum(r.what in ("version", "verdict") for r in history.all_records()) - 1
    assert {taken.reason for taken in history.rejected().values()} == {"checksum"}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("reason", lambda record: "deadline"),
        ("position", lambda record: record.position + 1),
        ("opened_at_s", lambda record: record.opened_at_s - 1),
        ("learning_rate", lambda record: record.learning_rate * 2),
        ("policy", lambda record: record.policy.model_copy(update={"floor": 9})),
        ("inputs", lambda record: ()),
    ],
)
def test_a_record_that_says_something_else_is_shown(field, change):
    _, history = play(eventful)
    seq, record = history.records[0][4]
    changed = record.model_copy(update={field: change(record)})
    history.records[0][4] = (seq, changed)
    found = list(decide(history, 0, history.records[0]))
    # What was recorded is what the next one is decided from, so that it may differ too.
    different, *_ = [made for made in found if made.outcome == "different"]
    assert different.record_seq == seq
    assert field in {name for name, _, _ in different.fields}
    # What follows is decided from what was recorded, as soon as that is enough.
    assert found[-1].outcome == "same"


def test_an_observation_that_is_missing_is_noticed():
    _, history = play(eventful)
    seq, record = history.records[0][3]
    history.records[0][3] = (seq, record.model_copy(update={"observations": ()}))
    assert outcomes(history)[2] == "different"


async def collected(lab: Lab) -> None:
    async with lab.aggregating():
        await lab.join("a")
        await lab.send_many("a", 12)
        await lab.until(lambda: trimmed(lab), "the tape is trimmed")


async def trimmed(lab: Lab) -> bool:
    return (await lab.on_tape(names.record(RUN, 0)))[0] > 5


def test_a_tape_that_was_trimmed_is_followed_from_where_it_can_be():
    _, history = play(collected, replay_window_s=0.0)
    found = outcomes(history)
    assert "different" not in found
    assert found[-1] == "same"
    made = verify(history, chains(history, [0], None, {}), VerifyProgress(None, history))
    assert not made.differences
    assert made.versions.again >= 3


def test_verify_begins_at_a_stored_state_and_ends_where_it_is_told():
    _, history = play(eventful)
    whole = chains(history, [0], None, {})[0]
    (part,) = chains(history, [0], 5, {0: whole[9][0]}).values()
    assert part[0][1].version == 3
    assert part[-1] == whole[9]
    found = verify(history, {0: part}, VerifyProgress(None, history), keep_views=True)
    assert not found.differences
    assert shards.digest(found.views[0]) == part[-1][1].view_digest
    with pytest.raises(ConfigError, match="no view is stored"):
        chains(history, [0], -1, {})
    # The doctor's way through the same versions.
    objects = ObjectsReport()
    remake(history, objects)
    assert not objects.breaches


# What if


def played(history: History, *assignments: str):
    """The plan, and all views at the end of both models, without a task to evaluate."""
    plan = whatif.make_plan(history, chains(history, [0], None, {}), assignments)
    models = whatif._Models(history, plan)
    for at in plan.chains[0][1:]:
        models.follow(*at)
    for made in plan.rounds:
        models.make(made)
    return plan, models.was[0].view, models.would[0].view


async def plain(lab: Lab) -> None:
    async with lab.aggregating():
        await lab.join("a")
        await lab.join("b")
        for _ in range(4):
            await lab.send("a")
            await lab.send("b")


def test_what_if_is_exact_for_settings_of_the_outer_step():
    """A run that had the other setting from the beginning makes the same bits of the same
    updates."""
    _, history = play(plain)
    rate = history.settings.outer.learning_rate
    plan, was, would = played(history, "outer.learning_rate=0.3")
    assert len(plan.rounds) == 8
    newest = history.records[0][-1][1]
    assert shards.digest(was) == newest.view_digest
    start = np.ones_like(was)
    # Plain outer descent moves in proportion to its rate, up to rounding.
    np.testing.assert_allclose((would - start) / 0.3, (was - start) / rate, rtol=1e-3, atol=1e-5)
    assert "learners do not react" in plan.sentences[0]
    assert not plan.decided


def test_what_if_nothing_were_another_is_what_was():
    """The same setting once more through the other path gives every bit again."""
    _, history = play(plain)
    plan, was, would = played(history, "staleness.power=0.75")
    assert np.array_equal(was, would)  # Nothing was stale: no discount differs.
    plan, was, would = played(history, "bounds.norm_clip=99")
    assert plan.decided
    assert len(plan.rounds) == 8
    assert np.array_equal(was, would)


def test_what_if_the_quorum_were_larger():
    _, history = play(plain)
    plan, was, would = played(history, "quorum.min_learners=2")
    assert [len(made.admitted) for made in plan.rounds] == [2, 2, 2, 2]
    assert not np.array_equal(was, would)


def test_what_if_another_optimizer_begins_afresh():
    _, history = play(plain)
    _, was, would = played(history, "outer.optimizer=nesterov", "outer.momentum=0.5")
    assert not np.array_equal(was, would)


def test_what_if_goes_back_with_a_rollback():
    _, history = play(eventful)
    plan, was, _ = played(history, "outer.learning_rate=0.1")
    assert shards.digest(was) == history.records[0][-1][1].view_digest
    assert any("rollback" in sentence for sentence in plan.sentences)

    # On one time line, as the command goes: what was at a version stands again behind it.
    line = [(made.at_s, 0, made) for made in plan.rounds]
    line += [(at[1].closed_at_s, 1, at) for at in plan.chains[0][1:]]
    models, views, back = whatif._Models(history, plan), {}, []
    for _, kind, item in sorted(line, key=lambda at: at[:2]):
        if kind == 0:
            models.make(item)
            if item.restored_version is not None:
                back.append(np.array_equal(models.would[0].view, views[item.restored_version]))
        else:
            models.follow(*item)
            views[item[1].version] = models.would[0].view.copy()
    assert back == [True]


def test_what_if_refuses_what_learners_would_have_done_otherwise():
    _, history = play(plain)
    for assignment in ("sync.interval_steps=16", "run.steps=9"):
        with pytest.raises(ConfigError, match="cannot be replayed"):
            played(history, assignment)
    with pytest.raises(ConfigError, match="lr"):
        played(history, "outer.lr=0.9")


def test_what_if_of_the_runs_own_settings_is_what_was():
    _, history = play(plain)
    _, was, would = played(history, "outer.learning_rate=0.9")
    assert shards.digest(would) == shards.digest(was) == history.records[0][-1][1].view_digest


def test_what_if_says_what_was_collected():
    _, history = play(collected, replay_window_s=0.0)
    plan, was, _ = played(history, "outer.learning_rate=0.1")
    assert any("earlier versions stay as recorded" in sentence for sentence in plan.sentences)
    assert shards.digest(was) == history.records[0][-1][1].view_digest
