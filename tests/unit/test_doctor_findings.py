"""The doctor's findings on learners, clocks and owners, from runs in memory."""

import asyncio
import dataclasses
import time
from collections.abc import Coroutine
from io import StringIO
from typing import Any

import pytest
from records import make_input, make_member, make_record
from rich.console import Console
from runlab import RUN, Lab

from diloco.common.process.config import RunSettings
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import Recorded
from diloco.judge import doctor_findings
from diloco.judge.audit import audit
from diloco.judge.doctor import without_repeats
from diloco.run.health_findings import CLOCK_SKEW, FRAGMENT_STOPPED, clock, judged
from diloco.run.history import History, read_history
from diloco.run.observed import Observed
from diloco.run.state import Finding
from diloco.show.status.screen import picture


def ask(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 300))


def beat(learner: str, incarnation: int) -> wire.Heartbeat:
    return wire.Heartbeat(
        learner=learner, incarnation=incarnation, local_step=8, global_step=8, tokens=80,
        loss=1.0, tokens_per_s=10.0, step_time_s=0.1, stall_s=0.0, run_s=1.0, bytes_up=0,
        bytes_down=0, updates_sent=1, state="training",
    )  # fmt: skip


async def read(lab: Lab) -> tuple[History, Observed]:
    """Its tape, for who audits it and for who looks at the run."""
    seen = Observed(RUN, 0, lab.context.settings)
    seen.from_start = True
    return await read_history(lab.context, seen.take), seen


def of_learner(seen: Observed, learner: str) -> list[Finding]:
    """Findings on one learner that was heard of just now."""
    now_s = time.time()
    for name in ("fast", learner):
        seen.hear(beat(name, seen.known[name].joined), now_s)
    return about(seen, f"learner {learner}", now_s)


def about(seen: Observed, subject: str, now_s: float = 0.0) -> list[Finding]:
    found = judged(seen.run(now_s), seen.settings)
    return [finding for finding in found if finding.about == subject]


def test_a_learner_whose_updates_are_stale() -> None:
    async def run() -> tuple[History, Observed]:
        # However the time goes by between two updates, nobody is credited less for it.
        said = {"max_steps_per_s": 1e9, "max_tokens_per_step": 1 << 20}
        lab = Lab(sections={"bounds": {"learners": {"fast": said, "slow": said}}})
        await lab.create()
        async with lab.aggregating():
            await lab.join("fast")
            await lab.join("slow")
            first, _ = await lab.newest()
            await lab.send_many("fast", 6)
            for _ in range(4):
                manifest = lab.upload("slow").model_copy(
                    update={"base_version": 0, "base_digest": first.view_digest}
                )
                subject = names.update(RUN, "slow", 0)
                await lab.bus.publish(subject, wire.encode(manifest))
                await lab.answered(manifest)
        return await read(lab)

    history, seen = ask(run())
    (finding,) = of_learner(seen, "slow")
    assert finding.severity == "warning"
    assert "7.5 versions old" in finding.sentence
    (finding,) = of_learner(seen, "fast")
    assert finding.severity == "ok", finding
    assert not audit(history).breaches


def test_a_learner_whose_updates_are_rejected() -> None:
    async def run() -> tuple[History, Observed]:
        lab = Lab()
        await lab.create()
        async with lab.aggregating():
            await lab.join("fast")
            await lab.join("odd")
            await lab.send("fast")
            for _ in range(3):
                manifest = lab.upload("odd").model_copy(update={"layout": "0" * 32})
                await lab.announce(manifest)
                await lab.answered(manifest)
        return await read(lab)

    history, seen = ask(run())
    (finding,) = of_learner(seen, "odd")
    assert finding.severity == "warning"
    assert "3 of its last 3 updates were rejected: layout 3" in finding.sentence
    assert finding.advice == "layout: not the run's layout"
    assert finding.runbook == "runbooks/run-mismatch.md"
    account = audit(history).account
    assert (account.sent, account.merged, account.rejected) == (4, 1, 3)

    # No learner can know that the last version was made while its update was on the way.
    recent = seen.known["odd"].recent
    for index, answer in enumerate(recent):
        recent[index] = answer._replace(reason="ended")
    assert "warning" not in {finding.severity for finding in of_learner(seen, "odd")}


