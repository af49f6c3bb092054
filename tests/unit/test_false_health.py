"""Each sentence that says that something is well, and the run of which it must not be said."""

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
from runlab import RUN, Lab

from diloco.aggregator.settings import change_settings
from diloco.common.process.config import RunSettings
from diloco.common.process.health import Health
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import read_tape
from diloco.judge import doctor_findings
from diloco.judge.audit import Audit, Breach, audit
from diloco.run.health_findings import (
    DISK_FULL,
    NO_LEARNERS,
    PATIENCE,
    configuration,
    judged,
    patience_s,
)
from diloco.run.history import History, read_history
from diloco.run.model.evaluate import keep, read_scores
from diloco.run.observed import Observed
from diloco.run.state import Finding, RunStatus
from diloco.run.watch import Watch

MINUTE_S = 60.0
UPHILL = "the inner optimizer's first step goes uphill"


def ask(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 300))


def beat(learner: str, incarnation: int, **fields: Any) -> wire.Heartbeat:
    return wire.Heartbeat.model_validate(
        {
            "learner": learner, "incarnation": incarnation, "local_step": 8, "global_step": 8,
            "tokens": 80, "loss": 1.0, "tokens_per_s": 10.0, "step_time_s": 0.1, "stall_s": 0.0,
            "run_s": 1.0, "bytes_up": 0, "bytes_down": 0, "updates_sent": 1, "state": "training",
        }
        | fields
    )  # fmt: skip


async def say(lab: Lab, subject: str, body: wire.Body) -> None:
    await lab.bus.publish(subject, wire.encode(body))


async def leave(lab: Lab, learner: str) -> None:
    word = wire.Leave(
        run=RUN, learner=learner, incarnation=lab.lives[learner], position=0, fragments=()
    )
    await say(lab, names.leave(RUN, learner), word)


async def stop(lab: Lab) -> None:
    await say(lab, names.stop(RUN), wire.Stop(run=RUN, global_step=1, reason="steps", by="test"))


async def played(story: Callable[[Lab], Coroutine[Any, Any, None]]) -> Lab:
    """A run to which this happens, beside a learner "well" of which one is merged."""
    lab = Lab()
    await lab.create()
    async with lab.aggregating():
        await lab.join("well")
        await lab.send("well")
        await story(lab)
    return lab


async def observed(lab: Lab) -> Observed:
    """Its tape, as whoever looks at the run knows it; without heartbeats."""
    found = Observed(RUN, 0, lab.context.settings)
    found.from_start = True
    async for item in read_tape(lab.context):
        found.take(item)
    return found


def observed_of(story: Callable[[Lab], Coroutine[Any, Any, None]]) -> Observed:
    async def read() -> Observed:
        return await observed(await played(story))

    found: Observed = ask(read())
    return found


def history_of(story: Callable[[Lab], Coroutine[Any, Any, None]]) -> History:
    async def read() -> History:
        return await read_history((await played(story)).context)

    found: History = ask(read())
    return found


def told(seen: Observed, later_s: float = 0.0) -> list[Finding]:
    """Returns the findings on the run, so long after its last message."""
    run = seen.run(seen.extent.last_s + later_s)
    return [*judged(run, seen.settings)]


def about(
    seen: Observed, learner: str, later_s: float = 0.0, **fields: Any
) -> list[tuple[str, str]]:
    """Returns the findings on a learner that has just sent a heartbeat of these fields."""
    now_s = seen.extent.last_s + later_s
    life = fields.pop("incarnation", seen.known[learner].joined)
    seen.hear(beat("well", seen.known["well"].joined), now_s)
    seen.hear(beat(learner, life, **fields), now_s)
    found = told(seen, later_s)
    assert {severity for severity, _ in said(found, "learner well")} == {"ok"}
    return said(found, f"learner {learner}")


def said(found: Iterable[Finding], subject: str) -> list[tuple[str, str]]:
    return [(one.severity, one.sentence) for one in found if one.about == subject]


async def _joins(lab: Lab) -> None:
    await lab.join("odd")
    await lab.send("well")


