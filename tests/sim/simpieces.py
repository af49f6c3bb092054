"""A long simulation, divided into pieces of some seeds each, that can be interrupted.

A file has a line for each piece that has passed. Such a piece is not run again if the line is of
the same commit and the same settings.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simtrial import FULL, KINDS, Outcome, Trial

# The number of seeds in a piece.
PIECE = 50


class Sums(NamedTuple):
    """The number of some seeds, and sums over their simulations."""

    seeds: int
    events: int
    simulated_s: float
    cpu_s: float
    fates: Counter[str]
    injected: Counter[str]

    def plus(self, other: "Sums") -> "Sums":
        """Returns the sums over both sets of seeds."""
        return Sums(*(mine + others for mine, others in zip(self, other, strict=True)))


NOTHING = Sums(0, 0, 0.0, 0.0, Counter(), Counter())


def sums(outcomes: Sequence[Outcome]) -> Sums:
    """Returns the sums over the outcomes of seeds that have passed."""
    total = NOTHING
    for one in outcomes:
        total = total.plus(Sums(1, one.events, one.simulated_s, one.cpu_s, one.fates, one.injected))
    return total


def pieces(plans: Sequence[Trial]) -> Iterator[Sequence[Trial]]:
    """Yields pieces of `PIECE` consecutive seeds."""
    for start in range(0, len(plans), PIECE):
        yield plans[start : start + PIECE]


class Results:
    """The file of pieces that have passed.

    Args:
        path: path of the file, which is created with the first piece.
        commit: the commit whose code is simulated.
    """

    def __init__(self, path: Path, commit: str) -> None:
        self._path = path
        self._commit = commit

    def find(self, piece: Sequence[Trial]) -> Sums | None:
        """Returns the stored result of a piece, or None if it has not been run."""
        return self._known().get(json.dumps(self._key(piece)))

    def add(self, piece: Sequence[Trial], found: Sums) -> None:
        """Adds a line for a piece that has passed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"of": self._key(piece), "sums": found._asdict()}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _known(self) -> dict[str, Sums]:
        if not self._path.exists():
            return {}
        lines = self._path.read_text(errors="replace").splitlines()
        return dict(self._parse(number, line) for number, line in enumerate(lines, 1))

    def _parse(self, number: int, line: str) -> tuple[str, Sums]:
        """Returns the piece of a line, and its sums.

        Raises:
            ValueError: this program did not write the line.
        """
        try:
            said = json.loads(line)
            return json.dumps(said["of"]), _read(said["sums"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {self._path} is no piece of a simulation ({error!r}): a file"
                " that --results has written was expected; remove the line, or give another file"
            ) from error

    def _key(self, piece: Sequence[Trial]) -> dict[str, Any]:
        first = piece[0]
        named = {KINDS: "light", FULL: "full"}
        return {
            "commit": self._commit,
            "first": first.seed,
            "seeds": len(piece),
            "minutes": first.minutes,
            "learners": first.learners,
            "fragments": first.fragments,
            "intensity": first.intensity,
            "kinds": named.get(first.kinds, " ".join(first.kinds)),
        }


def _read(fields: dict[str, Any]) -> Sums:
    counted = {name: Counter(fields.pop(name)) for name in ("fates", "injected")}
    return Sums(**fields, **counted)
