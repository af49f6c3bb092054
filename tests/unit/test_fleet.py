"""Learners that are far from the fleet are told of, and nobody else is."""

import io
import math
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import spoiled
from records import make_input, make_member, make_record
from rich.console import Console
from runlab import Lab

from diloco.aggregator.core import memory
from diloco.common.protocol import wire
from diloco.common.storage.tape import Recorded
from diloco.judge import doctor_findings
from diloco.run import comparison
from diloco.run.cli.opening import RunLocation, open_run, use_place
from diloco.run.comparison import LOSS_SPIKE
from diloco.run.health_findings import grouped, judged, ranked
from diloco.run.learner_history import POINTS, Trend, others_losses
from diloco.run.observed import Observed
from diloco.run.outliers import began, outliers
from diloco.run.state import Finding, MergedPoint
from diloco.run.watch import Watch
from diloco.show.status import screen


def rounds(**of_c):
    """Rounds of three learners, of whom c is as it is said to be."""
    return [
        make_record(
            version=version,
            inputs=tuple(
                make_input(
                    learner=name, loss=0.05 + 0.001 * version, norm=1.0 + 0.1 * (version % 2)
                )
                if name != "c"
                else make_input(learner=name, **({"loss": 0.05, "norm": 1.1} | of_c))
                for name in "abc"
            ),
        )
        for version in range(1, 17)
    ]


def strangers(records):
    """Findings on learners of these rounds, which nobody has heard of."""
    seen = Observed("lab", 0, Lab().context.settings)
    for seq, record in enumerate(records, 1):
        seen.note_record(Recorded(record, seq, record.closed_at_s))
    found = judged(seen.run(0.0), seen.settings)
    return [one for one in found if one.runbook == LOSS_SPIKE]


def test_a_fleet_of_equals_has_no_strangers():
    assert strangers(rounds()) == []


@pytest.mark.parametrize(
    ("of_c", "sentence"),
    [
        ({"loss": 14.5}, "its loss is 14.5, the others' in the same rounds 0.0585: it trains on"),
        ({"loss": 0.0005}, "on the same few batches over and over"),
        ({"loss": -91.0}, "its loss is -91, the others' in the same rounds 0.0585: a sign"),
        ({"norm": 50.0}, "times as long as the others': its learning rate is too high"),
        ({"norm": 0.01}, "times as long as the others': they hardly do anything"),
        ({"norm": 9e-8}, "they hardly do anything"),
    ],
)
def test_who_is_far_from_the_others_is_told_of(of_c, sentence):
    (found,) = strangers(rounds(**of_c))
    assert (found.about, found.severity) == ("learner c", "warning")
    assert sentence in found.sentence


def test_a_finding_says_since_which_version_and_its_figures():
    records = rounds()[:8] + rounds(loss=14.5)[8:]
    (found,) = strangers([*records, *later(rounds(loss=14.5), 16)])
    assert found.since == 9
    assert found.since_s == records[8].closed_at_s
    assert found.evidence == "loss 14.5 beside 0.0585 ± 0"


def later(records, versions):
    """The same rounds, so many versions on."""
    return [record.model_copy(update={"version": record.version + versions}) for record in records]


@pytest.mark.parametrize("of_c", [{"loss": 0.15}, {"loss": 0.02}, {"norm": 2.5}, {"norm": 0.4}])
def test_whose_data_and_speed_are_its_own_is_not_accused(of_c):
    assert strangers(rounds(**of_c)) == []


def test_where_all_differ_nobody_is_accused():
    records = [
        make_record(
            version=version,
            inputs=tuple(
                make_input(learner=name, loss=loss, norm=loss)
                for name, loss in {"a": 0.1, "b": 0.6, "c": 3.0, "d": 14.0, "e": 60.0}.items()
            ),
        )
        for version in range(1, 17)
    ]
    assert strangers(records) == []


@pytest.mark.parametrize("of_c", [{"loss": 14.5}, {"loss": -91.0}, {"norm": 50.0}])
def test_of_two_none_is_accused_alone(of_c):
    records = [record.model_copy(update={"inputs": record.inputs[1:]}) for record in rounds(**of_c)]
    (found,) = strangers(records)
    assert found.about == "learners b and c"
    assert "of two, figures do not say which one is wrong" in found.sentence


def paces(versions, **speeds):
    """Records in which each learner has a speed: of a version, in steps a second."""

    for version in range(1, versions):
        # Who is slower sends less often.
        sent = [name for name in speeds if version % max(1, round(1 / speeds[name](version))) == 0]
        policy = memory.beginning().model_copy(
            update={"members": tuple(make_member(n, of(version)) for n, of in speeds.items())}
        )
        inputs = tuple(make_input(learner=name, steps_credited=1) for name in sent)
        times = {"closed_at_s": 10.0 * version, "opened_at_s": 10.0 * version - 5.0}
        yield make_record(version=version, inputs=inputs, policy=policy, **times)


