"""A run that one learner spoils while it goes on: found, put out and gone back, as the pages say."""

import json

import pytest
from audit import read_tape
from harness import ENDLESS, World, eventually
from night import Night

from diloco.common.process import log

pytestmark = pytest.mark.slow

HONEST = ("island-a", "island-b", "island-d")
CULPRIT = "island-c"
# Of the culprit, and of versions before it comes.
VERDICTS = {"labels": "harmful", "rate": "harmful"}
COMES_AT = {"labels": 4, "rate": 4}
ROUNDS = 40


@pytest.fixture
def night(new_world, own_nats_server, monkeypatch, tmp_path) -> Night:
    """A run of honest learners that goes on."""
    monkeypatch.setattr(log, "configure", lambda _level: None)
    monkeypatch.chdir(tmp_path)
    world = new_world(
        server=own_nats_server,
        run=ENDLESS,
        task={
            "build": "spoiling_task:build", "options": {"notes": "notes", "sleep_s": 0.03},
        },
        outer={"learning_rate": 0.5, "momentum": 0.5},
        bounds={"norm_clip": 10.0},
        quorum={"min_learners": 4, "deadline_s": 20.0, "liveness_timeout_s": 30.0, "grace_cap_s": 1.0},
    )  # fmt: skip
    world.aggregator()
    return Night(world, own_nats_server)


def spoil(world: World, how: str) -> None:
    """Have the culprit join, and its updates merged in rounds with those of the others."""
    path = world.variant("culprit", {"learner": {"options": {"spoiled": how}}})
    for name in HONEST:
        world.learner(name)
    world.until(lambda: min(read_tape(world).versions()) >= COMES_AT[how], "versions")
    world.start(CULPRIT, "learner", "--config", str(path), "--learner", CULPRIT)

    def merged() -> bool:
        rounds = [
            record for record in read_tape(world).all_records()
            if len({one.learner for one in record.inputs}) == 1 + len(HONEST)
        ]  # fmt: skip
        return len(rounds) >= ROUNDS

    world.until(merged, "rounds of all four", every_s=1.0)


def held_out(night: Night, *options: str) -> float:
    said = night.run(["evaluate", night.places["RUN"], "--json", *options])
    assert said.status == 0, said.text
    return float(json.loads(said.text.splitlines()[-1])["loss"])


@pytest.mark.parametrize("how", VERDICTS)
def test_the_culprit_is_put_out_while_the_run_goes_on(night, how, tmp_path, monkeypatch):
    world, run = night.world, night.places["RUN"]
    spoil(world, how)
    # Pictures are drawn where the operator is.
    monkeypatch.chdir(tmp_path)
    # Who is it? On a copy, as the page says, of a run that goes on.
    copy = str(tmp_path / "run.bundle")
    night.do("debug-with-replay", "diloco bundle RUN BUNDLE", BUNDLE=copy)
    said = night.do("debug-with-replay", "diloco replay RUN --blame", RUN=copy)
    assert CULPRIT in said
    said = night.run(["replay", copy, "--blame", "--json"]).text
    # On a busy machine the command tells first how far it is.
    blamed = json.loads(said[said.index("{") :])["learners"]
    assert [
        (one["learner"], one["conclusion"]) for one in blamed if one["conclusion"] != "helpful"
    ] == [(CULPRIT, VERDICTS[how])]
    since = blamed[0]["since"]
    place = f"{since['fragment']}@{since['version']}"
    assert CULPRIT in night.do("debug-with-replay", "diloco show RUN WHAT", RUN=copy, WHAT=place)
    first = min(
        record.version
        for record in read_tape(world).all_records()
        for one in record.inputs
        if one.learner == CULPRIT
    )
    before = str(max(0, min(first, since["version"]) - 1))
    good, spoilt = held_out(night, "--version", before), held_out(night)
    # Out with it, and back to what was before.
    page = "rejected-updates"
    night.do("loss-spike", "diloco run quarantine RUN NAME", NAME=CULPRIT)
    assert "checkpoint" in night.do(page, "diloco run checkpoint RUN")
    back_at = read_tape(world).last_seq
    back = night.run(["run", "rollback", run, "--to", before, "--yes"])
    assert back.status == 0, back.text
    # The run goes on, without it and from there; and is soon as good as before.
    reached = max(read_tape(world).versions()) + 4
    world.until(lambda: min(read_tape(world).versions()) >= reached, "versions", every_s=1.0)
    # Honest steps alone scatter by more than what the best moment of a spoiled run was below that.
    eventually(lambda: held_out(night) <= good, f"{good:.4f} again, from {spoilt:.4f}", every_s=2.0)
    tape = read_tape(world)
    after = [record for seq, record in tape.in_order() if seq > back_at]
    assert {one.learner for record in after for one in record.inputs} == {*HONEST}
    assert {one.learner for record in after for one in record.rejected if one.reason == "quarantined"} == {
        CULPRIT
    }  # fmt: skip
    assert "is quarantined" in night.do(page, "diloco status RUN --learners")
    world.stop()
    world.until(lambda: read_tape(world).end, "the end", every_s=0.5)
    read_tape(world).check(hostile=[CULPRIT])
