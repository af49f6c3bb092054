"""The planner: outages, rounds, traffic, and what the command says of them."""

import itertools
import json
import math
import tomllib
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench.rounds import record
from diloco.aggregator.core import events, machine
from diloco.common.process.config import load_config, parse_settings
from diloco.common.protocol import names, wire
from diloco.common.protocol.codecs import encoded_bytes
from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.store.gcs.bucket import PART_BYTES
from diloco.plan import costs
from diloco.plan import forecast as plan
from diloco.plan import inputs as plan_inputs
from diloco.plan import intervals as plan_intervals
from diloco.plan import outages as plan_outages
from diloco.plan import simulated_rounds as plan_rounds
from diloco.plan import traffic as plan_traffic
from diloco.plan.options import PlanOptions
from diloco.plan.outages import Outages
from diloco.plan.run import run_plan, write_interval
from diloco.plan.simulated_rounds import PlannedAggregator, PlannedLearner
from diloco.program import app

YEAR_S = 365.25 * 86400


def run_settings(**sections):
    base = {"run": {"name": "plan", "steps": 1}, "sync": {"fragments": 8, "interval_steps": 24}}
    merged = {name: {**base.get(name, {}), **keys} for name, keys in sections.items()}
    return parse_settings(base | merged)


@pytest.fixture
def short(monkeypatch):
    """Few rounds and failures, where the claim is not of their number."""
    monkeypatch.setattr(plan, "MOST_ROUNDS", 25)
    monkeypatch.setattr(plan, "FAILURES", 300)


# Outages


def traced(outages, chips, horizon_s, *, elastic, seed=0, step_s=0.01):
    rng = np.random.default_rng(seed)
    return plan_outages.simulate(outages, chips, horizon_s, rng, elastic=elastic, step_s=step_s)


def test_a_rigid_job_with_spares_trains_between_restarts():
    """Renewals: up for MTBI / chips on average, then down for the restart."""
    outages = Outages(mtbi_s=1e6, slice_chips=10, restart_s=50.0)
    trace = traced(outages, 10_000, 400_000, elastic=False)
    assert trace.uptime == pytest.approx(100 / 150, abs=0.02)
    assert trace.goodput == pytest.approx(trace.uptime)


def test_a_rigid_job_without_spares_waits_for_every_slice():
    outages = Outages(
        mtbi_s=1000.0, slice_chips=1, restart_s=10.0, return_s=40.0, spares=False, merge_s=0.0,
        spread="fixed",
    )  # fmt: skip
    assert traced(outages, 1, 2e6, elastic=False).uptime == pytest.approx(1000 / 1050, abs=0.01)
    # Four: up for 250 s. What fails while the job is down makes it wait longer.
    assert 0.79 < traced(outages, 4, 2e6, elastic=False).uptime < 250 / 300
    # Two, each there for a third of the time.
    often = replace(outages, mtbi_s=20.0, restart_s=0.0, spread="exponential")
    assert traced(often, 2, 2e5, elastic=False).uptime == pytest.approx((20 / 60) ** 2, abs=0.01)


@pytest.mark.parametrize("spread", ["exponential", "uniform", "fixed"])
def test_a_slice_is_away_for_its_mean_time(spread):
    outages = Outages(
        mtbi_s=100.0,
        slice_chips=1,
        restart_s=0.0,
        return_s=50.0,
        spares=False,
        spread=spread,
        merge_s=0.0,
    )
    assert traced(outages, 1, 2e5, elastic=False).uptime == pytest.approx(2 / 3, abs=0.02)


def test_failures_of_one_step_count_as_one():
    """Drawn once in 20 s: the span in which something fails is the last one."""
    outages = Outages(mtbi_s=1e6, slice_chips=1, restart_s=80.0, merge_s=20.0)
    trace = traced(outages, 50_000, 400_000, elastic=False)
    up_s = 20 / (1 - math.exp(-1))
    assert trace.uptime == pytest.approx(up_s / (up_s + 80), abs=0.01)
    elastic = traced(replace(outages, return_s=1000.0), 50_000, 400_000, elastic=True)
    each = traced(replace(outages, return_s=1000.0, merge_s=0.0), 50_000, 400_000, elastic=True)
    assert elastic.goodput > each.goodput + 0.05


def test_a_restart_loses_what_was_trained_since_the_checkpoint():
    outages = Outages(mtbi_s=1e5, slice_chips=1, restart_s=0.0, checkpoint_every_s=100.0)
    trace = traced(outages, 100, 2e6, elastic=False)
    # Failures at random within an interval: half of it is lost, once in a thousand seconds.
    assert trace.goodput == pytest.approx(1 - 50 / 1000, abs=0.005)


def test_an_elastic_job_stands_for_failures_and_for_returns():
    outages = Outages(mtbi_s=1e6, slice_chips=1, reconfigure_s=20.0, return_s=100.0, hold_s=0.0)
    trace = traced(outages, 1000, 2e6, elastic=True)
    assert trace.uptime == pytest.approx(1000 / 1040, abs=0.01)
    assert trace.goodput == pytest.approx(trace.uptime * (1 - 1e-4), abs=0.002)
    assert not trace.deaths_s


def test_a_job_of_new_lives_loses_what_was_not_sent_where_slices_fail():
    outages = Outages(mtbi_s=1e6, slice_chips=1, reconfigure_s=20.0, return_s=100.0, hold_s=0.0)
    outages = replace(outages, new_lives=True)
    trace = traced(outages, 1000, 2e6, elastic=True)
    assert len(trace.deaths_s) == pytest.approx(2e6 / 1040, rel=0.1)
    assert trace.uptime == pytest.approx(1000 / 1040, abs=0.01)


def test_slices_of_the_runs_file_are_planned(tmp_path, monkeypatch):
    """A learner of several slices is between one that stops whole and one that loses nothing."""
    monkeypatch.setattr(plan_intervals, "UPDATES", 1)  # which nothing is claimed of

    def goodput(*more, slices=1, snapshot_steps=0):
        file = tmp_path / f"run-{slices}.toml"
        peers = [f"host-{number}:8470" for number in range(slices)]
        given = f"slices = {slices}\npeers = {peers}\ncheckpoint_dir = '/c'\n"
        given += f"snapshot_steps = {snapshot_steps}\n"
        file.write_text(RUN + ("\n[learner]\n" + given if slices > 1 else ""))
        arguments = (str(file), "--json", "--learners", "2", "--chips", "64", "--mtbi", "8h")
        arguments += ("--slice-chips", "8", "--parameters", "1B", "--return", "60s", *more)
        (*_, ours) = json.loads(invoke(*arguments))["systems"]
        return ours["goodput"], ours["name"]

    stops, name = goodput()
    assert name == "this system"
    continues, name = goodput(slices=4)
    assert name == "this system, 4 slices each"
    goes_on, _ = goodput(slices=4, snapshot_steps=1)
    same_slices, _ = goodput("--elastic", "--slice-chips", "8", slices=4)
    loses_nothing, _ = goodput("--elastic", slices=4)
    assert stops + 0.01 < continues < goes_on <= same_slices
    assert continues < loses_nothing


