"""Reads bundles through an index of their frames; the frames' contents stay on disk.

The index has some 20 bytes for each message, whatever the message's length.
"""

import os
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diloco.common.protocol import names
from diloco.common.protocol.errors import IntegrityError
from diloco.common.storage.bundle.check import (
    as_message,
    check_header,
    check_nesting,
    check_of_run,
    check_oldest,
    check_piece,
)
from diloco.common.storage.bundle.contents import BundleContents, FilePiece, Whole
from diloco.common.storage.bundle.frames import (
    HEAD,
    Frame,
    damaged,
    frame_bytes,
    read_frame,
    read_frames,
    whole_frames,
)
from diloco.common.storage.bus import Message


def read_header(path: Path) -> dict[str, Any]:
    """Returns the header of a bundle: `run`, `made_s` (seconds since the epoch), `objects`, ...

    Raises:
        OSError: the file cannot be read.
        IntegrityError: the header is damaged.
    """
    with path.open("rb") as file:
        frame = next(read_frames(path, file), None)
    content: Any = frame.content if frame else None
    check_header(path, content)
    return dict(content)


class StreamIndex:
    """The index of a stream's messages, in the order of the stream.

    Attributes:
        seqs: stream sequence of each message.
        offsets: offset in the file of the frame with each message.
        subject_of: the subject of each message, as an index of `subjects`.
        subjects: the distinct subjects.
    """

    def __init__(self) -> None:
        self.seqs = array("q")
        self.offsets = array("q")
        self.subject_of = array("i")
        self.subjects: list[str] = []
        self._ids: dict[str, int] = {}

    def ids(self, subject: str) -> list[int]:
        """Returns [the subject's index in `subjects`]; [] if no message has the subject."""
        return [self._ids[subject]] if subject in self._ids else []

    def add(self, at: int, message: Message) -> None:
        """Adds the next message, whose frame is at offset `at` of the file."""
        if message.subject not in self._ids:
            self._ids[message.subject] = len(self.subjects)
            self.subjects.append(message.subject)
        self.seqs.append(message.seq)
        self.offsets.append(at)
        self.subject_of.append(self._ids[message.subject])

    def drop(self, below: dict[str, int]) -> None:
        """Removes messages by subject: those with a sequence smaller than `below[subject]`."""
        limits = {self._ids[subject]: seq for subject, seq in below.items() if subject in self._ids}
        rows = zip(self.seqs, self.subject_of, strict=True)
        left = array("q", (i for i, (seq, of) in enumerate(rows) if seq >= limits.get(of, 0)))
        self.seqs = array("q", (self.seqs[index] for index in left))
        self.offsets = array("q", (self.offsets[index] for index in left))
        self.subject_of = array("i", (self.subject_of[index] for index in left))

    def last(self, wanted: Iterable[int]) -> int | None:
        """Returns the file offset of the last message with a subject in `wanted`; None: no message.

        `wanted` has indexes of `subjects`.
        """
        chosen = {*wanted}
        for index in range(len(self.seqs) - 1, -1, -1):
            if self.subject_of[index] in chosen:
                return self.offsets[index]
        return None

    def rows(self, wanted: set[int], start_seq: int) -> Iterator[int]:
        """Yields the file offsets of messages from `start_seq` on with a subject in `wanted`.

        `wanted` has indexes of `subjects`.
        """
        for index in range(bisect_left(self.seqs, start_seq), len(self.seqs)):
            if self.subject_of[index] in wanted:
                yield self.offsets[index]


class Bundle:
    """An open bundle; call `close` after use.

    Attributes:
        header: the bundle's header, as `read_header` returns it.
        tape: the index of the tape's messages.
        ops: the index of the messages of the stream of heartbeats and rejections.
        objects: the index of the run's objects.
        files: the index of other files, such as logs.
        lost: a sentence that describes the damage, if a damaged file was salvaged; else "".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.tape, self.ops = StreamIndex(), StreamIndex()
        self.objects, self.files = BundleContents(), BundleContents()
        self.lost = ""
        self._file = path.open("rb")

    @property
    def run(self) -> str:
        """The name of the bundle's run."""
        return str(self.header["run"])

    @property
    def has_objects(self) -> bool:
        """True if the bundle was made with the run's objects."""
        return bool(self.header["objects"])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def content(self, at: int) -> Any:
        """Returns the content of the frame at an offset in the file; callable from any thread.

        Raises:
            IntegrityError: the file has changed since it was opened.
        """
        head = os.pread(self._file.fileno(), HEAD.size, at)
        return read_frame(self.path, os.pread(self._file.fileno(), frame_bytes(head), at))

    def message(self, at: int) -> Message:
        """Returns the message in the frame at an offset in the file.

        Raises:
            IntegrityError: the file has changed since it was opened.
        """
        content = self.content(at)
        return as_message(self.path, content["ops"] if isinstance(content, dict) else content)

    def file(self, name: str) -> bytes:
        """Returns the bytes of the file `name` in the bundle.

        Raises:
            KeyError: the bundle has no file of that name.
        """
        return b"".join(self.parts(name))

    def parts(self, name: str) -> Iterator[bytes]:
        """Yields the bytes of the file `name` in the bundle, piece by piece.

        Raises:
            KeyError: the bundle has no file of that name.
        """
        whole = self.files.get(name)
        if whole is None:
            raise KeyError(name)
        for piece in whole.pieces:
            yield self.content(piece.frame_at)["data"]

    def read(self, whole: Whole, start: int, stop: int) -> bytes:
        """Returns the bytes [start, stop) of an object or a file, given by its entry."""
        found = []
        for piece in whole.pieces:
            if piece.start < stop and piece.stop > start:
                data = self.content(piece.frame_at)["data"]
                found.append(data[max(0, start - piece.start) : stop - piece.start])
        return b"".join(found)


