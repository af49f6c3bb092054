"""The aggregator's rules: docs/design/paper.md's formulas, and what is believed of a manifest."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.aggregator.core import admission_and_credit
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.core.members import Member, Members
from diloco.common.process.config import QuorumSection, StalenessSection, make_config
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.layout import Rhythm, Tensor, make_layout

LAYOUT = make_layout([Tensor(name="w", shape=(48, 64), dtype="float32")], fragments=1, block=32)


def make_rules(**sections) -> formulas.FragmentRules:
    document = {
        "run": {"name": "rules", "steps": 480},
        "store": {"url": "unused"},
        "sync": {"fragments": 1, "interval_steps": 24, "block": 32, "shard_elements": 1024},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return formulas.fragment_rules(make_config(document, source="test").settings(), LAYOUT, 0)


def test_rules_of_a_fragment_come_from_settings_and_layout():
    rules = make_rules(sync={"mode": "lockstep"})
    assert (rules.run, rules.fragment, rules.size) == ("rules", 0, 3072)
    assert (rules.layout, rules.codec, rules.block) == (LAYOUT.digest, "int4", 32)
    assert rules.rhythm == Rhythm(0, 1, 24, 0, 6)
    assert (rules.steps, rules.lockstep) == (480, True)


# Weight and discounts


@pytest.mark.parametrize(
    ("tokens", "steps", "expected"), [(240, 24, 2400.0), (240, 12, 4800.0), (1, 1, 1.0)]
)
def test_the_weight_is_quantity_times_quality(tokens, steps, expected):
    """P §3: w = c_tokens x (c_tokens / c_steps)."""
    assert formulas.weight(tokens, steps) == expected


# docs/design/paper.md, section 4, worked out by hand.
DISCOUNTS = [
    ("constant", {}, {0: 1, 1: 1, 100: 1}),
    ("polynomial", {"power": 0.5}, {0: 1, 3: 0.5, 8: 1 / 3, 99: 0.1}),
    ("polynomial", {"power": 1}, {0: 1, 1: 0.5, 3: 0.25}),
    ("hinge", {"rate": 10, "threshold": 4}, {0: 1, 4: 1, 5: 1 / 11, 6: 1 / 21}),
    ("exponential", {"rate": 0.5}, {0: 1, 1: 0.6065306597, 2: 0.3678794412}),
    ("inverse", {"rate": 0.25}, {0: 1, 1: 0.8, 4: 0.5, 12: 0.25}),
]


@pytest.mark.parametrize(("rule", "constants", "table"), DISCOUNTS)
def test_discounts_of_the_table(rule, constants, table):
    section = StalenessSection(rule=rule, **constants)
    for staleness, expected in table.items():
        assert formulas.discount(section, staleness) == pytest.approx(expected, rel=1e-9)


sections = st.builds(
    StalenessSection,
    rule=st.sampled_from(["constant", "polynomial", "hinge", "exponential", "inverse"]),
    power=st.floats(0, 4),
    rate=st.floats(0, 20),
    threshold=st.integers(0, 20),
)


@given(sections, st.integers(0, 10_000))
def test_a_discount_only_shrinks_and_does_so_with_staleness(section, staleness):
    now, later = formulas.discount(section, staleness), formulas.discount(section, staleness + 1)
    assert 0 <= later <= now <= 1
    assert formulas.discount(section, 0) == 1


# Time


def test_the_moving_average_begins_with_its_first_value():
    assert formulas.ema(0.0, 8.0) == 8.0
    assert formulas.ema(8.0, 4.0) == 6.0
    assert formulas.ema(6.0, 6.0) == 6.0


@pytest.mark.parametrize(
    ("least", "live", "expected"), [(1, 0, 1), (3, 0, 1), (3, 2, 2), (3, 3, 3), (3, 9, 3)]
)
def test_the_effective_quorum_is_what_the_live_can_reach(least, live, expected):
    assert formulas.effective_quorum(QuorumSection(min_learners=least), live) == expected


@pytest.mark.parametrize(
    ("live", "first", "later"),
    [(0, 3, 1), (1, 3, 1), (2, 3, 2), (3, 3, 2), (4, 3, 3), (5, 4, 4), (8, 6, 6)],
)
def test_where_learners_may_lie_two_thirds_are_a_quorum_and_three_of_the_first(live, first, later):
    assert formulas.robust_quorum(live, 0) == first
    assert formulas.robust_quorum(live, 1) == later


def usual_s(steps_s):
    """The usual step of learners that say these."""
    each = {str(at): Member(1, step_time_s=step_s) for at, step_s in enumerate(steps_s)}
    return Members(each).usual_step_s()


def test_the_median_learner_sets_the_pace():
    rules = make_rules(quorum={"pace": 0.5})
    assert formulas.pace_s(rules, usual_s([2.0, 1.0, 4.0])) == 24.0
    assert formulas.pace_s(rules, usual_s([2.0, 1.0, 4.0]), 6) == 6.0
    # Of two, and of the middle two, the faster.
    assert formulas.pace_s(rules, usual_s([2.0, 1.0])) == 12.0
    assert formulas.pace_s(rules, usual_s([8.0, 1.0, 4.0, 2.0])) == 24.0
    # One that has not said how fast it is does not count; nobody has: no pace.
    assert formulas.pace_s(rules, usual_s([0.0, 2.0])) == 24.0
    assert formulas.pace_s(rules, usual_s([0.0])) == 0.0
    assert formulas.pace_s(rules, usual_s([])) == 0.0
    assert formulas.pace_s(make_rules(quorum={"pace": 0}), usual_s([1.0])) == 0.0
    assert formulas.pace_s(make_rules(sync={"mode": "lockstep"}), usual_s([1.0])) == 0.0


@pytest.mark.parametrize("claim", [1e-12, 1e-9, 1e12])
def test_one_step_time_moves_pace_and_grace_no_further_than_another_honest_one(claim):
    rules = make_rules(quorum={"pace": 0.5, "grace_cap_s": 1e9})
    honest = [1.0, 1.1, 1.2]
    for steps in ([claim, *honest], [claim, *honest[:2]]):
        assert 12.0 <= formulas.pace_s(rules, usual_s(steps)) <= 14.4
        assert 0.9 * 2 <= formulas.grace_s(rules, usual_s(steps), 0.0, 0.0) <= 0.9 * 2 * 1.2


def test_an_allowance_grows_with_time_up_to_ten_seconds_worth():
    bounds = make_rules(bounds={"max_updates_per_s": 2.0}).bounds
    assert admission_and_credit.allowance(bounds, math.inf, 0.0, 0.0) == 20.0
    assert admission_and_credit.allowance(bounds, 0.0, 100.0, 103.0) == 6.0
    assert admission_and_credit.allowance(bounds, 0.0, 100.0, 1000.0) == 20.0
    assert admission_and_credit.allowance(bounds, 5.0, 100.0, 90.0) == 5.0, "a clock that went back"
    slow = make_rules(bounds={"max_updates_per_s": 0.01}).bounds
    assert admission_and_credit.allowance(slow, math.inf, 0.0, 0.0) == 1.0, "one must be possible"


def test_grace_is_a_share_of_the_slack():
    """P Eq. 3: gamma x (tau x step - (quorum + sync)), with the median step."""
    rules = make_rules(
        sync={"overlap_steps": 2}, quorum={"grace_fraction": 0.5, "grace_cap_s": 3.0}
    )
    assert formulas.grace_s(rules, usual_s([2.0, 9.0]), 1.0, 0.5) == 0.5 * (2 * 2.0 - 1.5)
    assert formulas.grace_s(rules, usual_s([2.0]), 3.0, 1.0) == 0.0
    assert formulas.grace_s(rules, usual_s([2.0]), 9.0, 9.0) == 0.0, "never less than nothing"
    assert formulas.grace_s(rules, usual_s([100.0]), 1.0, 1.0) == 3.0, "never more than the cap"
    assert formulas.grace_s(rules, usual_s([0.0]), 1.0, 1.0) == 0.0
    assert formulas.grace_s(rules, usual_s([]), 1.0, 1.0) == 0.0


# What a manifest alone shows


def make_manifest(rules, **changes) -> wire.Manifest:
    fields = {
        "run": "rules",
        "learner": "a",
        "epoch": 0,
        "incarnation": 7,
        "seq": 3,
        "fragment": 0,
        "base_version": 0,
        "base_digest": "0" * 32,
        "layout": rules.layout,
        "codec": "int4",
        "shards": make_shards(rules),
        "tokens": 240,
        "steps": 24,
        "position": 0,
        "local_step": 24,
        "loss": 1.0,
        "step_time_s": 1.0,
        "encode_s": 0.0,
        "upload_s": 0.0,
        "attempt": 0,
        "final": False,
    }
    return wire.Manifest(**(fields | changes))


def make_shards(rules) -> tuple[wire.Shard, ...]:
    return tuple(
        wire.Shard(
            name=names.shard("rules", "a", 0, 0, 7, 3, index),
            size_bytes=shards.shard_bytes("int4", stop - start, rules.block),
            crc32c=1,
            slices=slices.of_range(start, stop, rules.block),
        )
        for index, (start, stop) in enumerate(
            shards.shard_ranges(rules.size, rules.block, rules.shard_elements)
        )
    )


def test_an_honest_manifest_is_well_formed():
    rules = make_rules()
    assert len(make_shards(rules)) == 3
    assert admission_and_credit.malformed(rules, make_manifest(rules)) is None
    any_order = make_manifest(rules, shards=make_shards(rules)[::-1])
    assert admission_and_credit.malformed(rules, any_order) is None
    again = make_rules()
    assert admission_and_credit.malformed(again, make_manifest(again)) is None


def spoil(index, **changes):
    def change(honest):
        return tuple(
            shard.model_copy(update=changes) if i == index else shard
            for i, shard in enumerate(honest)
        )

    return change


@pytest.mark.parametrize(
    ("reason", "named", "changes"),
    [
        ("layout", "f" * 32, {"layout": "f" * 32}),
        ("codec", "int8", {"codec": "int8"}),
        ("shards", "64 blocks, the fragment 96", {"shards": lambda honest: honest[:2]}),
        ("shards", "128 blocks", {"shards": lambda honest: (*honest, honest[-1])}),
        ("shards", "two shards", {"shards": spoil(1, slices=slices.of_range(0, 1024, 32))}),
        ("name", "rules/learner/b", {"shards": spoil(1, name="rules/learner/b/update/0/7-3.1")}),
        ("name", "0-7-3.0", {"shards": spoil(1, name="rules/learner/a/update/0/0-7-3.0")}),
        ("name", "/7-2.1", {"shards": spoil(1, name="rules/learner/a/update/0/7-2.1")}),
        ("name", "rules/learner/a/update/0/0-8-3.", {"incarnation": 8}),
        ("name", "0-7-3.x", {"shards": spoil(1, name="rules/learner/a/update/0/0-7-3.x")}),
        ("size", "shard 1", {"shards": spoil(1, size_bytes=1)}),
    ],
)
def test_what_does_not_fit_is_named_with_both_sides(reason, named, changes):
    rules = make_rules()
    made = {k: v(make_shards(rules)) if callable(v) else v for k, v in changes.items()}
    found = admission_and_credit.malformed(rules, make_manifest(rules, **made))
    assert found is not None
    assert found[0] == reason
    assert named in found[1]