def test_slices_that_wait_for_each_other_stop_the_job_less_often():
    outages = Outages(mtbi_s=YEAR_S, slice_chips=128, hold_s=0.0)
    alone = traced(outages, 1_200_000, 1e5, elastic=True).uptime
    together = traced(replace(outages, hold_s=60.0), 1_200_000, 1e5, elastic=True).uptime
    assert together > alone + 0.02


def test_the_last_slice_takes_the_job_s_memory_with_it():
    outages = Outages(mtbi_s=1000.0, slice_chips=1, return_s=100.0, restart_s=25.0)
    trace = traced(outages, 1, 2e6, elastic=True)
    assert trace.uptime == pytest.approx(1000 / 1125, abs=0.01)
    assert len(trace.deaths_s) == pytest.approx(2e6 / 1125, rel=0.1)


def test_the_step_under_way_gives_nothing():
    outages = Outages(mtbi_s=1000.0, slice_chips=1, restart_s=0.0, merge_s=0.0)
    coarse = traced(outages, 100, 1e5, elastic=False, step_s=5.0)
    # Up for 10 s on average; the mean of whole steps of 5 s in it is 5 / (e^0.5 - 1).
    assert coarse.uptime == pytest.approx(5 / (math.exp(0.5) - 1) / 10, abs=0.02)


def test_somebody_trains_while_not_all_stand():
    one = plan_outages.Trace(10.0, np.asarray([0.0, 4.0, 6.0]), np.asarray([1.0, 0, 1]), (), ())
    two = plan_outages.Trace(10.0, np.asarray([0.0, 5.0]), np.asarray([1.0, 0]), (), ())
    assert plan_outages.anyone_up([one, two]) == pytest.approx(0.9)
    assert plan_outages.anyone_up([two]) == pytest.approx(0.5)


outages_strategy = st.builds(
    Outages,
    mtbi_s=st.floats(3e3, 1e7),
    slice_chips=st.integers(1, 16),
    return_s=st.floats(1, 3000),
    hold_s=st.floats(0, 100),
    reconfigure_s=st.floats(0, 100),
    restart_s=st.floats(0, 200),
    checkpoint_every_s=st.sampled_from([0.0, 30.0, 600.0]),
    spares=st.booleans(),
    spread=st.sampled_from(["exponential", "uniform", "fixed"]),
)


@settings(max_examples=40)
@given(outages_strategy, st.integers(1, 100), st.booleans(), st.integers(0, 99))
def test_traces_are_possible_and_repeat(outages, chips, elastic, seed):
    trace = traced(outages, chips, 20_000.0, elastic=elastic, seed=seed, step_s=1.0)
    again = traced(outages, chips, 20_000.0, elastic=elastic, seed=seed, step_s=1.0)
    np.testing.assert_array_equal(trace.times_s, again.times_s)
    np.testing.assert_array_equal(trace.shares, again.shares)
    assert (np.diff(trace.times_s) >= 0).all()
    assert trace.times_s[-1] < trace.horizon_s
    assert ((trace.shares >= 0) & (trace.shares <= 1)).all()
    assert 0 <= trace.goodput <= trace.uptime + 1e-9 <= 1 + 2e-9


@settings(max_examples=15)
@given(outages_strategy, st.integers(4, 100), st.booleans(), st.integers(0, 99))
def test_a_fleet_that_fails_more_does_less(outages, chips, elastic, seed):
    horizon_s = 200 * outages.mtbi_s / chips
    often = traced(outages, chips, horizon_s, elastic=elastic, seed=seed)
    seldom = traced(
        replace(outages, mtbi_s=8 * outages.mtbi_s),
        chips,
        8 * horizon_s,
        elastic=elastic,
        seed=seed,
    )
    assert seldom.goodput >= often.goodput - 0.05


# Rounds

QUICK = PlannedAggregator(read_s=0.01, make_s=0.02, store_s=0.02, message_s=0.005)


def rounds_of(
    workers, horizon_s=2000.0, aggregator=QUICK, seed=0, most_versions=1 << 20, **sections
):
    return plan_rounds.simulate(
        run_settings(**sections),
        workers,
        aggregator=aggregator,
        horizon_s=horizon_s,
        rng=np.random.default_rng(seed),
        most_versions=most_versions,
    )


def test_an_aggregator_that_cannot_keep_up_is_simulated_for_so_many_versions():
    """Its rounds close with an update each: a fleet of 100,000 would take minutes."""
    slow, workers = replace(QUICK, read_s=60.0), [worker() for _ in range(8)]
    every = rounds_of(workers, aggregator=slow)
    some = rounds_of(workers, aggregator=slow, most_versions=9)
    assert every.versions > 20
    assert some.committed_s == every.committed_s[:9]
    assert some.utilization == pytest.approx(every.utilization, abs=0.01)


def worker(step_s=1.0, trace=None, upload_s=0.1, download_s=0.1, horizon_s=2000.0):
    return PlannedLearner(
        step_s=step_s,
        step_tokens=100,
        upload_s=upload_s,
        download_s=download_s,
        trace=trace or plan_outages.always(horizon_s),
    )


def test_a_machine_is_told_nothing_while_its_version_is_made(monkeypatch):
    """As in production, where the owner of a fragment waits for the outer step."""
    told = []
    step = machine.step

    def spy(rules, state, event):
        told.append((state.phase, type(event)))
        return step(rules, state, event)

    monkeypatch.setattr(machine, "step", spy)
    slow = replace(QUICK, make_s=10.0)
    found = rounds_of([worker(1.0), worker(1.4), worker(2.3)], aggregator=slow)
    assert found.versions > 5
    assert {kind for phase, kind in told if phase == "closing"} == {events.Made}


def test_equal_learners_make_complete_rounds_every_h_steps():
    rounds = rounds_of([worker()] * 4)
    assert rounds.interval_s == pytest.approx(24, rel=0.03)
    assert rounds.participants == 4
    assert (rounds.mean_staleness, rounds.late_share, rounds.kept) == (0, 0, 1)
    mean_s, worst_s = rounds.wait_s
    assert 0 < mean_s < worst_s < 1.0
    # The delta takes a tenth of a step; the boundary that adopts it comes within a step.
    mean_s, worst_s = rounds.adoption_s
    assert 0.1 < mean_s <= worst_s <= 1.1
    assert rounds.reasons == {"complete": rounds.versions}
    assert rounds.utilization == 1