def open_bundle(path: Path, *, salvage: bool = False) -> Bundle:
    """Opens a bundle.

    Args:
        path: the file.
        salvage: index the undamaged frames of a damaged file; `Bundle.lost` describes the damage.

    Raises:
        IntegrityError: the file is damaged; with `salvage`, so damaged that its header is lost.
        ConfigError: the file is a tape that an earlier release exported.
        OSError: the file cannot be read.
    """
    bundle = Bundle(path)
    try:
        _fill(bundle, salvage=salvage)
    except BaseException:
        bundle.close()
        raise
    return bundle


def _fill(bundle: Bundle, *, salvage: bool) -> None:
    try:
        with bundle.path.open("rb") as file:
            ended = _take_all(bundle, read_frames(bundle.path, file))
        if not ended:
            count = len(bundle.tape.seqs)
            raise damaged(bundle.path, f"was cut short after {count} messages")
    except IntegrityError as error:
        if not salvage:
            raise
        bundle.header, bundle.tape, bundle.ops = {}, StreamIndex(), StreamIndex()
        bundle.objects, bundle.files = BundleContents(), BundleContents()
        bundle.lost = error.message
        _take_all(bundle, whole_frames(bundle.path), strict=False)
        bundle.objects.drop_damaged()
        bundle.files.drop_damaged()
        check_header(bundle.path, bundle.header)


def _take_all(bundle: Bundle, frames: Iterator[Frame], *, strict: bool = True) -> bool:
    """Adds the content of every frame to the indexes; True if the bundle's last frame was found.

    With `strict`, raises on the first frame that breaks the format; else skips such frames.

    Raises:
        IntegrityError: a frame breaks the format, or the last frame contradicts the others.
    """
    for at, content in frames:
        if not bundle.header:
            check_header(bundle.path, content)
            bundle.header = content
        elif isinstance(content, dict) and "messages" in content:
            _check_end(bundle, content, strict=strict)
            if strict and next(frames, None) is not None:
                raise damaged(bundle.path, "has data after its last frame")
            return True
        else:
            try:
                _take(bundle, at, content)
            except IntegrityError:
                if strict:
                    raise
    return False


def _take(bundle: Bundle, at: int, content: Any) -> None:
    if isinstance(content, list):
        _take_message(bundle, bundle.tape, at, content)
        return
    if not isinstance(content, dict):
        raise damaged(bundle.path, f"has a frame that is a {type(content).__name__}")
    if "ops" in content:
        _take_message(bundle, bundle.ops, at, content["ops"])
        return
    named = next((kind for kind in ("object", "file") if kind in content), None)
    if named is None:
        raise damaged(bundle.path, f"has a frame with {sorted(map(str, content))[:8]}")
    check_piece(bundle.path, bundle.run, named, content)
    of = bundle.objects if named == "object" else bundle.files
    begin = content["at"]
    of.add(content[named], content["of"], FilePiece(at, begin, begin + len(content["data"])))


def _take_message(bundle: Bundle, stream_index: StreamIndex, at: int, content: Any) -> None:
    message = as_message(bundle.path, content)
    if stream_index.seqs and message.seq <= stream_index.seqs[-1]:
        raise damaged(bundle.path, f"sequence {message.seq} comes after {stream_index.seqs[-1]}")
    if not stream_index.ids(message.subject):
        subjects = names.tape_subjects if stream_index is bundle.tape else names.ops_subjects
        check_of_run(bundle.path, bundle.run, subjects(bundle.run), message)
    stream_index.add(at, message)


def _check_end(bundle: Bundle, content: dict[str, Any], *, strict: bool) -> None:
    counted = {"messages": len(bundle.tape.seqs), "objects": len(bundle.objects)}
    said = {key: content.get(key) for key in counted}
    if strict and (said != counted or bundle.objects.damaged() or bundle.files.damaged()):
        raise damaged(
            bundle.path,
            f"ends with {said} and holds {counted}, {bundle.objects.damaged()} objects and "
            f"{bundle.files.damaged()} files of them in part or twice",
        )
    if strict:
        check_nesting(bundle.path, [*bundle.files])
    # Records that were garbage-collected while the objects were copied have no objects here.
    oldest = check_oldest(bundle.path, content.get("oldest", {}))
    below = {names.record(bundle.run, fragment): seq for fragment, seq in oldest.items()}
    if below:
        bundle.tape.drop(below)