# A learner "has left", "took part to the end", "trains"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_learner_that_an_error_has_ended_is_told_of_as_that(*, stopped: bool) -> None:
    async def story(lab: Lab) -> None:
        await _joins(lab)
        if stopped:
            await stop(lab)

    found = about(observed_of(story), "odd", state="failed", trouble=UPHILL)
    assert found == [("warning", f"an error has ended it: {UPHILL}")]


def test_who_sent_nothing_that_was_merged_has_not_simply_left() -> None:
    async def leaves(lab: Lab) -> None:
        await _joins(lab)
        await leave(lab, "odd")

    seen = observed_of(leaves)
    assert about(seen, "odd") == [("note", "has left, and nothing of it was merged")]


def test_who_was_rejected_throughout_has_not_simply_left() -> None:
    async def leaves(lab: Lab) -> None:
        await lab.join("odd")
        for _ in range(3):
            manifest = lab.upload("odd").model_copy(update={"layout": "0" * 32})
            await lab.announce(manifest)
            await lab.answered(manifest)
        await leave(lab, "odd")

    ((severity, sentence),) = about(observed_of(leaves), "odd")
    assert (severity, sentence) == (
        "warning", "3 of its last 3 updates were rejected: layout 3"
    )  # fmt: skip


def test_a_superseded_process_that_goes_on_is_told_of_when_the_newer_one_has_left() -> None:
    async def leaves(lab: Lab) -> None:
        await lab.join("odd")
        await _joins(lab)
        await lab.send("odd")
        await leave(lab, "odd")

    seen, history = observed_of(leaves), history_of(leaves)
    first, newest = history.lives("odd")
    ((severity, sentence),) = about(seen, "odd", 5.0, incarnation=first)
    assert severity == "warning"
    assert "the earlier process is superseded" in sentence
    assert about(seen, "odd", incarnation=newest) == [("ok", "has left")]


def test_who_joined_when_no_record_came_any_more_did_not_take_part_to_the_end() -> None:
    async def joins_late(lab: Lab) -> None:
        await stop(lab)
        await lab.join("odd")

    ((severity, _),) = about(observed_of(joins_late), "odd")
    assert severity == "note"


def test_who_has_not_taken_a_step_or_hangs_does_not_train() -> None:
    seen = observed_of(_joins)
    assert about(seen, "odd", state="starting") == [("note", "does not train: starting")]
    now_s = [100.0]
    health = Health(clock=lambda: now_s[0])
    health.turned()
    assert health.line() == ""
    now_s[0] += 90.0
    hangs = "the main loop has not turned for 90 s"
    assert health.line() == hangs
    assert about(seen, "odd", trouble=health.line()) == [("warning", f"says: {hangs}")]


# `diloco status`


def status_of(story: Callable[[Lab], Coroutine[Any, Any, None]]) -> RunStatus:
    async def look() -> RunStatus:
        lab = await played(story)
        for name, life in lab.lives.items():
            if name != "odd":
                await say(lab, names.heartbeat(RUN, name), beat(name, life))
        return await Watch(lab.context).begin()

    found: RunStatus = ask(look())
    return found


def state_in(status: RunStatus, learner: str) -> str:
    return next(one.state for one in status.learners if one.name == learner)


def test_status_shows_a_learner_that_an_error_has_ended_as_failed() -> None:
    async def fails(lab: Lab) -> None:
        life = await lab.join("odd")
        last = beat("odd", life, state="failed", trouble=UPHILL)
        await say(lab, names.heartbeat(RUN, "odd"), last)

    status = status_of(fails)
    assert state_in(status, "odd") == "failed"
    assert said(status.alerts, "learner odd") == [("warning", f"an error has ended it: {UPHILL}")]


def test_who_has_left_and_joined_again_has_not_left() -> None:
    async def returns(lab: Lab) -> None:
        await _joins(lab)
        await leave(lab, "odd")
        await lab.send("well")
        await lab.join("odd")

    status = status_of(returns)
    assert state_in(status, "odd") == "silent"
    assert said(status.alerts, "learner odd")
    assert {one.name: one.live for one in status.learners} == {"well": True, "odd": None}


def test_a_run_that_everybody_has_left_is_not_under_way() -> None:
    async def leaves(lab: Lab) -> None:
        await leave(lab, "well")

    status = status_of(leaves)
    assert status.state == "waiting for learners"
    ((severity, sentence),) = said(status.findings, "fragments")
    assert (severity, sentence.partition(":")[0]) == ("ok", "waiting for learners")


