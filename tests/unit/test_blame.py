"""Learners that did harm, and the time and place of it, found in runs spoiled in known ways."""

import asyncio
import io
import json
import re
import shutil
from statistics import median

import pytest
import spoiled
from rich.console import Console

from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.wire import WHOLE
from diloco.common.storage.store.protocol import KEPT
from diloco.judge.doctor import examine, show
from diloco.replay import blame, blame_screen, verify_run
from diloco.replay.diff import run_diff
from diloco.replay.modes import run_replay
from diloco.replay.options import Options
from diloco.replay.show import run_show
from diloco.run.cli.opening import RunLocation, open_run, use_place
from diloco.run.history import read_history

KINDS = ("labels", "rate unclipped", "noise")


class Runs(dict):
    """A run of each kind in one store, made when it is asked for; "" is honest.

    "rate unclipped" has no bound of norms.
    """

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, kind):
        how, *unclipped = kind.split(" ")
        store = self.folder / "-".join(["store", *unclipped])
        clip = {"norm_clip": 1e9} if unclipped else {}
        self[kind] = spoiled.make_run(self.folder / f"of{kind}", how, store=store, **clip)
        return self[kind]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("spoiled"))


@pytest.fixture
def asked(runs, capsys):
    def ask(kind, *, store=None, status=0, **options):
        use_place(RunLocation(None, str(store or runs[kind].store)))
        # Its making is logged to the same output.
        capsys.readouterr()
        console = Console(file=io.StringIO(), width=200)
        assert run_replay(str(runs[kind].tape), Options(**options), console) == status
        return capsys.readouterr().out if options.get("json") else console.file.getvalue()

    yield ask
    use_place(RunLocation())


@pytest.mark.parametrize("kind", KINDS)
def test_the_bad_learner_is_named_with_its_first_bad_update(asked, kind):
    found = json.loads(asked(kind, blame=True, json=True))
    first, *others = found["learners"]
    assert (first["learner"], [one["conclusion"] for one in others]) == (
        spoiled.CULPRIT,
        ["helpful"] * 3,
    )
    # Of all their updates, and not of a stretch in which they did little: no harm to be read there.
    assert all(one["alone"] < 0 for one in others)
    # Of so little noise as this nobody is sure: by its direction its sender is named (`test_fleet`).
    assert first["conclusion"] == ("unclear" if kind == "noise" else "harmful")
    if kind != "noise":
        # Version 0 is the first parameters: the first spoiled round makes this one.
        assert first["since"]["version"] == spoiled.SPOILED_FROM[kind.split()[0]] + 1
        worst = max(found["updates"], key=lambda one: one["did"])
        assert (worst["learner"], worst["did"] > 0) == (spoiled.CULPRIT, True)
        assert {one["tensor"] for one in found["tensors"]} <= {"first", "bias", "second"}


def test_nobody_is_blamed_for_an_honest_run(asked, tmp_path):
    text = asked("", blame=True, plot=tmp_path / "blame.html")
    assert "no learner did" in text
    assert "harmful" not in text
    assert "useless" not in text
    assert "harmful" not in text
    assert "useless" not in text
    assert (tmp_path / "blame.html").stat().st_size > 1000


@pytest.mark.parametrize(("kind", "told"), [("step", True), ("", False)])
def test_an_outer_step_that_ruins_the_model_is_told_by_the_doctor(runs, kind, told, capsys):
    use_place(RunLocation(None, str(runs[kind].store)))
    try:
        report = asyncio.run(examine(str(runs[kind].tape), deep=True))
    finally:
        use_place(RunLocation())
    found = [one for one in report.findings if one.about == "held-out loss"]
    assert bool(found) == told
    assert not told or "outer.learning_rate" in found[0].advice
    assert not [one for one in report.findings if "points elsewhere" in one.sentence]
    capsys.readouterr()
    show(report, Console(width=200))
    text = capsys.readouterr().out
    assert "has no errors, but look at its warnings" in text
    assert "is healthy" not in text


def test_nobody_is_blamed_for_an_outer_step_that_is_too_long(asked, tmp_path):
    text = asked("step", blame=True, plot=tmp_path / "blame.html")
    assert "the outer step may be too long" in text
    assert "harmful" not in text
    assert "did harm" not in text