def test_the_fastest_learner_sets_the_pace():
    rounds = rounds_of([worker(1.0), worker(1.5)])
    assert rounds.interval_s == pytest.approx(24, rel=0.05)
    # The slow one sends what it has when a round opens.
    assert rounds.participants == 2
    # One step of this one is longer than a round is open: it comes after H steps of its own.
    slower = rounds_of([worker(1.0), worker(6.0)])
    assert slower.interval_s == pytest.approx(24, rel=0.05)
    assert 1.1 < slower.participants < 1.5
    assert slower.kept == 1


# Of the fastest learner: one before the first version, and one in the middle of a run.
@pytest.mark.parametrize("away_s", [(0.0, 41.0), (230.0, 257.0)], ids=["late start", "outage"])
def test_the_round_after_an_outage_closes_the_gap(away_s):
    """Learners announce as long before their rounds as they waited, else, for many rounds."""
    rounds = rounds_of(
        [worker(1 + number / 16) for number in range(8)], aggregator=replace(QUICK, away_s=away_s)
    )
    back = next(index for index, at_s in enumerate(rounds.committed_s) if at_s >= away_s[1])
    after_s = rounds.waits_s[sum(rounds.merged[: back + 1]) :]
    assert max(after_s) < 2
    assert set(rounds.merged) == {8}


def test_without_grace_a_slower_learner_is_late():
    """The quorum's constants are those of the run's own policy."""
    late = rounds_of([worker(), worker(upload_s=1.0)], quorum={"grace_fraction": 0.0})
    waited = rounds_of([worker(), worker(upload_s=1.0)])
    assert late.late_share > 0.05
    assert waited.late_share == 0
    quorum = rounds_of(
        [worker(), worker(upload_s=1.0)], quorum={"grace_fraction": 0.0, "min_learners": 2}
    )
    assert quorum.late_share == 0
    assert quorum.participants == 2


@pytest.mark.parametrize("least", [1, 32, 64])
@pytest.mark.parametrize("min_steps", [6, 24])
@pytest.mark.parametrize("reads_a_step", [5, 40])
def test_slow_reading_excludes_nobody(least, min_steps, reads_a_step):
    """Reading a round takes 13 steps, where the grace window has two."""
    slow = replace(QUICK, read_s=1 / reads_a_step)
    rounds = rounds_of(
        [worker()] * 64,
        horizon_s=800.0,
        aggregator=slow,
        sync={"min_steps": min_steps},
        quorum={"min_learners": least},
    )
    assert rounds.interval_s == pytest.approx(24, rel=0.03)
    assert rounds.participants > 63.5
    assert rounds.mean_staleness < 0.01


def test_slow_storing_excludes_nobody():
    slow = replace(QUICK, read_s=0.2, store_s=1.6)
    rounds = rounds_of([worker()] * 8, aggregator=slow)
    assert rounds.interval_s == pytest.approx(24, rel=0.03)
    assert (rounds.participants, rounds.mean_staleness) == (8, 0)


def test_a_snapshot_holds_its_record_up():
    """Every eighth record takes an interval longer; nobody's work is lost by it."""
    slow = replace(QUICK, snapshot_s=24.0)
    rounds = rounds_of([worker()] * 4, aggregator=slow)
    apart_s = np.diff(rounds.committed_s)
    assert apart_s.max() > 40
    assert rounds.kept == 1


@pytest.mark.parametrize("read_s", [0.01, 0.18])
def test_a_snapshot_excludes_nobody_from_the_next_round(read_s):
    """Storing it takes a whole interval, which is not what a commit usually takes."""
    slow = replace(QUICK, read_s=read_s, snapshot_s=24.0)
    rounds = rounds_of([worker()] * 64, aggregator=slow)
    assert rounds.participants > 63.5
    assert rounds.mean_staleness < 0.01


def test_a_learner_with_too_few_steps_sends_once_it_has_them():
    """A round is open; the slow one has four of six steps then, and the round waits for both."""
    slower = PlannedLearner(
        step_s=4.4, step_tokens=100, upload_s=0.1, download_s=0.1,
        trace=plan_outages.always(2000.0),
    )  # fmt: skip
    rounds = rounds_of([worker(), slower], quorum={"min_learners": 2, "deadline_s": 40.0})
    assert rounds.participants == 2
    assert rounds.interval_s == pytest.approx(6 * 4.4, rel=0.15)


def test_learners_out_of_phase_fall_into_it():
    """One begins half an interval later; the quorum is all eight."""
    late = plan_outages.Trace(2000.0, np.asarray([0.0, 12.0]), np.asarray([0.0, 1.0]), (), ())
    rounds = rounds_of([worker()] * 7 + [worker(trace=late)], quorum={"min_learners": 8})
    assert rounds.participants > 7.9
    assert "deadline" not in rounds.reasons


def test_pace_holds_the_rounds_apart():
    paced = rounds_of([worker(), worker(1.3)])
    raced = rounds_of([worker(), worker(1.3)], quorum={"pace": 0.0, "grace_fraction": 0.0})
    assert raced.versions > 1.3 * paced.versions


def test_a_learner_that_dies_loses_what_it_had_not_sent():
    """Half of an interval on average."""
    outages = Outages(mtbi_s=240.0, slice_chips=1, return_s=20.0, restart_s=5.0, spread="fixed")
    traces = [traced(outages, 1, 20_000.0, elastic=True, seed=seed, step_s=1.0) for seed in (1, 2)]
    workers = [worker(trace=trace) for trace in traces]
    rounds = rounds_of(workers, 20_000.0)
    assert 1 - rounds.kept == pytest.approx(12 / 240, rel=0.25)
    assert rounds.participants < 2


def test_nobody_waits_long_for_a_learner_that_is_silent():
    """Of two one falls silent for a while; after `liveness_timeout_s` a quorum of two is one."""
    still = plan_outages.Trace(
        2000.0, np.asarray([0.0, 200.0, 1800.0]), np.asarray([1.0, 0.0, 1.0]), (), ()
    )
    rounds = rounds_of([worker(), worker(trace=still)], quorum={"min_learners": 2})
    assert rounds.reasons.get("deadline", 0) <= 1
    assert rounds.interval_s == pytest.approx(24, rel=0.05)


def test_too_stale_updates_are_no_part_of_goodput():
    slow = worker(1.0, upload_s=60.0)
    assert rounds_of([worker(), slow], staleness={"max_versions": 1}).kept < 0.8
    assert rounds_of([worker(), slow]).kept == 1


