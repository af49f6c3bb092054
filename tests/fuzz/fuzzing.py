"""Feeds a decoder with what hypothesis draws, and with many small damages to each of these."""

import copy
import random
import tracemalloc
from collections import Counter
from typing import Any

import msgpack
from decoders import Decoder
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from diloco.common.protocol.errors import DilocoError

# Inputs for each one that hypothesis draws.
BATCH = 25
# What decoding may allocate beside a multiple of its input.
SPARE_BYTES = 2 << 20
BYTES_FOR_EACH = 128
# Beginnings of MessagePack values that claim to be long, and numbers at their limits.
TOKENS = (
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x00\xff\xff", b"\xde\xff\xff",
    b"\xdf\xff\xff\xff\xff", b"\xd9\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x00\x0f\xff\xff",
    b"\xc4\x00", b"\xc0", b"\xc1", b"\xc2", b"\x90", b"\x80", b"\xa0", b"\x91", b"\x81\xa1a",
    b"\xc7\x00\x05", b"\xd6\xff\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7,
    b"\xcb\x7f\xf0" + b"\0" * 6, b"\xcb\x7f\xf8" + b"\0" * 6, b"\xcb\x80" + b"\0" * 7,
    b"\x80\x7f", b"\xc0\x7f", b"\x01\x00", b"[", b"{", b'"', b"=", b"\n", b"../", b"9" * 5000,
    b"[" * 500, b"a=", b"\xff\xfe", b"1979-02-30", b"inf", b"-nan", b"\0",
)  # fmt: skip


class CaseError(AssertionError):
    """An input that a decoder does not take as it should."""


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 255, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.0, -0.0,
    0.5, 5e-324, 1.7e308, float("nan"), float("inf"), "", "a", "../x", "a\0", "A" * 3000, "é", b"",
    b"\0" * 99, [], [[]], {}, {"a": 1}, [0] * 70_000, [None] * 999, {"name": "x"}, "0" * 32,
)  # fmt: skip


def damage(data: bytes, rng: random.Random, examples: tuple[bytes, ...]) -> bytes:
    """One to four changes: of values if it is MessagePack, of bits and bytes, of its length."""
    kind = rng.randrange(3)
    if kind == 0 and (fields := _fields(data)) is not None:
        for _ in range(rng.choice((1, 1, 2, 4))):
            _change(fields, rng)
        return bytes(msgpack.packb(fields))
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if kind == 1 and found:
            at = rng.randrange(len(found))
            found[at] = rng.choice((found[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
        else:
            _cut(found, rng, examples)
    return bytes(found)


def _fields(data: bytes) -> dict[Any, Any] | None:
    try:
        fields = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return None
    return fields if isinstance(fields, dict) and fields else None


def _change(fields: Any, rng: random.Random) -> None:
    """Another value somewhere in it, a key too few or too many, an item once more."""
    places = [fields]
    while rng.random() < 0.7:
        inner = places[-1].values() if isinstance(places[-1], dict) else places[-1]
        deeper = [item for item in inner if isinstance(item, dict | list) and item]
        if not deeper:
            break
        places.append(rng.choice(deeper))
    place = places[-1]
    key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
    match rng.randrange(8):
        case 0 if len(place) > 1:
            del place[key]
        case 1 if isinstance(place, dict):
            place[rng.choice(("", "extra", "kind", "a" * 300))] = _value(rng)
        case 2 if isinstance(place, list) and len(place) < 20:
            place.extend(place * rng.choice((1, 5, 300)))
        case _:
            place[key] = _value(rng)


def _value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))


def _cut(found: bytearray, rng: random.Random, examples: tuple[bytes, ...]) -> None:
    at = rng.randrange(len(found) + 1)
    upto = min(len(found), at + rng.choice((1, 2, 8, 64)))
    match rng.randrange(5):
        case 0:
            del found[at:upto]
        case 1:
            found[at:at] = found[at:upto] * rng.choice((1, 2, 300))
        case 2:
            found[at:at] = rng.choice(TOKENS)
        case 3:
            token = rng.choice(TOKENS)
            found[at:upto] = token * (rng.choice((1, 1, 400)) if len(token) < 9 else 1)
        case _:
            other = rng.choice(examples)
            start = rng.randrange(len(other))
            found[at:upto] = other[start : start + rng.choice((1, 4, 32))]


def check(decoder: Decoder, data: bytes) -> str:
    """Decode; how it ended.

    Raises:
        CaseError: with an error that is none of ours, or with too much memory.
    """
    limit = SPARE_BYTES + BYTES_FOR_EACH * len(data)
    ended, peak = _measured(decoder, data)
    # Once it may have been Python's own affairs: caches, or a collection of garbage.
    if decoder.bounded and peak > limit and (peak := _measured(decoder, data)[1]) > limit:
        raise CaseError(f"{peak} bytes of memory for an input of {len(data)}: {data[:600]!r}")
    return ended


def _measured(decoder: Decoder, data: bytes) -> tuple[str, int]:
    tracemalloc.start()
    try:
        return _ended(decoder, data), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _ended(decoder: Decoder, data: bytes) -> str:
    try:
        decoder.decode(data)
    except DilocoError as error:
        return getattr(error, "reason", type(error).__name__)
    except Exception as error:
        raise CaseError(f"{type(error).__name__}: {error} for {data[:600]!r}") from error
    return "taken"


def fuzz(decoder: Decoder, cases: int, first_seed: int) -> Counter[str]:
    """Feed so many inputs, a multiple of `BATCH`; how often each end was met.

    Raises:
        CaseError: the smallest input that hypothesis found to go wrong.
    """
    ends: Counter[str] = Counter()
    for example in decoder.examples:
        check(decoder, example)  # What is imported and compiled at first use is no one's input.

    # Hypothesis ends early when there is little to draw; the damages have a seed of their own.
    @seed(first_seed)
    @settings(
        max_examples=-(-cases // BATCH),
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(decoder.draws, st.integers(0, (1 << 64) - 1))
    def feed(data: bytes, damages: int) -> None:
        rng = random.Random(damages)
        ends[check(decoder, data)] += 1
        for _ in range(BATCH - 1):
            ends[check(decoder, damage(data, rng, decoder.examples))] += 1

    feed()
    return ends
