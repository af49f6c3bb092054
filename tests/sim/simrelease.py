"""An earlier release of this program, as others meet it: it writes no field that came after it.

What it would have decided otherwise is not simulated: of a record's inputs a field is left out only
where it says what its absence says.
"""

from typing import Any

import msgpack

from diloco.common.protocol import wire

# What a message's kind, or the field that a part of it is in, may lack, and what its absence says.
LATER = {
    where: {
        name: field.get_default()
        for name, field in part.model_fields.items()
        if not field.is_required()
    }
    for where, part in {
        "heartbeat": wire.Heartbeat,
        "record": wire.Record,
        "inputs": wire.Input,
        "policy": wire.PolicyState,
        "members": wire.MemberState,
        "totals": wire.Totals,
    }.items()
}


def as_earlier(payload: bytes) -> bytes:
    """A message as a process of the earlier release would have written it."""
    try:
        fields = msgpack.unpackb(payload, use_list=False)
    except ValueError:
        return payload  # A liar's, which is no message.
    if not isinstance(fields, dict) or fields.get("kind") not in LATER:
        return payload
    packed: bytes = msgpack.packb(_without_later(fields, fields["kind"]))
    return packed


def _without_later(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_later(one, key)
            for key, one in value.items()
            if not _is_later(where, key, one)
        }
    if isinstance(value, tuple):
        return tuple(_without_later(one, where) for one in value)
    return value


def _is_later(where: str, key: str, value: Any) -> bool:
    later = LATER.get(where, {})
    return key in later and (where != "inputs" or value == later[key])