def test_overwriting_drops_the_steps_that_were_taken_meanwhile():
    slow = worker(upload_s=3.0, download_s=2.0)
    overwritten = rounds_of([slow, slow], sync={"adopt": "overwrite"})
    # Six of thirty steps: the version comes back at the sixth boundary after the update was sent.
    assert overwritten.kept == pytest.approx(24 / 30, abs=0.04)
    assert rounds_of([slow, slow]).kept == 1


def test_a_blend_drops_a_share_of_them_and_keeps_the_pace():
    slow = worker(upload_s=3.0, download_s=2.0)
    blended = rounds_of([slow, slow], sync={"adopt": "blend", "blend": 0.5})
    # Three of the six steps behind each update; the next one is due when it was.
    assert blended.kept == pytest.approx(21 / 24, abs=0.02)
    assert blended.interval_s == pytest.approx(rounds_of([slow, slow]).interval_s, rel=0.02)


def test_in_lockstep_learners_wait_for_each_version():
    workers = [worker(upload_s=3.0, download_s=2.9)] * 2
    rounds = rounds_of(workers, sync={"mode": "lockstep"}, quorum={"min_learners": 2})
    assert rounds.utilization == pytest.approx(24 / 30.3, abs=0.03)
    assert rounds.kept == 1


def test_rounds_repeat_by_seed():
    workers = [worker(), worker(upload_s=1.0)]
    first, again, other = (
        rounds_of(workers, seed=seed, quorum={"grace_fraction": 0.0}) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


# Traffic


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4"])
def test_bytes_are_those_of_the_codec(codec):
    run = run_settings(sync={"codec": codec, "delta_codec": "int4", "fragments": 4})
    sized = plan_traffic.sizes(run, [1 << 20] * 4)
    header = 16 * 4
    assert sized.update_bytes == 4 * encoded_bytes(codec, 1 << 20, 64) + header
    assert sized.delta_bytes == 4 * encoded_bytes("int4", 1 << 20, 64)
    assert sized.update_objects == 4


def test_large_fragments_are_several_objects():
    run = run_settings(sync={"shard_elements": 1 << 20, "fragments": 2})
    assert plan_traffic.sizes(run, [5 << 20, 1 << 20]).update_objects == 6


def test_memory_follows_the_outer_optimizer():
    plain = plan_traffic.sizes(run_settings(), [1 << 20] * 8)
    heavy = plan_traffic.sizes(run_settings(outer={"optimizer": "delayed_nesterov"}), [1 << 20] * 8)
    assert heavy.resident_bytes - plain.resident_bytes == 2 * 4 * (8 << 20)
    assert heavy.snapshot_bytes - plain.snapshot_bytes == 2 * 4 * (8 << 20)


def test_a_large_object_is_read_in_several_requests():
    assert plan_traffic.RANGE_BYTES == PART_BYTES
    sized = plan_traffic.sizes(run_settings(sync={"fragments": 2}), [40 << 20] * 2)
    each = math.ceil(encoded_bytes("int4", 40 << 20, 64) / PART_BYTES)
    assert sized.delta_gets == 2 * each == sized.update_gets


def test_what_is_kept_is_the_window_and_what_its_snapshot_reaches():
    sized = plan_traffic.sizes(run_settings(), [1 << 20] * 8)
    each = 3 * sized.update_bytes + sized.delta_bytes
    kept = plan_traffic.retained_bytes(sized, 3, 10.0, 1000.0)
    assert kept == pytest.approx(104 * each + 14 * sized.snapshot_bytes)
    # Without a window: what recovery needs.
    least = plan_traffic.retained_bytes(sized, 3, 10.0, 0.0)
    assert least == pytest.approx(12 * each + 2.5 * sized.snapshot_bytes)


def test_transfers_take_processor_time():
    sized = plan_traffic.sizes(run_settings(), [1 << 20] * 8)
    more = plan_traffic.core_s(sized, 4, tls=True) - plan_traffic.core_s(sized, 4, tls=False)
    moved = 4 * sized.update_bytes + sized.delta_bytes + sized.snapshot_bytes / 8
    assert more == pytest.approx(moved * (plan_traffic.TLS_CORE_S - plan_traffic.PLAIN_CORE_S))


def test_a_full_link_delays_every_fragment():
    sized = plan_traffic.sizes(run_settings(), [1 << 20] * 8)
    need = plan_traffic.steady_gbit(sized, 24.0)
    up_s, down_s = plan_traffic.travel_s(sized, 24.0, 2 * need)
    assert up_s == pytest.approx(24 / 8 / 2, rel=0.01)
    assert down_s == pytest.approx(up_s, rel=0.01)
    up_s, down_s = plan_traffic.travel_s(sized, 24.0, need / 3)
    assert up_s + down_s == pytest.approx(72, rel=0.01)


@settings(max_examples=50)
@given(st.floats(0.05, 50), st.floats(0, 0.3), st.floats(0, 1), st.floats(0.3, 0.99))
def test_a_link_gives_the_utilization_that_it_was_chosen_for(step_s, rtt_s, hidden, utilization):
    sent = plan_traffic.ring_bits(10**9, 16, 4)
    gbit = plan_traffic.data_parallel_gbit(step_s, sent, rtt_s, hidden, utilization)
    if math.isinf(gbit):
        assert rtt_s >= (hidden + 1 / utilization - 1) * step_s - 1e-9
    else:
        took_s = plan_traffic.data_parallel_step_s(step_s, sent, gbit, rtt_s, hidden)
        assert step_s / took_s == pytest.approx(utilization)


def test_the_ring_moves_the_gradient_nearly_twice():
    assert plan_traffic.ring_bits(10, 16, 1) == 0
    assert plan_traffic.ring_bits(10, 16, 2) == 160
    assert plan_traffic.ring_bits(10, 16, 4) == 240


# The whole plan


def small_plan(learners=4, mtbi_s=YEAR_S, seed=0, chips=100_000, **island):
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 10**9))
    fleet = plan.Fleet(
        islands=(plan.PlannedIsland(chips=chips, **island),) * learners,
        outages=Outages(mtbi_s=mtbi_s),
        elastic=True,
    )
    return plan.make_plan(run, fleet, 10**9, sized, tokens=10**6, seed=seed, updates=100)


@settings(max_examples=6)
@given(st.integers(1, 9), st.floats(0.05, 20), st.integers(0, 50))
def test_plans_are_possible_and_repeat(learners, years, seed):
    made = small_plan(learners, years * YEAR_S, seed)
    assert made == small_plan(learners, years * YEAR_S, seed)
    for system in made.systems:
        assert 0 <= system.goodput <= system.uptime + 1e-9 <= 1 + 2e-9
        assert 0 < system.utilization <= 1
    assert 1 <= made.participants <= learners
    assert 0 <= made.late_share <= 1


