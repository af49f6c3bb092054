"""Each learner's time, as the tape shows it."""

import numpy as np
import pytest

from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.common.storage.tape import Extent
from diloco.run.timeseries import Incarnation, TimeSeries
from diloco.show.page import figures
from diloco.show.page.lanes import Lane, make_lanes
from diloco.show.page.numbers import Shown, spent

STEP_S = 0.5
EVERY = 4  # steps between two updates


def series(*lives: Incarnation, ends_s: float = 400.0) -> TimeSeries:
    settings = RunSettings.model_validate({"run": {"name": "r", "steps": 9}, "sync": {"block": 16}})
    layout = make_layout([Tensor(name="w", shape=(64,), dtype="float32")], fragments=1, block=16)
    made = TimeSeries("r", settings, layout, 0.0)
    made.learners = sorted({life.learner for life in lives})
    made.lives = list(lives)
    made.ended_s = ends_s
    return made


def update(made: TimeSeries, life: Incarnation, at_s: float, position: float) -> None:
    made.updates.add(
        made.learners.index(life.learner), life.incarnation, 0, at_s, 1, EVERY, position, 1.0,
        STEP_S, 1, 1,
    )  # fmt: skip


def trained(
    made: TimeSeries, life: Incarnation, begins_s: float, ends_s: float, position: float = 0
) -> float:
    """Steady updates; the position after them."""
    for at_s in np.arange(begins_s, ends_s, EVERY * STEP_S)[1:]:
        position += EVERY
        update(made, life, at_s, position)
    return position


def states(lane: Lane) -> dict[str, float]:
    return {state: round(lane.seconds(state)) for state in ("training", "stalled", "down")}


def test_a_life_that_trains_and_leaves() -> None:
    life = Incarnation("a", 1, 0.0, "host", left_s=200.0, merged_s=10.0)
    made = series(life)
    life.position = int(trained(made, life, 0.0, 200.0)) + EVERY
    (lane,) = make_lanes(made)
    assert states(lane) == {"training": 190, "stalled": 0, "down": 0}
    assert lane.seconds("catching up") == 10
    assert (lane.kills, lane.step_s) == ([], STEP_S)
    assert lane.spans[-1].end_s == 200.0, "away afterwards: no span"


def test_a_killed_life_is_down_until_it_joins_again() -> None:
    first = Incarnation("a", 1, 0.0, "host", merged_s=0.0)
    second = Incarnation("a", 9, 150.0, "host", left_s=400.0, merged_s=160.0)
    made = series(first, second)
    position = trained(made, first, 0.0, 100.0)
    trained(made, second, 150.0, 400.0, position)
    (lane,) = make_lanes(made)
    assert states(lane)["down"] == pytest.approx(50, abs=EVERY * STEP_S)
    assert lane.seconds("catching up") == 10
    assert len(lane.kills) == 1
    assert lane.joins == [0.0, 150.0]


def test_a_killed_life_that_never_returns_is_down_to_the_end() -> None:
    gone = Incarnation("a", 1, 0.0, "host", merged_s=0.0)
    stays = Incarnation("b", 2, 0.0, "host", merged_s=0.0)
    made = series(gone, stays)
    trained(made, gone, 0.0, 100.0)
    trained(made, stays, 0.0, 400.0)
    lanes = make_lanes(made)
    assert states(lanes[0])["down"] == pytest.approx(300, abs=EVERY * STEP_S)
    assert states(lanes[1]) == {"training": 400, "stalled": 0, "down": 0}


def test_a_pause_is_a_stall() -> None:
    life = Incarnation("a", 1, 0.0, "host", left_s=400.0, merged_s=0.0)
    made = series(life)
    position = trained(made, life, 0.0, 100.0)
    life.position = int(trained(made, life, 160.0, 400.0, position))
    (lane,) = make_lanes(made)
    assert states(lane)["stalled"] == pytest.approx(60, abs=12)


