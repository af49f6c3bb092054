"""Every message survives the wire; whatever else arrives raises `WireError` and nothing else."""

import json
import math
import random
import struct
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import BODIES, EXAMPLES, fields_of, json_like, messages

from diloco.common.protocol import wire
from diloco.common.protocol.errors import WireError


def kinds(function):
    return pytest.mark.parametrize("body", BODIES, ids=lambda body: body.kind)(function)


def reason_of(body: type[wire.Body], payload: bytes) -> str:
    with pytest.raises(WireError) as caught:
        wire.decode(body, payload)
    return caught.value.reason


@kinds
@settings(max_examples=12)
@given(data=st.data())
def test_a_message_survives_the_wire(body, data):
    message = data.draw(messages(body))
    payload = wire.encode(message)
    assert wire.decode(body, payload) == message
    assert msgpack.unpackb(payload)["kind"] == body.kind


def test_every_kind_has_a_word_of_its_own():
    assert len({body.kind for body in BODIES}) == len(BODIES) > 9


REASONS = ("oversize", "undecodable", "schema", "kind", "malformed")


def fault_of(decode: Callable[[], object]) -> str | None:
    """Why `decode` refuses; None if it does not. Whatever else it raises fails the test."""
    try:
        decode()
    except WireError as error:
        return error.reason if len(error.message) < 1000 else "an endless message"
    return None


# Strictness


@kinds
def test_a_missing_field_is_named(body):
    for name in (name for name, field in body.model_fields.items() if field.is_required()):
        fields = fields_of(EXAMPLES[body])
        del fields[name]
        with pytest.raises(WireError, match=f"'{name}'") as caught:
            wire.decode(body, msgpack.packb(fields))
        assert caught.value.reason == "malformed"


@kinds
def test_an_unknown_field_is_refused_and_named(body):
    fields = fields_of(EXAMPLES[body]) | {"extra": 1}
    with pytest.raises(WireError, match="'extra'"):
        wire.decode(body, msgpack.packb(fields))


WRONG = {int: ["1", 1.5, True, None, -1 << 63], float: ["1", None, True], str: [1, b"x", None]}
WRONG |= {bool: [0, 1, "true", None], bytes: ["x", 1, None]}
# A float, or null.
MAYBE = wire.Heartbeat.model_fields["loss"].annotation
WRONG[MAYBE] = ["1", True]


@kinds
def test_a_field_of_another_type_is_refused(body):
    for name, field in body.model_fields.items():
        kind = field.annotation
        for value in WRONG.get(kind, [3.5, True]):
            if value == -1 << 63 and not field.metadata:
                continue
            fields = fields_of(EXAMPLES[body]) | {name: value}
            assert reason_of(body, msgpack.packb(fields)) == "malformed", (name, value)


@kinds
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_are_finite(body, value):
    for name, field in body.model_fields.items():
        if field.annotation in (float, MAYBE):
            fields = fields_of(EXAMPLES[body]) | {name: value}
            assert reason_of(body, msgpack.packb(fields)) == "malformed", name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learner", "../x"),
        ("learner", "a" * 41),
        ("learner", "A"),
        ("learner", "a\n"),
        ("learner", "a.b"),
        ("learner", "*"),
        ("run", ""),
        ("layout", "f" * 31),
        ("layout", "F" * 32),
        ("base_digest", "f" * 32 + "\n"),
        ("codec", "int3"),
        ("seq", 0),
        ("incarnation", 0),
        ("steps", 0),
        ("tokens", 0),
        ("tokens", 1 << 63),
        ("base_version", -1),
        ("step_time_s", -0.1),
        ("step_time_s", 1e308),
        ("shards", []),
        ("fragment", -1),
    ],
)
def test_bounds_of_a_manifest(name, value):
    fields = fields_of(EXAMPLES[wire.Manifest]) | {name: value}
    assert reason_of(wire.Manifest, msgpack.packb(fields)) == "malformed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", ""),
        ("name", "n" * 513),
        ("size_bytes", 0),
        ("crc32c", 1 << 32),
        ("crc32c", -1),
        ("stop", 0),
        ("extra", 1),
    ],
)
def test_bounds_of_a_shard(name, value):
    shard = {"name": "n", "size_bytes": 1, "crc32c": 0, "start": 0, "stop": 1, name: value}
    fields = fields_of(EXAMPLES[wire.Manifest]) | {"shards": [shard]}
    assert reason_of(wire.Manifest, msgpack.packb(fields)) == "malformed"


RUN_OF_ONE = {"start": 0, "shape": [1], "strides": [1]}


def test_an_update_has_at_most_4096_shards():
    shard = {"name": "n", "size_bytes": 1, "crc32c": 0, "slices": [RUN_OF_ONE]}
    fields = fields_of(EXAMPLES[wire.Manifest])
    wire.decode(wire.Manifest, msgpack.packb(fields | {"shards": [shard] * 4096}))
    payload = msgpack.packb(fields | {"shards": [shard] * 4097})
    assert reason_of(wire.Manifest, payload) == "malformed"