@settings(max_examples=4)
@given(st.integers(1, 8), st.integers(0, 50))
def test_fewer_failures_never_make_a_plan_worse(learners, seed):
    plans = [small_plan(learners, years * YEAR_S, seed) for years in (0.1, 1.0, 10.0)]
    for worse, better in itertools.pairwise(plans):
        for bad, good in zip(worse.systems, better.systems, strict=True):
            assert good.goodput > bad.goodput
            assert good.days < bad.days


def test_a_slow_link_costs_data_parallel_and_not_this_system():
    """1B parameters over 200 Mbit/s and 50 ms."""
    _, elastic, decoupled = small_plan(2, gbit=0.2, rtt_s=0.05).systems
    assert elastic.utilization < 0.02
    assert decoupled.utilization > 0.99
    assert decoupled.tokens_per_s > 20 * elastic.tokens_per_s


def test_what_a_dead_learner_had_not_sent_is_no_goodput():
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 10**6))
    outages = Outages(mtbi_s=240.0, slice_chips=1, return_s=50.0, spread="fixed", restart_s=0.0)
    fleet = plan.Fleet(islands=(plan.PlannedIsland(),) * 4, outages=outages)
    ours = plan.make_plan(run, fleet, 10**6, sized).systems[2]
    assert ours.goodput == pytest.approx(240 / 290 * (1 - 12 / 240), abs=0.02)


def test_learners_stop_whole_unless_they_are_planned_elastic():
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 10**9))
    outages = Outages(mtbi_s=YEAR_S, spread="fixed", return_s=600.0)
    fleet = plan.Fleet(islands=(plan.PlannedIsland(chips=4096),) * 4, outages=outages)
    elastic, whole, quick = (
        plan.make_plan(run, one, 10**9, sized, updates=100).systems[2].goodput
        for one in (replace(fleet, elastic=True), fleet, replace(fleet, learner_restart_s=0.0))
    )
    # One failure of a learner in 7700 s, and 675 s for each, or 600.
    assert whole == pytest.approx(1 - 675 / (7704 + 675), abs=0.01)
    assert quick == pytest.approx(1 - 600 / (7704 + 600), abs=0.01)
    assert elastic > 0.98


def test_an_aggregator_s_link_that_is_full_makes_versions_late():
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 10**9))
    fleet = plan.Fleet(islands=(plan.PlannedIsland(),) * 4)
    made = plan.make_plan(run, fleet, 10**9, sized, updates=100)
    enough = replace(fleet, aggregator_gbit=2 * made.aggregator_gbit)
    full = replace(fleet, aggregator_gbit=made.aggregator_gbit / 4)
    # The last record that is counted waits for its snapshot.
    assert plan.make_plan(run, enough, 10**9, sized, updates=100).interval_s < 24.4
    late = plan.make_plan(run, full, 10**9, sized, updates=100)
    # It reads a quarter of what four learners would send every 24 steps, and no more: versions are
    # fewer, and the latest updates of a round wait for the next one.
    assert late.interval_s > 60
    assert late.participants / late.interval_s <= 4 / (4 * 24)


def test_versions_over_a_link_that_is_too_slow_come_later():
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 10**12))
    fleet = plan.Fleet(islands=(plan.PlannedIsland(gbit=0.5),) * 4)
    made = plan.make_plan(run, fleet, 10**12, sized, updates=100)
    took_s = 8 * made.sizes.update_bytes / 0.5e9
    # Of one learner; they are not in step with each other.
    interval_s = made.interval_s * made.learners / made.participants
    assert took_s < interval_s < 1.3 * took_s
    assert made.systems[2].goodput == 1


def test_the_slowest_learner_holds_data_parallel_up():
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 10**9))
    islands = tuple(
        plan.PlannedIsland(step_s=step_s, step_tokens=100) for step_s in (1.0, 1.0, 4.0)
    )
    made = plan.make_plan(run, plan.Fleet(islands=islands), 10**9, sized, updates=100)
    rigid, _, decoupled = made.systems
    assert rigid.tokens_per_s == pytest.approx(75)
    assert decoupled.tokens_per_s == pytest.approx(225, rel=0.01)


def test_of_a_large_fleet_one_stands_for_several(monkeypatch):
    run = run_settings(quorum={"min_learners": 60})
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 10**8))
    islands = tuple(plan.PlannedIsland(step_s=step_s) for step_s in [1.0, 1.2] * 30)
    fleet = plan.Fleet(islands=islands)
    whole = plan.make_plan(run, fleet, 10**8, sized, updates=100)
    monkeypatch.setattr(plan, "MOST_LEARNERS", 20)
    some = plan.make_plan(run, fleet, 10**8, sized, updates=100)
    assert some.participants == pytest.approx(whole.participants, rel=0.02)
    assert some.interval_s == pytest.approx(whole.interval_s, rel=0.02)
    assert some.daily.bytes_read == pytest.approx(whole.daily.bytes_read, rel=0.03)


def test_a_version_is_made_on_the_threads_that_make_it():
    """However many cores the updates need."""
    run = run_settings(sync={"fragments": 1})
    sized = plan_traffic.sizes(run, [1 << 30])
    fleet = plan.Fleet(islands=(plan.PlannedIsland(),) * 64, aggregator_gbit=1000.0)
    made = plan.make_plan(run, fleet, 1 << 30, sized, updates=100)
    assert made.cores > 4
    assert made.close_s > (1 << 30) * plan_traffic.VERSION_CORE_S / 2


# Costs


def costs_of(*regions, **changes):
    made = small_plan(4, mtbi_s=1000 * YEAR_S)
    table = plan_inputs.read_prices(None).model_copy(update=changes)
    return made, costs.compare(table, regions, made)


def test_in_one_region_nothing_but_machines_storage_and_requests_costs():
    _, (cheapest, other) = costs_of(*["us-east1"] * 4)
    assert cheapest.name.startswith("regional bucket in us-east1")
    assert (cheapest.uploads, cheapest.downloads, cheapest.replication) == (0, 0, 0)
    assert min(cheapest.operations, cheapest.storage, cheapest.machines) > 0
    assert other.downloads > 0 < other.replication


def test_bytes_between_regions_cost_by_their_continents():
    regions = ("us-east1", "us-east1", "us-west1", "europe-west4")
    made, found = costs_of(*regions)
    regional = next(cost for cost in found if cost.name.startswith("regional"))
    each_gib = made.daily.bytes_merged / 4 / (1 << 30)
    assert regional.uploads == pytest.approx(each_gib * (0.02 + 0.05))
    down_gib = (made.daily.bytes_read - made.daily.bytes_merged) / 4 / (1 << 30)
    assert regional.downloads == pytest.approx(down_gib * (0.02 + 0.05))
    multi = next(cost for cost in found if cost.name.startswith("multi"))
    assert multi.name == "multi-region bucket in north-america"
    merged_gib = 4 * each_gib
    assert multi.downloads == pytest.approx(down_gib * (3 * 0.02 + 0.05) + merged_gib * 0.02)
    assert multi.uploads == pytest.approx(each_gib * 0.05)
    assert regional.total == pytest.approx(sum(regional[1:]))


