"""The updates that a machine handles: waiting, merged and rejected, with the counts for rounds.

An update *waits* from its announcement until its shards are verified. Then it is merged into the
open round's sum, or rejected; the next record has the verdict.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, NamedTuple, Self, TypeVar, overload

from diloco.aggregator.core.immutable_collections import PersistentMap, Ranked, Tally
from diloco.common.protocol import wire


class UpdateId(NamedTuple):
    """Identifies an update of a fragment: `seq` numbers the updates of one incarnation."""

    learner: str
    incarnation: int
    seq: int


class UpdateCredit(NamedTuple):
    """An update's believed steps, tokens and weight (`admission_and_credit.py`)."""

    steps: int
    tokens: int
    weight: float


class Pending(NamedTuple):
    """An update that is announced and not yet verified. Times are in seconds of Unix time.

    Attributes:
        manifest: the update's manifest.
        stream_seq: the manifest's stream sequence.
        announced_at_s: when the owner received the manifest, by the owner's clock.
        stored_at_s: when the server stored the manifest, by the server's clock.
        credit: the update's credit.
        fetching: True once the driver was asked to read the update's shards.
        passed: True if the update could not be read in its round's time. It is merged when it has
            been read, but no later round waits for it, or one slow object would delay every
            version.
        broke: the number of times that adding the update to the sum failed.
    """

    manifest: wire.Manifest
    stream_seq: int
    announced_at_s: float
    stored_at_s: float
    credit: UpdateCredit
    fetching: bool = False
    passed: bool = False
    broke: int = 0


class Admitted(NamedTuple):
    """An update that the round has merged.

    Attributes:
        manifest, stream_seq, credit, announced_at_s, stored_at_s: as in `Pending`.
        staleness: the version that the round builds on, minus the update's base version.
        discount: the factor for the staleness, in (0, 1].
        clip: the factor that shortens the update, in (0, 1].
        norm: the update's L2 norm before discount and clip.
    """

    manifest: wire.Manifest
    stream_seq: int
    credit: UpdateCredit
    staleness: int
    discount: float
    clip: float
    norm: float
    announced_at_s: float = 0.0
    stored_at_s: float = 0.0

    @property
    def weight(self) -> float:
        """The update's weight in the merge."""
        return self.credit.weight

    @property
    def norm_per_step(self) -> float:
        """The clipped norm, divided by the credited steps."""
        return self.clip * self.norm / self.credit.steps


class RejectedUpdate(NamedTuple):
    """An update that the next record rejects, with `reason` and `detail`; made by `refuse`."""

    manifest: wire.Manifest
    stream_seq: int
    reason: str
    detail: str


def refuse(manifest: wire.Manifest, stream_seq: int, reason: str, detail: str) -> RejectedUpdate:
    """Returns the rejection of an update.

    `detail`, a sentence for people that may quote the sender, is shortened, so that no manifest
    makes a record too long to be published.
    """
    return RejectedUpdate(manifest, stream_seq, reason, wire.note(detail))


def update_id(manifest: wire.Manifest) -> UpdateId:
    """Returns the id of the update that a manifest announces."""
    return UpdateId(manifest.learner, manifest.incarnation, manifest.seq)


T = TypeVar("T", bound=Admitted | RejectedUpdate)


class Resolved(Sequence[T], Generic[T]):
    """Updates on which the next record has a verdict, in order; immutable.

    Args:
        updates: the initial updates.
    """

    __slots__ = ("_lives", "_named", "_senders", "_updates")

    def __init__(self, updates: Iterable[T] = ()) -> None:
        self._updates: tuple[T, ...] = tuple(updates)
        named = [update_id(one.manifest) for one in self._updates]
        self._named = Tally(named)
        self._lives = Tally(one[:2] for one in named)
        self._senders = Tally(one.learner for one in named)

    def plus(self, update: T) -> Self:
        """Returns the sequence with `update` appended."""
        named = update_id(update.manifest)
        made = object.__new__(type(self))
        made._updates = (*self._updates, update)
        made._named = self._named.more(named)
        made._lives = self._lives.more(named[:2])
        made._senders = self._senders.more(named.learner)
        return made

    @property
    def senders(self) -> Tally[str]:
        """The number of updates of each learner."""
        return self._senders

    @property
    def lives(self) -> Tally[tuple[str, int]]:
        """The number of updates of each (learner, incarnation)."""
        return self._lives

    @property
    def named(self) -> Tally[UpdateId]:
        """The number of times that each update is in the sequence, by the update's id."""
        return self._named

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        """Returns the update at an index, or the updates of a slice."""
        found: T | tuple[T, ...] = self._updates[index]
        return found

    def __len__(self) -> int:
        """Returns the number of updates."""
        return len(self._updates)

    def __iter__(self) -> Iterator[T]:
        """Yields the updates in order."""
        return iter(self._updates)

    def __eq__(self, other: object) -> bool:
        """True if both have the same updates, in the same order."""
        return isinstance(other, Resolved) and self._updates == other._updates

    __hash__ = None  # type: ignore[assignment]


