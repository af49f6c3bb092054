"""Addresses: what is fenced by a prefix or a subject stays within it."""

import re
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from diloco.common.protocol import names

valid = st.from_regex(names.NAME, fullmatch=True)
anything = st.text(max_size=50)
counts = st.integers(0, 1 << 62)


@given(anything)
def test_a_valid_name_is_one_token_of_a_subject_and_one_step_of_a_path(name):
    if names.valid_name(name):
        assert re.fullmatch("[a-z0-9-]{1,40}", name)


@pytest.mark.parametrize(
    "name", ["", "A", "a.b", "a/b", "*", ">", "..", "-a", "a\n", "ä", "a" * 41]
)
def test_what_is_no_name(name):
    assert not names.valid_name(name)


@given(valid, valid, st.tuples(*[counts] * 5))
def test_a_learners_objects_are_under_its_prefix_alone(run, learner, numbers):
    own = names.shard(run, learner, *numbers)
    assert own.startswith(names.learner_prefix(run, learner))
    assert not own.startswith(names.learner_prefix(run, learner + "x"))
    if len(learner) > 1:
        assert not own.startswith(names.learner_prefix(run, learner[:-1]))
    assert not own.startswith(names.fragment_prefix(run, numbers[0]))
    checkpoint = names.learner_checkpoint(run, learner, numbers[0], "0" * 32)
    assert checkpoint.startswith(names.learner_prefix(run, learner))
    assert not own.startswith(names.learner_checkpoints(run, learner))


numbers = st.tuples(*[st.integers(0, 300)] * 5)


@given(numbers, numbers)
def test_two_shards_have_two_names(one, other):
    assert (one == other) == (names.shard("r", "l", *one) == names.shard("r", "l", *other))


@given(valid, valid, st.tuples(*[counts] * 5), st.from_regex("[0-9a-f]{32}", fullmatch=True))
def test_names_of_objects_can_be_read_back(run, learner, numbers, digest):
    found = names.parse_shard(run, names.shard(run, learner, *numbers))
    assert found == (learner, *numbers[:4])
    for what in ("delta", "view", "outer", "record"):
        name = names.version_object(run, numbers[0], numbers[1], what, digest)
        assert names.parse_version_object(run, numbers[0], name) == (numbers[1], what)
        assert names.parse_version_object(run, numbers[0] + 1, name) is None


@pytest.mark.parametrize(
    "name",
    [
        "r/learner/l/update/0/0-1-1",
        "r/learner/l/update/0/1-1.0",
        "r/learner/l/update/0/0-1-1.0.0",
        "r/learner/l/checkpoint/0-1-1.0",
        "r/learner/l/x/update/0/0-1-1.0",
        "s/learner/l/update/0/0-1-1.0",
        "r/global/0/00000001-delta-",
        f"r/global/0/00000001-other-{'0' * 32}",
        f"r/global/0/1-delta-{'0' * 32}",
        f"r/global/layout-{'0' * 32}",
    ],
)
def test_what_is_no_name_of_ours_is_not_read(name):
    assert names.parse_shard("r", name) is None
    assert names.parse_version_object("r", 0, name) is None


NUMBERS = st.one_of(st.integers(0, 20), st.integers(0, 10**19 - 1))
LIVES = st.from_regex("[0-9a-f]{32}", fullmatch=True)
# By its kind, how each subject is made, of what it says besides its run.
SUBJECTS = {
    "spec": (names.spec, st.tuples()),
    "settings": (names.settings, st.tuples()),
    "checkpoint": (names.checkpoint, st.tuples()),
    "stop": (names.stop, st.tuples()),
    "end": (names.end, st.tuples()),
    "join": (names.join, st.tuples(valid)),
    "leave": (names.leave, st.tuples(valid)),
    "claim": (names.claim, st.tuples(valid)),
    "quarantine": (names.quarantine, st.tuples(valid)),
    "heartbeat": (names.heartbeat, st.tuples(valid)),
    "rejected": (names.rejected, st.tuples(valid)),
    "update": (names.update, st.tuples(valid, NUMBERS)),
    "record": (names.record, st.tuples(NUMBERS)),
    "round": (names.round_open, st.tuples(NUMBERS)),
    "lease of a fragment": (names.fragment_lease, st.tuples(NUMBERS)),
    "lease of an aggregator": (names.aggregator_lease, st.tuples(LIVES)),
}


def said(subject: names.Subject) -> tuple[object, ...]:
    """Returns the parts of a subject besides its kind and run."""
    return tuple(part for part in subject[2:] if part is not None)