@pytest.mark.parametrize(("learners", "updates"), [(8, 8), (128, 1), (128, 128), (1000, 1000)])
def test_a_records_bytes_are_those_of_a_real_one(learners, updates):
    sized = plan_traffic.sizes(run_settings(), [1 << 20] * 4)
    assert sized.update_objects == 4  # One shard an update, as the real one has.
    real = len(wire.encode(record(learners, updates)))
    assert plan_traffic.record_bytes(sized, learners, updates) == pytest.approx(real, rel=0.05)


def test_a_small_update_costs_what_its_request_does():
    small = plan_traffic.sizes(run_settings(), [1 << 16] * 4)
    more = plan_traffic.core_s(small, 65, tls=False) - plan_traffic.core_s(small, 1, tls=False)
    assert 64 * 4 * 2.1e-3 < more < 64 * 4 * 2.5e-3


def test_each_learner_pays_for_every_record_from_the_place_of_the_bus():
    regions = ("us-east1", "us-east1", "us-west1", "europe-west4")
    made, found = costs_of(*regions)
    each = plan_traffic.record_bytes(made.sizes, 4, made.participants)
    assert made.daily.record_reads == pytest.approx(4 * made.daily.records * each)
    gib = made.daily.record_reads / 4 / (1 << 30)
    assert found[0].name.startswith("regional bucket in us-east1")
    assert found[0].records == pytest.approx(gib * (0.02 + 0.05))


@pytest.mark.parametrize("learners", [1000, 4000])
def test_bytes_of_words_and_answers_are_those_of_real_ones(learners):
    made = record(learners, learners)

    def ref(what: str) -> wire.ObjectRef:
        name = names.version_object("a-run-of-12b", 17, 1234, what, "0" * 32)
        return wire.ObjectRef(name=name, size_bytes=1 << 28, crc32c=1 << 31)

    # Half of the versions between two stored views.
    deltas = (ref("delta"),) * (run_settings().sync.snapshot_interval_versions // 2)
    real = made.model_copy(update={"snapshot": ref("view"), "deltas": deltas, "delta": deltas[0]})
    _, answers = wire.with_answers(real, wire.encode(real))
    pointer = wire.RecordPointer(
        word=wire.word_of(real), body=ref("record"), answers=answers, attempt_id="0" * 32
    )
    start, stop = wire.answers_range(pointer, "learner-7")
    assert len(wire.encode(pointer)) == pytest.approx(plan_traffic.WORD_BYTES, rel=0.1)
    assert stop - start == pytest.approx(plan_traffic.ANSWERS_BYTES, rel=0.2)


def test_a_large_record_is_an_object_in_which_each_learner_reads_its_own_answers(monkeypatch):
    small = small_plan()
    monkeypatch.setattr(wire, "RECORD_BYTES", 1000)
    large = small_plan()
    records = small.daily.records
    assert large.daily.objects_written == pytest.approx(small.daily.objects_written + records)
    assert large.daily.gets == pytest.approx(small.daily.gets + large.participants * records)
    words = 4 * records * plan_traffic.WORD_BYTES
    answers = large.participants * records * plan_traffic.ANSWERS_BYTES
    assert large.daily.record_reads == pytest.approx(words + answers)


def test_the_cheapest_is_first_and_prices_decide_it():
    regions = ("us-east1", "us-west1", "us-central1", "us-east4")
    _, found = costs_of(*regions)
    assert found[0].name.startswith("regional")
    _, found = costs_of(*regions, multi_region_read=0.0, replication=0.0)
    assert found[0].name.startswith("multi-region")
    _, free = costs_of(*regions, uploads_charged=False)
    assert free[0].uploads == 0


def test_levers_name_what_they_save_and_what_they_cost():
    """Two learners a region: a cache halves what three regions read, and costs its machine."""
    regions = ("us-central1", "us-east1", "us-west1", "europe-west4")
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 12 * 10**9))
    fleet = plan.Fleet(islands=(plan.PlannedIsland(step_s=6.0),) * 8)
    made = plan.make_plan(run, fleet, 12 * 10**9, sized, updates=100)
    table = plan_inputs.read_prices(None)
    found = {one.name: one for one in costs.levers(table, regions * 2, made, run.sync.block)}
    as_it_is, cached, short, alone, near, thin, both, _ = found.values()
    assert as_it_is.cost == costs.compare(table, regions * 2, made)[0]
    assert cached.cost.downloads == pytest.approx(as_it_is.cost.downloads / 2)
    assert cached.cost.uploads == as_it_is.cost.uploads
    caches = 3 * 24 * table.machines[costs.CACHE_MACHINE]
    assert cached.cost.machines == pytest.approx(as_it_is.cost.machines + caches)
    assert cached.uploads_free == pytest.approx(cached.cost.total - cached.cost.uploads)
    assert short.cost.storage < cached.cost.storage / 2
    # Of a block the codes are half as many bytes, and the scale is as large.
    share = (1 / 4 + 2 / run.sync.block) / (1 / 2 + 2 / run.sync.block)
    assert thin.cost.downloads == pytest.approx(as_it_is.cost.downloads * share, rel=0.01)
    assert both.cost.downloads == pytest.approx(as_it_is.cost.downloads / 2 * share, rel=0.01)
    assert both.cost.uploads == pytest.approx(as_it_is.cost.uploads * share, rel=0.01)
    standby = 24 * (32 * 0.031611 + 256 * 0.004237)
    assert short.cost.machines - alone.cost.machines == pytest.approx(standby)
    # Each region away sends and reads once; two learners of Europe cost more than the others.
    assert near.cost.uploads == pytest.approx(as_it_is.cost.uploads / 2)
    assert near.cost.downloads == pytest.approx(alone.cost.downloads)
    assert near.cost.machines == pytest.approx(alone.cost.machines - caches)
    assert [one.loss == (0, 0) for one in found.values()] == [True] * 5 + [False] * 3
    # One learner a region has nothing to share, and beside the bucket nothing to pay for.
    single = costs.levers(table, regions, made, run.sync.block)
    assert single[1].cost == single[0].cost
    beside = costs.levers(table, regions[:1] * 8, made, run.sync.block)
    assert beside[1].cost == beside[0].cost


