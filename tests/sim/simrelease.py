"""Messages as an earlier release of this program would write them: without later fields.

Decisions by the rules of that release are not simulated: a later field of a record's inputs is left
out only if its value is the default, which is what readers assume for a missing field.
"""

from typing import Any

import msgpack

from diloco.common.protocol import wire

# By a message's kind, or a nested part's field: the fields that may be missing, with defaults.
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
    """Returns a message as a process of the earlier release would have written it."""
    try:
        fields = msgpack.unpackb(payload, use_list=False)
    except ValueError:
        return payload  # A liar's bytes, which are no message.
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
