"""Token files as examples: windows of memory-mapped arrays, which a terabyte of needs no memory.

A folder has `train*.npy` and `held_out*.npy`: arrays of one axis, uint16 or uint32 (or any other
integers), one document after the other, each with the end-of-text token behind it. Window i of a
file begins at token i * L and has L + 1 of them, since the last is a target only.

Shapes: L positions that a window predicts.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diloco.common.errors import TaskError


class TokenWindows:
    """A source of examples for grain: int32 [L + 1] each.

    Args:
        paths: of the files, in their order.
        length: L.
        vocab: that tokens are below; each window is held to it as it is read.

    Raises:
        TaskError: a file cannot be read, is of another kind, or all are too short.
    """

    def __init__(self, paths: Sequence[Path], *, length: int, vocab: int) -> None:
        self._paths, self._length, self._vocab = tuple(paths), length, vocab
        counts = [max(0, (len(_mapped(path)) - 1) // length) for path in self._paths]
        self._ends = np.cumsum(counts)
        if not len(self):
            raise TaskError(
                f"the token files {', '.join(map(str, self._paths[:3]))} hold no window of"
                f" {length + 1} tokens",
                hint="give more text, or choose a shorter length",
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        file = int(np.searchsorted(self._ends, index, side="right"))
        number = index - (int(self._ends[file - 1]) if file else 0)
        first = number * self._length
        window = np.asarray(_mapped(self._paths[file])[first : first + self._length + 1])
        if int(window.max()) >= self._vocab or int(window.min()) < 0:
            raise TaskError(
                f"{str(self._paths[file])!r} has a token {int(window.max())}, but the model has"
                f" {self._vocab}",
                hint="make the files with the model's own tokenizer",
            )
        return window.astype(np.int32)


def files_of(folder: Path, side: str) -> list[Path]:
    """The token files of one side, "train" or "held_out".

    Raises:
        TaskError: there are none.
    """
    found = sorted(folder.glob(f"{side}*.npy"))
    if not found:
        raise TaskError(
            f"data={str(folder)!r} has no {side}*.npy (seen from {Path.cwd()})",
            hint="give a folder of token files (docs/models.md says how to make them)",
        )
    return found


def _mapped(path: Path) -> np.ndarray:
    try:
        tokens: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TaskError(
            f"{str(path)!r} cannot be read: {error}",
            hint="it is not a NumPy file, or it is cut short: make it again",
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TaskError(
            f"{str(path)!r} must hold integers along one axis, but it holds {tokens.dtype}"
            f"{list(tokens.shape)}",
            hint="save the tokens of all documents one after the other",
        )
    return tokens