@pytest.mark.parametrize(("ahead_s", "severity"), [(5.0, "warning"), (60.0, "error")])
def test_an_aggregator_whose_clock_is_ahead(ahead_s: float, severity: str) -> None:
    async def run() -> History:
        lab = Lab()
        await lab.create()
        runtime = Runtime(clock=lambda: time.time() + ahead_s)
        lab.context = dataclasses.replace(lab.context, runtime=runtime)
        async with lab.aggregating():
            await lab.join("fast")
            await lab.send_many("fast", 2)
        return await read_history(lab.context)

    (finding,) = doctor_findings.aggregator_clocks(ask(run()))
    assert finding.severity == severity
    assert finding.runbook == CLOCK_SKEW


def test_clocks_that_agree_and_a_clock_that_is_behind() -> None:
    assert clock("clock", 0.4, 10.0).severity == "ok"
    behind = clock("clock", -20.0, 10.0)
    assert (behind.severity, "behind" in behind.sentence) == ("error", True)


def lease(name: str, state: str) -> wire.Lease:
    return wire.Lease.model_validate(
        {
            "aggregator": name,
            "life": "0" * 32,
            "state": state,
            "ttl_s": 5.0,
            "pinned": None,
            "refuses": (),
        }
    )


def test_owners() -> None:
    async def run() -> Observed:
        lab = Lab(fragments=3)
        await lab.create()
        await lab.join("fast")
        return (await read(lab))[1]

    seen = ask(run())
    seen.leases = {0: lease("one", "held"), 1: lease("two", "held"), 2: lease("one", "held")}
    (finding,) = about(seen, "owners")
    assert (finding.severity, finding.sentence) == ("ok", "fragments are owned by one 2, two 1")
    seen.leases = {0: lease("one", "held"), 1: lease("two", "released")}
    (finding,) = about(seen, "owners")
    assert (finding.severity, finding.runbook) == ("warning", FRAGMENT_STOPPED)
    assert "fragment 1, 2" in finding.sentence


async def _said(lab: Lab, subject: str, body: wire.Body) -> None:
    await lab.bus.publish(subject, wire.encode(body))


def test_a_learner_that_is_shut_out_is_not_well_whatever_else_it_does() -> None:
    """The learner beats, and later it has left: in both cases nothing of it was merged."""

    async def run() -> list[Observed]:
        lab = Lab()
        await lab.create()
        async with lab.aggregating():
            await lab.join("fast")
            life = await lab.join("odd")
            word = wire.Quarantine(run=RUN, learner="odd", active=True, reason="norms", by="agg")
            await _said(lab, names.quarantine(RUN, "odd"), word)
            await lab.send("fast")
            _, beating = await read(lab)
            leave = wire.Leave(run=RUN, learner="odd", incarnation=life, position=0, fragments=())
            await _said(lab, names.leave(RUN, "odd"), leave)
            await lab.send("fast")
        return [beating, (await read(lab))[1]]

    for seen in ask(run()):
        (finding,) = of_learner(seen, "odd")
        assert (finding.severity, finding.sentence) == ("warning", "is quarantined: norms")
        assert finding.runbook == "runbooks/quarantined-learner.md"
        (finding,) = of_learner(seen, "fast")
        assert finding.severity == "ok"


def test_heartbeats_of_a_superseded_life_do_not_make_the_newer_one_well() -> None:
    async def run() -> tuple[Observed, int]:
        lab = Lab()
        await lab.create()
        async with lab.aggregating():
            await lab.join("fast")
            life = await lab.join("twice")
            await lab.join("twice")
            await lab.send("fast")
        return (await read(lab))[1], life

    seen, first = ask(run())
    now_s = time.time()
    seen.hear(beat("twice", first), now_s)
    seen.hear(beat("fast", 10**6), now_s)
    found = about(seen, "learner twice", now_s)
    assert {finding.severity for finding in found} == {"warning"}
    assert f"is of incarnation {first}, but" in found[0].sentence
    assert "silent" in found[1].sentence


def test_who_was_silent_when_the_run_stopped_did_not_take_part_to_the_end() -> None:
    async def run() -> Observed:
        lab = Lab()
        await lab.create()
        async with lab.aggregating():
            await lab.join("fast")
            await lab.join("dead")
            await lab.send("fast")
            await _said(
                lab, names.stop(RUN), wire.Stop(run=RUN, global_step=1, reason="steps", by="test")
            )
        _, seen = await read(lab)
        record = seen.records[0].record
        members = tuple(
            one.model_copy(update={"live": one.learner == "fast"}) for one in record.policy.members
        )
        policy = record.policy.model_copy(update={"members": members})
        changed = record.model_copy(update={"policy": policy})
        seen.records[0] = seen.records[0]._replace(record=changed)
        return seen

    seen = ask(run())
    (finding,) = of_learner(seen, "dead")
    assert (finding.severity, finding.sentence) == ("note", "was silent when the run stopped")
    (finding,) = of_learner(seen, "fast")
    assert (finding.severity, finding.sentence) == ("ok", "took part to the end")


