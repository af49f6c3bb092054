"""Bundles as somebody who knows the format would forge them: every checksum is right."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from diloco.common.protocol import names, wire
from diloco.common.protocol.shards import digest
from diloco.common.storage.bundle import BundleWriter, open_bundle
from diloco.common.storage.bundle.frames import MAGIC, read_frames, write_frame
from diloco.common.storage.bus import Message
from diloco.common.storage.tape import decode, record_digest

Frames = list[Any]


def frames_of(bundle: Path) -> Frames:
    """The frames of a bundle: header, messages and the rest, end."""
    with bundle.open("rb") as file:
        return [frame.content for frame in read_frames(bundle, file)]


def write(path: Path, frames: Frames) -> Path:
    """A bundle of frames, whatever they say."""
    with path.open("wb") as file:
        file.write(MAGIC)
        for content in frames:
            write_frame(file, content)
    return path


def write_tape(path: Path, run: str, messages: Iterable[Message]) -> Path:
    """A bundle without objects of these messages."""
    with BundleWriter(path, {"run": run, "made_s": 1e9, "objects": False}) as writer:
        for message in messages:
            writer.message(message)
    return path


def messages_in(path: Path) -> list[Message]:
    """The tape of a bundle."""
    bundle = open_bundle(path)
    try:
        return [bundle.message(at) for at in bundle.tape.offsets]
    finally:
        bundle.close()


def with_file(frames: Frames, name: str, data: bytes = b"x") -> Frames:
    """With one more file."""
    piece = {"file": name, "of": len(data), "at": 0, "data": data}
    return [*frames[:-1], piece, frames[-1]]


def with_object(frames: Frames, name: str, data: bytes) -> Frames:
    """With one more object, that is counted."""
    piece = {"object": name, "of": len(data), "at": 0, "data": data}
    end = {**frames[-1], "objects": frames[-1]["objects"] + 1}
    return [*frames[:-1], piece, end]


def object_at(frames: Frames, part: str) -> int:
    """Returns the index of the frame with the first object whose name has this text in it."""
    return next(
        index for index, one in enumerate(frames)
        if isinstance(one, dict) and part in one.get("object", "")
    )  # fmt: skip


def retold(frames: Frames, change: Callable[[wire.Body], wire.Body]) -> Frames:
    """With other messages, whose records are chained again: each has the digest of the one before.

    `change` is given each body.
    """
    newest: dict[int, str] = {}
    found = []
    for one in frames:
        if not isinstance(one, list):
            found.append(one)
            continue
        subject, seq, time_s, payload, msg_id = one
        body = change(decode(subject, payload))
        if isinstance(body, wire.Record):
            if body.previous:
                body = body.model_copy(update={"previous": newest[body.fragment]})
            newest[body.fragment] = record_digest(body)
        found.append([subject, seq, time_s, wire.encode(body), msg_id])
    return found


def score_of(frames: Frames, score: wire.Score) -> Frames:
    """With a kept score under the name that its content gives it."""
    data = wire.encode(score)
    name = names.score_object(score.run, score.epoch, score.global_step, digest(data))
    return with_object(frames, name, data)
