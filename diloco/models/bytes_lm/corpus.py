"""Reads text as bytes, splits it into training and held-out bytes, and draws learners' batches.

Rules:
  1. A file is either training text or held out, decided by a hash of its relative path: adding or
     removing other files does not change that.
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
        """Splits files into training text and held-out text.

        About a tenth of the files is held out, and never none or all of them. Of a single file the
        last tenth of its bytes is held out.

        Args:
            files: contents by relative path; at least one file.
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
    """Returns those of two or more relative paths that are held out: at least one, never all."""
    by_hash = sorted(names, key=lambda name: (stable_hash(name) % HELD_OUT_ONE_IN, name))
    chosen = {name for name in by_hash if stable_hash(name) % HELD_OUT_ONE_IN == 0}
    return (chosen or {by_hash[0]}) - ({by_hash[-1]} if len(chosen) == len(by_hash) else set())


def load_corpus(where: str, held_out: str | None = None) -> Corpus:
    """Reads a corpus.

    A folder is read recursively, as bytes and whole; hidden files and folders are skipped.

    Args:
        where: the path of a folder of text; or "stdlib": the source of Python's standard library
            (*.py in path order, without installed packages, the first 24 MB), so that a
            demonstration needs no download.
        held_out: the path of another folder, all of which is held out; all of `where` is then
            training text. None: about a tenth of the files of `where` is held out.

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

    Args:
        corpus: the text.
        seed: seed of the run's batches.
        learner: the learner's name.
        position: number of the first batch.
        batch: windows in a batch, B.
        length: bytes predicted in each window, L.
        rows: the rows of each batch to yield; their values do not depend on this choice.

    Yields:
        int32[rows, L + 1]: windows that begin at uniformly random offsets of the training bytes.
    """
    while True:
        rng = np.random.default_rng([seed, stable_hash(learner), position])
        starts_B = rng.integers(len(corpus.train) - length, size=batch)
        yield _windows(corpus.train, starts_B[rows], length)
        position += 1


def eval_windows(corpus: Corpus, *, count: int, batch: int, length: int) -> list[Windows]:
    """Returns `count` batches int32[B, L + 1] of windows evenly spread over the held-out bytes.

    They are the same each time.
    """
    starts = np.linspace(0, len(corpus.held_out) - length - 1, count * batch).astype(np.int64)
    return [_windows(corpus.held_out, starts_B, length) for starts_B in np.split(starts, count)]


def require_length(corpus: Corpus, length: int) -> None:
    """Checks that training text and held-out text have a window of `length` + 1 bytes each.

    Raises:
        TaskError: one of the two is too short.
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


def stable_hash(text: str) -> int:
    """Returns a hash of a text that is the same in each process."""
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
