"""Causes have names: what a tape and shards say of a learner, an aggregator and a setting."""

import math

import numpy as np
import pytest
from records import make_input, make_member, make_record
from runlab import RUN, Lab

from diloco.common.protocol import names, wire
from diloco.common.storage.tape import Entry, Recorded
from diloco.replay.blame_learners import Effect, Effects, LearnerJudgement, judge
from diloco.replay.why_screen import accusations, leaks
from diloco.run.agreement import ComparedRound, _Compared
from diloco.run.health_findings import judged, patience_s
from diloco.run.observed import Observed
from diloco.run.state import ShardFigures

LAYOUT = "0" * 32


@pytest.fixture
def seen():
    return Observed(RUN, 0, Lab().context.settings)


def said(seen, about):
    """Sentences of what is amiss with somebody."""
    found = judged(seen.run(1000.0), seen.settings)
    return [one.sentence for one in found if one.about == about and one.severity != "ok"]


def take(seen, seq, subject, body, at_s=0.0):
    seen.take(Entry(seq, at_s, subject, body, 0))


def join(seen, seq, learner="a", **fields):
    body = wire.Join(run=RUN, learner=learner, layout=LAYOUT, host="h", **fields)
    take(seen, seq, names.join(RUN, learner), body)


def leave(seen, seq, life):
    body = wire.Leave(run=RUN, learner="a", incarnation=life, position=0, fragments=())
    take(seen, seq, names.leave(RUN, "a"), body)


def test_a_life_that_leaves_behind_a_newer_join_is_of_a_second_process(seen):
    join(seen, 1)
    join(seen, 2)
    assert not [one for one in said(seen, "learner a") if "two processes" in one]
    leave(seen, 3, 1)
    (found,) = [one for one in said(seen, "learner a") if "two processes" in one]
    assert "1 times an earlier one still ran" in found


def test_a_life_that_leaves_before_the_next_joins_is_alone(seen):
    join(seen, 1)
    leave(seen, 2, 1)
    join(seen, 3)
    assert not [one for one in said(seen, "learner a") if "two processes" in one]


@pytest.mark.parametrize(
    ("error", "named"),
    [("the training loss is nan: it has diverged", True), ("the disk is full", False)],
)
def test_the_error_of_the_life_before_is_told_and_what_is_no_number_named(seen, error, named):
    join(seen, 1)
    join(seen, 2, before=error)
    (found,) = [one for one in said(seen, "learner a") if "errors have ended" in one]
    assert error in found
    assert ("not finite (NaN)" in found) is named


@pytest.mark.parametrize(
    ("ahead_s", "far"), [(0.5, False), (-5.0, False), (70.0, True), (-70.0, True)]
)
def test_a_learners_clock_is_held_against_the_servers(seen, ahead_s, far):
    join(seen, 1)
    beat = wire.Heartbeat(
        learner="a", incarnation=1, local_step=8, global_step=8, tokens=80, loss=1.0,
        tokens_per_s=10.0, step_time_s=0.1, stall_s=0.0, run_s=1.0, bytes_up=0, bytes_down=0,
        updates_sent=1, state="training", now_s=1000.0 + ahead_s,
    )  # fmt: skip
    seen.hear(beat, 1000.0)
    assert any("clock" in one for one in said(seen, "learner a")) is far


@pytest.mark.parametrize(
    ("late_s", "late_steps", "told"), [(30.0, 300.0, True), (30.0, 1.0, False), (0.9, 90.0, False)]
)
def test_who_adopts_far_later_in_seconds_and_in_its_steps_has_a_slow_link(
    seen, late_s, late_steps, told
):
    for name in "abc":
        join(seen, 1, name)
        after_s, steps = (late_s, late_steps) if name == "a" else (0.1, 1.0)
        beat = wire.Heartbeat(
            learner=name, incarnation=1, local_step=8, global_step=8, tokens=80, loss=1.0,
            tokens_per_s=10.0, step_time_s=0.1, stall_s=0.0, run_s=1.0, bytes_up=0, bytes_down=0,
            updates_sent=1, state="training", adoption_s=after_s, worst_adoption_s=after_s,
            adoption_steps=steps, worst_adoption_steps=steps,
        )  # fmt: skip
        seen.hear(beat, 1000.0)
    found = {
        name: [s for s in said(seen, f"learner {name}") if "versions reach" in s] for name in "abc"
    }
    assert {name: len(one) for name, one in found.items()} == {"a": int(told), "b": 0, "c": 0}


