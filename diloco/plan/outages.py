"""Simulates at which times a job of many slices trains, and at which it is stopped by failures.

A job is one learner, or data-parallel training on all chips; a slice is a number of chips that fail
together. Pure: randomness comes in as a generator. The rules, after Decoupled DiLoCo (arXiv
2604.21428, its simulation of failures; docs/plan.md has the constants):

- Each chip fails at random, once in `mtbi_s` on average, and takes its slice out. A slice that is
  out returns after a random time, `return_s` on average.
- An *elastic* job continues with its remaining slices. It stops for `reconfigure_s` when slices
  fail or join; failures and returns in this time are part of the same reconfiguration. A slice
  that has returned waits up to `hold_s` for others, so that all join in one reconfiguration.
- A *rigid* job trains with all of its slices or not at all. It restarts from its checkpoint.
- The step in progress when a slice fails is lost.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
Spread = Literal["exponential", "uniform", "fixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outages:
    """The failures and returns of machines; all times in seconds.

    Attributes:
        mtbi_s: mean time between two interruptions of one chip.
        slice_chips: chips that are lost when one of them fails.
        return_s: mean time from a slice's failure to its return.
        hold_s: longest time that a returned slice waits for others before an elastic job
            reconfigures to take it in.
        reconfigure_s: time for which an elastic job stops when slices fail or join.
        restart_s: time from when slices are available until a job without any memory left trains.
        checkpoint_every_s: training time between two checkpoints of a rigid job; 0: a restart
            loses nothing but the step in progress.
        new_lives: in an elastic job, work that was not sent is lost when slices fail, as the job
            goes on as a new life (`deaths_s`).
        spares: in a rigid job, a spare slice replaces a failed slice at once.
        merge_s: failures within one interval of this length count as one failure at the interval's
            end, as in a simulation that draws once a step whether a chip fails; 0: each counts.
        spread: distribution of the time to a slice's return: exponential, uniform from 0.5 to 1.5
            of `return_s`, or fixed.
    """

    mtbi_s: float
    slice_chips: int = 128
    return_s: float = 1200.0
    hold_s: float = 10.0
    reconfigure_s: float = 15.0
    restart_s: float = 85.0
    checkpoint_every_s: float = 0.0
    spares: bool = True
    new_lives: bool = False
    merge_s: float = 8.0
    spread: Spread = "exponential"


@dataclass(frozen=True, slots=True)
class Trace:
    """A job's training and losses from 0 to `horizon_s`.

    Attributes:
        horizon_s: the end of the trace, in seconds.
        times_s: the times at which the job's share changes, float64 [N], ascending from 0.
        shares: the share of its slices with which the job trains from each of `times_s` on, float64
            [N] in [0, 1]; 0 while it is stopped.
        losses: restarts from a checkpoint: (time, seconds of training whose work was lost).
        deaths_s: times at which the job lost everything it had in memory; with
            `Outages.new_lives` also times at which slices failed.
    """

    horizon_s: float
    times_s: Column
    shares: Column
    losses: tuple[tuple[float, float], ...]
    deaths_s: tuple[float, ...]

    @property
    def _lengths_s(self) -> Column:
        return np.diff(np.append(self.times_s, self.horizon_s))

    @property
    def uptime(self) -> float:
        """Share of the time in which the job trained."""
        return float(self._lengths_s[self.shares > 0].sum() / self.horizon_s)

    @property
    def goodput(self) -> float:
        """The work that no restart lost, as a share of the work without any failure."""
        lost_s = sum(seconds for _, seconds in self.losses)
        return max(0.0, float(self._lengths_s @ self.shares - lost_s) / self.horizon_s)


def always(horizon_s: float) -> Trace:
    """Returns the trace of a job that never fails."""
    return Trace(horizon_s, np.zeros(1), np.ones(1), (), ())


def anyone_up(traces: list[Trace]) -> float:
    """Returns the share of the time in which at least one of the jobs trains."""
    times_s = np.concatenate([trace.times_s for trace in traces])
    changes = np.concatenate(
        [np.diff((trace.shares > 0).astype(int), prepend=0) for trace in traces]
    )
    order = np.argsort(times_s, kind="stable")
    running = np.cumsum(changes[order])
    lengths_s = np.diff(np.append(times_s[order], traces[0].horizon_s))
    return float(lengths_s[running > 0].sum() / traces[0].horizon_s)


class _Job(NamedTuple):
    slices: int
    failures_per_s: float  # The rate of one slice.
    step_s: float
    horizon_s: float


class _Line:
    """A `Trace` under construction; methods append to it, by ascending time."""

    def __init__(self) -> None:
        self.times_s = [0.0]
        self.shares = [0.0]
        self.losses: list[tuple[float, float]] = []
        self.deaths_s: list[float] = []

    def begin(self, at_s: float, share: float) -> None:
        self.times_s.append(at_s)
        self.shares.append(share)

    def stop(self, at_s: float, step_s: float) -> None:
        """Stops training at `at_s`; the step in progress is lost."""
        trained_s = at_s - self.times_s[-1]
        self.begin(self.times_s[-1] + trained_s // step_s * step_s, 0.0)

    def trace(self, horizon_s: float) -> Trace:
        times_s, shares = np.asarray(self.times_s), np.asarray(self.shares)
        here = times_s < horizon_s
        losses = tuple(loss for loss in self.losses if loss[0] < horizon_s)
        deaths_s = tuple(death for death in self.deaths_s if death < horizon_s)
        return Trace(horizon_s, times_s[here], shares[here], losses, deaths_s)


def simulate(
    outages: Outages,
    chips: int,
    horizon_s: float,
    rng: np.random.Generator,
    *,
    elastic: bool,
    step_s: float = 1.0,
) -> Trace:
    """Simulates a job until `horizon_s`; all of its slices are available at the beginning.

    Args:
        outages: failures and returns.
        chips: chips of the job, divided into slices of about `outages.slice_chips`.
        horizon_s: seconds to simulate.
        rng: draws all random times.
        elastic: whether the job is elastic; else it is rigid.
        step_s: seconds of a step.
    """
    slices = max(1, round(chips / outages.slice_chips))
    job = _Job(slices, chips / slices / outages.mtbi_s, step_s, horizon_s)
    return (_elastic if elastic else _rigid)(outages, job, rng).trace(horizon_s)


def _fails_after_s(outages: Outages, failures_per_s: float, rng: np.random.Generator) -> float:
    after_s = float(rng.exponential(1 / failures_per_s))
    if not outages.merge_s:
        return after_s
    return math.ceil(after_s / outages.merge_s) * outages.merge_s


def _failures(
    outages: Outages, failures_per_s: float, span_s: float, rng: np.random.Generator
) -> int:
    """Draws the number of slices that fail within `span_s` seconds in which the job is stopped."""
    if not outages.merge_s:
        return int(rng.poisson(failures_per_s * span_s))
    draws = round(span_s / outages.merge_s)
    return int(rng.binomial(draws, -math.expm1(-failures_per_s * outages.merge_s)))


def _return_at(outages: Outages, at_s: float, rng: np.random.Generator) -> float:
    match outages.spread:
        case "exponential":
            return at_s + rng.exponential(outages.return_s)
        case "uniform":
            return at_s + outages.return_s * rng.uniform(0.5, 1.5)
        case "fixed":
            return at_s + outages.return_s


def _elastic(outages: Outages, job: _Job, rng: np.random.Generator) -> _Line:
    line = _Line()
    line.shares[0] = 1.0
    now_s, up, back = 0.0, job.slices, 0
    returns: list[float] = []
    join_s = np.inf
    while now_s < job.horizon_s:
        # Train, until a slice fails or returned slices join.
        fails_s = now_s + _fails_after_s(outages, up * job.failures_per_s, rng)
        while returns and returns[0] < min(fails_s, join_s):
            back_s = heapq.heappop(returns)
            back += 1
            join_s = min(join_s, max(now_s, back_s) + outages.hold_s)
        now_s = min(fails_s, join_s)
        if fails_s <= join_s:
            line.stop(now_s, job.step_s)
            up -= 1
            heapq.heappush(returns, _return_at(outages, now_s, rng))
        else:
            line.begin(now_s, 0.0)
        none_left = up + back == 0
        if none_left or (outages.new_lives and fails_s <= join_s):
            line.deaths_s.append(now_s)
        ends_s = returns[0] + outages.restart_s if none_left else now_s + outages.reconfigure_s
        up += back
        # Slices that fail meanwhile are left out of the new mesh.
        failed = _failures(outages, up * job.failures_per_s, ends_s - now_s, rng) if up else 0
        for _ in range(min(up - 1, failed)):
            up -= 1
            heapq.heappush(returns, _return_at(outages, rng.uniform(now_s, ends_s), rng))
        while returns and returns[0] <= ends_s:
            heapq.heappop(returns)
            up += 1
        now_s, back, join_s = ends_s, 0, np.inf
        line.begin(now_s, up / job.slices)
    return line


def _rigid(outages: Outages, job: _Job, rng: np.random.Generator) -> _Line:
    line = _Line()
    line.shares[0] = 1.0
    now_s = 0.0
    while now_s < job.horizon_s:
        now_s += _fails_after_s(outages, job.slices * job.failures_per_s, rng)
        _fail(line, outages, now_s, job.step_s)
        now_s = _restarted_at(outages, job, now_s, rng)
        line.begin(now_s, 1.0)
    return line


def _fail(line: _Line, outages: Outages, at_s: float, step_s: float) -> None:
    """Stops a rigid job at a failure, and counts the training since its checkpoint as lost."""
    began_s = line.times_s[-1]
    line.stop(at_s, step_s)
    line.deaths_s.append(at_s)
    if outages.checkpoint_every_s:
        trained_s = line.times_s[-1] - began_s
        line.losses.append((at_s, trained_s % outages.checkpoint_every_s))


def _restarted_at(outages: Outages, job: _Job, failed_s: float, rng: np.random.Generator) -> float:
    """Returns the time at which a rigid job that failed at `failed_s` trains again.

    Without spares, all failed slices must return first, and further slices may fail meanwhile.
    """
    if outages.spares:
        return failed_s + outages.restart_s
    now_s, returns = failed_s, [_return_at(outages, failed_s, rng)]
    while True:
        there = job.slices - len(returns)
        fails_s = now_s + rng.exponential(1 / (there * job.failures_per_s)) if there else np.inf
        next_s = returns[0] if returns else now_s + outages.restart_s
        if fails_s < next_s < job.horizon_s:
            now_s = fails_s
            heapq.heappush(returns, _return_at(outages, now_s, rng))
        elif returns:
            now_s = heapq.heappop(returns)
        else:
            return next_s
