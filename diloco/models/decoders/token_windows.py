"""Reads token files as training examples: windows, which are read from disk one by one.

A folder has `train*.npy` and `held_out*.npy`: arrays of one axis, uint16 or uint32 (or any other
integers), one document after the other, each followed by the end-of-text token. Window i of a
file begins at token i * L and has L + 1 tokens: the last token is predicted, and not an input.

Shapes: L positions that a window predicts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diloco.common.protocol.errors import TaskError


class TokenWindows:
    """The windows of some token files, int32 [L + 1] each: a source of examples for grain.

    Args:
        paths: the files, in order.
        length: positions that a window predicts, L.
        vocab: size of the vocabulary; reading a window with a token beyond it raises a TaskError.
        masked: whether a negative number ~t stands for a token t that is not trained on.

    Raises:
        TaskError: a file cannot be read or has another format, or no file has a whole window.
    """

    def __init__(
        self, paths: Sequence[Path], *, length: int, vocab: int, masked: bool = False
    ) -> None:
        self._files = tuple(map(_token_file, paths))
        self._length, self._vocab, self._masked = length, vocab, masked
        self._ends = np.cumsum([max(0, (file.tokens - 1) // length) for file in self._files])
        if not len(self):
            raise TaskError(
                f"the token files {', '.join(map(str, paths[:3]))} hold no window of"
                f" {length + 1} tokens",
                hint="give more text, or choose a shorter length",
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        number = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[number]
        first = (index - (int(self._ends[number - 1]) if number else 0)) * self._length
        window = file.read(first, self._length + 1)
        tokens = np.where(window < 0, ~window, window) if self._masked else window
        if int(tokens.max()) >= self._vocab or int(tokens.min()) < 0:
            raise TaskError(
                f"{str(file.path)!r} has a token {int(tokens.max())}, but the model has"
                f" {self._vocab}",
                hint="make the files with the model's own tokenizer",
            )
        return window.astype(np.int32)


class TokenFile(NamedTuple):
    """A token file.

    Attributes:
        path: the file.
        dtype: dtype of its tokens.
        offset: offset of the first token in the file, in bytes.
        tokens: the number of tokens.
    """

    path: Path
    dtype: np.dtype[np.integer]
    offset: int
    tokens: int

    def read(self, first: int, count: int) -> np.ndarray:
        """Reads `count` tokens of the file from number `first` on; returns them in `dtype`.

        Uses no memory map: if the file were truncated meanwhile, that would kill the process.

        Raises:
            TaskError: the file cannot be read, or is too short.
        """
        offset = self.offset + first * self.dtype.itemsize
        try:
            found = np.fromfile(self.path, self.dtype, count, offset=offset)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if len(found) != count:
            raise _unreadable(self.path, "it was cut short")
        return found


def files_of(folder: Path, side: str) -> list[Path]:
    """Returns the token files of one side, "train" or "held_out", by name.

    Raises:
        TaskError: the folder has no such files, or rows with images beside them.
    """
    found = sorted(folder.glob(f"{side}*.npy"))
    pictured = any(folder.glob(f"{side}*.npz"))
    if found and pictured:
        raise TaskError(
            f"data={str(folder)!r} has rows with images ({side}*.npz) beside text, which would not"
            " be read",
            hint="move them into a folder of their own; the option images reads them:"
            " docs/models.md",
        )
    if not found:
        raise TaskError(
            f"data={str(folder)!r} has no {side}*.npy (seen from {Path.cwd()})",
            hint="its rows with images need the option images: docs/models.md"
            if pictured
            else "make it with diloco data prepare: docs/data.md",
        )
    return found


def _token_file(path: Path) -> TokenFile:
    try:
        tokens: np.memmap = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, error) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TaskError(
            f"{str(path)!r} must hold integers along one axis, but it holds {tokens.dtype}"
            f"{list(tokens.shape)}",
            hint="save the tokens of all documents one after the other",
        )
    return TokenFile(path, tokens.dtype, tokens.offset, len(tokens))


def _unreadable(path: Path, why: object) -> TaskError:
    return TaskError(
        f"{str(path)!r} cannot be read: {why}",
        hint="it is not a NumPy file, or it is cut short: make it again",
    )