def test_who_left_with_its_last_update_was_there_for_the_round() -> None:
    async def leaves(lab: Lab) -> None:
        version = (await lab.newest())[0].version
        await lab.announce(lab.upload("well"))
        await leave(lab, "well")

        async def merged() -> bool:
            return (await lab.newest())[0].version > version

        await lab.until(merged, "its last update")

    status = status_of(leaves)
    (fragment,) = status.fragments
    assert (fragment.round_updates, fragment.live_learners) == (1, 1)


# A run without learners


def nobody(story: Callable[[Lab], Coroutine[Any, Any, None]], later_s: float) -> list[Finding]:
    """Returns the findings on the fleet, so long after the last message."""
    seen = observed_of(story)
    seen.hear(beat("well", seen.known["well"].joined), seen.extent.last_s)
    return [one for one in told(seen, later_s) if one.about == "learners"]


async def _nothing(_lab: Lab) -> None:
    pass


async def _well_leaves(lab: Lab) -> None:
    await leave(lab, "well")


async def _paused(lab: Lab) -> None:
    document = lab.context.settings.model_dump()
    document["run"] |= {"paused": True}
    await change_settings(lab.context, RunSettings.model_validate(document))


def test_a_run_whose_learners_are_all_gone_is_not_well() -> None:
    assert nobody(_nothing, 0.0) == []
    (silent,) = nobody(_nothing, MINUTE_S)
    assert (silent.severity, silent.runbook) == ("error", NO_LEARNERS)
    (left,) = nobody(_well_leaves, 0.0)
    assert (left.severity, left.runbook) == ("warning", NO_LEARNERS)
    assert nobody(_paused, MINUTE_S) == []
    assert nobody(stop, MINUTE_S) == []


def test_status_says_that_no_learner_is_there() -> None:
    status = status_of(_well_leaves)
    assert [one.runbook for one in status.alerts if one.about == "learners"] == [NO_LEARNERS]
    status = status_of(_nothing)
    assert said(status.alerts, "learners") == []


# A fragment, the tape, the rules, the configuration


def test_a_run_that_was_stopped_and_never_ends_is_not_stopping_for_ever() -> None:
    seen = observed_of(stop)
    longest_s = patience_s(seen.settings)
    ((_, sentence),) = said(told(seen, longest_s), "fragments")
    assert sentence.startswith("stopping: ")
    ((severity, sentence),) = said(told(seen, longest_s + MINUTE_S), "fragments")
    assert severity == "error"
    assert "no end is on the tape" in sentence


def test_a_tape_to_which_nothing_comes_while_learners_train_is_not_well() -> None:
    seen = observed_of(_joins)
    each_s = PATIENCE * seen.settings.sync.interval_steps * 0.1
    longest_s = patience_s(seen.settings) + each_s

    def of_tape(after_s: float, **fields: Any) -> list[Finding]:
        seen.hear(beat("well", 10**6, **fields), seen.extent.last_s + after_s)
        return [one for one in told(seen, after_s) if one.about == "tape"]

    assert of_tape(longest_s - 1) == []
    assert of_tape(longest_s + 1, state="starting") == []
    (finding,) = of_tape(longest_s + 1)
    assert (finding.severity, finding.runbook) == ("error", DISK_FULL)


def test_decisions_that_could_not_be_followed_do_not_follow_from_the_rules() -> None:
    (followed,) = doctor_findings.rules(Audit(deep=True, followed=7, unknown=2, remade=3))
    (unknown,) = doctor_findings.rules(Audit(deep=True, unknown=2))
    assert (followed.severity, unknown.severity) == ("ok", "note")


def test_settings_that_were_changed_are_judged_and_not_those_of_the_file() -> None:
    async def changes(lab: Lab) -> None:
        settings = lab.context.settings.model_dump(mode="json")
        settings["outer"]["participation"] = True
        word = wire.Settings(
            run=RUN, settings=settings, changed=("outer.participation",), by="test"
        )
        await say(lab, names.settings(RUN), word)

    history = history_of(changes)
    file = [*configuration(history.settings)]
    found = [*configuration(history.in_force)]
    assert {one.severity for one in found} == {"warning"}
    assert len(found) > len([one for one in file if one.severity != "ok"])


