"""Whatever a fragment's newest record says falsely is found: no record behind it has its digest."""

from collections.abc import Iterator
from typing import Any

import pytest
from test_false_health import five_versions

from diloco.common.protocol import wire
from diloco.common.protocol.errors import IntegrityError
from diloco.judge.audit import audit
from diloco.judge.remake_and_compare import FragmentRemaker
from diloco.replay.decide import decide_newest

Path = tuple[str | int, ...]
# The tape's reader holds it against the message's subject.
READ = ("fragment",)
# What nothing follows from, and nothing else says: who made the record and with what, and when.
# The attempt's name is the message's, by which the tape's reader holds it.
FREE = {
    ("aggregator",), ("release",), ("lock",), ("attempt_id",), ("merged_at_s",),
    ("observations", 0, "at_s"),
}  # fmt: skip
FEWER = "one fewer"


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every field of a record, with the first two of every list, and each list itself."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, tuple):
        if value:
            yield (*path, FEWER), value
        for index, inner in enumerate(value[:2]):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def replaced(value: Any, path: Path, other: Any) -> Any:
    if not path:
        return other
    step, rest = path[0], path[1:]
    if isinstance(value, dict):
        return {**value, step: replaced(value[step], rest, other)}
    if step == FEWER:
        return value[:-1]
    return (*value[:step], replaced(value[step], rest, other), *value[step + 1 :])


def another(value: Any) -> Any:
    """A value of the same kind that is false."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case bytes():
            # A float's last byte has its exponent: in its first is what rounding may take away.
            return value[:-1] + bytes([value[-1] ^ 1]) if value else bytes(4)
        case str():
            return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return 1


def is_found(path: Path, value: Any) -> bool:
    """Whether audit, decision or merging again finds another value in the newest record."""
    if path == READ:
        return True
    history = five_versions()
    chain: Any = history.records[0]
    seq, record = chain[-1]
    document = replaced(record.model_dump(), path, another(value))
    try:
        chain[-1] = (seq, wire.Record.model_validate(document))
    except ValueError:
        return True  # Nobody can read it.
    try:
        if audit(history).breaches:
            return True
        decision = decide_newest(history, 0)
        assert decision is not None
        if decision.outcome == "different":
            return True
        remaker = FragmentRemaker(history, 0)
        for each in chain:
            remaker.take(*each)
    except IntegrityError:
        return True
    finally:
        chain[-1] = (seq, record)
    return False


def test_each_field_of_the_newest_record_is_held_against_something() -> None:
    record = five_versions().records[0][-1][1]
    assert audit(five_versions()).breaches == []
    decision = decide_newest(five_versions(), 0)
    assert decision is not None
    assert decision.outcome == "same"
    believed = {path for path, value in leaves(record.model_dump()) if not is_found(path, value)}
    assert believed == FREE


@pytest.mark.parametrize("what", ["kept", "radii"])
def test_numbers_of_other_segments_are_wrong_and_no_crash(what: str) -> None:
    """Of a merge about a center, say, which this run has not."""
    assert is_found((what,), b"")