def speed_findings(records):
    seen = Observed("lab", 0, Lab().context.settings)
    for seq, record in enumerate(records, 1):
        seen.note_record(Recorded(record, seq, record.closed_at_s))
        for taken in record.inputs:
            seen.known[taken.learner].joined = 1
    run = seen.run(seen.records[0].record.closed_at_s)
    found = outliers([replace(one, silent=False) for one in run.learners])
    return [(one.severity, one.about, one.sentence) for one in found]


def steady(speed):
    return lambda _version: speed


def test_learners_of_equal_speed_are_not_spoken_of():
    fleet = {name: steady(1.0) for name in "abc"}
    assert speed_findings(paces(60, **fleet)) == []


def test_who_is_slow_from_the_beginning_is_a_fact_and_no_trouble():
    fleet = {"a": steady(1.0), "b": steady(1.0), "c": steady(0.1)}
    ((severity, about, sentence),) = speed_findings(paces(240, **fleet))
    assert (severity, about) == ("note", "learner c")
    assert "0.1 tokens/s are credited to it, 1 to the others" in sentence


def test_who_becomes_far_slower_than_it_was_is_in_trouble():
    fleet = {name: steady(1.0) for name in "ab"}
    fleet["c"] = lambda version: 1.0 if version < 60 else 0.125
    ((severity, about, sentence),) = speed_findings(paces(220, **fleet))
    assert (severity, about) == ("warning", "learner c")
    assert "it trains 8 times as slowly as it did" in sentence


def test_a_pause_is_no_pace():
    """A life that ended, or a machine that slept: of 16 updates one gap is most of the time."""
    records = [
        one.model_copy(update={"inputs": one.inputs[:2]}) if 100 <= one.version < 190 else one
        for one in paces(200, **{name: steady(1.0) for name in "abc"})
    ]
    assert speed_findings(records) == []


def test_where_all_become_slower_nobody_is_accused():
    fleet = {name: lambda version: 1.0 if version < 60 else 0.125 for name in "abc"}
    assert speed_findings(paces(220, **fleet)) == []


def test_in_a_large_fleet_the_odd_one_is_told_of_without_comparing_all_with_all(monkeypatch):
    monkeypatch.setattr(comparison, "MANY", 3)
    (found,) = strangers(rounds(loss=14.5))
    assert found.about == "learner c"
    names = [f"learner-{index}" for index in range(9)]
    fleet = {name: steady(1.0) for name in names} | {"slow": steady(0.1)}
    ((_, about, _),) = speed_findings(paces(240, **fleet))
    assert about == "learner slow"


@pytest.mark.parametrize(("least", "told"), [(0.001, 0), (0.3, 1)], ids=["faded", "not yet"])
def test_where_a_schedule_ends_at_zero_lengths_say_nothing(least, told):
    """A learner that began a little earlier sends far longer updates then."""
    long = [make_record(inputs=tuple(make_input(learner=name) for name in "abc"))]
    short = [
        one.model_copy(
            update={
                "inputs": tuple(
                    taken.model_copy(update={"norm": least * (10 if taken.learner == "c" else 1)})
                    for taken in one.inputs
                )
            }
        )
        for one in rounds()
    ]
    assert len(strangers([*long, *short])) == told


@pytest.mark.parametrize(("scatter", "told"), [(0.2, 1), (7.0, 0)], ids=["steady", "scattered"])
def test_a_median_is_held_against_the_scatter_of_what_it_is_of(scatter, told):
    """Losses of a model that has seen all its data differ tenfold from batch to batch."""
    records = [
        make_record(
            version=version,
            inputs=tuple(
                make_input(learner=name, loss=1.0 if name != "c" else 5.0 * math.exp(away))
                for name in "abc"
            ),
        )
        for version, away in enumerate(scatter * (place / 15 - 0.5) for place in range(16))
    ]
    assert len(strangers(records)) == told


def test_of_few_updates_nothing_is_said():
    assert strangers(rounds(loss=14.5)[1:]) == []
    assert len(strangers(rounds(loss=14.5))) == 1


def test_two_whose_losses_fall_fast_are_held_against_each_other_round_by_round():
    def merged(version, **losses):
        inputs = (make_input(learner=name, loss=loss) for name, loss in losses.items())
        return make_record(version=version, inputs=tuple(inputs))

    together = [merged(step, a=9.0 / 1.4**step, b=6.0 / 1.4**step) for step in range(1, 17)]
    # The last ones of a were merged beside a newcomer's.
    later_on = [merged(step, a=9.0 / 1.4**step, z=9.0 / 1.4**step) for step in range(17, 27)]
    assert strangers([*together, *later_on]) == []


