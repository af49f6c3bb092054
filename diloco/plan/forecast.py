"""Forecasts a run on a fleet before the fleet is paid for. Pure, and the same for the same seed.

`diloco/plan/outages.py` simulates at which times learners train, `diloco/plan/simulated_rounds.py`
simulates the rounds of their updates, and `diloco/plan/traffic.py` computes bytes, links, cores and
memory; this file combines the three. docs/plan.md lists what the forecast leaves out.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from diloco.common.process.config import GcSection, RunSettings
from diloco.common.protocol import wire
from diloco.plan import outages as plan_outages
from diloco.plan import simulated_rounds as plan_rounds
from diloco.plan import traffic as plan_traffic
from diloco.plan.outages import Outages, Trace
from diloco.plan.simulated_rounds import PlannedAggregator, PlannedLearner, RoundTotals
from diloco.plan.traffic import RoundTraffic

DAY_S = 86400.0
UTILIZATIONS = (0.5, 0.75, 0.9, 0.95, 0.99)
# The extent of the simulation: updates of a fragment, and failures of the fleet.
UPDATES = 4000
FEWEST_ROUNDS = 12
# In a larger fleet, one simulated learner stands for several.
MOST_LEARNERS = 128
MOST_ROUNDS = 500
FAILURES = 3000
# Seconds from a message to its effect, in addition to the link's round trip: one poll of the bus,
# one request of the store.
MESSAGE_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedIsland:
    """The machines of one learner.

    Attributes:
        chips: accelerator chips.
        step_s: seconds of an inner step, with all chips.
        step_tokens: tokens of an inner step, with all chips.
        gbit: Gbit/s of the learner's link to store and bus, each way.
        rtt_s: round trip of that link, in seconds.
    """

    chips: int = 1
    step_s: float = 1.0
    step_tokens: int = 1
    gbit: float = math.inf
    rtt_s: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The machines that a plan is for, their failures, and data-parallel training to compare with.

    Attributes:
        islands: the machines of each learner.
        outages: how machines fail and return; None: nothing ever fails.
        slices: `learner.slices`. With several, a learner continues with those that are left, as a
            new life (ADR 90); with one, a learner stops while one of its slices is out.
        snapshot_steps: `learner.snapshot_steps`: the new life goes on with the work of a snapshot.
        elastic: a learner continues with the slices that are left, and loses nothing, as in the
            paper.
        learner_restart_s: seconds to restart a learner; None: `outages.restart_s`.
        aggregator_gbit: Gbit/s of the aggregator's link to the store, each way.
        tls: whether that link is encrypted, which takes processor time.
        replay_window_s: seconds for which garbage collection keeps versions in the store.
        gradient_bits: bits of one element of the gradient in data-parallel training.
        hidden: share of a data-parallel step with which the exchange of gradients may overlap.
    """

    islands: tuple[PlannedIsland, ...]
    outages: Outages | None = None
    slices: int = 1
    snapshot_steps: int = 0
    elastic: bool = False
    learner_restart_s: float | None = None
    aggregator_gbit: float = 10.0
    tls: bool = True
    replay_window_s: float = GcSection().replay_window_s
    gradient_bits: int = 16
    hidden: float = 2 / 3

    @property
    def chips(self) -> int:
        """The number of chips of all islands."""
        return sum(island.chips for island in self.islands)

    @property
    def stops_whole(self) -> bool:
        """Whether some learner has several slices, all of which stop while one is out."""
        if self.outages is None or self.elastic or self.slices > 1:
            return False
        return any(island.chips > self.outages.slice_chips for island in self.islands)

    @property
    def step_tokens(self) -> int:
        """The tokens of one inner step of every learner together."""
        return sum(island.step_tokens for island in self.islands)


class System(NamedTuple):
    """The forecast for one way of training: data-parallel, elastic data-parallel, or this system.

    Attributes:
        name: the way of training, for people.
        goodput: work that ends in the model, as a share of the same job's without failures.
        uptime: share of the time in which at least one learner trains.
        utilization: share of a step's time, without failures, in which no learner waits for a link.
        tokens_per_s: tokens a second that end in the model, after failures and waits. In
            data-parallel training every step takes as long as the slowest learner's.
        days: days to the token budget; None without a budget, infinite if it is never reached.
    """

    name: str
    goodput: float
    uptime: float
    utilization: float
    tokens_per_s: float
    days: float | None


