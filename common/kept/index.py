"""Where everything stands in a file that keeps a run; the file itself stays on disk.

A message takes some 20 bytes here, whatever its length.
"""

import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diloco.common import names
from diloco.common.bus import Message
from diloco.common.errors import IntegrityError
from diloco.common.increasing import Increasing
from diloco.common.kept.check import check_header, check_nesting, check_oldest, check_piece
from diloco.common.kept.contents import Contents, Piece, Whole
from diloco.common.tape.file import MAGIC, as_message, begins_with, check_of_run
from diloco.common.tape.frames import (
    HEAD,
    Frame,
    damaged,
    frame_bytes,
    read_frame,
    read_frames,
    whole_frames,
)

BUNDLE = b"DLBUND1\n"


def is_kept(path: Path) -> bool:
    """Whether a file is an exported tape or a bundle."""
    return begins_with(path, MAGIC) or begins_with(path, BUNDLE)


def is_bundle(path: Path) -> bool:
    """Whether a file is a bundle."""
    return begins_with(path, BUNDLE)


def magic_of(path: Path) -> bytes:
    """How a kept file begins."""
    return BUNDLE if is_bundle(path) else MAGIC


def read_header(path: Path) -> dict[str, Any]:
    """What a kept file says of itself: at least the run's name, as "run".

    Raises:
        IntegrityError: it is damaged.
    """
    magic = magic_of(path)
    with path.open("rb") as file:
        frame = next(read_frames(path, file, magic), None)
    content: Any = frame.content if frame else None
    check_header(path, content, bundle=magic == BUNDLE)
    return dict(content)


class Log:
    """The messages of a stream: sequence, place in the file, subject."""

    def __init__(self) -> None:
        self.seqs = Increasing()
        self.ats = array("q")
        self.whose = array("i")
        self.subjects: list[str] = []
        self._ids: dict[str, int] = {}

    def ids(self, subject: str) -> list[int]:
        """The subject's index, if it has a message."""
        return [self._ids[subject]] if subject in self._ids else []

    def add(self, at: int, message: Message) -> None:
        """The next message."""
        if message.subject not in self._ids:
            self._ids[message.subject] = len(self.subjects)
            self.subjects.append(message.subject)
        self.seqs.append(message.seq)
        self.ats.append(at)
        self.whose.append(self._ids[message.subject])

    def drop(self, below: dict[str, int]) -> None:
        """Forget messages of these subjects below sequences."""
        limits = {self._ids[subject]: seq for subject, seq in below.items() if subject in self._ids}
        rows = zip(self.seqs, self.whose, strict=True)
        kept = array("q", (i for i, (seq, of) in enumerate(rows) if seq >= limits.get(of, 0)))
        seqs, self.seqs = self.seqs, Increasing()
        for index in kept:
            self.seqs.append(seqs[index])
        self.ats = array("q", (self.ats[index] for index in kept))
        self.whose = array("i", (self.whose[index] for index in kept))

    def last(self, wanted: Iterable[int]) -> int | None:
        """Place in the file of the last message of these subjects."""
        chosen = {*wanted}
        for index in range(len(self.seqs) - 1, -1, -1):
            if self.whose[index] in chosen:
                return self.ats[index]
        return None

    def rows(self, wanted: set[int], start_seq: int) -> Iterator[int]:
        """Places in the file of the messages of these subjects from a sequence on."""
        for index in range(self.seqs.first_from(start_seq), len(self.seqs)):
            if self.whose[index] in wanted:
                yield self.ats[index]