@kinds
@pytest.mark.parametrize("schema", [0, 2, "1", 1.0, True, None, [1], {"a": 1}, "x" * 1000])
def test_another_schema_is_refused_and_says_what_to_do(body, schema):
    fields = fields_of(EXAMPLES[body]) | {"schema": schema}
    with pytest.raises(WireError, match="this program reads") as caught:
        wire.decode(body, msgpack.packb(fields))
    assert caught.value.reason == "schema"
    assert caught.value.hint is not None
    assert len(caught.value.message) < 200


def test_a_message_without_schema_is_refused():
    fields = fields_of(EXAMPLES[wire.Join])
    del fields["schema"]
    assert reason_of(wire.Join, msgpack.packb(fields)) == "schema"


@kinds
def test_a_message_of_another_kind_is_refused(body):
    for other in BODIES:
        if other is not body:
            assert reason_of(body, wire.encode(EXAMPLES[other])) == "kind"
    for kind in (None, 1, ["join"], {"join": 1}):
        fields = fields_of(EXAMPLES[body]) | {"kind": kind}
        assert reason_of(body, msgpack.packb(fields)) == "kind"


# Size and shape


@kinds
def test_what_is_too_large_is_not_even_unpacked(body):
    assert reason_of(body, b"\xc1" * (body.limit_bytes + 1)) == "oversize"
    assert reason_of(body, b"\xc1" * 1000) == "undecodable"


def test_a_record_on_the_tape_is_no_larger_than_a_message():
    with pytest.raises(WireError) as caught:
        wire.decode_record(b"\0" * (wire.MESSAGE_BYTES + 1))
    assert caught.value.reason == "oversize"


NOT_MAPS = [b"", b"\xc0", b"\x01", b"\x90", b"\xa1a", b"\xff", b"\xc1", b"\x80\x00"]
HUGE_CLAIMS = [
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 items
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xdb\xff\xff\xff\xff",  # a string
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\xdd\x00\x01\x00\x00" * 500,  # arrays within arrays of 65536
]
HOSTILE = [
    b"\x91" * 5000 + b"\xc0",  # nested deep
    (b"\x81\xa1a" * 5000) + b"\xc0",
    b"\x81\x01\x01",  # a key that is no string
    b"\x81\x91\x01\x01",  # a key that is a list
    b"\x81\xc4\x01k\x01",  # a key of bytes
    b"\x81\xa1\xff\x01",  # not UTF-8
    b"\xd4\x01\x00",  # an extension
    b"\xd6\xff\x00\x00\x00\x00",  # a time stamp, which is one too
]


@pytest.mark.parametrize("payload", NOT_MAPS + HUGE_CLAIMS + HOSTILE, ids=lambda p: p[:6].hex())
@kinds
def test_what_is_no_message(body, payload):
    assert reason_of(body, payload) in ("undecodable", "schema")
    with pytest.raises(WireError):
        wire.decode_record(payload)


ITEMS = wire.MAX_ITEMS - 1
BOMBS = [
    b"\xdc\xff\xff" * 900,  # each array would get room for its 65535 items
    b"\xde\x0f\xff\xa1a" * 900,
    {"fragments": [["x"]] * ITEMS},
    {"observations": [{}] * ITEMS},
    {"shards": [{f"{key:x}": 0 for key in range(wire.MAX_KEYS)}] * 9},
    {"positions": {f"{key:X}": -1 for key in range(wire.MAX_KEYS)}},
    {f"{key:x}": 0 for key in range(wire.MAX_KEYS - 2)},
]


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: str(bomb)[:16])
@kinds
def test_claims_take_no_memory(body, bomb):
    """And to say what is wrong takes none: of thousands of wrong items the first is enough."""
    if isinstance(bomb, dict):
        bomb = msgpack.packb({"schema": wire.SCHEMA, "kind": body.kind, **bomb})
    tracemalloc.start()
    try:
        long = len(bomb) > body.limit_bytes
        assert reason_of(body, bomb) in (("oversize",) if long else ("undecodable", "malformed"))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", [10, 500, 900, 2000])
def test_deep_settings_of_a_specification_are_no_crash(depth):
    """`settings` may hold anything: its depth is the one a peer chooses."""
    nested = b"\x81\xa1a" * depth + b"\xc0"
    fields = fields_of(EXAMPLES[wire.Specification])
    payload = msgpack.packb(fields | {"settings": {"deep": "here"}})
    payload = payload.replace(msgpack.packb("here"), nested)
    assert fault_of(lambda: wire.decode(wire.Specification, payload)) in (None, "undecodable")


def test_settings_hold_plain_values_alone():
    """Nothing builds an object from what a peer sends, not even a time stamp."""
    fields = fields_of(EXAMPLES[wire.Specification])
    for value in (msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 0)):
        payload = msgpack.packb(fields | {"settings": {"value": value}})
        assert reason_of(wire.Specification, payload) == "undecodable"