def test_what_two_looks_find_is_said_once_as_the_worse() -> None:
    note, error, other = (
        Finding(severity=severity, about=about, sentence="there is no store")
        for severity, about in (("note", "store"), ("error", "store"), ("note", "bus"))
    )
    assert without_repeats([note, other, error, note]) == [error, other]


def waited(*waits_s: float, steps_per_s: float = 2.0, before: int = 0) -> Observed:
    """A round of learners whose updates waited so long, after some in which they waited little."""
    who = [f"learner-{index}" for index in range(len(waits_s))]
    policy = make_record().policy.model_copy(
        update={"members": tuple(make_member(name, steps_per_s) for name in who)}
    )
    inputs = tuple(
        make_input(learner=name, announced_at_s=1000.0 - wait_s)
        for name, wait_s in zip(who, waits_s, strict=True)
    )
    seen = Observed("lab", 0, RunSettings.model_validate({"run": {"name": "lab", "steps": 9}}))
    for at in range(before):
        quick = tuple(one.model_copy(update={"announced_at_s": 999.9}) for one in inputs)
        record = make_record(version=1 + at, inputs=quick, policy=policy)
        seen.note_record(Recorded(record, 2 + at, 1000.0))
    record = make_record(version=1 + before, inputs=inputs, policy=policy)
    seen.note_record(Recorded(record, 2 + before, 1000.0))
    return seen


def test_updates_that_waited_once_for_an_aggregator_are_no_warning() -> None:
    seen = waited(120.0, 130.0, before=20)
    (finding,) = about(seen, "rounds", 1001.0)
    assert finding.severity == "ok", finding
    assert "260.0 at worst" in finding.sentence


# An interval is 24 steps of the run.
@pytest.mark.parametrize(
    ("waits_s", "steps_per_s", "severity"),
    [((0.6, 3.0), 2.0, "ok"), ((9.0, 18.0), 2.0, "warning"), ((0.5, 0.9), 50.0, "ok")],
    ids=["within an interval", "past an interval", "messages alone"],
)
def test_updates_that_wait_for_longer_than_an_interval(
    waits_s: tuple[float, ...], steps_per_s: float, severity: str
) -> None:
    seen = waited(*waits_s, steps_per_s=steps_per_s)
    (finding,) = about(seen, "rounds", 1001.0)
    assert finding.severity == severity, finding
    mean, worst = steps_per_s * sum(waits_s) / 2, steps_per_s * max(waits_s)
    assert f"{mean:.1f} steps of their learners on average" in finding.sentence
    assert f"{worst:.1f} at worst" in finding.sentence
    assert (finding.runbook is not None) == (severity == "warning")


def test_waits_and_delays_are_shown_of_each_and_of_all() -> None:
    seen = waited(0.5, 1.5)
    said = {"delay_s": 2.0, "worst_delay_s": 3.0, "delay_steps": 4.0, "worst_delay_steps": 6}
    said |= {f"{key.replace('delay', 'adoption')}": value / 2 for key, value in said.items()}
    seen.hear(beat("learner-0", 1).model_copy(update=said), 1000.0)
    seen.hear(beat("learner-1", 1), 1000.0)
    run = seen.run(1001.0)
    assert run.wait == (1.0, 1.5, 2.0, 3.0)
    assert [one.wait for one in run.learners] == [(0.5, 0.5, 1.0, 1.0), (1.5, 1.5, 3.0, 3.0)]
    assert [one.delay for one in run.learners] == [(2.0, 3.0, 4.0, 6.0), None]
    assert run.delay == (2.0, 3.0, 4.0, 6.0)
    assert [one.adoption for one in run.learners] == [(1.0, 1.5, 2.0, 3.0), None]
    assert run.adoption == (1.0, 1.5, 2.0, 3.0)
    console = Console(width=160, record=True, file=StringIO())
    console.print(picture(run))
    shown = " ".join(console.export_text().split())
    assert "updates wait 2.0 steps (1.0 s), 3.0 at worst" in shown
    assert "answers after 4.0 steps (2.0 s), 6.0 at worst" in shown
    assert "versions adopted after 2.0 steps (1.0 s), 3.0 at worst (1.5 s)" in shown
