"""A tape in one file: every message of a run's stream, with its sequence, time and message id.

docs/protocol.md has the format. The same tape gives the same bytes, whichever bus held it; each
frame has a checksum, and the last one counts the messages, so that a file which was cut short is
known for one.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from diloco.common import names
from diloco.common.bus import Message, subject_matches
from diloco.common.errors import ConfigError
from diloco.common.tape.frames import damaged, read_frames, write_frame

MAGIC = b"DLTAPE1\n"
# Of times in seconds since the epoch, and of sequences: later than any run, and of 64 bits.
LATEST_S, LAST_SEQ = 1e11, (1 << 63) - 1


def is_tape_file(path: Path) -> bool:
    """Whether a file begins as an exported tape does."""
    return begins_with(path, MAGIC)


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether a file, if it is one, begins so."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


async def write_tape_file(path: Path, run: str, messages: AsyncIterator[Message]) -> int:
    """Write a tape to a new file, which stands under its name once it is whole; how many messages.

    Raises:
        ConfigError: the file is there already, or cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{str(path)!r} exists already", hint="give another name")
    partial = path.with_name(f"{path.name}.partial")
    count = 0
    try:
        with partial.open("wb") as file:
            file.write(MAGIC)
            write_frame(file, {"run": run})
            async for message in messages:
                write_frame(file, list(message))
                count += 1
            write_frame(file, {"messages": count})
        partial.rename(path)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return count


def tape_file_run(path: Path) -> str:
    """The run whose tape a file holds.

    Raises:
        IntegrityError: it is no tape, or damaged.
    """
    with path.open("rb") as file:
        frame = next(read_frames(path, file, MAGIC), None)
        return run_in(path, frame.content if frame else None)


def read_tape_file(path: Path) -> Iterator[Message]:
    """Every message of an exported tape, in order.

    Raises:
        IntegrityError: it is no tape, is damaged, or was cut short.
    """
    with path.open("rb") as file:
        frames = (frame.content for frame in read_frames(path, file, MAGIC))
        run = run_in(path, next(frames, None))
        known, count, before = set[str](), 0, 0
        for content in frames:
            if isinstance(content, dict):
                if content != {"messages": count} or next(frames, None) is not None:
                    raise damaged(path, f"ends after {count} messages with {content}")
                return
            message = as_message(path, content)
            if message.seq <= before:
                raise damaged(path, f"sequence {message.seq} comes after {before}")
            if message.subject not in known:
                check_of_run(path, run, message)
                known.add(message.subject)
            before = message.seq
            count += 1
            yield message
    raise damaged(path, f"was cut short after {count} messages")


def run_in(path: Path, header: Any) -> str:
    """The run that a first frame names.

    Raises:
        IntegrityError: it names none.
    """
    if not isinstance(header, dict) or not isinstance(header.get("run"), str):
        raise damaged(path, "has no header")
    return str(header["run"])


def as_message(path: Path, content: Any) -> Message:
    """The message in a frame.

    Raises:
        IntegrityError: there is none.
    """
    kinds = (str, int, float, bytes, str)
    if not isinstance(content, list) or [type(part) for part in content] != list(kinds):
        raise damaged(path, "holds what is no message")
    message = Message(*content)
    if not 1 <= message.seq <= LAST_SEQ:
        raise damaged(path, f"has a message of sequence {message.seq}")
    if not 0 <= message.time_s <= LATEST_S:
        raise damaged(path, f"has a message, {message.seq}, of time {message.time_s}")
    # Its id becomes a header where the tape is imported.
    if not {"\r", "\n", "\0"}.isdisjoint(message.msg_id):
        raise damaged(path, f"has a message, {message.seq}, with an id that no server gave it")
    return message


def check_of_run(path: Path, run: str, message: Message) -> None:
    """Refuse a message that the stream of a run could not have taken.

    Raises:
        IntegrityError: it is of another run, or its subject is none.
    """
    subject, patterns = message.subject, (*names.tape_subjects(run), *names.ops_subjects(run))
    if not {*" \t\r\n"}.isdisjoint(subject) or not any(
        subject_matches(pattern, subject) for pattern in patterns
    ):
        raise damaged(
            path, f"is of run {run!r} and has a message, {message.seq}, of {subject[:80]!r}"
        )