@pytest.mark.parametrize(
    ("of_c", "told"),
    [((40, 0, 1, 0, 0), False), ((6, 7, 6, 8, 6), True), ((9, 9, 9), False)],
    ids=["joined late", "lags", "too few to say"],
)
def test_a_learner_lags_whose_updates_are_old_as_a_rule(of_c, told):
    seen = Observed("lab", 0, Lab().context.settings)
    for version, staleness in enumerate(of_c, 1):
        taken = make_input(learner="c", seq=version, staleness=staleness)
        record = make_record(version=version, inputs=(make_input(seq=version), taken))
        seen.note_record(Recorded(record, version, record.closed_at_s))
    found = judged(seen.run(0.0), seen.settings)
    assert ["learner c" for one in found if "versions old" in one.sentence] == ["learner c"] * told


def test_an_ended_run_is_judged_as_one_that_goes_on():
    seen = Observed("lab", 0, Lab().context.settings)
    for seq, record in enumerate(rounds(loss=-91.0), 1):
        seen.note_record(Recorded(record, seq, record.closed_at_s))
    going_on = [one for one in judged(seen.run(0.0), seen.settings) if one.runbook == LOSS_SPIKE]
    seen.ended = True
    ended = [*judged(seen.run(0.0), seen.settings)]
    assert len(going_on) == 1
    assert going_on[0] in ended


def test_of_whom_something_is_amiss_nobody_says_that_it_is_well():
    seen = Observed("lab", 0, Lab().context.settings)
    for seq, record in enumerate(rounds(loss=14.5), 1):
        seen.note_record(Recorded(record, seq, record.closed_at_s))
    for name in "abc":
        seen.hear(
            wire.Heartbeat(
                learner=name, incarnation=1, local_step=8, global_step=8, tokens=80, loss=1.0,
                tokens_per_s=10.0, step_time_s=0.1, stall_s=0.0, run_s=1.0, bytes_up=0,
                bytes_down=0, updates_sent=1, state="training",
            ),
            0.0,
        )  # fmt: skip
    found = [one for one in judged(seen.run(0.0), seen.settings) if "learner " in one.about]
    assert [(one.about, one.severity) for one in found] == [
        ("learner c", "warning"), ("learner a", "ok"), ("learner b", "ok"),
    ]  # fmt: skip


def test_trouble_begins_where_most_of_what_follows_is_off():
    def first(offs):
        points = [
            MergedPoint(0.0, float(off == "x"), 1.0, index, None) for index, off in enumerate(offs)
        ]
        found = began(points, lambda point: point.loss > 0)
        return found and found.version

    assert first("....") is None
    assert first(".x......xxx.xx") == 8  # A single one long before is an accident.
    assert first("..x.xx") == 2
    assert first("xxxx....") is None


def found_of(severity, about, sentence="late", advice="wait", **fields):
    return Finding(severity=severity, about=about, sentence=sentence, advice=advice, **fields)


def test_findings_are_ranked_by_severity_and_then_by_their_beginning():
    given = [
        found_of("warning", "a"), found_of("warning", "b", since=9),
        found_of("ok", "c"), found_of("error", "d"), found_of("warning", "e", since=3),
    ]  # fmt: skip
    assert [one.about for one in ranked(given)] == ["d", "e", "b", "a", "c"]


def test_findings_that_ask_for_the_same_are_one_with_their_count():
    many = [found_of("warning", f"learner {index}") for index in range(7)]
    worst = found_of("error", "store", "away")
    other = found_of("warning", "learner 1", "slow", "test its link")
    groups = grouped([*many, worst, other])
    assert [one.severity for one in groups] == ["error", "warning", "warning"]
    assert groups[1].about == ("learner 0, learner 1, learner 2, learner 3, learner 4, ...")
    assert groups[1].sentence == "late (7 findings like this)"
    assert groups[2] == other


def test_updates_that_point_elsewhere_are_told_of(tmp_path, run_async):
    run = spoiled.make_run(tmp_path, "noise", versions=5)

    async def at_the_end():
        async with open_run(str(run.tape), reads=True) as opened:
            watch = Watch(opened.context)
            watch.observed.ended = True
            return (await watch.begin(1)).findings

    async def look():
        async with open_run(str(run.tape), reads=True) as opened:
            watch = Watch(opened.context)
            await watch.begin(1)
            return [
                one for one in (await watch.look_into_store()).findings if "point" in one.sentence
            ]

    use_place(RunLocation(None, str(run.store)))
    try:
        found = run_async(look())
        ended = run_async(at_the_end())
        known = run_async(screen.look_at_learners(str(run.tape)))
    finally:
        use_place(RunLocation())
    cosines = {one.name: one.shards.cosine for one in known}
    assert min(cosines, key=cosines.__getitem__) == spoiled.CULPRIT
    assert {len(one.trend) for one in known} == {5 * spoiled.FRAGMENTS}
    assert [one.about for one in found] == [f"learner {spoiled.CULPRIT}"]
    assert "point elsewhere" in found[0].sentence
    assert "-" not in found[0].evidence.split(" beside ")[1]
    assert [one for one in ended if one.severity == "warning"] == found
    assert all(one.merged_loss is not None and 0.5 < one.norm < 2 for one in known)