def test_effects_are_what_merging_without_an_update_gives(asked, tmp_path):
    """The model after the round, with and without it: in the last round that is the whole run's."""
    found = json.loads(asked("labels", blame=True, json=True))
    last = found["updates"][-1]
    assert last["did"] == pytest.approx(last["loss"] - last["loss_without"], abs=1e-12)
    scores = json.loads(asked("labels", score=True, json=True))["scores"]
    assert scores[-1]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    text = asked(
        "labels",
        without=[f"{spoiled.CULPRIT}@{last['version']}"],
        points=1,
        plot=tmp_path / "figure.html",
    )
    assert f"without {spoiled.CULPRIT}@{last['version']}-{last['version']}" in text
    assert "learners do not react" in text


def test_whom_the_rounds_so_far_speak_against_is_told_before_the_rest(asked, monkeypatch):
    monkeypatch.setattr(blame_screen, "LINE_S", 0.0)
    said = asked("labels", blame=True)
    first = re.search(rf"^after \d+ rounds: {spoiled.CULPRIT} is harmful", said, re.MULTILINE)
    assert first
    assert first.start() < said.index("What each learner's updates did")
    assert said.count(f"rounds: {spoiled.CULPRIT} is") == 1


@pytest.mark.parametrize("allowed", [0, 1, 7, 10_000])
def test_when_the_time_is_over_blame_keeps_what_it_has_and_counts_the_rest(runs, allowed):
    """Of one round too, where a fleet is large."""
    run, scored, first = runs["labels"], [], {}

    def evaluate(_views):
        scored.append(1)
        return {WHOLE: 1.0}

    async def blamed():
        async with open_run(str(run.tape), reads=True) as opened:
            history = await read_history(opened.context)
            chains = verify_run.chains(history, sorted(history.records), 0, {})
            for _, record in history.in_order():
                first.update({one.learner: one.loss for one in record.inputs} | first)
            return blame.blame(
                opened.context,
                history,
                chains,
                evaluate,
                enough=lambda _: len(scored) >= 2 * allowed,
            )

    use_place(RunLocation(None, str(run.store)))
    found = asyncio.run(blamed())
    use_place(RunLocation())
    rounds = found.rounds.fates
    assert found.began == median(first.values()) > 0
    assert not found.tensors
    assert rounds["judged"] + rounds["later"] == rounds.total() > 0
    assert len(found.effects) <= allowed
    assert (rounds["later"] > 0) == (allowed < 10_000)


def objects_of(store, run, whole, *kinds):
    """The files of an update of island-a, or of a delta, in a store; what is kept has two names."""
    shard = names.shard(run.name, "island-a", 0, 0, *_sent(whole, 0, 4), 0)
    wanted = {"shard": shard, "delta": f"{run.name}/global/0/00000004-delta-"}
    for kind in kinds:
        for folder in (store, store / KEPT):
            yield from folder.glob(f"{wanted[kind]}*")


