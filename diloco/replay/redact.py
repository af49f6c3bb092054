"""Replaces the names of learners, machines and the run in everything that a bundle contains.

A name becomes a hash under a random key, which is discarded. The name's rank in alphabetical order
stands before the hash, since decisions depend on the order of names. Each record has the digest of
the one before it; the digests are recomputed. A record that did not match the one before it does
not match in the redacted tape either.
"""

import contextlib
import ipaddress
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgpack

from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import DilocoError
from diloco.common.storage.bus import Message
from diloco.common.storage.tape import decode, record_digest

# NAMES: fields whose value is a name. TABLES: fields with names as keys, or with a list of names.
NAMES = frozenset({"run", "learner", "aggregator", "host", "by"})
TABLES = frozenset({"positions", "quarantined"})
# Settings that are tables by learners' names.
BY_LEARNER = (("run", "tokens_per_step"), ("bounds", "learners"))
# Fields with constants of the protocol or digests: they stay, even if a learner has such a name.
WORDS = frozenset({
    "kind", "what", "codec", "attempt_id", "release", "lock", "base_digest", "layout", "previous",
    "view_digest", "outer_digest", "reason", "state",
})  # fmt: skip
# Values of the fields NAMES that are not names of anyone.
KEPT = frozenset({"operator", ""})
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
# This matches times of day too; `ipaddress` decides.
MAYBE_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:[0-9A-Fa-f.]+)?(?![\w:])")
MAIL = re.compile(r"[\w.+%-]+@[\w-]+(?:\.[\w-]+)+")
# In the path of a home folder, its owner's name; the rest of the path stays.
HOME = re.compile(r"(?<=/home/)[^/\s\"':,;)]+|(?<=/Users/)[^/\s\"':,;)]+")
# Tasks in modules of this package keep their names.
OWN = "diloco."


def names_in(payload: bytes) -> Iterator[str]:
    """Yields every name in the payload of a message or an object that can be decoded."""
    yield from _names_of("", msgpack.unpackb(payload, max_ext_len=0))


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns a section of settings; empty if it is missing or invalid."""
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def task_of(settings: Mapping[str, Any]) -> str:
    """Returns `task.build` of the settings; "" if the task is one of this package."""
    build = _section(settings, "task").get("build")
    return build if isinstance(build, str) and not build.startswith(OWN) else ""


def _names_of(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if key in TABLES:
            yield from value
        if key == "settings":
            told = (_section(value, section).get(name) for section, name in BY_LEARNER)
            yield from (name for one in told if isinstance(one, dict) for name in one)
        for inner, one in value.items():
            yield from _names_of(inner, one)
    elif isinstance(value, list):
        for one in value:
            yield from _names_of(key, one)
    elif isinstance(value, str) and (key in NAMES or key in TABLES):
        yield value


def _ref(name: str, data: bytes) -> dict[str, Any]:
    """Returns an object's reference after a change of its bytes: new name, size and checksum."""
    return {
        "name": f"{name.rpartition('-')[0]}-{shards.digest(data)}",
        "size_bytes": len(data),
        "crc32c": shards.crc32c(data),
    }