class Kept:
    """A kept file, opened; `close` it.

    Attributes:
        header: what it says of itself.
        tape, ops: its streams.
        objects, files: what a bundle holds, by name.
        lost: what is wrong with it, in a sentence, where it was opened all the same; or "".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.tape, self.ops = Log(), Log()
        self.objects, self.files = Contents(), Contents()
        self.lost = ""
        self._file = path.open("rb")

    @property
    def run(self) -> str:
        """The run that it is of."""
        return str(self.header["run"])

    @property
    def bundle(self) -> bool:
        """Whether it brings its objects with it."""
        return is_bundle(self.path)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def content(self, at: int) -> Any:
        """What the frame at a place holds; from any thread.

        Raises:
            IntegrityError: the file has changed since.
        """
        head = os.pread(self._file.fileno(), HEAD.size, at)
        return read_frame(self.path, os.pread(self._file.fileno(), frame_bytes(head), at))

    def message(self, at: int) -> Message:
        """The message at a place."""
        content = self.content(at)
        return as_message(self.path, content["ops"] if isinstance(content, dict) else content)

    def file(self, name: str) -> bytes:
        """A file that it holds.

        Raises:
            KeyError: it holds none of that name.
        """
        return b"".join(self.parts(name))

    def parts(self, name: str) -> Iterator[bytes]:
        """A file that it holds, piece by piece.

        Raises:
            KeyError: it holds none of that name.
        """
        whole = self.files.get(name)
        if whole is None:
            raise KeyError(name)
        for piece in whole.pieces:
            yield self.content(piece.frame_at)["data"]

    def read(self, whole: Whole, start: int, stop: int) -> bytes:
        """Bytes of an object or a file."""
        found = []
        for piece in whole.pieces:
            if piece.start < stop and piece.stop > start:
                data = self.content(piece.frame_at)["data"]
                found.append(data[max(0, start - piece.start) : stop - piece.start])
        return b"".join(found)


def open_kept(path: Path, *, salvage: bool = False) -> Kept:
    """Open a kept file.

    Args:
        path: the file.
        salvage: take what is whole of a damaged one; `Kept.lost` says that it is.

    Raises:
        IntegrityError: it is damaged.
    """
    kept = Kept(path)
    try:
        _fill(kept, salvage=salvage)
    except BaseException:
        kept.close()
        raise
    return kept


def _fill(kept: Kept, *, salvage: bool) -> None:
    magic = magic_of(kept.path)
    try:
        with kept.path.open("rb") as file:
            ended = _take_all(kept, read_frames(kept.path, file, magic))
        if not ended:
            count = len(kept.tape.seqs)
            raise damaged(kept.path, f"was cut short after {count} messages")
    except IntegrityError as error:
        if not salvage:
            raise
        kept.header, kept.tape, kept.ops = {}, Log(), Log()
        kept.objects, kept.files = Contents(), Contents()
        kept.lost = error.message
        _take_all(kept, whole_frames(kept.path, magic), strict=False)
        kept.objects.drop_damaged()
        kept.files.drop_damaged()
        check_header(kept.path, kept.header, bundle=magic == BUNDLE)


def _take_all(kept: Kept, frames: Iterator[Frame], *, strict: bool = True) -> bool:
    """Note where everything stands; whether the file's end is there."""
    for at, content in frames:
        if not kept.header:
            check_header(kept.path, content, bundle=kept.bundle)
            kept.header = content
        elif isinstance(content, dict) and "messages" in content:
            _check_end(kept, content, strict=strict)
            if strict and next(frames, None) is not None:
                raise damaged(kept.path, "goes on behind its end")
            return True
        else:
            try:
                _take(kept, at, content)
            except IntegrityError:
                if strict:
                    raise
    return False


def _take(kept: Kept, at: int, content: Any) -> None:
    if isinstance(content, list):
        _take_message(kept, kept.tape, at, content)
        return
    if not isinstance(content, dict):
        raise damaged(kept.path, f"has a frame that is a {type(content).__name__}")
    if "ops" in content:
        _take_message(kept, kept.ops, at, content["ops"])
        return
    named = next((kind for kind in ("object", "file") if kind in content), None)
    if named is None:
        raise damaged(kept.path, f"has a frame with {sorted(map(str, content))[:8]}")
    check_piece(kept.path, named, content)
    of = kept.objects if named == "object" else kept.files
    begin = content["at"]
    of.add(content[named], content["of"], Piece(at, begin, begin + len(content["data"])))


def _take_message(kept: Kept, log: Log, at: int, content: Any) -> None:
    message = as_message(kept.path, content)
    if log.seqs and message.seq <= log.seqs[-1]:
        raise damaged(kept.path, f"sequence {message.seq} comes after {log.seqs[-1]}")
    if not log.ids(message.subject):
        check_of_run(kept.path, kept.run, message)
    log.add(at, message)


def _check_end(kept: Kept, content: dict[str, Any], *, strict: bool) -> None:
    counted = {"messages": len(kept.tape.seqs)}
    if kept.bundle:
        counted["objects"] = len(kept.objects)
    said = {key: content.get(key) for key in counted}
    if strict and (said != counted or kept.objects.damaged() or kept.files.damaged()):
        raise damaged(
            kept.path,
            f"ends with {said} and holds {counted}, {kept.objects.damaged()} objects and "
            f"{kept.files.damaged()} files of them in part or twice",
        )
    if strict:
        check_nesting(kept.path, [*kept.files])
    # What was collected from the tape while the objects were copied is not of this copy.
    oldest = check_oldest(kept.path, content.get("oldest", {}))
    below = {names.record(kept.run, fragment): seq for fragment, seq in oldest.items()}
    if below:
        kept.tape.drop(below)