def test_a_view_that_differs_is_told_since_its_version(seen):
    refused = wire.Rejected(
        learner="a", incarnation=1, seq=1, stream_seq=3, tokens=1, steps=1, reason="view", detail=""
    )
    join(seen, 1)
    record = make_record(version=7, rejected=(refused,))
    seen.note_record(Recorded(record, 4, 50.0))
    (found,) = [
        one for one in judged(seen.run(0.0), seen.settings) if "view that it holds" in one.sentence
    ]
    assert (found.severity, found.since, found.since_s) == ("error", 7, 50.0)


def changed(seen, value):
    settings = seen.settings.model_dump(mode="json")
    before, settings["outer"]["participation"] = settings["outer"]["participation"], value
    lines = (f"outer.participation: {before!r} -> {value!r}",)
    word = wire.Settings(run=RUN, settings=settings, changed=lines, by="operator eve@host")
    take(seen, 9, names.settings(RUN), word)


def test_a_bad_setting_says_who_set_it_and_how_to_set_it_back(seen):
    changed(seen, True)
    (found,) = [
        one for one in judged(seen.run(0.0), seen.settings) if "operator eve" in one.sentence
    ]
    assert found.advice == "set it back: diloco run set RUN outer.participation=False"


def test_a_run_is_no_alert_for_settings_that_it_was_created_with(seen):
    found = judged(seen.run(0.0), seen.settings)
    assert [one for one in found if one.about == "configuration"] == []


@pytest.mark.parametrize(("times", "told"), [(2, False), (3, True)])
def test_an_aggregator_that_ends_again_and_again_is_told_of(seen, times, told):
    for version in range(1, times + 2):
        resumed = wire.Observation(
            what="resumed", at_s=1.0, after_seq=0, learner="", incarnation=0, seq=0, value=0.0
        )
        record = make_record(version=version, observations=(resumed,))
        seen.note_record(Recorded(record, version, 990.0))
    assert bool(said(seen, "aggregators")) is told


@pytest.mark.parametrize(("late_s", "told"), [(1.0, True), (-1.0, False)])
def test_an_aggregator_that_was_away_for_long_is_told_of_afterwards(seen, late_s, told):
    waited_s = patience_s(seen.settings) + late_s
    for version, made_at_s in ((1, 100.0), (2, 100.0 + waited_s), (3, 101.0 + waited_s)):
        waits = make_input(announced_at_s=100.0 if version == 2 else made_at_s)
        record = make_record(version=version, inputs=(waits,))
        seen.note_record(Recorded(record, version, made_at_s))
    found = [one for one in judged(seen.run(300.0), seen.settings) if one.about == "aggregators"]
    assert [(one.severity, one.since) for one in found] == ([("note", 2)] if told else [])


def round_of(change):
    """A round of three alike updates, of which the first is changed."""
    return round_of_all(lambda values: change(values[0]))


def round_of_all(change):
    """A round of three alike updates, which are changed."""
    values = np.random.default_rng(0).normal(size=(3, 512))
    change(values)
    found = ComparedRound.__new__(ComparedRound)
    found.tensors = [("first", [(0, 256)]), ("second", [(256, 512)])]
    found.products, found.squares = np.zeros((3, 3)), np.zeros((3, 2))
    found.lone, found.factor = np.zeros(3, np.int64), np.zeros(3)
    found.tensor = np.zeros(3, np.int64)
    for start in (0, 100):
        stop = 100 if not start else 512
        found.add(values[:, start:stop], start)
    return found


def test_updates_alike_have_no_lone_elements():
    assert [*round_of(lambda _: None).lone] == [0, 0, 0]


def test_a_lone_element_is_counted_with_its_tensor_and_how_far_it_is():
    def spoil(values):
        values[300] = 50.0

    found = round_of(spoil)
    assert [*found.lone] == [1, 0, 0]
    assert found.tensors[found.tensor[0]][0] == "second"
    assert 30 < found.factor[0] < 80


