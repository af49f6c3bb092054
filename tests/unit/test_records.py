"""Records are built from typed parts, which state every field once."""

from records import make_record

from diloco.aggregator.core.decisions import Decided
from diloco.aggregator.owner.committer import RecordContents, contents_of, sum_up, unchanged
from diloco.common.protocol import wire

# What `compose` adds: who makes the record, and what it follows.
MAKER = {"run", "epoch", "fragment", "layout", "aggregator", "attempt_id", "release", "lock"}
BASIS = {"base_digest", "previous", "restored_version", "totals"}


def test_each_field_of_a_record_is_stated_by_one_part() -> None:
    stated = [*Decided._fields, *RecordContents._fields, *MAKER, *BASIS]
    assert sorted(stated) == sorted(wire.Record.model_fields)


def test_contents_are_what_the_record_states() -> None:
    record = make_record(learning_rate=0.7, momentum=0.9, snapshot_version=3, outer_seq=12)
    for name, value in contents_of(record)._asdict().items():
        assert value == getattr(record, name), name


def test_a_verdict_merges_nothing_and_leaves_the_objects() -> None:
    before = make_record(factors=b"1234", snapshot_version=3, outer_seq=12)
    after = unchanged(before, 5.0)
    assert (after.inputs, after.factors, after.delta) == ((), b"", None)
    assert after.merged_at_s == 5.0
    assert after._replace(factors=b"1234", merged_at_s=0.0) == contents_of(before)


def test_sums_stop_at_the_greatest_count() -> None:
    rejected = wire.Rejected(
        learner="a", incarnation=1, seq=1, stream_seq=1, tokens=wire.GREATEST, steps=1,
        reason="tokens", detail="",
    )  # fmt: skip
    totals = sum_up(make_record().totals, (), (rejected, rejected))
    assert totals.tokens_rejected == wire.GREATEST
    assert totals.updates_rejected == 2
