"""Encodes and decodes messages; the types and limits of messages' fields."""

from typing import Annotated, Any, ClassVar, TypeVar

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from diloco.common.protocol.errors import WireError
from diloco.common.protocol.names import NAME
from diloco.common.protocol.reasons import Reason

SCHEMA = 1
# A reader accepts its own schema and the one before; schema 0 was never published. A new schema is
# read by one release and written by the next, so that two releases in a row read each other.
READABLE = frozenset({SCHEMA})
MESSAGE_BYTES = 1 << 20
# The limits of a learner's messages other than updates. Every fragment's owner reads these without
# an allowance, so they are no longer than their fields need.
WORD_BYTES = 16 << 10
LONG_WORD_BYTES = 64 << 10
# A record larger than this is stored as an object, so that streams stay small, and what a learner
# reads of a record does not grow with the fleet.
RECORD_BYTES = 64 << 10
MAX_ITEMS = 1 << 16
MAX_KEYS = 1 << 12
# The most shards of an update, slices of a shard, and axes of a slice.
MAX_SHARDS = 1 << 12
MAX_SLICES = 1 << 12
MAX_AXES = 4
GREATEST = (1 << 63) - 1
# In seconds: longer than any run, and so small that sums and products of times stay finite.
GREATEST_S = 1e12

# The most characters of a sentence for people; shorter than `Text`, which readers accept.
NOTE = 500


def printable(text: str) -> str:
    """Returns a sender's text with each unprintable character as '?', safe for a terminal."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else "?" for one in text)


Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
ObjectName = Annotated[str, Field(min_length=1, max_length=512)]
Count = Annotated[int, Field(ge=0, le=GREATEST)]
Positive = Annotated[int, Field(ge=1, le=GREATEST)]
# As `learner.slices`.
SliceCount = Annotated[int, Field(ge=1, le=64)]
# Exponents of float64.
PowerOfTwo = Annotated[int, Field(ge=-1074, lt=1024)]
CheckpointName = Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{12}$")]
Seconds = Annotated[float, Field(ge=0, le=GREATEST_S)]
# More than all accelerators of the world reach.
Rate = Annotated[float, Field(ge=0, le=1e15)]
Measure = Annotated[float, Field(ge=0)]
# A loss may be any number, also after divergence; clipped, so that no sum of losses overflows.
Loss = Annotated[float, AfterValidator(lambda loss: max(-GREATEST_S, min(GREATEST_S, loss)))]
Text = Annotated[str, Field(max_length=2000), AfterValidator(printable)]
# Text that a model wrote: line breaks stay.
Passage = Annotated[
    str,
    Field(max_length=2000),
    AfterValidator(lambda text: "\n".join(map(printable, text.split("\n")))),
]
# A task's metrics beside the loss, by name; and the same for slices of the held-out data.
MOST_METRICS = 64
METRIC_NAME = "[a-zA-Z][a-zA-Z0-9_]{0,49}"
Figures = Annotated[
    dict[Annotated[str, Field(pattern=f"^{METRIC_NAME}$")], Loss], Field(max_length=MOST_METRICS)
]
MOST_HELD_OUT_SLICES = 64
WHOLE = ""  # the slice name that stands for all the data
SLICE_NAME = "[a-zA-Z0-9][a-zA-Z0-9_.+-]{0,49}"
FiguresOfSlices = Annotated[
    dict[Annotated[str, Field(pattern=f"^{SLICE_NAME}$")], Figures],
    Field(max_length=MOST_HELD_OUT_SLICES),
]
Item = TypeVar("Item")
# Validation stops at the first wrong item: an error for each of 65,536 would take 300 MB.
Several = Annotated[tuple[Item, ...], Field(fail_fast=True)]


def note(text: str) -> str:
    """Returns `text` with at most `NOTE` characters, and each unprintable character as '?'.

    For sentences in messages that may quote text of another sender.
    """
    cleaned = printable(text[: NOTE + 1])
    return cleaned if len(cleaned) <= NOTE else f"{cleaned[: NOTE - 3]}..."


class NestedRecord(BaseModel):
    """Base of the structures within messages."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Body(NestedRecord):
    """Base of the messages.

    Attributes:
        kind: the message's type on the wire.
        limit_bytes: the greatest length of an encoded message.
    """

    kind: ClassVar[str]
    limit_bytes: ClassVar[int] = MESSAGE_BYTES


T = TypeVar("T", bound=Body)
# The limits of any message. Writers obey them too, so that no reader refuses what was written.
LIMITS = {"max_array_len": MAX_ITEMS, "max_map_len": MAX_KEYS, "max_ext_len": 0}
# An item takes at least a byte, so a packed message of at most so many bytes is within all limits.
FEW_BYTES = min(MAX_ITEMS, MAX_KEYS)


def encode(body: Body) -> bytes:
    """Returns the message's bytes.

    Raises:
        WireError: the message is too long or has too many items; every reader would refuse it.
    """
    fields = body.model_dump()
    fields["schema"] = SCHEMA
    fields["kind"] = body.kind
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(packed) > FEW_BYTES:
        # Only decoding counts items as a reader does; skipping over them does not.
        unpack(packed, body.limit_bytes)
    return packed


def decode(expected: type[T], payload: bytes) -> T:
    """Returns the message in `payload`, which must be a message of the class `expected`.

    Raises:
        WireError: reason "oversize", "undecodable", "schema", "kind" or "malformed".
    """
    return parse(expected, unpack(payload, expected.limit_bytes))


def parse(expected: type[T], fields: dict[str, Any]) -> T:
    """Returns the message of class `expected` with the `fields` that `unpack` returned.

    Raises:
        WireError: reason "kind" or "malformed".
    """
    if fields.pop("kind", None) != expected.kind:
        raise WireError(Reason.KIND, f"expected a message of kind {expected.kind!r}")
    try:
        return expected.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise WireError(
            Reason.MALFORMED, f"{expected.kind} message: field {where!r}: {first['msg'][:200]}"
        ) from error


def _check_limits(payload: bytes, limit_bytes: int) -> None:
    """Checks a message's claimed lengths, as decoding would allocate arrays of these lengths."""
    if len(payload) > limit_bytes:
        raise WireError(Reason.OVERSIZE, f"message of {len(payload)} bytes, at most {limit_bytes}")
    look = msgpack.Unpacker(max_buffer_size=max(1, len(payload)), **LIMITS)
    look.feed(payload)
    try:
        look.skip()
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise _undecodable(error) from error


def _undecodable(error: Exception) -> WireError:
    why = str(error) or type(error).__name__
    return WireError(Reason.UNDECODABLE, f"not a msgpack message: {why}"[:300])


def unpack(payload: bytes, limit_bytes: int) -> dict[str, Any]:
    """Returns the fields of a message, with "kind" and without "schema".

    Raises:
        WireError: reason "oversize" (longer than `limit_bytes`), "undecodable" or "schema".
    """
    _check_limits(payload, limit_bytes)
    try:
        fields = msgpack.unpackb(payload, use_list=False, strict_map_key=True, **LIMITS)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise _undecodable(error) from error
    if not isinstance(fields, dict):
        raise WireError(Reason.UNDECODABLE, f"expected a map, got {type(fields).__name__}")
    schema = fields.pop("schema", None)
    if type(schema) is not int or schema not in READABLE:
        raise WireError(
            Reason.SCHEMA,
            f"message of schema {str(schema)[:40]}; this program reads {sorted(READABLE)}",
            hint="upgrade the older side: docs/operations.md, Upgrading",
        )
    return fields
