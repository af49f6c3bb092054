"""Checks of a bundle's frames, which may have been made by anybody.

Nothing here says that a file tells the truth of a run: that is for `diloco replay` to find out.
"""

from pathlib import Path
from typing import Any, TypeGuard

from diloco.common.protocol import names
from diloco.common.protocol.errors import BusError, StoreError
from diloco.common.protocol.wire.fields import GREATEST
from diloco.common.storage.bundle.frames import damaged
from diloco.common.storage.bus import Message, check_subject, subject_matches
from diloco.common.storage.store import check_object_name

# Of times in seconds since the epoch: later than any run.
LATEST_S = 1e11
# Of a file's name: what file systems take.
TOKEN, LONGEST = 255, 1024
# What Python would import of a folder that a bundle was unpacked into.
IMPORTED = (".py", ".pyc", ".so")


def check_header(path: Path, header: Any) -> None:
    """Check a file's header against its format.

    Raises:
        IntegrityError: it has no run's name, no time, or no word on its objects.
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
    """The message in a frame.

    Raises:
        IntegrityError: the frame holds no message.
    """
    kinds = (str, int, float, bytes, str)
    if not isinstance(content, list) or [type(part) for part in content] != list(kinds):
        raise damaged(path, "holds what is no message")
    message = Message(*content)
    if not 1 <= message.seq <= GREATEST:
        raise damaged(path, f"has a message of sequence {message.seq}")
    if not 0 <= message.time_s <= LATEST_S:
        raise damaged(path, f"has a message, {message.seq}, of time {message.time_s}")
    # Its id becomes a header where the tape is restored.
    if not {"\r", "\n", "\0"}.isdisjoint(message.msg_id):
        raise damaged(path, f"has a message, {message.seq}, with an id that no server gave it")
    return message


def check_of_run(path: Path, run: str, patterns: list[str], message: Message) -> None:
    """Refuse a message that a stream of these subjects could not have taken.

    Raises:
        IntegrityError: it is of another run or stream, or its subject is none.
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
    """Hold a piece of an object or a file to its format.

    Raises:
        IntegrityError: it has no name that can be used, is an object of another run, or lies
            outside of what it is a piece of.
    """
    name, size, at, data = (content.get(key) for key in (kind, "of", "at", "data"))
    if not isinstance(name, str) or not isinstance(data, bytes):
        raise damaged(path, f"has a piece of no {kind}")
    if not (is_count(size) and is_count(at) and at + len(data) <= size):
        raise damaged(path, f"has a piece of {kind} {name[:80]!r} that lies outside of it")
    if not data and size:
        raise damaged(path, f"has an empty piece of {kind} {name[:80]!r}")
    check_name(path, kind, name)
    # Restored, it would lie among the objects of a run that the file is not of.
    if kind == "object" and not name.startswith(f"{run}/"):
        raise damaged(path, f"is of run {run!r} and has an object {name[:80]!r}")


def check_name(path: Path, kind: str, name: str) -> None:
    """Refuse the name of an object or a file that could lead out of its folder.

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
    """Whether a bundle may hold a file of this name, which is written where it is unpacked."""
    tokens = name.split("/")
    return (
        len(name) <= LONGEST
        and name.isprintable()
        and "\\" not in name
        and all(token not in {"", ".", ".."} and len(token.encode()) <= TOKEN for token in tokens)
        and not name.lower().endswith(IMPORTED)
    )


def check_oldest(path: Path, oldest: Any) -> dict[int, int]:
    """The oldest record of each fragment that counts, from a bundle's last frame.

    Raises:
        IntegrityError: the frame does not hold such records.
    """
    if not isinstance(oldest, dict) or not all(
        isinstance(key, str) and key.isdecimal() and len(key) < 5 and is_count(seq)
        for key, seq in oldest.items()
    ):
        raise damaged(path, "ends with oldest records that are none")
    return {int(key): seq for key, seq in oldest.items()}


def check_nesting(path: Path, files: list[str]) -> None:
    """Refuse files of which one would be the folder of another.

    Raises:
        IntegrityError: the bundle has such files.
    """
    known = {*files}
    for name in files:
        parents = {str(parent) for parent in Path(name).parents}
        if found := parents & known:
            raise damaged(path, f"has a file {min(found)!r} and in it a file {name!r}")


def is_count(number: Any) -> TypeGuard[int]:
    """Whether a number is whole and fits into 64 bits."""
    return type(number) is int and 0 <= number <= GREATEST