def test_work_that_an_outage_kept_back_is_no_stall() -> None:
    life = Incarnation("a", 1, 0.0, "host", left_s=400.0, merged_s=0.0)
    made = series(life)
    position = trained(made, life, 0.0, 100.0)
    for _ in range(29):  # of 60 s, all at once
        position += EVERY
        update(made, life, 160.0, position)
    life.position = int(trained(made, life, 160.0, 400.0, position))
    (lane,) = make_lanes(made)
    assert states(lane)["stalled"] == 0


def test_a_life_of_which_nothing_was_merged_is_catching_up() -> None:
    life = Incarnation("a", 1, 0.0, "host", left_s=50.0)
    made = series(life)
    (lane,) = make_lanes(made)
    assert [span.state for span in lane.spans] == ["catching up"]


def test_of_a_life_that_began_before_a_trimmed_tape_the_rest_is_shown() -> None:
    life = Incarnation("a", 1, -5000.0, "host", left_s=400.0, merged_s=150.0)
    made = series(life)
    made.extent = Extent(whole_from=77, whole_s=100.0)
    life.position = int(trained(made, life, 100.0, 400.0, position=10_000))
    (lane,) = make_lanes(made)
    assert states(lane) == {"training": 300, "stalled": 0, "down": 0}
    assert lane.seconds("catching up") == 0
    assert (lane.joins, lane.lives) == ([], 1)


def test_the_work_of_a_learner_is_a_mean_over_the_fragments_that_it_holds() -> None:
    """Whose update of its one fragment is merged has lost nothing; another has two fragments."""
    one, both = (
        Incarnation(name, seq, 0.0, "host", merged_s=0.0, holds=holds)
        for seq, (name, holds) in enumerate((("a", ("w",)), ("b", ())), 1)
    )
    made = series(one, both)
    made.layout = make_layout(
        [Tensor(name=name, shape=(64,), dtype="float32") for name in ("v", "w")],
        fragments=2,
        block=16,
        hint=lambda name, _: TensorHint(module=name),
    )
    for life in (one, both):
        trained(made, life, 0.0, 400.0)
        row = dict.fromkeys(made.inputs.newest(0), 100.0)
        made.inputs.add(*(row | {"learner": made.learners.index(life.learner)}).values())
    of_one, of_both = make_lanes(made)
    assert of_one.steps == 2 * of_both.steps > 0
    times = spent(Shown(made, [of_one, of_both]))
    assert times["a"].merged == 2 * times["b"].merged > 0


def test_a_lane_is_as_high_as_the_share_of_slices_that_train() -> None:
    def slices(present: int) -> wire.LearnerSlices:
        return wire.LearnerSlices(present=present, given=4, least=1)

    whole = Incarnation("a", 1, 0.0, "host", merged_s=0.0, slices=slices(4))
    fewer = Incarnation("a", 9, 200.0, "host", merged_s=210.0, slices=slices(3))
    alone = Incarnation("b", 2, 0.0, "host", merged_s=0.0)
    made = series(whole, fewer, alone)
    position = trained(made, whole, 0.0, 100.0)
    trained(made, fewer, 200.0, 400.0, position)
    trained(made, alone, 0.0, 400.0)
    of_a, of_b = make_lanes(made)
    assert (of_a.slices, of_b.slices) == ("3 of 4", "")
    assert {(span.state, span.present) for span in of_a.spans} == {
        ("training", 1.0), ("down", 1.0), ("catching up", 0.75), ("training", 0.75),
    }  # fmt: skip
    assert {span.present for span in of_b.spans} == {1.0}

    (panel,) = figures.timeline(Shown(made, [of_a, of_b]))
    assert panel.y.names == ["versions", "a, 3 of 4", "b"]
    (training,) = [mark for mark in panel.marks if mark.name == "training"]
    assert set(np.round(training.high - training.low, 6)) == {0.39, 0.52}