class Bandwidth(NamedTuple):
    """The Gbit/s that each site's link needs for one value of utilization, by way of training.

    Attributes:
        utilization: share of the time in which a learner does not wait for a link.
        data_parallel: data-parallel training; infinite if the round trip alone takes too long.
        lockstep: this system with `sync.mode` lockstep; infinite if round trips and the
            aggregator's work alone take too long.
        decoupled: this system, for a version of every fragment in each H steps; it waits for no
            link, whatever the utilization.
    """

    utilization: float
    data_parallel: float
    lockstep: float
    decoupled: float


class Daily(NamedTuple):
    """Totals of a day, over all learners and the aggregator; without deletions and rejoins.

    A record larger than `wire.RECORD_BYTES` is stored as an object, of which a learner reads its
    own answers, once for each update. The object and these requests are counted as such, but the
    bytes only in `tape_bytes` and `record_reads`.

    Attributes:
        objects_written: objects written to the store.
        objects_read: objects read from the store, counted at each reader.
        gets: requests that read objects; a large object takes several.
        bytes_written: bytes written to the store, without records.
        bytes_read: bytes read from the store, without records; counted at each reader.
        bytes_merged: bytes of updates, which the aggregator reads; part of `bytes_read`.
        records: the number of records.
        tape_bytes: bytes of manifests and records.
        record_reads: bytes that learners read of records: of those in objects, the word of each,
            and the answers to their own updates.
    """

    objects_written: float
    objects_read: float
    gets: float
    bytes_written: float
    bytes_read: float
    bytes_merged: float
    records: float
    tape_bytes: float
    record_reads: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The forecast of a run: rates, waits, bytes and needs of its aggregators. Times in seconds.

    Attributes:
        learners: the number of learners.
        chips: the number of chips of all learners.
        sizes: bytes and objects of one round of every fragment.
        systems: data-parallel training, elastic data-parallel training, this system.
        bandwidth: a row for each of `UTILIZATIONS`.
        daily: totals of a day.
        cores: cores that all aggregators need together, if each is to be busy half of the time.
        busy_cores: cores that are busy on average in the simulated rounds.
        memory_bytes: the least memory of all aggregators together.
        retained_bytes: bytes in the store after garbage collection.
        aggregator_gbit: Gbit/s of the aggregators' links, each way, for a version of every fragment
            in H steps, with snapshots.
        close_s: time from a round's close to its record, once its updates are read.
        interval_s: mean time between two versions of a fragment.
        participants: mean number of updates merged in a version.
        staleness: mean staleness of merged updates, in versions.
        wait_s: (mean, worst) time from an update's announcement to the close of its round.
        adoption_s: (mean, worst) time from a version's record to its adoption by a learner.
        fastest_s: time of a step of the fastest learner.
        late_share: share of the merged updates that missed the round for which they were sent.
        kept: share of the trained tokens that was not lost with learners that died.
    """

    learners: int
    chips: int
    sizes: RoundTraffic
    systems: tuple[System, ...]
    bandwidth: tuple[Bandwidth, ...]
    daily: Daily
    cores: int
    busy_cores: float
    memory_bytes: int
    retained_bytes: float
    aggregator_gbit: float
    close_s: float
    interval_s: float
    participants: float
    staleness: float
    wait_s: tuple[float, float]
    adoption_s: tuple[float, float]
    fastest_s: float
    late_share: float
    kept: float


def make_plan(
    settings: RunSettings,
    fleet: Fleet,
    parameters: int,
    sized: RoundTraffic,
    *,
    tokens: int = 0,
    seed: int = 0,
    updates: int = UPDATES,
) -> Plan:
    """Forecasts a run on a fleet.

    Args:
        settings: settings of the run.
        fleet: the machines and their failures.
        parameters: the number of the model's parameters.
        sized: bytes and objects of a round of every fragment, from `plan_traffic.sizes`.
        tokens: the token budget; 0 for none.
        seed: seed of every random time.
        updates: about how many updates of a fragment to simulate.
    """
    rng = np.random.default_rng(seed)
    fastest_s = min(island.step_s for island in fleet.islands)
    interval_s = settings.sync.interval_steps * fastest_s
    cores = plan_traffic.cores(sized, len(fleet.islands), interval_s, tls=fleet.tls)
    in_lockstep = sized.fragments if settings.sync.mode == "lockstep" else 1
    aggregator = _aggregator(fleet, sized, cores, interval_s, in_lockstep)
    close_s = aggregator.make_s + aggregator.store_s + aggregator.message_s
    reads_s = len(fleet.islands) * aggregator.read_s + aggregator.message_s
    travels_s = [_travels_s(settings, island, sized) for island in fleet.islands]
    cycle_s = max(up_s + down_s for up_s, down_s in travels_s) + close_s + reads_s
    stands_for = math.ceil(len(fleet.islands) / MOST_LEARNERS)
    rounds_s = max(interval_s, cycle_s) * _rounds(len(fleet.islands) // stands_for, updates)
    traces = _learners(fleet, _horizon_s(fleet, rounds_s), rng)
    workers = [
        PlannedLearner(
            step_s=island.step_s,
            step_tokens=island.step_tokens,
            upload_s=up_s,
            download_s=down_s,
            trace=trace,
            snapshot_steps=fleet.snapshot_steps if fleet.slices > 1 else 0,
        )
        for island, (up_s, down_s), trace in zip(fleet.islands, travels_s, traces, strict=True)
    ]
    rounds = _simulated(settings, workers, aggregator, stands_for, rounds_s, rng)
    baselines = _data_parallel(fleet, parameters, rng)
    systems = (*baselines, _decoupled(fleet, traces, rounds, settings))
    return Plan(
        learners=len(fleet.islands),
        chips=fleet.chips,
        sizes=sized,
        systems=tuple(_until(system, tokens) for system in systems),
        bandwidth=_bandwidth(
            fleet, parameters, sized, interval_s, (reads_s + close_s) / in_lockstep
        ),
        daily=_daily(sized, rounds, len(fleet.islands)),
        cores=cores,
        busy_cores=plan_traffic.core_s(sized, rounds.participants, tls=fleet.tls)
        / rounds.interval_s,
        memory_bytes=sized.resident_bytes,
        retained_bytes=plan_traffic.retained_bytes(
            sized, rounds.participants, rounds.interval_s, fleet.replay_window_s
        ),
        aggregator_gbit=_aggregator_gbit(fleet, sized, interval_s),
        close_s=close_s / in_lockstep,
        interval_s=rounds.interval_s,
        participants=rounds.participants,
        staleness=rounds.mean_staleness,
        wait_s=rounds.wait_s,
        adoption_s=rounds.adoption_s,
        fastest_s=fastest_s,
        late_share=rounds.late_share,
        kept=rounds.kept,
    )


def _simulated(
    settings: RunSettings,
    workers: list[PlannedLearner],
    aggregator: PlannedAggregator,
    stands_for: int,
    horizon_s: float,
    rng: np.random.Generator,
) -> RoundTotals:
    """Simulates a fragment's rounds; each simulated learner stands for `stands_for` real ones.

    The real ones are its neighbors in the order of step times. Reading the simulated learner's
    update takes as long as reading theirs, so that rounds take as long as with all learners.
    """
    chosen = workers
    if stands_for > 1:
        by_speed = sorted(workers, key=lambda worker: worker.step_s)
        chosen = by_speed[stands_for // 2 :: stands_for]
    scale = len(workers) / len(chosen)
    least = max(1, math.ceil(settings.quorum.min_learners / scale))
    quorum = settings.quorum.model_copy(update={"min_learners": least})
    rounds = plan_rounds.simulate(
        settings.model_copy(update={"quorum": quorum}),
        chosen,
        aggregator=replace(aggregator, read_s=scale * aggregator.read_s),
        horizon_s=horizon_s,
        # An aggregator that cannot keep up makes many versions of few updates each.
        most_versions=MOST_ROUNDS,
        rng=rng,
    )
    rounds.stands_for = scale
    return rounds


def over_learners(
    settings: RunSettings,
    fleet: Fleet,
    parameters: int,
    sized: RoundTraffic,
    counts: list[int],
    *,
    seed: int = 0,
) -> list[Plan]:
    """Returns a plan for each number of learners in `counts`.

    The fleet's chips and tokens per step are divided equally among the learners (`divided`).
    """
    return [
        make_plan(
            settings, divided(fleet, count), parameters, sized, seed=seed, updates=UPDATES // 8
        )
        for count in counts
    ]


def divided(fleet: Fleet, count: int) -> Fleet:
    """Returns a fleet of `count` equal islands with the same chips and tokens per step in all.

    Step time and link are those of the first island.
    """
    island = replace(
        fleet.islands[0],
        chips=max(1, fleet.chips // count),
        step_tokens=max(1, fleet.step_tokens // count),
    )
    return replace(fleet, islands=(island,) * count)


def _rounds(learners: int, updates: int) -> int:
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, updates // learners))


def _horizon_s(fleet: Fleet, rounds_s: float) -> float:
    """Returns the seconds to simulate: at least `rounds_s`, and time for `FAILURES` failures."""
    if fleet.outages is None:
        return rounds_s
    return max(rounds_s, FAILURES * fleet.outages.mtbi_s / fleet.chips)


def _learners(fleet: Fleet, horizon_s: float, rng: np.random.Generator) -> list[Trace]:
    """Returns at which times each learner trains.

    The traces have no losses: `simulated_rounds` counts the work that dies with a learner.
    """
    if fleet.outages is None:
        return [plan_outages.always(horizon_s) for _ in fleet.islands]
    restart_s = fleet.learner_restart_s
    outages = replace(
        fleet.outages,
        checkpoint_every_s=0.0,
        spares=False,
        restart_s=fleet.outages.restart_s if restart_s is None else restart_s,
    )
    return [
        plan_outages.simulate(
            outages if fleet.slices == 1 else _of_slices(fleet, outages, island),
            island.chips,
            horizon_s,
            rng,
            elastic=fleet.elastic or fleet.slices > 1,
            step_s=island.step_s,
        )
        for island in fleet.islands
    ]


def _of_slices(fleet: Fleet, outages: Outages, island: PlannedIsland) -> Outages:
    """Returns the outages of a learner whose chips are `fleet.slices` equal slices."""
    return replace(
        outages,
        slice_chips=max(1, island.chips // fleet.slices),
        new_lives=not fleet.elastic,
    )


def _travels_s(
    settings: RunSettings, island: PlannedIsland, sized: RoundTraffic
) -> tuple[float, float]:
    """Returns a learner's seconds (from a send to its announcement, from a record to its delta)."""
    interval_s = settings.sync.interval_steps * island.step_s
    up_s, down_s = plan_traffic.travel_s(sized, interval_s, island.gbit)
    # In lockstep a learner waits for each fragment in turn: one stands for all.
    turns = sized.fragments if settings.sync.mode == "lockstep" else 1
    message_s = island.rtt_s + MESSAGE_S
    return turns * (up_s + message_s), turns * (down_s + message_s)


