"""Updates by their identities: some 150 bytes each, made into objects when they are asked for."""

from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Sent(NamedTuple):
    """An update by its identity, whatever how often it was announced."""

    learner: str
    incarnation: int
    fragment: int
    seq: int


class Announced(NamedTuple):
    """An update's first announcement that the tape still holds, in short."""

    stream_seq: int
    time_s: float
    tokens: int
    steps: int
    position: int
    base_version: int


# A learner's incarnation, and the fragment.
Life = tuple[str, int, int]
_COLUMNS = 5


class Updates(Mapping[Sent, Announced]):
    """What was sent, in order of the tape; each update has a row."""

    def __init__(self) -> None:
        self._lives: list[Life] = []
        self._rows_of: list[dict[int, int]] = []
        self._ids: dict[Life, int] = {}
        self._whose = array("i")
        self._seqs = array("q")
        self._times_s = array("d")
        self._said = array("q")

    def add(self, update: Sent, at: Announced) -> None:
        """An update; a later announcement of it changes nothing."""
        life = (update.learner, update.incarnation, update.fragment)
        if life not in self._ids:
            self._ids[life] = len(self._lives)
            self._lives.append(life)
            self._rows_of.append({})
        whose = self._ids[life]
        row = len(self._seqs)
        if self._rows_of[whose].setdefault(update.seq, row) != row:
            return
        self._whose.append(whose)
        self._seqs.append(update.seq)
        self._times_s.append(at.time_s)
        self._said.extend((at.stream_seq, at.tokens, at.steps, at.position, at.base_version))

    def row(self, update: Sent) -> int | None:
        """Where an update stands; None if it was not announced."""
        whose = self._ids.get((update.learner, update.incarnation, update.fragment))
        return None if whose is None else self._rows_of[whose].get(update.seq)

    def update(self, row: int) -> Sent:
        """The update of a row."""
        learner, incarnation, fragment = self._lives[self._whose[row]]
        return Sent(learner, incarnation, fragment, self._seqs[row])

    def at(self, row: int) -> Announced:
        """The announcement of a row."""
        begin = row * _COLUMNS
        stream_seq, tokens, steps, position, base_version = self._said[begin : begin + _COLUMNS]
        return Announced(stream_seq, self._times_s[row], tokens, steps, position, base_version)

    def stream_seq(self, row: int) -> int:
        """Where a row's update was announced."""
        return self._said[row * _COLUMNS]

    def lives(self) -> Iterator[tuple[Life, list[int]]]:
        """The rows of each life, in order of the tape."""
        for life, rows in zip(self._lives, self._rows_of, strict=True):
            yield life, [*rows.values()]

    def __getitem__(self, update: Sent) -> Announced:
        row = self.row(update)
        if row is None:
            raise KeyError(update)
        return self.at(row)

    def __contains__(self, update: object) -> bool:
        return isinstance(update, Sent) and self.row(update) is not None

    def __iter__(self) -> Iterator[Sent]:
        return (self.update(row) for row in range(len(self)))

    def __len__(self) -> int:
        return len(self._seqs)
