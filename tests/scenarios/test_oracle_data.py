"""Where the oracle lets a learner's data go on, over its lives."""

from types import SimpleNamespace

import pytest
from machinelab import lab_rules, make_manifest
from records import make_record

from diloco.common.protocol import wire
from diloco.judge.oracle.data import Data

SPECIFICATION = wire.Specification.model_construct(epoch=0)


def findings(story):
    """Of (sequence on the tape, message)."""
    data = Data(SPECIFICATION, {})
    return [(one.expected, one.found) for seq, body in story for one in data.take(body, seq)]


def join(holds=()):
    return wire.Join(run="lab", learner="a", layout="0" * 32, host="here", holds=holds)


def update(incarnation, seq, steps, position):
    return make_manifest(
        lab_rules(), "a", incarnation, seq, fragment=0, steps=steps, position=position
    )


def leave(incarnation, position):
    return wire.Leave(
        run="lab", learner="a", incarnation=incarnation, position=position, fragments=(0,)
    )


@pytest.mark.parametrize("begins_at", [7, 8])
def test_lives_go_on_behind_or_before_what_came_after_the_next_join(begins_at):
    # The first life's update comes when the second has begun, and is superseded.
    story = [
        (4, join()),
        (5, update(4, 1, 4, 4)),
        (6, join()),
        (7, update(4, 2, 4, 8)),
        (8, update(6, 1, 3, 7)),
        (9, leave(6, 7)),
        (10, join()),
        (11, update(10, 1, 1, begins_at + 1)),
    ]
    assert findings(story) == []


@pytest.mark.parametrize("begins_at", [6, 9])
def test_but_nowhere_else(begins_at):
    story = [
        (4, join()),
        (5, update(4, 1, 7, 7)),
        (6, join()),
        (7, update(4, 2, 1, 8)),
        (8, join()),
        (9, update(8, 1, 1, begins_at + 1)),
    ]
    assert findings(story) == [((7, 8), begins_at)]


@pytest.mark.parametrize(("begins_at", "found"), [(8, []), (4, [((8, 8), 4)]), (9, [((8, 8), 9)])])
def test_a_life_begins_behind_the_end_of_its_learners_claims(begins_at, found):
    """Or goes on with what the life before had not sent, as a life of four batches with 12 does."""
    ended = wire.Claim(
        run="lab", learner="a", incarnation=4, what="end", shares=2, batches=9, share=0, first=0,
        position=8, lost=(),
    )  # fmt: skip
    story = [
        (4, join()),
        (5, update(4, 1, 3, 3)),
        (6, ended),
        (7, join()),
        (8, update(7, 1, 4, begins_at + 4)),
    ]
    assert findings(story) == found
    assert findings([*story[:-1], (8, update(7, 1, 9, 12))]) == []


@pytest.mark.parametrize(("merged", "most"), [(4, 56), (5, 48), (0, 48)])
def test_it_knows_which_version_has_the_update_before(merged, most):
    """A gap behind an update that was rejected, or is in a later version only, is none of a blend."""
    data = Data(SPECIFICATION, {}, (), 0.7)
    sent = SimpleNamespace(seq=1, position=48, base_version=3, merged_version=merged)
    after = update(1, 2, 24, 72).model_copy(update={"base_version": 4})
    assert data._bounds(after, sent, None) == (48, most)


@pytest.mark.parametrize(
    ("restored", "base", "begins_at", "found"),
    [(2, 2, 5, []), (2, 2, 3, [3]), (2, 1, 5, [5]), (None, 2, 5, [5])],
)
def test_a_life_goes_on_with_what_the_life_before_kept_since_a_rollback(
    restored, base, begins_at, found
):
    """The life before let go of the steps from 4 to 5, sent the other fragment's and none of these."""
    data = Data(SPECIFICATION, {})
    of_other = update(6, 1, 8, 8).model_copy(update={"fragment": 1})
    for seq, body in ((4, join()), (5, update(4, 1, 4, 4)), (6, join()), (8, of_other)):
        assert [*data.take(body, seq)] == []
        if seq == 6 and restored:
            record = make_record(what="restore", version=restored, position=6)
            assert [*data.resolve(record, 7, followed=True)] == []
    assert [*data.take(join(), 9)] == []
    sent = update(9, 1, 10 - begins_at, 10).model_copy(update={"base_version": base})
    assert [one.found for one in data.take(sent, 10)] == found


def answer(update, seq):
    """A verdict that rejects an update, announced at `seq`."""
    rejected = wire.Rejected(
        learner="a", incarnation=update.incarnation, seq=update.seq, stream_seq=seq,
        tokens=update.tokens, steps=update.steps, reason="shards", detail="unreadable",
    )  # fmt: skip
    return make_record(what="verdict", rejected=(rejected,), position=seq + 1)


def test_an_update_behind_a_later_one_has_one_answer():
    """A hostile learner's: aggregators ignore the later one, which is not next."""
    data = Data(SPECIFICATION, {})
    first, second, third = (update(4, seq, 1, seq) for seq in (1, 2, 3))
    for seq, body in ((4, join()), (5, first), (6, third), (8, second)):
        [*data.take(body, seq)]
        if body is third:
            assert [*data.resolve(answer(first, 5), 7, followed=True)] == []
    assert [*data.resolve(answer(second, 8), 9, followed=True)] == []
    [again] = data.resolve(answer(second, 8), 10, followed=True)
    assert (again.rule, again.found) == ("once", "answered")


@pytest.mark.parametrize(("holds", "found"), [((), [0]), (("trunk",), []), (("expert",), [0])])
def test_who_is_there_to_the_end_has_sent_all_its_work_of_what_it_holds(holds, found):
    """Its update of the first fragment, of the trunk, and none of the second, an expert's."""
    data = Data(SPECIFICATION, {})
    for seq, body in ((4, join(holds)), (5, update(4, 1, 12, 12))):
        assert [*data.take(body, seq)] == []
    assert [*data.resolve(answer(update(4, 1, 12, 12), 5), 6, followed=True)] == []
    left = wire.Leave(run="lab", learner="a", incarnation=4, position=12, fragments=())
    assert [*data.take(left, 8)] == []
    assert [one.found for one in data.unfinished(["trunk", "expert"], 7, 9)] == found