class MergedUpdates(Resolved[Admitted]):
    """The updates that the open round has merged, in the order of the sum; immutable.

    Args:
        updates: the initial updates.
    """

    __slots__ = ("_first_s",)

    def __init__(self, updates: Iterable[Admitted] = ()) -> None:
        super().__init__(updates)
        self._first_s = min((one.announced_at_s for one in self), default=None)

    def plus(self, update: Admitted) -> Self:
        """Returns the sequence with `update` appended."""
        made, first_s = super().plus(update), update.announced_at_s
        first_s = first_s if self._first_s is None else min(self._first_s, first_s)
        made._first_s = first_s  # noqa: SLF001 - one of this class
        return made

    @property
    def first_announced_at_s(self) -> float | None:
        """The earliest `announced_at_s` of these updates; None if there are none."""
        return self._first_s


class WaitingUpdates(Mapping[UpdateId, Pending]):
    """Updates that are announced and not merged yet, in the order of announcement; immutable.

    Args:
        updates: the initial updates.
    """

    __slots__ = ("_lives", "_times", "_unfetched", "_updates", "_voices")

    def __init__(self, updates: Mapping[UpdateId, Pending] = MappingProxyType({})) -> None:
        self._updates = PersistentMap(updates)
        waited_for = [(key, one) for key, one in updates.items() if not one.passed]
        self._lives = Tally(key[:2] for key in updates)
        self._unfetched = Tally(key for key, one in updates.items() if not one.fetching)
        self._voices = Tally(key.learner for key, _ in waited_for)
        self._times = Ranked(one.announced_at_s for _, one in waited_for)

    def put(self, update: UpdateId, pending: Pending) -> "WaitingUpdates":
        """Returns the updates with `update` added; one that waits already keeps its position."""
        return self._made(update, pending, self._updates.put(update, pending))

    def drop(self, update: UpdateId) -> "WaitingUpdates":
        """Returns the updates without `update`, which need not be among them."""
        if update not in self._updates:
            return self
        return self._made(update, None, self._updates.drop(update))

    @property
    def lives(self) -> Tally[tuple[str, int]]:
        """The number of updates of each (learner, incarnation)."""
        return self._lives

    @property
    def awaited_from(self) -> Tally[str]:
        """For each learner, the number of its updates that rounds wait for (not `passed`)."""
        return self._voices

    @property
    def awaited(self) -> int:
        """The number of updates that rounds wait for (not `passed`)."""
        return len(self._times)

    @property
    def first_announced_at_s(self) -> float | None:
        """The earliest `announced_at_s` of the updates that rounds wait for, or None."""
        return self._times.least()

    def unfetched(self) -> list[UpdateId]:
        """Returns the updates with `fetching` False, in the order of announcement."""
        return sorted(self._unfetched, key=self._updates.place)

    def unordered(self) -> Iterator[Pending]:
        """Yields the updates in any order, which is faster."""
        return self._updates.unordered()

    def __getitem__(self, update: UpdateId) -> Pending:
        """Returns the update with an id."""
        return self._updates[update]

    def __contains__(self, update: object) -> bool:
        """True if an update waits."""
        return update in self._updates

    def __len__(self) -> int:
        """Returns the number of updates."""
        return len(self._updates)

    def __iter__(self) -> Iterator[UpdateId]:
        """Yields the updates' ids, in the order of announcement."""
        return iter(self._updates)

    def _made(
        self, update: UpdateId, after: Pending | None, updates: PersistentMap[UpdateId, Pending]
    ) -> "WaitingUpdates":
        before = self._updates.find(update)
        made = object.__new__(WaitingUpdates)
        made._updates = updates
        made._lives = _moved(self._lives, update[:2], before is not None, after is not None)
        made._unfetched = _moved(self._unfetched, update, _unread(before), _unread(after))
        made._voices = _moved(self._voices, update.learner, _counts(before), _counts(after))
        times = [one.announced_at_s if one and not one.passed else None for one in (before, after)]
        made._times = self._times.swap(*times)
        return made


K = TypeVar("K")


def _moved(tally: Tally[K], key: K, before: bool, after: bool) -> Tally[K]:
    return tally if before == after else tally.more(key, 1 if after else -1)


def _unread(one: Pending | None) -> bool:
    return one is not None and not one.fetching


def _counts(one: Pending | None) -> bool:
    return one is not None and not one.passed
