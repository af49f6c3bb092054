"""Checks the format of a bundle's frames, since anybody may have made the file.

These checks do not show that the file tells the truth about a run; `diloco replay` does.
"""

from pathlib import Path
from typing import Any, TypeGuard

from diloco.common.protocol import names
from diloco.common.protocol.errors import BusError, StoreError
from diloco.common.protocol.wire.encoding import GREATEST
from diloco.common.storage.bundle.frames import damaged
from diloco.common.storage.bus import Message, check_subject, subject_matches
from diloco.common.storage.store import check_object_name

# The latest accepted time, in seconds since the epoch: later than any run.
LATEST_S = 1e11
# The longest part of a file's name, and the longest name, that file systems accept.
TOKEN, LONGEST = 255, 1024
# Files that Python would import from the folder that a bundle was unpacked into.
IMPORTED = (".py", ".pyc", ".so")


def check_header(path: Path, header: Any) -> None:
    """Checks the header of the bundle `path` against the header's format.

    Raises:
        IntegrityError: the header lacks a valid run name, a time, or the flag `objects`.
    """
    if not isinstance(header, dict) or not isinstance(header.get("run"), str):
        raise damaged(path, "has no header")
    if not names.valid_name(header["run"]):
        raise damaged(path, f"is of a run {header['run'][:80]!r}, which is no run's name")
    if not isinstance(header.get("lost", ""), str):
        raise damaged(path, "has a header whose 'lost' is no sentence")
    made_s = header.get("made_s")
    if not (isinstance(made_s, int | float) and 0 <= made_s <= LATEST_S):
        raise damaged(path, f"was made at {made_s!r}, which is no time")
    if not isinstance(header.get("objects"), bool):
        raise damaged(path, "is of an earlier diloco, or does not say whether it has objects")


def as_message(path: Path, content: Any) -> Message:
    """Returns the message in a frame of the bundle `path`.

    Raises:
        IntegrityError: the frame holds no message.
    """
    kinds = (str, int, float, bytes, str)
    if not isinstance(content, list) or [type(part) for part in content] != list(kinds):
        raise damaged(path, "has a frame that holds no message")
    message = Message(*content)
    if not 1 <= message.seq <= GREATEST:
        raise damaged(path, f"has a message of sequence {message.seq}")
    if not 0 <= message.time_s <= LATEST_S:
        raise damaged(path, f"has a message, {message.seq}, of time {message.time_s}")
    # Restoring the tape puts the id into a header.
    if not {"\r", "\n", "\0"}.isdisjoint(message.msg_id):
        raise damaged(path, f"has a message, {message.seq}, with an id that no server gave it")
    return message


def check_of_run(path: Path, run: str, patterns: list[str], message: Message) -> None:
    """Refuses a message whose subject matches none of `patterns`.

    Raises:
        IntegrityError: the message is of another run or stream, or its subject is malformed.
    """
    subject = message.subject
    try:
        check_subject(subject)
        taken = any(subject_matches(pattern, subject) for pattern in patterns)
    except BusError:
        taken = False
    if not taken:
        raise damaged(
            path, f"is of run {run!r} and has a message, {message.seq}, of {subject[:80]!r}"
        )


def check_piece(path: Path, run: str, kind: str, content: dict[str, Any]) -> None:
    """Checks the frame with a piece of an object or a file against its format.

    Raises:
        IntegrityError: the name is unusable, the object belongs to another run, or the piece lies
            outside of its object or file.
    """
    name, size, at, data = (content.get(key) for key in (kind, "of", "at", "data"))
    if not isinstance(name, str) or not isinstance(data, bytes):
        raise damaged(path, f"has a piece of no {kind}")
    if not (is_count(size) and is_count(at) and at + len(data) <= size):
        raise damaged(path, f"has a piece of {kind} {name[:80]!r} that lies outside of it")
    if not data and size:
        raise damaged(path, f"has an empty piece of {kind} {name[:80]!r}")
    check_name(path, kind, name)
    # Restoring it would put it among the objects of another run.
    if kind == "object" and not name.startswith(f"{run}/"):
        raise damaged(path, f"is of run {run!r} and has an object {name[:80]!r}")


def check_name(path: Path, kind: str, name: str) -> None:
    """Refuses a name of an object or a file that could lead out of its folder.

    Raises:
        IntegrityError: the name leads out of its folder.
    """
    if kind == "object":
        try:
            check_object_name(name)
        except StoreError as error:
            raise damaged(path, f"has an object {name[:80]!r}: {error.message}") from error
        return
    if not is_file_name(name):
        raise damaged(path, f"has a file {name[:80]!r}, which no bundle has: nothing is written")


def is_file_name(name: str) -> bool:
    """True if a bundle may hold a file of this name, under which unpacking writes it to disk."""
    tokens = name.split("/")
    return (
        len(name) <= LONGEST
        and name.isprintable()
        and "\\" not in name
        and all(token not in {"", ".", ".."} and len(token.encode()) <= TOKEN for token in tokens)
        and not name.lower().endswith(IMPORTED)
    )


def check_oldest(path: Path, oldest: Any) -> dict[int, int]:
    """Returns fragment -> sequence of its oldest record, from the field of a bundle's last frame.

    Raises:
        IntegrityError: the field is malformed.
    """
    if not isinstance(oldest, dict) or not all(
        isinstance(key, str) and key.isdecimal() and len(key) < 5 and is_count(seq)
        for key, seq in oldest.items()
    ):
        raise damaged(path, "has an invalid list of the oldest records at its end")
    return {int(key): seq for key, seq in oldest.items()}


def check_nesting(path: Path, files: list[str]) -> None:
    """Refuses a bundle with a file whose name is the folder of another file of the bundle.

    Raises:
        IntegrityError: the bundle has such files.
    """
    known = {*files}
    for name in files:
        parents = {str(parent) for parent in Path(name).parents}
        if found := parents & known:
            raise damaged(path, f"has a file {min(found)!r} and in it a file {name!r}")


def is_count(number: Any) -> TypeGuard[int]:
    """True if `number` is an integer from 0 to 2^63 - 1."""
    return type(number) is int and 0 <= number <= GREATEST
