"""Decodes the messages of a run, and checks each message against its subject. Pure.

Servers restrict who may publish on a subject, so the subject proves who sent the message. A body
that names another learner, run or fragment than the subject is refused.

Messages that are too long are dropped undecoded. A manifest holds each block of its fragment once,
so it has at most as many shards and slices as the fragment has blocks. A message that is longer
than such a manifest with the longest names and numbers cannot be valid.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Final, TypeVar

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.layout import Layout
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.slices import MOST_SLICES

T = TypeVar("T", bound=wire.Body)

# The owners of several fragments read the same joins, leaves and settings, one after another, so
# short messages are decoded once for all of them. Long messages have one reader.
SHORT_BYTES: Final = 8 << 10
REMEMBERED: Final = 512

_BODIES: Mapping[names.Kind, type[wire.Body]] = {
    "spec": wire.Specification,
    "join": wire.Join,
    "leave": wire.Leave,
    "claim": wire.Claim,
    "update": wire.Manifest,
    "settings": wire.Settings,
    "quarantine": wire.Quarantine,
    "checkpoint": wire.Checkpoint,
    "stop": wire.Stop,
    "end": wire.End,
    "heartbeat": wire.Heartbeat,
    "rejected": wire.Rejection,
    "round": wire.RoundOpen,
    "lease": wire.Lease,
}


def decode(subject: str, payload: bytes) -> wire.Body:
    """Decodes a message to the class of `wire` that belongs to its subject.

    On a record's subject the result is a `Record`, or the `RecordPointer` that stands on the tape
    for a large record.

    Raises:
        WireError: the message cannot be decoded, or names another run, learner or fragment than its
            subject.
    """
    return (_decode_once if len(payload) <= SHORT_BYTES else _decode)(subject, payload)


def _decode(subject: str, payload: bytes) -> wire.Body:
    parsed = names.parse_subject(subject)
    if parsed is None:
        raise WireError(Reason.SENDER, f"{subject!r} is not a subject of a run")
    if parsed.kind == "record":
        body: wire.Body = wire.decode_record(payload)
    else:
        body = wire.decode(_BODIES[parsed.kind], payload)
    check_fits(subject, body.word if isinstance(body, wire.RecordPointer) else body)
    return body


_decode_once = lru_cache(REMEMBERED)(_decode)


def decode_as(expected: type[T], subject: str, payload: bytes) -> T:
    """Decodes a message that must be of the class `expected`.

    Raises:
        WireError: as `decode`, or the message is of another class.
    """
    body = decode(subject, payload)
    if not isinstance(body, expected):
        raise WireError(
            Reason.KIND,
            f"expected a message of kind {expected.kind!r}, {subject!r} has {body.kind!r}",
        )
    return body


def check_fits(subject: str, body: wire.NestedRecord) -> None:
    """Compares run, learner, fragment and life in a body with those in its subject.

    Raises:
        WireError: reason "sender": the body names another one than the subject.
    """
    parsed = names.parse_subject(subject)
    for field in ("run", "learner", "fragment", "life"):
        expected = getattr(parsed, field, None)
        if expected is None or field not in type(body).model_fields:
            continue
        said = getattr(body, field)
        if said != expected:
            raise WireError(
                Reason.SENDER,
                f"a message on {subject!r} names {field} {said!r}, its subject {expected!r}",
            )


# The most bytes that msgpack takes for a list's length.
_LIST_BYTES = 5
_NAME = "x" * 40


def check_length(layout: Layout, subject: str, size_bytes: int) -> None:
    """Refuses a message on an update's subject that is longer than any manifest of the fragment.

    Messages on other subjects are not checked.

    Raises:
        WireError: reason "oversize".
    """
    parsed = names.parse_subject(subject)
    if parsed is None or parsed.kind != "update":
        return
    fragment = int(parsed.fragment or 0)
    # Nobody reads updates of a fragment that the run does not have.
    if fragment >= len(layout.fragments):
        return
    most = manifest_bytes(layout.fragments[fragment].size // layout.block)
    if size_bytes > most:
        raise WireError(
            Reason.OVERSIZE,
            f"message of {size_bytes} bytes; a manifest of fragment {fragment} has at most {most}",
        )


@lru_cache
def manifest_bytes(blocks: int) -> int:
    """Returns the size in bytes of the longest manifest of a fragment of `blocks` blocks."""
    shards, slices = min(wire.MAX_SHARDS, blocks), min(MOST_SLICES, blocks)
    bare, shard, further_slice = _longest()
    needed = bare + shards * shard + (slices - shards) * further_slice
    return min(wire.Manifest.limit_bytes, needed)


@cache
def _longest() -> tuple[int, int, int]:
    """Returns the greatest sizes in bytes of three parts of a manifest.

    The parts are a manifest without shards, a shard with one slice, and a further slice.
    """
    great, axes = wire.GREATEST, (wire.GREATEST,) * wire.MAX_AXES
    box = wire.Slice(start=great, shape=axes, strides=axes)
    name = names.shard(_NAME, _NAME, great, great, great, great, great)

    def length(shards: int, slices: int) -> int:
        shard = wire.Shard(
            name=name, size_bytes=great, crc32c=(1 << 32) - 1, slices=(box,) * slices
        )
        return len(wire.encode(_manifest((shard,) * shards)))

    one, slice_bytes = length(1, 1), length(1, 2) - length(1, 1)
    shard_bytes = length(2, 1) - one + _LIST_BYTES
    return one - shard_bytes + 2 * _LIST_BYTES, shard_bytes, slice_bytes


def _manifest(shards: tuple[wire.Shard, ...]) -> wire.Manifest:
    great = wire.GREATEST
    return wire.Manifest(
        run=_NAME, learner=_NAME, epoch=great, incarnation=great, seq=great, fragment=great,
        base_version=great, base_digest="0" * 32, held_digest="0" * 32, layout="0" * 32,
        codec="bfloat16", shards=shards,
        tokens=great, steps=great, position=great, local_step=great, loss=1.0, step_time_s=1.0,
        encode_s=1.0, upload_s=1.0, attempt=great, final=True,
    )  # fmt: skip