@kinds
def test_bytes_as_keys_beside_the_right_ones_are_refused(body):
    fields = fields_of(EXAMPLES[body]) | {b"run": "x"}
    assert reason_of(body, msgpack.packb(fields)) == "malformed"


# Damage


def only_wire_errors(body: type[wire.Body], payload: bytes) -> None:
    for decode in (lambda: wire.decode(body, payload), lambda: wire.decode_record(payload)):
        assert fault_of(decode) in (None, *REASONS)


@settings(max_examples=300)
@given(st.sampled_from(BODIES), st.binary(max_size=300))
def test_garbage_raises_only_wire_errors(body, payload):
    only_wire_errors(body, payload)


@settings(max_examples=200)
@given(data=st.data(), body=st.sampled_from(BODIES))
def test_any_values_in_the_right_fields_raise_only_wire_errors(data, body):
    fields = fields_of(EXAMPLES[body])
    for name in data.draw(st.lists(st.sampled_from(sorted(body.model_fields)), max_size=3)):
        fields[name] = data.draw(json_like)
    only_wire_errors(body, msgpack.packb(fields))


@kinds
def test_a_truncated_message_raises_only_wire_errors(body):
    payload = wire.encode(EXAMPLES[body])
    for end in range(len(payload)):
        assert reason_of(body, payload[:end]) == "undecodable"
    assert reason_of(body, payload + b"\x00") == "undecodable"


@kinds
def test_flipped_bits_raise_only_wire_errors(body):
    payload = wire.encode(EXAMPLES[body])
    rng = random.Random(body.kind)
    for _ in range(300):
        damaged = bytearray(payload)
        for _ in range(rng.choice([1, 1, 1, 4])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        only_wire_errors(body, bytes(damaged))


# What the encoding is


def test_a_message_is_one_plain_map():
    """docs/protocol.md shows messages as JSON; programs in other languages must read them."""
    message = wire.Stop(run="r", global_step=7, reason="steps", by="a")
    fields = fields_of(message)
    assert json.loads(json.dumps(fields)) == fields
    said = {"run": "r", "global_step": 7, "reason": "steps", "by": "a"}
    assert fields == {"schema": 1, "kind": "stop", **said}


def test_floats_keep_all_their_bits():
    value = struct.unpack("<d", struct.pack("<Q", 0x3FB999999999999B))[0]
    message = EXAMPLES[wire.Manifest].model_copy(update={"loss": value})
    assert wire.decode(wire.Manifest, wire.encode(message)).loss.hex() == value.hex()


def test_a_pointer_stands_for_a_record():
    pointer = EXAMPLES[wire.RecordPointer]
    assert wire.decode_record(wire.encode(pointer)) == pointer
    record = EXAMPLES[wire.Record]
    assert wire.decode_record(wire.encode(record)) == record
    with pytest.raises(WireError) as caught:
        wire.decode_record(wire.encode(EXAMPLES[wire.Join]))
    assert caught.value.reason == "kind"


def test_what_a_sender_wrote_for_people_is_printable_once_it_is_decoded():
    join = wire.Join.model_construct(
        run="r", learner="a", layout="0" * 32, host="\x1b[2J\x1b]0;owned\x07h\u202et\n"
    )
    fields = join.model_dump() | {"schema": wire.SCHEMA, "kind": "join"}
    assert wire.decode(wire.Join, msgpack.packb(fields)).host == "?[2J?]0;owned?h?t?"


@pytest.mark.parametrize(("loss", "read"), [(1e300, 1e12), (-1e300, -1e12), (2.5, 2.5)])
def test_a_loss_is_bounded_and_its_update_is_not_lost(loss, read):
    fields = fields_of(EXAMPLES[wire.Manifest]) | {"loss": loss}
    assert wire.decode(wire.Manifest, msgpack.packb(fields)).loss == read


def test_words_of_a_learner_are_no_longer_than_their_fields_need():
    text, name, great = "\U0001f600" * 2000, "x" * 40, wire.GREATEST
    by_fragment = (great,) * 4096  # Of as many as a run may have.
    figures = {f"{'m' * 48}{index:02d}": 1.0 for index in range(64)}
    words = (
        EXAMPLES[wire.Join].model_copy(update={"host": text, "learner": name, "run": name}),
        EXAMPLES[wire.Leave].model_copy(update={"fragments": by_fragment}),
        EXAMPLES[wire.Claim].model_copy(update={"lost": by_fragment}),
        EXAMPLES[wire.Heartbeat].model_copy(
            update={"metrics": figures, "state": text, "trouble": text}
        ),
    )
    for word in words:
        payload = wire.encode(word)
        assert wire.decode(type(word), payload) == word
        assert type(word).limit_bytes < wire.MESSAGE_BYTES / 8
        # Decoded, it would take every owner of a fragment tens of milliseconds.
        long = payload + bytes(type(word).limit_bytes)
        assert reason_of(type(word), long) == "oversize"
