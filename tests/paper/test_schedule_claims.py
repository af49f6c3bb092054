"""Claims of Decoupled DiLoCo (arXiv 2604.21428) about schedule, weights and fragments."""

import itertools
import math

import pytest

from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.round_and_weight_formulas import fragment_rules
from diloco.common.process.config import RunSettings
from diloco.common.protocol.layout import Tensor, make_layout, offset_steps
from diloco.learner.core import sync
from diloco.learner.core.events import (
    Ready,
    Send,
    Start,
    Stepped,
    sync_rules,
)


def settings(**sections):
    return RunSettings.model_validate({"run": {"name": "paper", "steps": 240}, **sections})


def test_with_p_equal_to_h_one_fragment_is_sent_at_every_step():
    """§3: P = 24, H = 24, tau = 2: one fragment sent and one received per step, two in flight."""
    run = settings(sync={"fragments": 24, "interval_steps": 24, "overlap_steps": 2})
    rules = sync_rules(run.sync)
    state = sync.begin(rules, tuple(Start(0, "", f + 1, 0) for f in range(24)))
    travelling: list[tuple[int, Send]] = []
    sent_at, most_in_flight, record_seq = [], 0, 100
    for step in range(1, 241):
        for due, send in [item for item in travelling if item[0] == step]:
            travelling.remove((due, send))
            record_seq += 1
            clock = 24 * (send.seq - 1) + offset_steps(send.fragment, 24, 24)
            ready = Ready(send.fragment, record_seq, send.seq, "", clock, send.seq)
            state, _ = sync.step(rules, state, ready)
        state, effects = sync.step(rules, state, Stepped(float(step), 100))
        sends = [effect for effect in effects if isinstance(effect, Send)]
        assert len(sends) == 1
        assert sends[0].steps == (min(step, 24))
        sent_at.append(sends[0].fragment)
        travelling.append((step + 2, sends[0]))
        in_flight = sum(f.in_flight is not None for f in state.fragments)
        most_in_flight = max(most_in_flight, in_flight)
        # The run's clock and the learner's agree, so that schedules follow the run.
        assert abs(sync.clock(rules, state) - step) <= 3
    assert sorted(sent_at[:24]) == list(range(24))
    assert sent_at[24:48] == sent_at[:24]
    assert most_in_flight == 2


def test_offsets_are_distinct_and_spread_evenly():
    """§3: offsets t_p are distinct within an interval."""
    for fragments, interval in ((24, 24), (8, 24), (5, 24), (1, 24)):
        offsets = [offset_steps(f, fragments, interval) for f in range(fragments)]
        assert len(set(offsets)) == fragments
        gaps = [b - a for a, b in itertools.pairwise(offsets)]
        assert not gaps or max(gaps) - min(gaps) <= 1
        assert offsets[-1] == interval


def test_with_more_fragments_than_steps_each_step_has_as_many():
    """Large models are cut into many fragments, since one is the least that a process can own."""
    for fragments, interval in ((96, 24), (384, 24), (25, 24), (7, 3), (4096, 1)):
        run = settings(sync={"fragments": fragments, "interval_steps": interval, "min_steps": 1})
        rules = sync_rules(run.sync)
        state = sync.begin(rules, tuple(Start(0, "", f + 1, 0) for f in range(fragments)))
        sent, due = [], []
        for step in range(1, interval + 1):
            state, effects = sync.step(rules, state, Stepped(float(step), 100))
            sends = [effect for effect in effects if isinstance(effect, Send)]
            assert {send.steps for send in sends} == {step}
            sent += [send.fragment for send in sends]
            due.append(len(sends))
        assert sent == list(range(fragments))
        assert max(due) - min(due) <= 1


def test_weight_is_quantity_times_quality():
    """§3: w = c_tokens x (c_tokens / c_steps): half as many steps, half the weight; twice the
    tokens a step, four times the weight at equal steps."""
    assert formulas.weight(2400, 24) == pytest.approx(2 * formulas.weight(1200, 12))
    assert formulas.weight(4800, 24) == pytest.approx(4 * formulas.weight(2400, 24))


def test_grace_uses_the_slack_of_the_overlap():
    """Eq. 3: slack = tau x step - (quorum + sync); grace <= gamma x slack."""
    run = settings(
        sync={"overlap_steps": 2},
        quorum={"grace_fraction": 0.9, "grace_cap_s": 100.0},
    )
    layout = make_layout(
        [Tensor(name=f"w{i}", shape=(64, 64), dtype="float32") for i in range(8)],
        fragments=8,
        block=64,
    )
    rules = fragment_rules(run, layout, 0)
    assert formulas.grace_s(rules, 2.0, 0.5, 0.3) == pytest.approx(0.9 * (2 * 2.0 - 0.8))
    assert formulas.grace_s(rules, 0.1, 0.5, 0.3) == 0.0


def test_balanced_fragments_are_within_four_thirds_of_the_optimum():
    """App. C: each tensor, by size, into the smallest fragment (largest <= 4/3 of the optimum)."""
    sizes = [int(900 * math.exp(-i / 17)) + 60 for i in range(60)]
    tensors = [Tensor(name=f"t{i}", shape=(s,), dtype="float32") for i, s in enumerate(sizes)]
    for fragments in (2, 4, 8, 16):
        layout = make_layout(tensors, fragments=fragments, block=16)
        largest = max(fragment.elements for fragment in layout.fragments)
        optimum = max(sum(sizes) / fragments, *sizes)
        assert largest <= 4 / 3 * optimum