class Redactor:
    """Replaces names in messages, objects and logs; each name always has the same replacement.

    Args:
        run: the run's name.
        known: all other names, in any order.
        tasks: functions that build the run's task, as `"package.module:function"`.
    """

    def __init__(self, run: str, known: Iterable[str], tasks: Iterable[str] = ()) -> None:
        self.run = run
        self._key = secrets.token_hex(16)
        others = sorted({*known} - KEPT - {run})
        self._names = {name: self._hash(f"n{rank:04d}", name) for rank, name in enumerate(others)}
        self._names[run] = self._hash("run", run)
        modules = {task.partition(":")[0] for task in tasks} - {""}
        # Names of modules are replaced in texts, also where they are paths of files, but not in
        # subjects and names of objects.
        self._words = self._names | {
            written: self._module(module)
            for module in modules
            for written in (module, module.replace(".", "/"))
        }
        longest_first = sorted(self._words, key=len, reverse=True)
        self._pattern = re.compile(
            rf"(?<![A-Za-z0-9-])(?:{'|'.join(map(re.escape, longest_first))})(?![A-Za-z0-9-])"
        )
        self._digests: dict[str, str] = {}
        # References in messages to objects that were rewritten.
        self._refs: dict[str, dict[str, Any]] = {}

    def _hash(self, prefix: str, name: str) -> str:
        return f"{prefix}-{shards.digest(f'{self._key}:{name}'.encode())[:8]}"

    def _module(self, module: str) -> str:
        return self._hash("task", module).replace("-", "_")

    def name(self, name: str) -> str:
        """Returns the replacement of a known name; any other text stays."""
        return self._names.get(name, name)

    def _somebody(self, name: str) -> str:
        """Returns the replacement of a name; an unknown one is replaced by a hash too."""
        return name if name in KEPT else self._names.get(name) or self._hash("n", name)

    def text(self, text: str) -> str:
        """Returns a text with names, addresses, mail addresses and owners of homes replaced."""
        text = MAIL.sub(lambda found: self._hash("mail", found[0]), text)
        text = HOME.sub(lambda found: self._hash("home", found[0]), text)
        text = self._pattern.sub(lambda found: self._words[found[0]], text)
        text = MAYBE_IPV6.sub(lambda found: self._ipv6(found[0]), text)
        return ADDRESS.sub(lambda found: self._hash("address", found[0]), text)

    def _ipv6(self, text: str) -> str:
        with contextlib.suppress(ValueError):
            return self._hash("address", str(ipaddress.IPv6Address(text)))
        return text

    def path(self, name: str) -> str:
        """Returns the name of an object, or a subject, with each known name in it replaced."""
        separator = "." if name.startswith("diloco.") else "/"
        return separator.join(self.name(token) for token in name.split(separator))

    def message(self, message: Message, record: bytes | None = None) -> tuple[Message, bytes]:
        """Redacts a message of the tape, and the record that it points to.

        Args:
            message: the original.
            record: the encoded record, if the message only points to an object with it.

        Returns:
            The redacted message, and the redacted record (empty without `record`). If the message
            cannot be decoded, its payload becomes `b"redacted"`, since it may contain any name.
        """
        subject = self._subject(message.subject)
        try:
            decode(message.subject, message.payload)
            if record is None:
                payload = self._body(message.payload)
                return message._replace(subject=subject, payload=payload), b""
            payload, body = self._pointer(message.payload, record)
        except (ValueError, msgpack.UnpackException, DilocoError):
            # An unreadable payload may hold any name.
            return message._replace(subject=subject, payload=b"redacted"), b""
        return message._replace(subject=subject, payload=payload), body

    def _subject(self, subject: str) -> str:
        tokens = subject.split(".")
        # The kind of message, its third token, is not a name.
        return ".".join(t if at == 2 else self.name(t) for at, t in enumerate(tokens))

    def _body(self, payload: bytes) -> bytes:
        fields = msgpack.unpackb(payload, max_ext_len=0)
        if fields.get("kind") != wire.Record.kind:
            told = self._map(fields)
            match fields:
                case {"positions_object": {"name": str(beside)}} if beside in self._refs:
                    told["positions_object"] = self._refs[beside]
            return bytes(msgpack.packb(told))
        was = record_digest(wire.decode(wire.Record, payload))
        fields = self._map(fields)
        if fields.get("previous"):
            fields["previous"] = self._digests.get(fields["previous"], fields["previous"])
        packed: bytes = msgpack.packb(fields)
        self._digests[was] = record_digest(wire.decode(wire.Record, packed))
        return packed

    def _pointer(self, payload: bytes, data: bytes) -> tuple[bytes, bytes]:
        """Returns the payload of a message that points to a record, and the object's new bytes."""
        pointer = wire.decode(wire.RecordPointer, payload)
        body = self._body(data[: pointer.answers.start])
        record = wire.decode(wire.Record, body)
        told, answers = wire.with_answers(record, body)
        again = {
            "word": wire.word_of(record),
            "body": wire.ObjectRef(**_ref(self.path(pointer.body.name), told)),
            "answers": answers,
        }
        return wire.encode(pointer.model_copy(update=again)), told

    def positions(self, name: str, data: bytes) -> tuple[str, bytes]:
        """Redacts the object with data positions: returns its new name and bytes.

        Call this before the specification, which names that object, is redacted.
        """
        body = self._body(data)
        self._refs[name] = _ref(self.path(name), body)
        return str(self._refs[name]["name"]), body

    def object(self, name: str, data: bytes) -> tuple[str, bytes]:
        """Redacts an object: returns its new name and bytes; only scores and checkpoints change."""
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
            found["reason"] = self.text(fields["reason"])  # Free text.
        return found

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings with hashes for the names of run, task and learners."""
        run = _section(settings, "run")
        found = settings | {"run": run | {"name": self.name(run.get("name", ""))}}
        if build := task_of(settings):
            module, _, function = build.partition(":")
            task = {"build": f"{self._module(module)}:{function}"}
            found["task"] = self._map(_section(settings, "task")) | task
        for section, key in BY_LEARNER:
            told = _section(found, section).get(key)
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
            return self._somebody(value)
        if key in ("name", "constants"):
            return self.path(value)
        return self.text(value)
