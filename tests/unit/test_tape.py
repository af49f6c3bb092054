"""The tape's decoder and reader: each body is held against its subject, and one message at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import EXAMPLES
from runlab import RUN, Lab

from bench.tapes import Forger
from diloco.aggregator.owner.liveness import LivenessWatch
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import RunMissingError, WireError
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.shards import crc32c
from diloco.common.storage.bus import MemoryBus, Message
from diloco.common.storage.tape import (
    Entry,
    Extent,
    InvalidMessage,
    Item,
    Unreadable,
    await_specification,
    decode,
    decode_as,
    messages_of,
    read_message,
    read_tape,
)
from diloco.run.history import History, read_history
from diloco.run.state import RunStatus
from diloco.run.timeseries import read_time_series
from diloco.run.watch import Watch, read_heartbeats, read_leases

LIFE = "0123456789abcdef" * 2
# The subject that a message with the names below belongs to.
OWN = {"run": "r", "learner": "a", "fragment": 3, "life": LIFE}
SUBJECTS: dict[type[wire.Body], str] = {
    wire.Specification: names.spec("r"),
    wire.Join: names.join("r", "a"),
    wire.Leave: names.leave("r", "a"),
    wire.Claim: names.claim("r", "a"),
    wire.Manifest: names.update("r", "a", 3),
    wire.Record: names.record("r", 3),
    wire.RecordPointer: names.record("r", 3),
    wire.Settings: names.settings("r"),
    wire.Quarantine: names.quarantine("r", "a"),
    wire.Checkpoint: names.checkpoint("r"),
    wire.Stop: names.stop("r"),
    wire.End: names.end("r"),
    wire.Heartbeat: names.heartbeat("r", "a"),
    wire.Rejection: names.rejected("r", "a"),
    wire.RoundOpen: names.round_open("r", 3),
    wire.Lease: names.aggregator_lease("r", LIFE),
}
OTHERS = {"run": "s", "learner": "b", "fragment": 4, "life": "f" * 32}


def naming(message: wire.Body, **said) -> wire.Body:
    """A message with other names; a pointer to a record has them in its word."""
    if isinstance(message, wire.RecordPointer):
        said = {"word": message.word.model_copy(update=said)}
    return message.model_copy(update=said)


def named(body: type[wire.Body]) -> list[str]:
    """The fields of a message that are names."""
    fields = wire.RecordWord if body is wire.RecordPointer else body
    return [name for name in OWN if name in fields.model_fields]


def own(body: type[wire.Body]) -> wire.Body:
    """A message with the names of its subject."""
    return naming(EXAMPLES[body], **{name: OWN[name] for name in named(body)})


def checked(body: type[wire.Body]) -> list[str]:
    """The fields of a message that its subject has too."""
    subject = names.parse_subject(SUBJECTS[body])
    return [field for field in named(body) if getattr(subject, field) is not None]


def test_every_message_of_a_stream_has_a_subject_here():
    objects = {wire.CheckpointFile, wire.Positions, wire.Score}
    assert SUBJECTS.keys() == EXAMPLES.keys() - objects
    assert sum(len(checked(body)) for body in SUBJECTS) == 24


@pytest.mark.parametrize("body", SUBJECTS, ids=lambda body: body.kind)
def test_a_message_is_decoded_as_its_subject_says(body):
    message = own(body)
    assert decode(SUBJECTS[body], wire.encode(message)) == message
    assert decode_as(body, SUBJECTS[body], wire.encode(message)) == message


@pytest.mark.parametrize(
    ("body", "field"), [(body, field) for body in SUBJECTS for field in checked(body)]
)
def test_a_message_that_names_another_than_its_subject_is_refused(body, field):
    message = naming(own(body), **{field: OTHERS[field]})
    with pytest.raises(WireError) as caught:
        decode(SUBJECTS[body], wire.encode(message))
    assert caught.value.reason is Reason.SENDER
    said = f"names {field} {OTHERS[field]!r}, its subject {OWN[field]!r}"
    assert said in caught.value.message


@settings(max_examples=50)
@given(st.sampled_from([*SUBJECTS]), st.sampled_from([*SUBJECTS]))
def test_a_message_of_another_kind_than_its_subject_is_refused(body, other):
    if SUBJECTS[body] == SUBJECTS[other]:
        return
    with pytest.raises(WireError) as caught:
        decode(SUBJECTS[body], wire.encode(own(other)))
    assert caught.value.reason is Reason.KIND


def test_what_somebody_expects_must_come():
    with pytest.raises(WireError, match=r"expected a message of kind 'join', .*has 'leave'"):
        decode_as(wire.Join, SUBJECTS[wire.Leave], wire.encode(own(wire.Leave)))
    with pytest.raises(WireError, match="is not a subject of a run"):
        decode("diloco.r.record.x", wire.encode(own(wire.Record)))


# The reader


def run(make: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(make(), 300))


@pytest.fixture
def lab() -> Lab:
    """A run of two fragments with versions, rejections and deaths."""
    lab = Lab(fragments=2)

    async def forge() -> None:
        await lab.create()
        await Forger(lab.context, ["a", "b"], rejected_one_in=7, killed_one_in=20).forge(40)

    run(forge)
    return lab


async def items(lab: Lab) -> list[Item]:
    return [item async for item in read_tape(lab.context)]


class Counting:
    """A bus that counts what its reader has taken."""

    def __init__(self, bus: MemoryBus) -> None:
        self.given = 0
        self._bus = bus

    async def last_sequence(self, stream: str) -> int:
        return await self._bus.last_sequence(stream)

    async def read(self, *args: Any) -> AsyncIterator[Message]:
        async for message in self._bus.read(*args):
            self.given += 1
            yield message


def test_the_reader_holds_one_message_at_a_time(lab):
    async def walk() -> None:
        counting = Counting(lab.bus)
        object.__setattr__(lab.context, "bus", counting)
        taken = 0
        async for item in read_tape(lab.context):
            taken += 1
            assert (counting.given, item.seq) == (taken, taken)
        assert taken > 100

    run(walk)


def test_what_is_none_of_the_protocol_is_an_item_of_its_own(lab):
    async def spoil() -> list[Item]:
        join = wire.Join(run=RUN, learner="b", layout="0" * 32, host="here")
        record, _ = await lab.newest(0)
        for subject, payload, msg_id in (
            (names.update(RUN, "a", 0), b"rubbish", None),
            (names.join(RUN, "a"), wire.encode(join), None),
            (names.record(RUN, 0), b"rubbish", None),
            (names.record(RUN, 0), wire.encode(record), "another attempt's"),
            (names.record(RUN, 1), wire.encode(record), "elsewhere"),
        ):
            await lab.bus.publish(subject, payload, msg_id=msg_id)
        return (await items(lab))[-5:]

    rubbish, other, damaged, stolen, elsewhere = run(spoil)
    assert isinstance(rubbish, InvalidMessage)
    assert isinstance(other, InvalidMessage)
    assert "names learner 'b', its subject 'a'" in other.why
    bad = (damaged, stolen, elsewhere)
    assert [(type(item), item.fragment) for item in bad] == [
        (Unreadable, 0), (Unreadable, 0), (Unreadable, 1),
    ]  # fmt: skip
    assert "another attempt's" in stolen.why


FAULTS = {
    "gone": "no object",
    "damaged": "crc32c",
    "of another fragment": "the word on the tape is not that of the record",
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_body_of_a_large_record_is_fetched(lab, fault):
    async def publish() -> Item:
        record, _ = await lab.newest(0)
        fragment = int(fault == "of another fragment")
        own = {"fragment": fragment, "attempt_id": "new"}
        large = record.model_copy(update=own)
        body, answers = wire.with_answers(large, wire.encode(large))
        ref = wire.ObjectRef(name=f"{RUN}/body", size_bytes=len(body), crc32c=crc32c(body))
        if fault != "gone":
            lab.store.put(ref.name, body)
        if fault == "damaged":
            lab.damage(ref)
        word = wire.word_of(large).model_copy(update={"fragment": 0})
        said = wire.RecordPointer(word=word, body=ref, answers=answers, attempt_id="new")
        await lab.bus.publish(names.record(RUN, 0), wire.encode(said), msg_id="new")
        return (await items(lab))[-1]

    item = run(publish)
    assert item.stored is not None
    assert item.stored.name == f"{RUN}/body"
    if fault is None:
        assert isinstance(item, Entry)
        assert isinstance(item.body, wire.Record)
    else:
        assert isinstance(item, Unreadable)
        assert item.fragment == 0
        assert FAULTS[fault] in item.why


@given(st.sets(st.integers(1, 40)))
def test_the_extent_says_from_where_on_nothing_is_missing(seqs):
    extent, held = Extent(), sorted(seqs)
    for seq in held:
        extent.take(InvalidMessage(seq, float(seq), "", ""))
    last = held[-1] if held else 0
    assert extent.last_seq == extent.last_s == last
    missing = [seq for seq in range(1, last) if seq not in seqs]
    assert extent.whole_from == (missing[-1] + 1 if missing else 1)
    assert extent.whole_s == (extent.whole_from if missing else 0)


# What is built on it


def test_all_folds_say_the_same(lab):
    async def look() -> tuple[History, Any, RunStatus]:
        run = await Watch(lab.context).begin(1)
        return await read_history(lab.context), await read_time_series(lab.context, 0.0), run

    history, series, state = run(look)
    assert [one.version for one in state.fragments] == history.versions()
    assert state.updates_sent == len(history.sent()) == len(series.updates)
    assert state.updates_merged == len(history.merged()) == len(series.inputs)
    assert state.updates_rejected == len(history.rejected()) == len(series.refusals)
    assert {one.name: one.lives for one in state.learners} == {
        name: len(history.lives(name)) for name in series.learners
    }
    assert {join.learner for _, join in history.joins} == {*series.learners}
    assert sum(one.merged for one in state.learners) == len(history.merged())
    assert sum(one.rejected for one in state.learners) == len(history.rejected())
    assert history.extent == series.extent
    assert len(history.times_s) == history.last_seq


def test_heartbeats_and_leases_of_another_are_not_believed(lab):
    async def speak() -> None:
        beat = EXAMPLES[wire.Heartbeat].model_copy(update={"learner": "a"})
        lease = EXAMPLES[wire.Lease]
        await lab.bus.publish(names.heartbeat(RUN, "a"), wire.encode(beat))
        await lab.bus.publish(names.heartbeat(RUN, "b"), wire.encode(beat))
        await lab.bus.publish(names.fragment_lease(RUN, 0), wire.encode(beat))
        await lab.bus.publish(names.fragment_lease(RUN, 1), wire.encode(lease))
        assert (await read_heartbeats(lab.context, ["a", "b"])).keys() == {"a"}
        owners, _ = await read_leases(lab.context)
        assert owners.keys() == {1}

    run(speak)


def test_an_aggregator_does_not_take_anothers_heartbeat_for_a_sign_of_life(lab):
    watch = LivenessWatch(lab.context, [])

    async def speak() -> None:
        listening = asyncio.ensure_future(watch.watch())
        beat = EXAMPLES[wire.Heartbeat].model_copy(update={"learner": "a"})
        while not watch.last_heard._heard_at_s:
            await lab.bus.publish(names.heartbeat(RUN, "b"), wire.encode(beat))
            await lab.bus.publish(names.heartbeat(RUN, "a"), wire.encode(beat))
            await asyncio.sleep(0.001)
        await cancel(listening)

    run(speak)
    assert watch.last_heard._heard_at_s.keys() == {"a"}
    assert b'diloco_aggregator_ignored_total{reason="sender"}' in lab.context.metrics.exposition()


def test_messages_that_somebody_has_are_read_without_a_bus(lab):
    async def read() -> tuple[list[Message], list[Item]]:
        subjects = names.tape_subjects(RUN)
        messages = messages_of(lab.bus, lab.context.tape, subjects)
        return [message async for message in messages], await items(lab)

    messages, found = run(read)
    assert [read_message(message, lab.store, lab.context.layout) for message in messages] == found


class Half(MemoryBus):
    """A bus on which fragment 1 has no record yet."""

    whole = False

    async def last(self, stream: str, subject: str) -> Message | None:
        hidden = subject == names.record(RUN, 1) and not self.whole
        return None if hidden else await super().last(stream, subject)


def test_a_daemon_that_waits_for_its_run_has_it_once_it_is_wholly_created(monkeypatch) -> None:
    monkeypatch.setattr("diloco.common.storage.tape.run.CREATED_LOOK_S", 0.0)

    async def wait() -> None:
        lab = Lab(fragments=2)
        bus = lab.bus
        bus.__class__ = Half
        with pytest.raises(RunMissingError):
            await await_specification(bus, RUN, 0.0)
        waiting = asyncio.ensure_future(await_specification(bus, RUN, 600.0))
        await lab.create()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not waiting.done()
        bus.whole = True
        assert (await waiting).run == RUN

    asyncio.run(wait())
