"""Writes bundles under a temporary name, which is replaced once the bundle is complete."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diloco.common.protocol.errors import ConfigError
from diloco.common.storage.bundle.frames import MAGIC, write_frame
from diloco.common.storage.bus import Message

# The most bytes of an object or a file in one frame.
PIECE_BYTES = 1 << 20


class BundleWriter:
    """Writes a bundle, in a `with` block; if the block ends by an error, no file is left.

    Args:
        path: the file to write.
        header: "run": the run's name; "made_s": the time, in seconds since the epoch; "objects":
            True if the bundle has the run's objects.

    Attributes:
        messages: number of messages of the tape written so far.
        objects: number of objects written so far.

    Raises:
        ConfigError: the file exists already, or cannot be written.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        if path.exists():
            raise ConfigError(f"{str(path)!r} exists already", hint="give another name")
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self.messages = self.objects = 0
        self._oldest: dict[str, int] = {}
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from error
        self._file.write(MAGIC)
        write_frame(self._file, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                write_frame(self._file, self._end())
                self._file.close()
                self._partial.rename(self._path)
        except OSError as failed:
            raise ConfigError(f"cannot write {str(self._path)!r}: {failed.strerror}") from failed
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot write {str(self._path)!r}: {error.strerror}") from error

    def _end(self) -> dict[str, Any]:
        return {"messages": self.messages, "objects": self.objects, "oldest": self._oldest}

    def message(self, message: Message) -> None:
        """Writes the next message of the tape."""
        write_frame(self._file, list(message))
        self.messages += 1

    def ops(self, message: Message) -> None:
        """Writes the next message of the stream of heartbeats and rejections."""
        write_frame(self._file, {"ops": list(message)})

    def object(self, name: str, data: bytes) -> None:
        """Writes an object with all its bytes."""
        self._pieces("object", name, data)
        self.objects += 1

    def file(self, name: str, data: bytes) -> None:
        """Writes a file, such as a log."""
        self._pieces("file", name, data)

    def oldest(self, fragment: int, seq: int) -> None:
        """Notes the sequence of a fragment's oldest record, for the bundle's last frame.

        Readers ignore earlier records, whose objects garbage collection removed while the bundle
        was written.
        """
        self._oldest[str(fragment)] = seq

    def _pieces(self, kind: str, name: str, data: bytes) -> None:
        for at in range(0, max(1, len(data)), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            write_frame(self._file, {kind: name, "of": len(data), "at": at, "data": piece})