def scores(*losses):
    return [
        wire.Score(
            run="r", epoch=0, versions=(index,), record_seqs=(index + 1,), global_step=10 * index,
            tokens=index, at_s=float(index), loss=loss,
        )
        for index, loss in enumerate(losses)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "ruined"),
    [
        ((2.0, 0.5, 1.6), True),  # Most of what was gained is lost.
        ((2.0, 0.5, 0.7), False),
        ((0.5, 0.51, 4.0), True),  # From the beginning.
        ((2.0, 1.0), False),  # Two say nothing.
        ((0.5, 0.5, 0.52), False),
    ],
)
def test_a_ruined_held_out_loss_is_told_of(losses, ruined):
    found = [*doctor_findings.ruined(scores(*losses))]
    assert [one.about for one in found] == ["held-out loss"] * ruined
    assert not ruined or f"it was {min(losses):.4g}" in found[0].sentence


def test_a_slice_that_is_ruined_is_told_of_where_the_whole_is_not():
    made = [
        one.model_copy(update={"slices": {"en": {"loss": 1.0}, "de": {"loss": de}}})
        for one, de in zip(scores(2.0, 0.5, 0.5), (2.0, 0.5, 1.6), strict=True)
    ]
    (found,) = doctor_findings.ruined(made)
    assert found.about == "held-out loss of de"
    assert "1.6 at step 20; it was 0.5 at step 10" in found.sentence


def test_scores_that_name_other_slices_are_told_of():
    first, *others = scores(2.0, 1.0, 0.5)
    others = [one.model_copy(update={"slices": {"en": {"loss": 1.0}}}) for one in others]
    (found,) = doctor_findings.ruined([first, *others])
    assert (found.severity, found.about) == ("note", "held-out slices")
    assert "none at step 0, en at step 20" in found.sentence


def test_trends_keep_few_points_of_however_many():
    trend = Trend()
    for index in range(10_000):
        trend.add(MergedPoint(float(index), 1.0, 1.0, index, None))
    assert 16 <= len(trend.points) <= POINTS
    assert trend.points[0].at_s == 0.0
    assert trend.points[-1].at_s > 9000


def test_a_curve_is_a_line_of_bars():
    assert screen.spark([1.0, 2.0, 3.0, 8.0]) == "▁▂▃█"
    assert screen.spark([5.0] * 100) == "▁" * screen.WIDTH
    assert screen.spark([float("nan")]) == ""
    points = (MergedPoint(0.0, 2.0, 1.0, 1, None), MergedPoint(1.0, 1.0, 3.0, 2, None))
    told = [
        SimpleNamespace(name="a", trend=points, shards=SimpleNamespace(cosine=0.6)),
        SimpleNamespace(name="b", trend=(), shards=None),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(screen.trends(told, "lately"))
    assert "+0.60" in console.file.getvalue()
    assert "█▁" in console.file.getvalue()


def test_a_norm_that_diverges_takes_no_other_figures_place():
    points = (MergedPoint(0.0, 2.0, 9.78e13, 1, None),)
    console = Console(file=io.StringIO(), width=80)
    console.print(screen.trends([SimpleNamespace(name="a", trend=points, shards=None)], "lately"))
    assert "9.8e+13" in console.file.getvalue()


def test_a_table_leaves_columns_out_before_it_cuts_a_figure():
    def shown(width):
        console = Console(file=io.StringIO(), width=width)
        made = screen.Fitted(
            ("learner", "step", "up"), [("island-a", "1,047", "367.2 kB")], words=(), spare=("up",)
        )
        console.print(made)
        return console.file.getvalue()

    assert "367.2 kB" in shown(40)
    assert "367" not in shown(20)
    assert "1,047" in shown(20)


def test_theothers_losses_are_a_median_without_ones_own():
    rng = np.random.default_rng(3)
    for count in range(1, 12):
        inputs = [
            SimpleNamespace(learner=f"l{rng.integers(4)}", loss=float(rng.integers(6)))
            for _ in range(count)
        ]
        for learner, loss in others_losses(inputs).items():
            others = [one.loss for one in inputs if one.learner != learner]
            assert loss == (median(others) if others else None)
