"""Forecasts a fleet for several values of H: whether its links carry the traffic, and the loss.

Pure. Traffic is that of simulated rounds. Loss is a line fitted to this project's own sweep
(docs/benchmarks.md, "One thing changed at a time": H of 6, 12, 24 and 48, two small tasks, AdamW
as the inner optimizer, budgets of 360 steps): percent over H = 24, per e-fold of H. The line gives
direction and rough size for models far larger than those that were measured.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from diloco.common.process.config import RunSettings
from diloco.plan.forecast import Fleet, Plan, make_plan
from diloco.plan.traffic import RoundTraffic

INTERVALS = (6, 12, 24, 48, 96)
# Percent of loss per e-fold of H, on the task where H mattered least and on the other task.
SLOPES = (0.14, 1.82)
MEASURED_AT = 24
# Simulated updates of a fragment for one H.
UPDATES = 500
# Links carry an H if no link is nearly full, and versions come almost every H steps.
FULLEST = 0.9
MOST_APART = 1.1


class Interval(NamedTuple):
    """The forecast of a fleet with one H.

    Attributes:
        steps: H.
        gbit_up: Gbit/s that the fastest learner sends.
        gbit_down: Gbit/s that each learner receives.
        full: used share of the busiest link, a learner's or the aggregator's.
        apart: time between two versions of a fragment, in steps of the fastest learner.
        loss: least and most percent by which the loss is expected to exceed that of H = 24, if
            versions come every H steps.
    """

    steps: int
    gbit_up: float
    gbit_down: float
    full: float
    apart: float
    loss: tuple[float, float]

    @property
    def carried(self) -> bool:
        """Whether the links carry H: none is nearly full, and versions come about every H steps."""
        return self.full <= FULLEST and self.apart <= MOST_APART * self.steps


def expected_loss(steps: int) -> tuple[float, float]:
    """Returns (least, most) percent by which the loss of H = `steps` exceeds that of H = 24."""
    folds = math.log(steps / MEASURED_AT)
    ends = sorted(slope * folds for slope in SLOPES)
    return ends[0], ends[1]


def with_interval(settings: RunSettings, steps: int) -> RunSettings:
    """Returns the settings with H = `steps`, and `fragments` and `min_steps` lowered to fit it."""
    sync = settings.sync.model_copy(
        update={
            "interval_steps": steps,
            "fragments": min(settings.sync.fragments, steps),
            "min_steps": min(settings.sync.min_steps, max(1, steps // 2)),
        }
    )
    return settings.model_copy(update={"sync": sync})


def intervals(
    settings: RunSettings,
    fleet: Fleet,
    parameters: int,
    sizes_of: Callable[[RunSettings], RoundTraffic],
    *,
    seed: int = 0,
) -> list[Interval]:
    """Forecasts the fleet, without failures, for each H of `INTERVALS` and the run's own H.

    Args:
        settings: settings of the run.
        fleet: the machines; their outages are left out.
        parameters: the number of the model's parameters.
        sizes_of: returns the bytes and objects of a round of all fragments under settings.
        seed: seed of every random time.

    Returns:
        The forecasts, by ascending H.
    """
    fleet = replace(fleet, outages=None)
    chosen = sorted({*INTERVALS, settings.sync.interval_steps})
    return [
        _interval(with_interval(settings, steps), fleet, parameters, sizes_of, seed)
        for steps in chosen
    ]


def _interval(
    settings: RunSettings,
    fleet: Fleet,
    parameters: int,
    sizes_of: Callable[[RunSettings], RoundTraffic],
    seed: int,
) -> Interval:
    sized = sizes_of(settings)
    steps = settings.sync.interval_steps
    made: Plan = make_plan(settings, fleet, parameters, sized, seed=seed, updates=UPDATES)
    step_s = min(island.step_s for island in fleet.islands)
    return Interval(
        steps=steps,
        gbit_up=8 * sized.update_bytes / (steps * step_s) / 1e9,
        gbit_down=8 * sized.delta_bytes / (steps * step_s) / 1e9,
        full=_full(fleet, sized, steps, made.aggregator_gbit),
        apart=made.interval_s / step_s,
        loss=expected_loss(steps),
    )


def _full(fleet: Fleet, sized: RoundTraffic, steps: int, aggregator_gbit: float) -> float:
    """Returns the used share of the busiest link; deltas come at the fastest learner's pace."""
    fastest_s = min(island.step_s for island in fleet.islands)
    shares = [aggregator_gbit / fleet.aggregator_gbit]
    for island in fleet.islands:
        busiest = max(sized.update_bytes / island.step_s, sized.delta_bytes / fastest_s)
        shares.append(8 * busiest / steps / (island.gbit * 1e9))
    return max(shares)


def advice(found: list[Interval], current: int) -> str:
    """Returns a sentence with the smallest H that the links carry, and why a smaller H fails.

    Args:
        found: forecasts by ascending H.
        current: the run's own H.
    """
    carried = [interval for interval in found if interval.carried]
    if not carried:
        return (
            f"these links carry no H up to {found[-1].steps}, at which {_said(found[-1])}: choose "
            "a longer one, or smaller codecs"
        )
    best = carried[0]
    smaller = [interval for interval in found if interval.steps < best.steps]
    why = "the smallest that was tried"
    if smaller:
        last = smaller[-1]
        why = f"at {last.steps} {_said(last)}"
    start = f"sync.interval_steps = {best.steps}"
    if best.steps == current:
        return f"{start}, as it is, is the smallest that these links carry: {why}"
    return f"{start} is the smallest that these links carry: {why}; it is {current} now"


def _said(interval: Interval) -> str:
    """Returns why the links do not carry an H."""
    if interval.full > FULLEST:
        return f"a link would be {100 * interval.full:.0f} % full"
    return f"versions would come every {interval.apart:.3g} steps"