def test_where_honest_updates_have_large_single_elements_none_is_lone():
    """Of inputs that come seldom Adam makes steps that are large beside all other elements."""

    def spoil(values):
        rng = np.random.default_rng(1)
        for row in range(3):
            places = rng.choice(512, 24, replace=False)
            values[row, places] *= 1 + 10 * rng.pareto(1.5, 24)
        values[0, 300] = 50.0

    found = round_of_all(spoil)
    assert [*found.lone] == [0, 0, 0]


def test_longer_updates_have_no_lone_elements_for_that():
    def spoil(values):
        values[0] *= 30

    assert [*round_of_all(spoil).lone] == [0, 0, 0]


@pytest.mark.parametrize(
    ("factors", "told"),
    [((9, 9, 9, 1), [9]), ((9, 9, 1, 1), [1]), ((0.1, 9, 9, 9), [9]), ((0.2, 0.1, 0.1, 1), [0.2])],
)
def test_a_part_is_as_long_as_three_of_four_rounds_say(factors, told):
    """At a schedule's end, single rounds of honest learners are many times as long."""
    found = _Compared()
    found._cosines = [(0.0, 0.0), *[(1.0, 0.5)] * 4]
    found.squares = {"w": [(factor**2, 1.0) for factor in factors], "few": [(81.0, 1.0)] * 3}
    assert found.figures()[:2] == (0.5, 5)  # What is zero points nowhere.
    assert found.figures().norms == {"w": pytest.approx(math.log(told[0]))}


def figures(**fields):
    return ShardFigures(cosine=0.5, updates=32, **fields)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (figures(still=("embed",)), "its updates are zero in embed"),
        (figures(lone=9, factor=60.0, tensor="w"), "bits of parameters turn over"),
        (figures(lone=9, factor=1e9, tensor="w"), "its gradients overflow"),
        (figures(lone=2, factor=60.0, tensor="w"), None),
        (figures(norms={"v": 0.1, "w": 2.0, "x": 0.0}), "in w its updates are 7.4 times as long"),
        (figures(norms={"v": 0.1, "w": 1.0, "x": 0.0}), None),
        (figures(norms={"v": 2.1, "w": 2.0, "x": 0.0}), None),
        (figures(), None),
    ],
)
def test_shards_name_frozen_parts_memory_errors_and_overflow(seen, own, sentence):
    for version in range(1, 3):
        inputs = tuple(make_input(learner=name) for name in "abc")
        seen.note_record(Recorded(make_record(version=version, inputs=inputs), version, 1.0))
    equal = figures(norms=dict.fromkeys("vwx", 0.0))
    seen.shards = {"a": own, "b": equal, "c": equal}
    found = [one for one in said(seen, "learner a") if "updates are" in one or "element" in one]
    assert bool(found) is (sentence is not None)
    assert sentence is None or sentence in found[0]


SIGN, DECAY, EITHER = (
    "a sign is wrong", "its weight decay outweighs its gradient",
    "a sign is wrong, or a decay outweighs its gradient",
)  # fmt: skip


@pytest.mark.parametrize(
    ("cosine", "to_zero", "others_to_zero", "cause"),
    [
        (-0.4, None, None, EITHER),
        (-0.4, 0.1, -0.1, SIGN),
        (-0.4, 0.3, -0.3, SIGN),
        (-0.1, 0.9, 0.0, DECAY),
        (0.1, 0.9, 0.0, DECAY),
        (0.1, 0.9, 0.6, None),
    ],
)
def test_a_sign_and_a_decay_are_told_apart_by_where_the_parameters_go(
    seen, cosine, to_zero, others_to_zero, cause
):
    for version in range(1, 17):
        # One who takes its parameters to zero has another loss, another length, huge elements.
        inputs = [make_input(learner=name) for name in "bc"]
        wrong = make_input(learner="a", loss=9.0, norm=9.0) if cause == DECAY else make_input()
        record = make_record(version=version, inputs=(wrong, *inputs))
        seen.note_record(Recorded(record, version, 1.0))
    other = figures()._replace(to_zero=others_to_zero)
    own = figures(lone=9 * (cause == DECAY), factor=60.0, tensor="w")
    own = own._replace(cosine=cosine, to_zero=to_zero)
    seen.shards = {"a": own, "b": other, "c": other}
    found = [one.rpartition(": ")[2] for one in said(seen, "learner a") if ": " in one]
    assert found == ([cause] if cause else ["it may train on other data or labels"])


