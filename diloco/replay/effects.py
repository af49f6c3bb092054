"""What each of very many updates did to the held-out loss, as columns of numbers."""

from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from diloco.common import wire

Column = npt.NDArray[np.float64]


class Judged(NamedTuple):
    """An update that is judged, in short."""

    learner: str
    incarnation: int
    seq: int
    norm: float
    loss: float
    weight: float
    staleness: int
    clip: float

    @classmethod
    def of(cls, taken: wire.Input) -> "Judged":
        """As a record has it."""
        return cls(
            taken.learner, taken.incarnation, taken.seq, taken.norm, taken.loss, taken.weight,
            taken.staleness, taken.clip,
        )  # fmt: skip


class Effect(NamedTuple):
    """What one update did to the held-out loss, within its round.

    Attributes:
        did: the loss after the round less the loss without this update: above 0 it did harm.
        alone: the loss had the round been this update alone, less the loss before.
        loss, loss_without: of the model after the round.
    """

    fragment: int
    version: int
    record_seq: int
    global_step: int
    at_s: float
    update: Judged
    did: float
    alone: float
    loss_before: float
    loss: float
    loss_without: float


# A row: an effect's fields but its update, then the update's.
_OF_UPDATE: Final = ("incarnation", "seq", "norm", "training_loss", "weight", "staleness", "clip")
_OF_EFFECT: Final = tuple(name for name in Effect._fields if name != "update")
_NAMES: Final = (*_OF_EFFECT, "learner", *_OF_UPDATE)
_WIDTH: Final = len(_NAMES)
_WHOLE: Final = frozenset(
    ("fragment", "version", "record_seq", "global_step", "incarnation", "seq", "staleness")
)


class Effects(Sequence[Effect]):
    """Effects in the order they were added; those of one round are neighbours.

    A column has the name of a field of `Effect` or of its update, whose loss is `training_loss`;
    `learner` is a place in `learners`.
    """

    def __init__(self) -> None:
        self.learners: list[str] = []
        self._place: dict[str, int] = {}
        self._values = array("d")

    def append(self, effect: Effect) -> None:
        """The next one."""
        name = effect.update.learner
        if name not in self._place:
            self._place[name] = len(self.learners)
            self.learners.append(name)
        of_effect = (value for value in effect if not isinstance(value, Judged))
        self._values.extend((*of_effect, self._place[name], *effect.update[1:]))

    def column(self, name: str) -> Column:
        """A column, float64 [effects]."""
        rows = np.frombuffer(self._values, np.float64).reshape(-1, _WIDTH)
        return rows[:, _NAMES.index(name)].copy()

    def __len__(self) -> int:
        return len(self._values) // _WIDTH

    @overload
    def __getitem__(self, index: int) -> Effect: ...
    @overload
    def __getitem__(self, index: slice) -> list[Effect]: ...
    def __getitem__(self, index: int | slice) -> Effect | list[Effect]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index] * _WIDTH
        row = self._values[at : at + _WIDTH]
        values: dict[str, Any] = {
            name: int(value) if name in _WHOLE else value
            for name, value in zip(_NAMES, row, strict=True)
        }
        learner = self.learners[int(values["learner"])]
        update = Judged(learner, *(values[name] for name in _OF_UPDATE))
        return Effect(update=update, **{name: values[name] for name in _OF_EFFECT})
