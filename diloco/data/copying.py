"""`diloco data copy`: from a place to another, whole or not at all."""

from diloco.common.errors import ConfigError, DataError
from diloco.common.store import ObjectStore
from diloco.common.token_manifest import MANIFEST, PLAN, TokenManifest, TokenShard, json_bytes
from diloco.data.check import difference
from diloco.data.places import Read, alone_in, first_of, found_at, manifest_at, reader, tidy, writer
from diloco.data.prepare import Progress


def copy(source: str, out: str, progress: Progress) -> TokenManifest:
    """Copy prepared data, or go on with it. What is copied is compared with its digests on the way.

    Raises:
        ConfigError: something else is there.
        DataError: the source is not whole, or damaged.
        StoreError: something cannot be stored.
    """
    read = reader(source)
    manifest = manifest_at(source, read)
    with alone_in(out):
        _check_free(out, json_bytes(manifest))
        store = writer(out)
        # It says of a copy that was ended midway what it was to be.
        store.put(PLAN, json_bytes(manifest))
        there = {info.name: info.size_bytes for info in store.list("")}
        done = 0
        for shard in manifest.shards:
            # Objects are stored whole or not at all.
            if there.get(shard.name) != shard.size_bytes:
                _copy_shard(source, shard, read, store)
            done += shard.size_bytes
            progress(done, manifest.size_bytes)
        store.put(MANIFEST, json_bytes(manifest))
        tidy(out, store)
    return manifest


def _copy_shard(source: str, shard: TokenShard, read: Read, store: ObjectStore) -> None:
    data = found_at(read, shard.name)
    what = "is missing" if data is None else difference(shard, data)
    if data is None or what is not None:
        raise DataError(
            f"{source}/{shard.name} {what}",
            hint="copy from another place, or prepare the data again",
        )
    store.put(shard.name, data)


def _check_free(out: str, manifest: bytes) -> None:
    """Refuse a place that has something else.

    Raises:
        ConfigError: it has.
    """
    read = reader(out)
    begun = found_at(read, MANIFEST) or found_at(read, PLAN)
    if begun is None and (other := first_of(out)) is not None:
        raise ConfigError(f"{out!r} is not empty: it has {other!r}", hint="give a new folder")
    if begun is not None and begun != manifest:
        raise ConfigError(f"{out!r} has other prepared data", hint="give a new folder")