# A score that somebody made better


def test_a_kept_score_that_was_edited_is_none() -> None:
    async def edits() -> tuple[list[float], list[float]]:
        lab = Lab()
        await lab.create()
        score = wire.Score(
            run=RUN, epoch=0, versions=(0,), record_seqs=(2,), global_step=0, tokens=0, at_s=1.0,
            loss=9.5,
        )  # fmt: skip
        await keep(lab.context, score)
        before = [one.loss for one in await read_scores(lab.context)]
        (name,) = lab.objects(names.scores_prefix(RUN))
        lab.store.delete(name)
        lab.store.put(name, wire.encode(score.model_copy(update={"loss": 0.5})))
        return before, [one.loss for one in await read_scores(lab.context)]

    assert ask(edits()) == ([9.5], [])


# Whoever was there when a run ended has sent all that it had


@pytest.mark.parametrize("in_time", [True, False])
def test_whom_the_end_overtook_has_broken_nothing(*, in_time: bool) -> None:
    async def ends(lab: Lab) -> None:
        await _joins(lab)
        await stop(lab)
        word = wire.Leave(
            run=RUN, learner="odd", incarnation=lab.lives["odd"], position=3, fragments=()
        )
        record, seq = await lab.newest()
        end = wire.End(run=RUN, versions=(record.version,), record_seqs=(seq,))
        said = [(names.leave(RUN, "odd"), word), (names.end(RUN), end)]
        for subject, body in said if in_time else said[::-1]:
            await say(lab, subject, body)

    broken = [
        one.what
        for one in audit(history_of(ends)).breaches
        if one.where.startswith("learner odd fragment 0")
    ]
    assert len(broken) == in_time
    assert all(what.endswith("position: expected 3, found 0") for what in broken)


# A newest record, of which no record behind it has the digest


@functools.cache
def five_versions() -> History:
    """A tape of versions 0 to 5 with stored states of 0 and 3."""

    async def sends_more(lab: Lab) -> None:
        await lab.send_many("well", 4)

    return history_of(sends_more)


def breaches_if(index: int, change: Callable[[wire.Record], wire.Record]) -> list[Breach]:
    """Returns the audit's breaches if one record of the five versions were another."""
    history = five_versions()
    chain: Any = history.records[0]
    seq, record = chain[index]
    chain[index] = (seq, change(record))
    try:
        return audit(history).breaches
    finally:
        chain[index] = (seq, record)


def but(**fields: Any) -> Callable[[wire.Record], wire.Record]:
    return lambda record: record.model_copy(update=fields)


def of(version: int) -> wire.Record:
    return five_versions().records[0][version][1]


def with_input(**fields: Any) -> Callable[[wire.Record], wire.Record]:
    """The record with other fields of its first input."""

    def change(record: wire.Record) -> wire.Record:
        inputs = (record.inputs[0].model_copy(update=fields), *record.inputs[1:])
        return record.model_copy(update={"inputs": inputs})

    return change