def test_a_loss_above_the_others_is_not_called_low_for_one_that_diverges_beside_it(seen):
    losses = {"a": 0.5, "c": 0.05, "b": 0.0017, "d": 0.0017}
    for version in range(1, 33):
        inputs = tuple(
            make_input(learner=name, loss=losses[name]) for name in ("ac", "bd")[version % 2]
        )
        seen.note_record(Recorded(make_record(version=version, inputs=inputs), version, 1.0))
    told = {
        name: [one for one in said(seen, f"learner {name}") if "loss" in one] for name in "abcd"
    }
    assert [name for name in "abcd" if told[name]] == ["a"]


def note_fallen(seen, field, first, later):
    """Notes 64 rounds of a, b and c: the first three with some figures, the rest with others."""
    for version in range(1, 65):
        figures = zip("abc", first if version < 4 else later, strict=True)
        inputs = tuple(make_input(learner=name, **{field: figure}) for name, figure in figures)
        seen.note_record(Recorded(make_record(version=version, inputs=inputs), version, 1.0))


@pytest.mark.parametrize("first", [2.3, 1000.0], ids=["alike", "its own word"])
@pytest.mark.parametrize(("own", "told"), [(0.27, False), (0.5, True)])
def test_where_data_are_learnt_by_heart_the_ratio_of_small_losses_accuses_nobody(
    seen, own, told, first
):
    """Progress is the others' median: one learner claims a huge loss at its beginning."""
    note_fallen(seen, "loss", (first, 2.3, 2.3), (own, 0.043, 0.04))
    assert any("its loss is" in one for one in said(seen, "learner a")) == told


@pytest.mark.parametrize(("own", "told"), [(0.9, ""), (1.8, "times as long"), (0.005, "hardly do")])
def test_where_updates_have_become_short_those_of_one_are_not_called_long(seen, own, told):
    note_fallen(seen, "norm", (1.0, 1.2, 1.1), (own, 0.05, 0.06))
    lengths = [one for one in said(seen, "learner a") if "as long as" in one]
    assert [told in one for one in lengths] == ([True] if told else [])


def test_where_updates_have_become_tiny_those_of_one_are_not_called_short(seen):
    note_fallen(seen, "norm", (1.0, 1.2, 1.1), (5e-5, 5e-3, 6e-3))
    assert not any("as long as" in one for one in said(seen, "learner a"))


def test_who_is_alone_in_a_round_does_not_say_what_is_long(seen):
    alone = make_record(version=1, inputs=(make_input(learner="a", norm=1e30),))
    seen.note_record(Recorded(alone, 1, 1.0))
    for version in range(2, 34):
        norms = (9.9, 1.0, 1.1)
        inputs = tuple(
            make_input(learner=name, norm=norm) for name, norm in zip("abc", norms, strict=True)
        )
        seen.note_record(Recorded(make_record(version=version, inputs=inputs), version, 1.0))
    assert any("times as long" in one for one in said(seen, "learner a"))


@pytest.mark.parametrize(
    ("speed", "losses", "cosine", "severity"),
    [
        (0.4, (1.0, 1.0), 0.1, "note"),
        (0.6, (1.0, 1.0), 0.1, "warning"),
        (0.6, (1.0, 0.04), 0.1, "note"),
        (0.6, (1.0, 0.06), 0.1, "warning"),
        (0.6, (1.0, 0.04), 0.04, "warning"),
        (0.6, (-0.7, -1.2), 0.1, "warning"),
    ],
    ids=["slow", "neither", "learnt", "not yet", "noise", "of another kind"],
)
@pytest.mark.parametrize("own", [None, 100.0], ids=["alike", "its own word"])
def test_who_may_point_elsewhere(seen, speed, losses, cosine, severity, own):
    """Once little is left to learn directions scatter, by the losses of the others."""
    members = [make_member("a", speed), make_member("b", 1.0), make_member("c", 1.0)]
    policy = make_record().policy.model_copy(update={"members": tuple(members)})
    for version in range(1, 33):
        now = losses[version > 3]
        first = own if own is not None and version <= 3 else now
        inputs = tuple(
            make_input(learner=name, loss=first if name == "a" else now) for name in "abc"
        )
        record = make_record(version=version, inputs=inputs, policy=policy)
        seen.note_record(Recorded(record, version, 1.0))
    seen.shards = {"a": figures()._replace(cosine=cosine), "b": figures(), "c": figures()}
    [found] = [
        one for one in judged(seen.run(1000.0), seen.settings) if "point elsewhere" in one.sentence
    ]
    assert (found.about, found.severity) == ("learner a", severity)