def test_machines_are_those_that_are_made():
    """For 12 billion parameters two n2-highmem-32, of which a day cost 100.6 dollars."""
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 12 * 10**9))
    fleet = plan.Fleet(islands=(plan.PlannedIsland(chips=64),) * 2, outages=None, elastic=False)
    made = plan.make_plan(run, fleet, 12 * 10**9, sized, tokens=10**6, seed=0, updates=100)
    table = plan_inputs.read_prices(None)
    (cheapest, _) = costs.compare(table, ["us-east1"] * 2, made)
    assert costs.aggregators(table, made) == (1, 32, 1)
    aggregators = 2 * 24 * (32 * 0.031611 + 256 * 0.004237)
    assert aggregators == pytest.approx(100.6, abs=0.05)
    others = 24 * (3 * 0.067006 + 0.033503)
    assert cheapest.machines == pytest.approx(aggregators + others)
    month = (100 + 60 + 20) * 0.10 + 150 * 0.17
    assert cheapest.disks == pytest.approx(month / costs.MONTH_DAYS)


def test_updates_of_many_learners_take_more_machines_than_the_model_needs():
    """Memory alone would do with 4 cores: a machine of this series has 8 GB for each."""
    run = run_settings()
    sized = plan_traffic.sizes(run, plan_traffic.equal_fragments(run, 10**9))
    fleet = plan.Fleet(islands=(plan.PlannedIsland(step_s=2.0),) * 1000)
    made = plan.make_plan(run, fleet, 10**9, sized, tokens=10**6, seed=0, updates=100)
    table = plan_inputs.read_prices(None)
    # By hand, where each is to be busy half of the time: 1,000 updates of 8 fragments within 48 s.
    a_round_s = 1000 * (10**9 * 0.5e-9 + 8 * 2.1e-3 + 0.53e9 * 1e-9) + 10**9 * 5.2e-9
    assert made.cores == pytest.approx(2 * a_round_s / 48, rel=0.05)
    assert costs.aggregators(table, made) == (1, 48, 1)
    assert costs.aggregators(table, replace(made, cores=4)) == (1, 4, 1)
    assert costs.aggregators(table, replace(made, cores=500)) == (7, 80, 1)
    assert costs.aggregators(table, replace(made, cores=500), standby=False) == (7, 80, 0)
    assert costs.aggregators(table, replace(made, memory_bytes=2 * 10**12)) == (4, 64, 1)


def test_a_longer_interval_costs_less_and_machines_stay():
    _, (cheapest, _) = costs_of("us-east1", "us-west1", "us-central1", "europe-west4")
    fixed = cheapest.machines + cheapest.disks
    assert costs.at_interval(cheapest, 24, 24) == pytest.approx(cheapest.total)
    assert costs.at_interval(cheapest, 24, 48) == pytest.approx((cheapest.total + fixed) / 2)


@pytest.mark.usefixtures("short")
def test_a_table_of_prices_of_one_s_own(tmp_path):
    text = resources.files("diloco.plan").joinpath("prices.toml").read_text()
    file = tmp_path / "prices.toml"
    file.write_text(text.replace("core = 0.031611", "core = 4000.0"))
    dear = json.loads(invoke("--json", "--learners", "2", "--mtbi", "never", "--prices", str(file)))
    cheap = json.loads(
        invoke(
            "--json", "--learners", "2", "--mtbi", "never", "--tokens", "1M", "--step-tokens", "1"
        )
    )
    day = cheap["costs"]["a_day"][0]
    assert dear["costs"]["a_day"][0]["machines"] > 1000 * day["machines"]
    assert cheap["costs"]["run"][0] == pytest.approx(day["total"] * cheap["systems"][2]["days"])
    file.write_text(text.replace("replication", "copies"))
    with pytest.raises(ConfigError, match="replication"):
        run_plan(PlanOptions(learners=2, prices=file))
    file.write_text(text.replace('"europe europe"', '"europe"'))
    with pytest.raises(ConfigError, match="two continents"):
        run_plan(PlanOptions(learners=2, prices=file))
    with pytest.raises(ConfigError, match="No such file"):
        run_plan(PlanOptions(learners=2, prices=tmp_path / "none.toml"))


def test_the_same_chips_in_more_islands():
    fleet = plan.Fleet(islands=(plan.PlannedIsland(chips=1000, step_tokens=600),) * 2)
    assert plan.divided(fleet, 8).islands == (plan.PlannedIsland(chips=250, step_tokens=150),) * 8


# H


def intervals_of(gbit, **sync):
    fleet = plan.Fleet(islands=(plan.PlannedIsland(gbit=gbit, rtt_s=0.05),) * 4)

    def sizes_of(settings):
        return plan_traffic.sizes(settings, plan_traffic.equal_fragments(settings, 10**9))

    return plan_intervals.intervals(run_settings(sync=sync), fleet, 10**9, sizes_of)


@pytest.mark.usefixtures("short")
def test_the_smallest_h_is_the_one_whose_bytes_fit_the_link():
    found = intervals_of(0.3)
    assert [row.steps for row in found if not row.carried] == [6, 12]
    tight = found[1]
    assert tight.full == pytest.approx(tight.gbit_up / 0.3)
    assert tight.full > 1
    said = plan_intervals.advice(found, 24)
    assert "interval_steps = 24, as it is, is the smallest" in said
    assert "at 12 a link would be 118 % full" in said
    assert "it is 96 now" in plan_intervals.advice(found, 96)


@pytest.mark.usefixtures("short")
def test_a_link_may_be_too_slow_for_any_h():
    said = plan_intervals.advice(intervals_of(0.01), 24)
    assert "carry no H up to 96" in said


@pytest.mark.usefixtures("short")
def test_what_must_not_exceed_h_is_cut_to_fit():
    (found,) = [row for row in intervals_of(10.0, interval_steps=3, fragments=3, min_steps=3)
                if row.steps == 3]  # fmt: skip
    assert found.carried
    six = plan_intervals.with_interval(run_settings(), 6).sync
    assert (six.interval_steps, six.fragments, six.min_steps) == (6, 6, 3)


def test_a_shorter_h_is_expected_to_learn_better_and_24_is_what_it_is_measured_by():
    assert plan_intervals.expected_loss(24) == (0, 0)
    least, most = plan_intervals.expected_loss(6)
    assert -3 < least < most < 0
    assert plan_intervals.expected_loss(96) == pytest.approx((-most, -least))


# The command


def invoke(*arguments):
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.usefixtures("short")
def test_twelve_billion_over_four_regions_have_a_cheap_way():
    """At most $300 a day at no loss where uploads are free, $420 with 2 bits where they are not."""
    said = invoke(
        "--parameters", "12B", "--learners", "8", "--step-s", "6", "--mtbi", "never",
        "--set", "sync.fragments=24", "--json",
    )  # fmt: skip
    levers = json.loads(said)["costs"]["levers"]
    assert min(one["uploads_free"] for one in levers if not any(one["loss"])) <= 300
    assert min(one["total"] for one in levers) <= 420


