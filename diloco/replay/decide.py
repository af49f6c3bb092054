"""Repeats the decisions of a run with `aggregator/core/decisions.py`, from the run's tape."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from diloco.aggregator.arrays.fragment import make_input, step_size
from diloco.aggregator.core import events, rounds
from diloco.aggregator.core.decisions import Decision, TapeEvent, decide_again
from diloco.aggregator.core.events import Commit
from diloco.aggregator.core.round_and_weight_formulas import FragmentRules, fragment_rules
from diloco.aggregator.core.updates import Admitted
from diloco.aggregator.owner.tenure import event_of
from diloco.common.process.config import RunSettings, settings_of
from diloco.common.protocol import names, wire
from diloco.common.storage.tape import Entry, InvalidMessage
from diloco.run.history import Chain, History
from diloco.run.spool import Lazy

# The newest record is decided again from one of at most this many records before it.
NEAR = 32


def decide(history: History, fragment: int, chain: Chain) -> Iterator[Decision]:
    """Decides a fragment's records again, with the state that the first of them has.

    Args:
        history: the tape.
        fragment: its index.
        chain: the fragment's records in order, from the first that is not decided again.
    """
    return decide_again(
        chain,
        heard(history, fragment, chain[0][1].position if chain else 0),
        rules_at=lambda seq: rules_of(history, history.settings_at(seq), fragment),
        whole_from=whole_from(history, fragment),
        further=lambda commit, record: _inputs_and_step(history, commit, record),
    )


def decide_newest(history: History, fragment: int) -> Decision | None:
    """Decides a fragment's newest record again, since no later record has its digest.

    Returns:
        The decision; None if an operator made the record, or settings of one of the `NEAR` records
        before it are no longer on the tape.
    """
    chain = history.records[fragment][-NEAR - 1 :]
    if any(history.settings_of(record) is None for _, record in chain):
        return None
    newest = deque(decide(history, fragment, chain), maxlen=1)
    return newest[0] if newest and newest[0].record_seq == chain[-1][0] else None


def whole_from(history: History, fragment: int) -> int:
    """Returns the stream sequence from which on the tape has every message about a fragment.

    Garbage collection takes a fragment's messages only from before its oldest record.
    """
    return min(history.whole_from, history.records[fragment][0][0])


def rules_of(history: History, settings: RunSettings, fragment: int) -> FragmentRules:
    """Returns the rules of a fragment's state machine under these settings."""
    return fragment_rules(settings, history.layout, fragment, history.specification.epoch)


class _Told(Lazy[TapeEvent]):
    """The events of the tape for a fragment's state machine, made from messages on access.

    `order` has, for each event, the index of its message in `entries`; a negative one is an index
    from the end of `undecoded`.
    """

    def __init__(
        self,
        history: History,
        fragment: int,
        entries: Sequence[Entry],
        undecoded: Sequence[InvalidMessage],
        order: Sequence[int],
    ) -> None:
        self._history = history
        self._fragment = fragment
        self._entries = entries
        self._undecoded = undecoded
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def item(self, index: int) -> TapeEvent:
        """Returns the event at an index."""
        at = self._order[index]
        if at < 0:
            return _undecoded(self._undecoded[at])
        event = _heard(self._history, self._fragment, self._entries[at])
        assert event is not None
        return event


def heard(history: History, fragment: int, first_seq: int = 0) -> Sequence[TapeEvent]:
    """Returns the tape's events for a fragment's state machine, from `first_seq` to the end."""
    about = history.entries.concerning(fragment, first_seq)
    undecoded = [
        one for one in history.undecoded if one.seq >= first_seq and _is_update(one, fragment)
    ]
    order, passed = array("q"), 0
    for index, entry in enumerate(about):
        while passed < len(undecoded) and undecoded[passed].seq < entry.seq:
            order.append(passed - len(undecoded))
            passed += 1
        if isinstance(entry.body, wire.End):
            break
        if _heard(history, fragment, entry) is not None:
            order.append(index)
    else:
        order.extend(range(passed - len(undecoded), 0))
    return _Told(history, fragment, about, undecoded, order)


def _is_update(message: InvalidMessage, fragment: int) -> bool:
    parsed = names.parse_subject(message.subject)
    return parsed is not None and (parsed.kind, parsed.fragment) == ("update", fragment)


def _undecoded(message: InvalidMessage) -> TapeEvent:
    learner = names.subject_learner(message.subject) or ""
    event = events.Undecoded(message.time_s, message.seq, learner, message.size_bytes)
    return TapeEvent(message.seq, event)


def _heard(history: History, fragment: int, entry: Entry) -> TapeEvent | None:
    if isinstance(entry.body, wire.Settings):
        if (settings := history.changes.get(entry.seq)) is None:
            return None
        changed = events.Changed(entry.time_s, entry.seq)
        return TapeEvent(entry.seq, changed, rules_of(history, settings, fragment))
    event = event_of(entry.body, entry.seq, entry.time_s, fragment, entry.size_bytes)
    return None if event is None else TapeEvent(entry.seq, event)


def _inputs_and_step(history: History, commit: Commit, record: wire.Record) -> dict[str, object]:
    """Returns the fields of inputs and outer step that the state machine decides, by name."""
    if commit.what != "version":
        return {"inputs": ()}
    state = commit.state
    settings = history.settings_at(state.settings_seq)
    settings = settings_of(settings, history.layout, record.fragment)
    centered = settings.robust and not history.layout.fragments[record.fragment].averaged
    part = rounds.step_share(state, participation=settings.outer.participation, centered=centered)
    learning_rate, momentum = step_size(settings, part)
    inputs = inputs_again(state.admitted, record)
    return {"inputs": inputs, "learning_rate": learning_rate, "momentum": momentum}


def inputs_again(admitted: Sequence[Admitted], record: wire.Record) -> tuple[wire.Input, ...]:
    """Returns the inputs that a record would have for these updates.

    Coefficients and units of weight are copied from `record`; recomputing the version verifies
    them.
    """
    given = {taken.stream_seq: (taken.coefficients, taken.weight_unit) for taken in record.inputs}
    return tuple(make_input(one, *given.get(one.stream_seq, (b"", 0))) for one in admitted)