DATA = "other data or labels, or on shifted targets"
EITHER_DATA = "other data or labels, or a sign is wrong"
RATE = "its learning rate is too high or grows, or its data is another"
OVERFLOW = "its gradients overflow, or its memory has errors"


@pytest.mark.parametrize(
    ("losses", "norm", "own", "cause"),
    [
        ((2.0, 20.0), 3.0, {"cosine": -0.2}, SIGN),
        ((2.0, 20.0), 30.0, {"cosine": 0.0}, RATE),
        ((2.0, 2.5), 2.0, {"cosine": -0.2}, DATA),
        ((2.0, 2.5), 2.0, {"cosine": -0.2, "to_zero": 0.7}, DATA),
        ((2.0, 2.2), 2.0, {"cosine": -0.2, "to_zero": 0.0}, EITHER_DATA),
        ((2.0, 2.0), 2.0, {"cosine": -0.2, "to_zero": 0.0}, SIGN),
        ((2.0, 2.0), 30.0, {"lone": 9, "factor": 1e9, "tensor": "w"}, OVERFLOW),
    ],
)
def test_what_follows_from_a_cause_is_no_second_cause(seen, losses, norm, own, cause):
    first, newest = losses
    for version in range(1, 40):
        others = [make_input(learner=name, loss=2.0) for name in "bcd"]
        loss = first if version == 1 else newest
        wrong = make_input(learner="a", loss=loss, norm=norm)
        record = make_record(version=version, inputs=(wrong, *others))
        seen.note_record(Recorded(record, version, 1.0))
    seen.shards = {"a": figures()._replace(**own), **dict.fromkeys("bcd", figures())}
    found = [one for one in said(seen, "learner a") if ": " in one]
    assert len(found) == 1
    assert found[0].endswith(cause)


def test_a_learner_none_of_whose_updates_tell_anything_is_judged_without_a_warning():
    effects = Effects(Effect)
    for seq in range(1, 13):
        for learner in "abc":
            effects.append(
                Effect(
                    0, seq, seq, 8 * seq, float(seq), learner, 1, seq, 1.0, 1.0, 1.0, 0, 1.0, 0.1,
                    0.1, 2.0, 2.1, 2.0,
                )
            )  # fmt: skip
    assert {one.conclusion for one in judge(effects)} <= {"unclear", "helpful"}


@pytest.mark.parametrize(
    ("learners", "accused"), [("ab", []), ("abc", ["learner a"])], ids=["of two", "of three"]
)
def test_of_two_learners_none_is_accused_by_what_its_updates_did(learners, accused):
    sentences = {
        f"learner {name}": LearnerJudgement(
            name, "harmful" if name == "a" else "helpful", 0.1, 9, 9, 0.01, -0.005, None
        )
        for name in learners
    }
    found = [*accusations(sentences, (), rounds=9)]
    assert [one.about for one in found if one.severity == "warning"] == accused
    assert len(found) == 1
    assert [*accusations(sentences, ("learner a",), rounds=9)] == []


# Training loss, and what an update alone does to the held-out loss, of the honest and of one other.
@pytest.mark.parametrize(
    ("honest", "other", "told"),
    [
        ((2.3, -0.03), (1e12, 0.2), []),
        ((2.45, -0.03), (2.6, 0.2), []),
        ((2.7, 0.01), (2.45, -0.03), ["learner d"]),
    ],
    ids=["one diverges", "one has other data", "one has seen it"],
)
def test_who_alone_makes_the_held_out_loss_better_has_seen_it(honest, other, told):
    effects = Effects(Effect)
    for seq in range(1, 25):
        for place, learner in enumerate("abcd"):
            training_loss, alone = other if learner == "d" else honest
            training_loss += 0.01 * place
            effects.append(
                Effect(
                    0, seq, seq, 8 * seq, float(seq), learner, 1, seq, 1.0, training_loss, 1.0, 0,
                    1.0, alone, alone, 2.5, 2.4, 2.4 - alone,
                )
            )  # fmt: skip
    sentences = {f"learner {one.learner}": one for one in judge(effects)}
    assert [one.about for one in leaks(effects, sentences)] == told