@pytest.mark.usefixtures("short")
def test_the_plan_as_json():
    found = json.loads(
        invoke(
            "--json", "--chips", "64k", "--learners", "4", "--parameters", "1B", "--elastic",
            "--step-tokens", "1M", "--tokens", "1T", "--set", "sync.codec=int8",
        )
    )  # fmt: skip
    assert (found["learners"], found["chips"], found["parameters"]) == (4, 64_000, 10**9)
    names = [system["name"] for system in found["systems"]]
    assert names == ["data-parallel", "elastic data-parallel", "this system, elastic learners"]
    assert found["systems"][2]["days"] == pytest.approx(1e12 / 4e6 / 86400, rel=0.02)
    assert found["sizes"]["update_bytes"] == pytest.approx(1e9 * (1 + 2 / 64), rel=1e-3)
    assert {row["utilization"] for row in found["bandwidth"]} == {0.5, 0.75, 0.9, 0.95, 0.99}
    assert found["cores"] >= 1
    assert [row["steps"] for row in found["intervals"]] == [6, 12, 24, 48, 96]
    assert found["intervals"][0]["carried"] is True
    # What no link can do.
    assert found["bandwidth"][-1]["lockstep"] is None


@pytest.mark.usefixtures("short")
def test_the_plan_as_tables():
    text = invoke("--chips", "1.2M", "--learners", "2", "--mtbi", "1y", "--gbit", "10")
    words = (
        "1,200,000 chips", "goodput", "elastic", "Gbit/s", "staleness", "steps of the fastest",
        "memory", "loss",
    )  # fmt: skip
    for word in ("Cheapest: regional bucket", *words):
        assert word in text


@pytest.mark.usefixtures("short")
def test_a_plan_from_a_run_s_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[run]\nname = "planned"\nsteps = 500\n[store]\nurl = "nowhere"\n'
        "[sync]\nfragments = 4\ninterval_steps = 12\n"
    )
    found = json.loads(invoke(str(file), "--json", "--learners", "3", "--mtbi", "never"))
    assert found["sizes"]["fragments"] == 4
    # The task's own model and batch.
    assert found["parameters"] == 994_400
    assert found["tokens"] % (500 * 3) == 0
    assert found["tokens"] > 500 * 3
    assert found["systems"][2]["goodput"] == 1


@pytest.mark.usefixtures("short")
def test_the_picture(tmp_path):
    file = tmp_path / "new" / "plan.html"
    invoke("--json", "--chips", "1000", "--learners", "2", "--plot", str(file))
    assert file.read_text().count("<svg") == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parameters": "many"}, "--parameters 'many'"),
        ({"parameters": "0"}, "--parameters '0'"),
        ({"tokens": "1X"}, "--tokens '1X'"),
        ({"chips": "3"}, "fewer than the 8 learners"),
        ({"chips": "1,2,3"}, "3 values for 8 learners"),
        ({"step_s": "0"}, "--step-s '0'"),
        ({"step_s": "nan"}, "--step-s 'nan'"),
        ({"gbit": "1,2"}, "2 values for 8 learners"),
        ({"rtt_ms": "-1"}, "--rtt-ms '-1'"),
        ({"spread": "wide"}, "--spread 'wide'"),
        ({"mtbi": "soon"}, "--mtbi 'soon'"),
        ({"return_time": "10"}, "--return '10'"),
        ({"merge_failures": "9"}, "--merge-failures '9'"),
        ({"regions": "us-east1,atlantis-1"}, "no continent of 'atlantis-1'"),
        ({"settings": ("sync.codec=int3",)}, "sync.codec"),
        ({"settings": ("sync",)}, "expected section.key=value"),
    ],
)
def test_what_cannot_be_understood_is_said(options, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        run_plan(PlanOptions(**options))


@pytest.mark.usefixtures("short")
def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for name, said in (("file/plan.html", "cannot write the page"), ("plan.png", "end in .html")):
        with pytest.raises(ConfigError, match=said):
            run_plan(PlanOptions(learners=1, plot=tmp_path / name))


def test_the_times_that_people_write():
    assert plan_inputs._time_s("--mtbi", "1.5h") == 5400
    assert plan_inputs._count("--chips", "1.2M") == 1_200_000


RUN = """\
[run]
name = "planned"
steps = 500

[store]
url = "nowhere"

[sync]  # how learners send
  interval_steps = 24  # H
codec = "int8"

[quorum]
min_learners = 2
"""


def write(file, full):
    """As the command does, where links would be so full at H = 6, 12, 24."""
    found = [
        plan_intervals.Interval(steps, 1.0, 1.0, share, float(steps), (0.0, 0.0))
        for steps, share in zip((6, 12, 24), full, strict=True)
    ]
    return write_interval(file, load_config(file).settings(), found)


def test_the_h_that_links_carry_is_put_into_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    said = write(file, (1.5, 0.5, 0.2))
    assert "interval_steps = 12 (was 24), fragments = 8 (was 8), min_steps = 6 (was 6)" in said
    changed = RUN.replace("interval_steps = 24", "interval_steps = 12")
    assert file.read_text() == changed.replace("send\n", "send\nfragments = 8\nmin_steps = 6\n")
    assert "interval_steps = 6 (was 12), fragments = 6 (was 8)" in write(file, (0.5, 0.3, 0.2))
    file.write_text(RUN[: RUN.index("[sync]")])
    write(file, (0.5, 0.3, 0.2))
    sync = {"interval_steps": 6, "fragments": 6, "min_steps": 3}
    assert tomllib.loads(file.read_text())["sync"] == sync


IN_ONE_LINE = "sync = {interval_steps = 24}\n" + RUN[: RUN.index("[sync]")]


@pytest.mark.parametrize(
    ("text", "full", "said"),
    [
        (RUN, (9.0, 5.0, 2.0), "carry no H up to 24"),
        (IN_ONE_LINE, (0.5, 0.3, 0.2), "not written with a line for each key"),
    ],
    ids=["no H", "in one line"],
)
def test_a_file_that_cannot_be_changed_stays_as_it_is(tmp_path, text, full, said):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        write(file, full)
    assert file.read_text() == text


@pytest.mark.usefixtures("short")
def test_the_command_writes_it_and_says_so(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    text = invoke(str(file), "--learners", "2", "--gbit", "1", "--step-s", "1", "--write")
    assert "written:" in text
    assert load_config(file).sync.interval_steps == 6
    with pytest.raises(ConfigError, match="needs FILE"):
        invoke("--learners", "2", "--write")
