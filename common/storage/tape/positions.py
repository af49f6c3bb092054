"""The data positions at which learners of earlier epochs continue, in batches.

A specification holds the positions itself, or names an object that holds them if there are more
than `wire.MAX_KEYS`, the most entries of a message's map.
"""

from collections.abc import Mapping

from diloco.common.protocol import names, shards, wire
from diloco.common.storage.store import ObjectStore
from diloco.common.storage.store.protocol import get_object


def entries(positions: Mapping[str, int]) -> tuple[wire.DataPosition, ...]:
    """Returns `positions` (learner -> position) as a list, sorted by the learners' names."""
    return tuple(
        wire.DataPosition(learner=learner, position=position)
        for learner, position in sorted(positions.items())
    )


def by_learner(listed: tuple[wire.DataPosition, ...]) -> dict[str, int]:
    """Returns learner -> position, from a list that `entries` made."""
    return {one.learner: one.position for one in listed}


def store_positions(
    store: ObjectStore, run: str, epoch: int, listed: tuple[wire.DataPosition, ...]
) -> wire.ObjectRef:
    """Stores the positions object of an epoch; returns the reference for the specification.

    Raises:
        StoreError: as `ObjectStore.put`.
    """
    data = wire.encode(wire.Positions(run=run, data_positions=listed))
    ref = wire.ObjectRef(
        name=names.positions_object(run, epoch, shards.digest(data)),
        size_bytes=len(data),
        crc32c=shards.crc32c(data),
    )
    store.put(ref.name, data)
    return ref


def read_positions(store: ObjectStore, specification: wire.Specification) -> Mapping[str, int]:
    """Returns learner -> data position, in batches, at the beginning of the specification's epoch.

    Raises:
        IntegrityError, WireError: the positions object is damaged.
        ObjectMissingError, StoreUnavailableError: as `ObjectStore.get`.
    """
    if specification.positions_object is None:
        return specification.positions
    data = get_object(store, specification.positions_object)
    return by_learner(wire.decode(wire.Positions, data).data_positions)