LIES: dict[str, Callable[[wire.Record], wire.Record]] = {
    "an old view": lambda record: but(snapshot=of(0).snapshot)(record),
    "an old view, and its version": lambda record: but(
        snapshot=of(0).snapshot,
        snapshot_version=0,
        deltas=tuple(of(version).delta for version in range(1, 6)),
    )(record),
    "an old outer state": lambda record: but(outer=of(0).outer)(record),
    "an old outer state, and its version": lambda record: but(
        outer=of(0).outer, outer_version=0, outer_seq=five_versions().records[0][0][0]
    )(record),
    "another record's outer state": but(outer_seq=1),
    "an outer state that it committed itself": but(outer_seq=0),
    "the view as the outer state": lambda record: but(outer=record.snapshot)(record),
    "a view of the version that is the one before": lambda record: but(
        snapshot_version=5, outer_version=5, outer_seq=0, deltas=()
    )(record),
    "no delta": but(delta=None),
    "an old delta": lambda record: but(delta=of(4).delta)(record),
    "an old delta, in its list too": lambda record: but(
        delta=of(4).delta, deltas=(of(4).delta, of(4).delta)
    )(record),
    "a list that ends with an old delta": lambda record: but(
        deltas=(*record.deltas[:-1], of(4).delta)
    )(record),
    "a list in another order": lambda record: but(deltas=record.deltas[::-1])(record),
    "another loss": with_input(loss=0.5),
    "another codec": with_input(codec="int4"),
    "more steps than were claimed": with_input(steps_credited=9),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_the_newest_record_says_of_stored_state_is_not_believed(lie: str) -> None:
    assert breaches_if(-1, but()) == []
    assert breaches_if(-1, LIES[lie])


def restored(**fields: Any) -> Callable[[wire.Record], wire.Record]:
    """The record as a rollback to version 3 with these fields."""

    def own(ref: wire.ObjectRef) -> wire.ObjectRef:
        return ref.model_copy(update={"name": ref.name.replace("/00000003-", "/00000005-")})

    def change(record: wire.Record) -> wire.Record:
        source, before = of(3), of(4)
        said = {
            "what": "restore", "restored_version": 3, "inputs": (), "delta": None, "deltas": (),
            "snapshot": own(source.snapshot), "snapshot_version": 5, "outer": own(source.outer),
            "outer_version": 5, "outer_seq": 0, "view_digest": source.view_digest,
            "outer_digest": source.outer_digest, "global_step": source.global_step,
            "position": before.position, "totals": before.totals,
            "policy": before.policy.model_copy(update={"floor": 5}),
        }  # fmt: skip
        return record.model_copy(update=said | fields)

    return change


@pytest.mark.parametrize("field", ["outer_digest", "view_digest", "global_step"])
def test_a_rollback_goes_back_to_all_of_a_version(field: str) -> None:
    assert breaches_if(-1, restored()) == []
    assert breaches_if(-1, restored(**{field: getattr(of(2), field)}))


def test_the_record_that_committed_an_outer_state_is_not_taken_on_trust() -> None:
    """Its sequence is in no digest: whoever recovers merges again from there on."""
    assert breaches_if(-2, but(outer_seq=1))
    assert breaches_if(3, but(outer_seq=1))


# An aggregator takes nobody for live who has said that it is over


def test_the_last_word_of_a_life_is_no_sign_of_life() -> None:
    """However often it comes: who fails again and again must not hold up those that train."""

    async def run() -> None:
        lab = Lab(sections={"quorum": {"liveness_timeout_s": 0.5}})
        await lab.create()
        async with lab.aggregating():
            await lab.join("well")
            await lab.join("odd")

            async def both_speak() -> None:
                while True:
                    for name, state in (("well", "training"), ("odd", "failed")):
                        word = beat(name, lab.lives[name], state=state)
                        await say(lab, names.heartbeat(RUN, name), word)
                    await asyncio.sleep(0.02)

            speaking = asyncio.ensure_future(both_speak())

            async def only_one_is_live() -> bool:
                record = await lab.send("well")
                return {one.learner for one in record.policy.members if one.live} == {"well"}

            try:
                await lab.until(only_one_is_live, "the other counts as gone")
            finally:
                await cancel(speaking)

    ask(run())


# What is dropped unread of a learner that is shut out is no fault of the aggregator's


def test_of_who_is_shut_out_updates_may_be_left_behind() -> None:
    """A rejection counts ten times against the limit of its rate: it is soon over it."""

    async def run() -> History:
        lab = Lab(sections={"bounds": {"max_updates_per_s": 1.0}})
        await lab.create()
        async with lab.aggregating():
            await lab.join("odd")
            await lab.join("well")
            await lab.send("well")
            word = wire.Quarantine(
                run=RUN, learner="odd", active=True, reason="test", by="operator me"
            )
            await say(lab, names.quarantine(RUN, "odd"), word)
            refused = await lab.send("odd")
            assert [one.reason for one in refused.rejected] == ["quarantined"]
            await lab.announce(lab.upload("odd"))
            await lab.send_many("well", 2)
        return await read_history(lab.context)

    history: History = ask(run())
    assert len(history.announced(0)) == 5
    assert history.records[0][-1][1].position > history.announced(0)[2][0]
    assert audit(history).breaches == []