def _aggregator(
    fleet: Fleet, sized: RoundTraffic, cores: int, interval_s: float, in_lockstep: int
) -> PlannedAggregator:
    """Returns the times of the aggregator's work for the one fragment that is simulated.

    Updates of one fragment are read after those of another, since the fragments' offsets are spread
    over the interval. If reading all takes longer than the interval, each fragment has only its
    share of the link.

    Args:
        fleet: the machines.
        sized: bytes of a round of every fragment.
        cores: the aggregator's cores.
        interval_s: seconds of H steps of the fastest learner.
        in_lockstep: P in lockstep mode, where the fragment's work stands for all fragments' in
            turn; else 1.
    """
    share = sized.largest / sized.elements
    threads = min(cores, plan_traffic.CLOSING_THREADS)
    link_s = 8 / (fleet.aggregator_gbit * 1e9)
    update_core_s = sized.update_bytes * plan_traffic.byte_core_s(tls=fleet.tls)
    update_core_s += plan_traffic.update_core_s(sized)
    read_s = max(link_s * sized.update_bytes, update_core_s / cores) / sized.fragments
    if read_s * sized.fragments * len(fleet.islands) > interval_s:
        read_s *= sized.fragments
    return PlannedAggregator(
        read_s=in_lockstep * read_s,
        make_s=in_lockstep * sized.largest * plan_traffic.VERSION_CORE_S / threads,
        store_s=in_lockstep * link_s * sized.delta_bytes * share,
        snapshot_s=in_lockstep * link_s * sized.snapshot_bytes * share,
        message_s=in_lockstep * MESSAGE_S,
    )