def test_blame_goes_on_behind_a_damaged_shard(asked, runs, tmp_path):
    """At the next stored version; the other fragment is judged as if nothing had been damaged."""
    whole = json.loads(asked("labels", blame=True, json=True))
    assert (whole["verdict"], whole["left_out"]) == ("complete", 0)
    store = tmp_path / "damaged"
    shutil.copytree(runs["labels"].store, store)
    for path in objects_of(store, runs["labels"], whole, "shard"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = json.loads(asked("labels", store=store, status=2, blame=True, json=True))
    # Versions 3 and 6 are stored: 4 cannot be merged, nor 5 and 6 behind it.
    assert (found["verdict"], found["left_out"]) == ("incomplete", 3)
    assert (found["rounds"]["damaged"], found["rounds"]["behind"]) == (1, 2)
    assert found["updates"] == [
        one for one in whole["updates"]
        if (one["fragment"], one["version"]) not in {(0, 4), (0, 5), (0, 6)}
    ]  # fmt: skip
    assert found["learners"][0]["learner"] == spoiled.CULPRIT
    text = asked("labels", store=store, status=2, blame=True, plot=tmp_path / "blame.html")
    assert "rounds: 17 judged, 1 GONE OR DAMAGED, 2 after such a round" in text
    assert "0@4: " in text


def test_blame_leaves_out_rounds_beside_a_fragment_that_is_unknown(asked, runs, tmp_path):
    """Without shard and delta nobody knows its view, until it is stored again."""
    whole = json.loads(asked("labels", blame=True, json=True))
    store = tmp_path / "thinned"
    shutil.copytree(runs["labels"].store, store)
    for path in objects_of(store, runs["labels"], whole, "shard", "delta"):
        path.unlink()
    found = json.loads(asked("labels", store=store, status=2, blame=True, json=True))
    fates = {fate: count for fate, count in found["rounds"].items() if count}
    assert fates == {"judged": 15, "damaged": 1, "behind": 2, "beside": 2}


def _sent(found, fragment, version):
    """Incarnation and sequence of island-a's update in a round."""
    [name] = [one["update"] for one in found["updates"] if one["learner"] == "island-a"
              and (one["fragment"], one["version"]) == (fragment, version)]  # fmt: skip
    return map(int, name.split(":")[1].split("-"))


def test_a_whole_run_without_a_learner_says_that_the_others_do_not_react(asked, tmp_path):
    text = asked(
        "labels", without=[f"{spoiled.CULPRIT}@6-"], points=1, plot=tmp_path / "figure.html"
    )
    rows = [line.split() for line in text.splitlines() if line.startswith("20")]
    assert (float(rows[0][5]), float(rows[-1][5]) != 0) == (0.0, True), text
    assert "leaving out good ones can make the model explode" in text
    with pytest.raises(ConfigError, match="no such update was merged"):
        asked("labels", without=["island-x"])
    with pytest.raises(ConfigError, match="expected NAME"):
        asked("labels", without=["island-c@x"])


def test_every_version_is_scored_once_and_the_rise_is_found(asked):
    every = json.loads(asked("rate unclipped", score=True, json=True))
    assert len(every["scores"]) == 1 + spoiled.FRAGMENTS * spoiled.VERSIONS
    rise = every["rises"][0]
    assert (rise["version"], spoiled.CULPRIT in rise["learners"]) == (6, True)
    bisected = json.loads(asked("rate unclipped", bisect=True, json=True))
    assert len(bisected["scores"]) < len(every["scores"])
    assert bisected["rises"][0]["record_seq"] == rise["record_seq"]


def told(capsys, function, *arguments) -> str:
    function(*map(str, arguments))
    return capsys.readouterr().out


def test_log_line_message_update_and_object_lead_to_each_other(asked, runs, capsys):
    found = json.loads(asked("labels", blame=True, json=True))
    worst = max(found["updates"], key=lambda one: one["did"])
    tape, place = runs["labels"].tape, f"{worst['fragment']}@{worst['version']}"
    story = told(capsys, run_show, tape, place)
    assert f"record {worst['record_seq']}: version {worst['version']}" in story
    assert "merged 4, in this order:" in story
    assert worst["update"] in story
    assert "by tensor: norm, cosine to the sum of the others" in story
    log = f"2026-01-01 committed fragment=0 record_seq={worst['record_seq']} rejected=[]"
    for what in (worst["record_seq"], log, f'{{"record_seq": {worst["record_seq"]}}}'):
        assert told(capsys, run_show, tape, what) == story
    update = told(capsys, run_show, tape, worst["update"])
    assert f"merged into version {worst['version']} of fragment {worst['fragment']}" in update
    shard = next(line.split()[1] for line in update.splitlines() if "shard " in line)
    assert told(capsys, run_show, tape, shard) == update
    delta = next(line.split()[1] for line in story.splitlines() if line.startswith("  delta "))
    assert told(capsys, run_show, tape, delta) == story
    for wrong in ("9999", "0@99", "island-x:1-1", "nothing"):
        with pytest.raises(ConfigError):
            run_show(str(tape), wrong)


def test_two_runs_differ_from_the_first_spoiled_round_on(asked, runs, capsys, tmp_path):
    asked("", score=True)
    text = told(capsys, run_diff, runs[""].tape, runs[""].tape)
    assert "settings: the same" in text
    assert "fragment 0: the same in all 11 versions" in text
    # Layout, settings and learners are the same, so that only what was trained differs.
    text = told(capsys, run_diff, runs[""].tape, runs["labels"].tape)
    assert "setting run.name: 'honest' -> 'spoiled-labels'" in text
    assert f"version {spoiled.SPOILED_FROM['labels'] + 1} is the first that differs" in text