def test_every_kind_of_subject_is_made_and_read():
    assert {kind.split()[0] for kind in SUBJECTS} == {*get_args(names.Kind)}


@pytest.mark.parametrize("kind", SUBJECTS)
@settings(max_examples=30)
@given(run=valid, data=st.data())
def test_a_subject_is_read_back_as_it_was_made(kind, run, data):
    make, parts = SUBJECTS[kind]
    given_parts = data.draw(parts)
    subject = make(run, *given_parts)
    found = names.parse_subject(subject)
    assert found is not None
    assert (found.kind, found.run, said(found)) == (kind.split()[0], run, given_parts)
    learner = next((part for part in given_parts if kind != "lease of an aggregator"
                    and isinstance(part, str)), None)  # fmt: skip
    assert names.subject_learner(subject) == learner


odd_token = st.one_of(
    st.sampled_from([*get_args(names.Kind), "diloco", "$KV", "diloco-r_leases", "fragment", "a"]),
    st.sampled_from(["*", ">", "", "00", "01", "-1", "1e3", "A", "a b", "a\n", "x" * 41, "9" * 20]),
    valid,
)


@settings(max_examples=500)
@given(st.lists(odd_token, min_size=1, max_size=6).map(".".join))
def test_what_is_read_is_what_would_be_made(subject):
    """No second spelling, no wildcard, nothing behind it."""
    found = names.parse_subject(subject)
    if found is not None:
        made = [make for kind, (make, _) in SUBJECTS.items() if kind.split()[0] == found.kind]
        assert subject in [make(found.run, *said(found)) for make in made]


@pytest.mark.parametrize(
    "subject",
    [
        "diloco.r.record.00", "diloco.r.record.x", "diloco.r.record.*", "diloco.r.update.a.1.2",
        "diloco.r.join", "diloco.r.join.a.b", "diloco.r.other", "other.r.spec", "diloco.R.spec",
        "diloco.r.spec.", " diloco.r.spec", "diloco.r.spec\n", "$KV.diloco-r.fragment.0",
        "$KV.diloco-r_leases.aggregator.x", f"diloco.r.record.{'9' * 20}",
    ],
)  # fmt: skip
def test_what_is_no_subject_of_ours_is_not_read(subject):
    assert names.parse_subject(subject) is None


def matches(pattern: str, subject: str) -> bool:
    """NATS: `*` is one token, `>` is the rest."""
    asked, found = pattern.split("."), subject.split(".")
    for position, token in enumerate(asked):
        if token == ">":
            return len(found) > position
        if position >= len(found) or token not in ("*", found[position]):
            return False
    return len(asked) == len(found)


@given(valid, valid, st.integers(0, 4095))
def test_every_subject_is_in_the_stream_it_belongs_to(run, learner, fragment):
    tape = [
        names.spec(run),
        names.join(run, learner),
        names.leave(run, learner),
        names.update(run, learner, fragment),
        names.record(run, fragment),
        names.stop(run),
        names.end(run),
    ]
    ops = [names.heartbeat(run, learner), names.rejected(run, learner)]
    # Two streams must not overlap, and what is broadcast must be in neither.
    expected = {**dict.fromkeys(tape, "tape"), **dict.fromkeys(ops, "ops")}
    expected[names.round_open(run, fragment)] = ""
    for subject, stream in expected.items():
        found = [
            name
            for name, patterns in (
                ("tape", names.tape_subjects(run)),
                ("ops", names.ops_subjects(run)),
            )
            for pattern in patterns
            if matches(pattern, subject)
        ]
        assert found == ([stream] if stream else [])


@given(valid, valid)
def test_runs_do_not_hear_each_other(run, other):
    assume(run != other)
    mine = [*names.tape_subjects(run), *names.ops_subjects(run)]
    theirs = [*names.tape_subjects(other), *names.ops_subjects(other)]
    assert not any(matches(one, two) for one in mine for two in theirs)


@pytest.mark.parametrize("other", ["a-ops"])
def test_two_runs_have_four_streams(other):
    streams = [make(run) for run in ("a", other) for make in (names.tape_stream, names.ops_stream)]
    assert len(set(streams)) == 4


def test_versions_sort_as_their_names_do():
    made = [names.version_object("r", 0, version, "delta", "d") for version in (2, 10, 9, 100)]
    assert sorted(made) == [made[i] for i in (0, 2, 1, 3)]
