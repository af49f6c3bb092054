"""Reads a run's checkpoints from its store; `aggregator/checkpoint.py` makes them."""

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import ConfigError, ObjectMissingError
from diloco.common.storage.store import ObjectStore


def checkpoints(store: ObjectStore, run: str) -> list[str]:
    """Returns the names of the run's complete checkpoints, oldest first.

    Raises:
        StoreError: as `ObjectStore.list`.
    """
    prefix = names.checkpoint_prefix(run)
    return [found.name.removeprefix(prefix) for found in store.list(prefix)]


def load_file(store: ObjectStore, run: str, name: str | None) -> wire.CheckpointFile:
    """Returns the file of checkpoint `name`; of the newest checkpoint if `name` is None.

    Raises:
        ConfigError: the run has no checkpoint, or none of that name.
        WireError: the file is damaged.
        StoreError: the store cannot be read.
    """
    known = checkpoints(store, run)
    if not known:
        raise ConfigError(
            f"the store holds no checkpoint of run {run!r}",
            hint="checkpoints are made with: diloco run checkpoint RUN",
        )
    try:
        data = store.get(names.checkpoint_object(run, name or known[-1]))
    except ObjectMissingError as error:
        raise ConfigError(
            f"there is no checkpoint {name!r} of run {run!r}",
            hint=f"there are {', '.join(known[-8:])}",
        ) from error
    return wire.decode(wire.CheckpointFile, data)
