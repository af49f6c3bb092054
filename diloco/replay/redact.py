"""Names of learners, machines and the run, replaced by others in all that a bundle holds.

The replacement is a hash under a key that nobody keeps, behind a rank: decisions follow the order
of names, and would come out otherwise. Records name each other by digests, which are made again;
a chain that was broken stays broken.
"""

import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack

from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import DilocoError
from diloco.common.storage.bus import Message
from diloco.common.storage.tape import record_digest

# Fields that hold nothing but a name, and a table or a list of them.
NAMES = frozenset({"run", "learner", "aggregator", "host", "by"})
TABLES = frozenset({"positions", "quarantined"})
# Settings that say something of learners by their names.
BY_LEARNER = (("run", "tokens_per_step"), ("bounds", "learners"))
# Words of the protocol, and what names nobody; a learner may be called like one of them.
WORDS = frozenset({
    "kind", "what", "codec", "attempt_id", "release", "lock", "base_digest", "layout", "previous",
    "view_digest", "outer_digest", "reason", "state",
})  # fmt: skip
# People's names for what nobody is called by.
KEPT = frozenset({"operator", ""})
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")


def names_in(payload: bytes) -> Iterator[str]:
    """Every name that a message speaks of."""
    try:
        yield from _names_of("", msgpack.unpackb(payload, max_ext_len=0))
    except (ValueError, msgpack.UnpackException):
        return


def _names_of(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if key in TABLES:
            yield from value
        if key == "settings":
            told = (value.get(section, {}).get(name) for section, name in BY_LEARNER)
            yield from (name for one in told if isinstance(one, dict) for name in one)
        for inner, one in value.items():
            yield from _names_of(inner, one)
    elif isinstance(value, list):
        for one in value:
            yield from _names_of(key, one)
    elif isinstance(value, str) and (key in NAMES or key in TABLES):
        yield value


def _ref(name: str, data: bytes) -> dict[str, Any]:
    """What names an object of other bytes than before."""
    return {
        "name": f"{name.rpartition('-')[0]}-{shards.digest(data)}",
        "size_bytes": len(data),
        "crc32c": shards.crc32c(data),
    }


class Redactor:
    """Replaces names in messages, objects and logs.

    Args:
        run: the run's name.
        known: all other names, in any order.
    """

    def __init__(self, run: str, known: Iterable[str]) -> None:
        self.run = run
        self._key = secrets.token_hex(16)
        others = sorted({*known} - KEPT - {run})
        self._names = {name: self._hash(f"n{rank:04d}", name) for rank, name in enumerate(others)}
        self._names[run] = self._hash("run", run)
        longest_first = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile(
            rf"(?<![A-Za-z0-9-])(?:{'|'.join(map(re.escape, longest_first))})(?![A-Za-z0-9-])"
        )
        self._digests: dict[str, str] = {}
        # What stands in a message for an object that was written anew.
        self._refs: dict[str, dict[str, Any]] = {}

    def _hash(self, prefix: str, name: str) -> str:
        return f"{prefix}-{shards.digest(f'{self._key}:{name}'.encode())[:8]}"

    def name(self, name: str) -> str:
        """What a name is called now."""
        return self._names.get(name, name)

    def text(self, text: str) -> str:
        """Words for people, without the names and addresses of machines."""
        text = self._pattern.sub(lambda found: self._names[found[0]], text)
        return ADDRESS.sub(lambda found: self._hash("address", found[0]), text)

    def path(self, name: str) -> str:
        """The name of an object, or a subject."""
        separator = "." if name.startswith("diloco.") else "/"
        return separator.join(self.name(token) for token in name.split(separator))

    def message(self, message: Message, record: bytes | None = None) -> tuple[Message, bytes]:
        """A message of the tape, and the record that it points to, if it does.

        Args:
            message: as it stands.
            record: the body of a record that is an object.
        """
        subject = self._subject(message.subject)
        try:
            if record is None:
                payload = self._body(message.payload)
                return message._replace(subject=subject, payload=payload), b""
            body = self._body(record)
            payload = self._pointer(message.payload, body)
        except (ValueError, msgpack.UnpackException, DilocoError):
            # What nobody can read may hold any name.
            return message._replace(subject=subject, payload=b"redacted"), b""
        return message._replace(subject=subject, payload=payload), body

    def _subject(self, subject: str) -> str:
        tokens = subject.split(".")
        # The kind of message, its third word, is no name.
        return ".".join(t if at == 2 else self.name(t) for at, t in enumerate(tokens))

    def _body(self, payload: bytes) -> bytes:
        fields = msgpack.unpackb(payload, max_ext_len=0)
        if fields.get("kind") != wire.Record.kind:
            beside = (fields.get("positions_object") or {}).get("name")
            fields = self._map(fields)
            if beside in self._refs:
                fields["positions_object"] = self._refs[beside]
            return bytes(msgpack.packb(fields))
        was = record_digest(wire.decode(wire.Record, payload))
        fields = self._map(fields)
        if fields.get("previous"):
            fields["previous"] = self._digests.get(fields["previous"], fields["previous"])
        packed: bytes = msgpack.packb(fields)
        self._digests[was] = record_digest(wire.decode(wire.Record, packed))
        return packed

    def _pointer(self, payload: bytes, body: bytes) -> bytes:
        """The message that points to a record, whose body is another now."""
        fields = self._map(msgpack.unpackb(payload, max_ext_len=0))
        fields["body"] = _ref(fields["body"]["name"], body)
        return bytes(msgpack.packb(fields))

    def positions(self, name: str, data: bytes) -> tuple[str, bytes]:
        """The object beside a specification; do it before the specification, which names it."""
        body = self._body(data)
        self._refs[name] = _ref(self.path(name), body)
        return str(self._refs[name]["name"]), body

    def object(self, name: str, data: bytes) -> tuple[str, bytes]:
        """An object: only scores and checkpoints speak of anybody."""
        if name.startswith(names.scores_prefix(self.run)):
            body = self._body(data)
            stem = self.path(name).rpartition("-")[0]
            return f"{stem}-{shards.digest(body)}", body
        if name.startswith(names.checkpoint_prefix(self.run)):
            return self.path(name), self._body(data)
        return self.path(name), data

    def _map(self, fields: dict[str, Any]) -> dict[str, Any]:
        found = {key: self._value(key, value) for key, value in fields.items()}
        if "by" in fields:
            found["reason"] = self.text(fields["reason"])  # Somebody's own words.
        return found

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Those of a run, which name it, and learners where they say something of one."""
        run = settings.get("run", {})
        found = settings | {"run": run | {"name": self.name(run.get("name", ""))}}
        for section, key in BY_LEARNER:
            told = found.get(section, {}).get(key)
            if isinstance(told, dict):
                own = {self.name(name): value for name, value in told.items()}
                found[section] = found[section] | {key: own}
        return found

    def _value(self, key: str, value: Any) -> Any:
        if key == "settings" and isinstance(value, dict):
            return self._settings(value)
        if isinstance(value, dict):
            if key in TABLES:
                return {self.name(name): count for name, count in value.items()}
            return self._map(value)
        if isinstance(value, list):
            return [self._value(key, one) for one in value]
        if not isinstance(value, str) or key in WORDS:
            return value
        if key in NAMES or key in TABLES:
            return self.name(value)
        if key in ("name", "constants"):
            return self.path(value)
        return self.text(value)
