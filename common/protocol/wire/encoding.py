"""Encodes messages to bytes, and decodes bytes to messages."""

from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from diloco.common.protocol.errors import WireError
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.wire.fields import MAX_ITEMS, MAX_KEYS, Body

SCHEMA = 1
# A reader accepts its own schema and the one before; schema 0 was never published. A new schema is
# read by one release and written by the next, so that two releases in a row read each other.
READABLE = frozenset({SCHEMA})
T = TypeVar("T", bound=Body)
# The limits of any message. Writers obey them too, so that no reader refuses what was written.
LIMITS = {"max_array_len": MAX_ITEMS, "max_map_len": MAX_KEYS, "max_ext_len": 0}
# An item takes at least a byte, so a message that we packed into so few is within all limits.
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
    """Returns the message in `payload`, which must be of the kind `expected`.

    Raises:
        WireError: reason "oversize", "undecodable", "schema", "kind" or "malformed".
    """
    return parse(expected, unpack(payload, expected.limit_bytes))


def parse(expected: type[T], fields: dict[str, Any]) -> T:
    """Returns the message of the `fields` that `unpack` returned; raises the errors of `decode`."""
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
    """Checks claimed lengths before decoding, which would allocate arrays as long as claimed."""
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
    """Returns the fields of a message, if this program reads its schema; errors as of `decode`."""
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