def _aggregator_gbit(fleet: Fleet, sized: RoundTraffic, interval_s: float) -> float:
    """Returns the larger of the rates at which the aggregator reads and writes, in Gbit/s."""
    read = len(fleet.islands) * sized.update_bytes
    written = sized.delta_bytes + sized.snapshot_bytes / sized.snapshot_interval_versions
    return 8 * max(read, written) / interval_s / 1e9


def _decoupled(
    fleet: Fleet, traces: list[Trace], rounds: RoundTotals, settings: RunSettings
) -> System:
    speeds = [island.step_tokens / island.step_s for island in fleet.islands]
    done = sum(speed * trace.goodput for speed, trace in zip(speeds, traces, strict=True)) / sum(
        speeds
    )
    goodput = done * rounds.kept
    name = "this system"
    name += ", in lockstep" if settings.sync.mode == "lockstep" else ""
    name += ", elastic learners" if fleet.elastic else ""
    name += f", {fleet.slices} slices each" if fleet.slices > 1 else ""
    uptime = plan_outages.anyone_up(traces)
    tokens_per_s = sum(speeds) * goodput * rounds.utilization
    return System(name, goodput, uptime, rounds.utilization, tokens_per_s, None)


def _data_parallel(
    fleet: Fleet, parameters: int, rng: np.random.Generator
) -> tuple[System, System]:
    """Simulates data-parallel training over all islands, and returns (rigid, elastic).

    Each step takes as long as the slowest island's. `outages.py` says what rigid and elastic are.
    """
    slowest_s = max(island.step_s for island in fleet.islands)
    step_s = plan_traffic.data_parallel_step_s(
        slowest_s,
        plan_traffic.ring_bits(parameters, fleet.gradient_bits, len(fleet.islands)),
        min(island.gbit for island in fleet.islands),
        max(island.rtt_s for island in fleet.islands),
        fleet.hidden,
    )
    systems = []
    for name, elastic in (("data-parallel", False), ("elastic data-parallel", True)):
        trace = plan_outages.always(1.0)
        if fleet.outages is not None:
            horizon_s = _horizon_s(fleet, 0.0)
            trace = plan_outages.simulate(
                fleet.outages, fleet.chips, horizon_s, rng, elastic=elastic, step_s=step_s
            )
        tokens_per_s = trace.goodput * fleet.step_tokens / step_s
        utilization = slowest_s / step_s
        systems.append(System(name, trace.goodput, trace.uptime, utilization, tokens_per_s, None))
    return systems[0], systems[1]


