"""Stores very many rows of numbers in little memory."""

from array import array
from collections.abc import Iterable
from typing import Any, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt

from diloco.run.spool import Lazy

Row = TypeVar("Row", bound=tuple[Any, ...])
Column = npt.NDArray[np.float64]


class TupleColumns(Lazy[Row]):
    """Rows of a class of named tuples whose fields are numbers and text, in eight bytes a field.

    Args:
        kind: the class of the rows; `item` makes them again.
        rows: the first rows.

    Attributes:
        texts: every text of the rows once, in order of appearance. In columns of text, its index
            stands for a text.
    """

    def __init__(self, kind: type[Row], rows: Iterable[Row] = ()) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}
        self._kind = kind
        self._types = get_type_hints(kind)
        self._values = array("d")
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        """Appends one row; a number must be exact as a float64."""
        self._values.extend(self._place(one) if isinstance(one, str) else one for one in row)

    def _place(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]

    def column(self, name: str) -> Column:
        """Returns a field of all rows, float64 [rows]."""
        rows = np.frombuffer(self._values, np.float64).reshape(-1, len(self._types))
        return rows[:, [*self._types].index(name)].copy()

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._values) // len(self._types)

    def item(self, index: int) -> Row:
        """Returns the row at an index as a named tuple."""
        width = len(self._types)
        at = index * width
        row = zip(self._types.values(), self._values[at : at + width], strict=True)
        values = (self.texts[int(one)] if of is str else of(one) for of, one in row)
        return self._kind(*values)
