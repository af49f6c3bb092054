"""The decoder of every message of a run: typed, and checked against the subject it came under.

Subjects are what the servers fence, so a subject says for sure who speaks; a body that says
something else is refused here, once for all readers. Pure.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TypeVar

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.reasons import Reason

T = TypeVar("T", bound=wire.Body)

# The owners of several fragments read the same joins, leaves and settings, one after another: what
# is short is decoded once for all of them. What is long is read by one.
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
    """The message that came under a subject: of the class that the subject carries.

    Under a record's subject that is a `Record`, or the `RecordPointer` that stands for one.

    Raises:
        WireError: it cannot be decoded, or names somebody or something else than its subject.
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
    check_fits(subject, body)
    return body


_decode_once = lru_cache(REMEMBERED)(_decode)


def decode_as(expected: type[T], subject: str, payload: bytes) -> T:
    """As `decode`, for one who knows what comes.

    Raises:
        WireError: also when something else came.
    """
    body = decode(subject, payload)
    if not isinstance(body, expected):
        raise WireError(
            Reason.KIND,
            f"expected a message of kind {expected.kind!r}, {subject!r} has {body.kind!r}",
        )
    return body


def check_fits(subject: str, body: wire.Body) -> None:
    """Refuse a body that names another run, learner, fragment or life than its subject.

    Raises:
        WireError: it does.
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
