"""`diloco data check`: whether every shard is what the manifest says."""

import hashlib

from diloco.common.errors import StoreError
from diloco.common.token_manifest import TokenManifest, TokenShard
from diloco.data.places import Read, found_at, manifest_at, reader
from diloco.data.prepare import Progress


def find_damage(place: str, progress: Progress) -> tuple[TokenManifest, list[str]]:
    """The manifest of a place, and a sentence for each shard that is not what it says.

    Raises:
        DataError: there is no manifest.
    """
    read = reader(place)
    manifest = manifest_at(place, read)
    found, done = [], 0
    for shard in manifest.shards:
        if (what := damage(shard, read)) is not None:
            found.append(f"{place}/{shard.name} {what}")
        done += shard.size_bytes
        progress(done, manifest.size_bytes)
    return manifest, found


def damage(shard: TokenShard, read: Read) -> str | None:
    """What is wrong with a shard; None if nothing is."""
    try:
        data = found_at(read, shard.name)
    except (OSError, StoreError) as error:
        return f"cannot be read: {error}"
    return "is missing" if data is None else difference(shard, data)


def difference(shard: TokenShard, data: bytes) -> str | None:
    """What tells bytes from those of a shard; None if nothing does."""
    if len(data) != shard.size_bytes:
        return f"has {len(data)} bytes, not {shard.size_bytes}"
    found = hashlib.sha256(data).hexdigest()
    return None if found == shard.sha256 else f"has the sha256 {found}, not {shard.sha256}"
