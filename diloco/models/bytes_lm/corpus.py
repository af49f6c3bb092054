"""Byte-level text, split into training and held-out bytes, and the batches of each learner.

Rules:
  1. A file is on one side only, decided by a hash of its relative path: adding or removing other
     files does not change that.
  2. A batch is a pure function of (seed, learner, position), so a learner that resumes at a
     position reads exactly the batches that it would have read, without replaying earlier ones.

Shapes: B windows of a batch, L bytes predicted per window; a window holds L + 1 bytes, because the
last one is a target only.
"""

import dataclasses
import functools
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from diloco.common.protocol.errors import TaskError

Bytes = npt.NDArray[np.uint8]
Windows = npt.NDArray[np.int32]

STDLIB = "stdlib"
STDLIB_MAX_BYTES = 24_000_000  # keeps a learner's start under a second
HELD_OUT_ONE_IN = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text as bytes, split by file.

    Attributes:
        train: uint8[bytes], the training files one after the other.
        held_out: uint8[bytes], the held-out files one after the other.
    """

    train: Bytes
    held_out: Bytes

    @classmethod
    def of_files(cls, files: dict[str, bytes]) -> Self:
        """Splits `files` (relative path -> contents, at least one) into the two sides.

        About a tenth of the files is held out, and never none or all of them. A lone file cannot
        be on both sides, so its last tenth of bytes is held out.
        """
        if len(files) == 1:
            (contents,) = files.values()
            cut = len(contents) - len(contents) // HELD_OUT_ONE_IN
            return cls(train=_as_array([contents[:cut]]), held_out=_as_array([contents[cut:]]))
        held_out = held_out_names(files)
        return cls(
            train=_as_array([data for name, data in files.items() if name not in held_out]),
            held_out=_as_array([data for name, data in files.items() if name in held_out]),
        )


def held_out_names(names: "dict[str, bytes] | list[str]") -> set[str]:
    """Returns the held-out ones of two or more relative paths, by hash: at least one, never all."""
    by_hash = sorted(names, key=lambda name: (_stable_hash(name) % HELD_OUT_ONE_IN, name))
    chosen = {name for name in by_hash if _stable_hash(name) % HELD_OUT_ONE_IN == 0}
    return (chosen or {by_hash[0]}) - ({by_hash[-1]} if len(chosen) == len(by_hash) else set())


def load_corpus(where: str, held_out: str | None = None) -> Corpus:
    """Reads the corpus `where`: "stdlib", or the path of a folder of text.

    With `held_out`, the path of another folder, all of `where` is training text, and all of
    `held_out` is held out.

    "stdlib" is Python's own standard library (*.py in path order, without installed packages, the
    first 24 MB), so a demonstration needs no download. A folder is read recursively and as
    bytes, whole; hidden files and folders are skipped.

    Raises:
        TaskError: the folder is missing, is not a folder, cannot be read or holds no text.
    """
    if held_out is None:
        return _stdlib() if where == STDLIB else Corpus.of_files(_read_folder(Path(where)))
    files = _stdlib_files() if where == STDLIB else _read_folder(Path(where))
    other = _read_folder(Path(held_out), "held_out")
    return Corpus(train=_as_array(list(files.values())), held_out=_as_array(list(other.values())))


def batches(
    corpus: Corpus,
    *,
    seed: int,
    learner: str,
    position: int,
    batch: int,
    length: int,
    rows: slice = slice(None),
) -> Iterator[Windows]:
    """Yields endless training batches of one learner, batch number `position` first.

    Yields:
        int32[B, L + 1]: windows at uniformly random places of the training bytes. With `rows`, only
        those rows of the batch, with the same values.
    """
    while True:
        rng = np.random.default_rng([seed, _stable_hash(learner), position])
        starts_B = rng.integers(len(corpus.train) - length, size=batch)
        yield _windows(corpus.train, starts_B[rows], length)
        position += 1


def eval_windows(corpus: Corpus, *, count: int, batch: int, length: int) -> list[Windows]:
    """Returns `count` batches int32[B, L + 1], evenly spread over held-out bytes; deterministic."""
    starts = np.linspace(0, len(corpus.held_out) - length - 1, count * batch).astype(np.int64)
    return [_windows(corpus.held_out, starts_B, length) for starts_B in np.split(starts, count)]


def require_length(corpus: Corpus, length: int) -> None:
    """Refuses a corpus with a side shorter than one window of `length` + 1 bytes.

    Raises:
        TaskError: a side is too short.
    """
    for side, held in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(held) <= length:
            raise TaskError(
                f"the corpus must hold more than length={length} bytes on each side, but its "
                f"{side} side has {len(held)}",
                hint="add text to the folder, or choose a shorter length",
            )


def _windows(data: Bytes, starts_B: npt.NDArray[np.int64], length: int) -> Windows:
    windows: Windows = data[starts_B[:, None] + np.arange(length + 1)].astype(np.int32)
    return windows


def _stable_hash(text: str) -> int:
    # hash() differs between processes.
    return zlib.crc32(text.encode())


def _as_array(contents: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(contents), np.uint8)


@functools.cache
def _stdlib() -> Corpus:
    return Corpus.of_files(_stdlib_files())


def _stdlib_files() -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, bytes] = {}
    room = STDLIB_MAX_BYTES
    installed = {"site-packages", "dist-packages"}
    roots = [path for path in root.iterdir() if path.name not in installed]
    for path in sorted(file for top in roots for file in (top, *top.rglob("*.py"))):
        if path.suffix != ".py" or not path.is_file():
            continue
        name = path.relative_to(root).as_posix()
        files[name] = path.read_bytes()[:room]
        room -= len(files[name])
        if room == 0:
            break
    return files


def _read_folder(root: Path, option: str = "corpus") -> dict[str, bytes]:
    if not root.is_dir():
        raise TaskError(
            f"{option}={str(root)!r} must be {'' if option == 'held_out' else f'{STDLIB!r} or '}"
            "an existing folder of text files, but "
            f"it is {'a file' if root.exists() else 'missing'}",
            hint=f"give a folder's path (seen from {Path.cwd()}), or corpus={STDLIB!r}",
        )
    try:
        read = {path: p.read_bytes() for path, p in _visible_files(root)}
    except OSError as error:
        raise TaskError(
            f"{option}={str(root)!r}: a file cannot be read: {error}",
            hint="make the file readable, or move it out of the folder",
        ) from error
    files = {path: contents for path, contents in read.items() if contents}
    if not files:
        raise TaskError(
            f"{option}={str(root)!r} must hold text, but no visible file in it has any bytes",
            hint="put text files in it; names that begin with a dot are skipped",
        )
    return files


def _visible_files(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in relative.parts):
            yield relative.as_posix(), path