def _until(system: System, tokens: int) -> System:
    """Returns `system` with the days that it needs for `tokens`; unchanged if `tokens` is 0."""
    if not tokens:
        return system
    days = tokens / system.tokens_per_s / DAY_S if system.tokens_per_s else math.inf
    return system._replace(days=days)


def _bandwidth(
    fleet: Fleet, parameters: int, sized: RoundTraffic, interval_s: float, round_s: float
) -> tuple[Bandwidth, ...]:
    step_s = max(island.step_s for island in fleet.islands)
    rtt_s = max(island.rtt_s for island in fleet.islands)
    sent = plan_traffic.ring_bits(parameters, fleet.gradient_bits, len(fleet.islands))
    steady = plan_traffic.steady_gbit(sized, interval_s)
    return tuple(
        Bandwidth(
            share,
            plan_traffic.data_parallel_gbit(step_s, sent, rtt_s, fleet.hidden, share),
            plan_traffic.lockstep_gbit(sized, interval_s, round_s, rtt_s, share),
            steady,
        )
        for share in UTILIZATIONS
    )


def _daily(sized: RoundTraffic, rounds: RoundTotals, learners: int) -> Daily:
    """Returns the totals of a day, without the reads of learners that rejoin or the deletions."""
    each = DAY_S / rounds.interval_s  # Versions of every fragment.
    snapshots = each / sized.snapshot_interval_versions
    updates = each * rounds.participants
    record_bytes = plan_traffic.record_bytes(sized, learners, rounds.participants)
    records = each * sized.fragments
    # A record that is too large for a message is an object.
    stored = records if record_bytes > wire.RECORD_BYTES else 0.0
    answers = updates * sized.fragments if stored else 0.0
    read_bytes = plan_traffic.WORD_BYTES if stored else record_bytes
    return Daily(
        objects_written=updates * sized.update_objects
        + records
        + stored
        + snapshots * 2 * sized.fragments,
        objects_read=updates * sized.update_objects + learners * records + answers,
        gets=updates * sized.update_gets + learners * each * sized.delta_gets + answers,
        bytes_written=updates * sized.update_bytes
        + each * sized.delta_bytes
        + snapshots * sized.snapshot_bytes,
        bytes_read=updates * sized.update_bytes + each * learners * sized.delta_bytes,
        bytes_merged=updates * sized.update_bytes,
        records=records,
        tape_bytes=each * plan_traffic.tape_bytes(sized, learners, rounds.participants),
        record_reads=learners * records * read_bytes + answers * plan_traffic.ANSWERS_BYTES,
    )
