"""Learners that are far from the fleet are told of, and nobody else is."""

import io
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import spoiled
from records import make_input, make_record
from rich.console import Console
from runlab import Lab

from diloco.common.protocol import wire
from diloco.common.storage.tape import Recorded
from diloco.judge import symptoms
from diloco.run import agreement
from diloco.run.cli.opening import RunLocation, open_run, use_place
from diloco.run.findings import LOSS_SPIKE, judged
from diloco.run.state import POINTS, MergedPoint, Observed, Trend, others_losses
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
        ({"loss": 14.5}, "its loss is 14.5, the others' in the same rounds 0.05"),
        ({"norm": 50.0}, "times as long as the others'"),
        ({"norm": 0.01}, "times as long as the others'"),
    ],
)
def test_who_is_far_from_the_others_is_told_of(of_c, sentence):
    (found,) = strangers(rounds(**of_c))
    assert (found.about, found.severity) == ("learner c", "warning")
    assert sentence in found.sentence


def test_updates_that_point_elsewhere_are_told_of(tmp_path, run_async):
    run = spoiled.make_run(tmp_path, "noise", versions=5)

    async def look():
        async with open_run(str(run.tape), reads=True) as opened:
            watch = Watch(opened.context)
            await watch.begin(1)
            cosines = agreement.cosines_of(opened.context, watch.observed.rounds)
            return [*agreement.strangers(cosines)]

    use_place(RunLocation(None, str(run.store)))
    try:
        found = run_async(look())
        known = run_async(screen.look_at_learners(str(run.tape)))
    finally:
        use_place(RunLocation())
    cosines = {one.name: one.cosine for one in known}
    assert min(cosines, key=cosines.__getitem__) == spoiled.CULPRIT
    assert {len(one.trend) for one in known} == {5 * spoiled.FRAGMENTS}
    assert [one.about for one in found] == [f"learner {spoiled.CULPRIT}"]
    assert "point elsewhere" in found[0].sentence
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
    found = [*symptoms.ruined(scores(*losses))]
    assert [one.about for one in found] == ["held-out loss"] * ruined
    assert not ruined or f"it was {min(losses):.4g}" in found[0].sentence


def test_trends_keep_few_points_of_however_many():
    trend = Trend()
    for index in range(10_000):
        trend.add(MergedPoint(float(index), 1.0, 1.0))
    assert 16 <= len(trend.points) <= POINTS
    assert trend.points[0].at_s == 0.0
    assert trend.points[-1].at_s > 9000


def test_a_curve_is_a_line_of_bars():
    assert screen.spark([1.0, 2.0, 3.0, 8.0]) == "▁▂▃█"
    assert screen.spark([5.0] * 100) == "▁" * screen.WIDTH
    assert screen.spark([float("nan")]) == ""
    points = (MergedPoint(0.0, 2.0, 1.0), MergedPoint(1.0, 1.0, 3.0))
    told = [
        SimpleNamespace(name="a", trend=points, cosine=0.6),
        SimpleNamespace(name="b", trend=(), cosine=None),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(screen.trends(told, "lately"))
    assert "+0.60" in console.file.getvalue()
    assert "█▁" in console.file.getvalue()


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
