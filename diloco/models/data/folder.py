"""Shows, verifies and copies finished folders of prepared data."""

import hashlib

from diloco.common.protocol.errors import ConfigError, DataError, StoreError
from diloco.models.data.manifest import (
    MANIFEST,
    PLAN,
    SIDES,
    TokenManifest,
    TokenShard,
    json_bytes,
)
from diloco.models.data.places import (
    Read,
    alone_in,
    first_of,
    found_at,
    manifest_at,
    reader,
    tidy,
    writer,
)
from diloco.run.cli.format_numbers import human_bytes, human_count
from diloco.run.cli.screen import Hear, say_plainly


def show(place: str, manifest: TokenManifest) -> None:
    """Prints counts of documents and tokens by source and by side, and the manifest's digest."""
    for source in manifest.sources:
        both = source.train + source.held_out
        empty = f", {source.empty:,} empty" if source.empty else ""
        say_plainly(
            f"{source.path}: {both.tokens:,} tokens in {both.documents:,} documents{empty}, of "
            f"{source.files:,} files with {human_bytes(source.size_bytes)}"
        )
    for side in SIDES:
        counted = manifest.counted(side)
        learned = counted.tokens - sum(shard.unlearned for shard in manifest.of(side))
        of_which = f" ({human_count(learned)} trained on)" if manifest.template_sha256 else ""
        say_plainly(
            f"{side}: {human_count(counted.tokens)} tokens{of_which} in {counted.documents:,} "
            f"documents, {len(manifest.of(side)):,} shards"
        )
    say_plainly(f"tokens.json: sha256 {hashlib.sha256(json_bytes(manifest)).hexdigest()}")
    say_plainly(
        f"{place}: {human_bytes(manifest.size_bytes)} of {manifest.dtype}, vocabulary "
        f"{manifest.tokenizer.vocabulary:,}, documents end in token {manifest.end}"
    )


def find_damage(place: str, hear: Hear) -> tuple[TokenManifest, list[str]]:
    """Verifies size and sha256 of each shard of a place.

    Args:
        place: the folder or URL.
        hear: called after each shard with (bytes verified, bytes in all), to show progress.

    Returns:
        (the manifest, a sentence for each shard that is missing, damaged or unreadable).

    Raises:
        DataError: there is no manifest, or it is invalid.
    """
    read = reader(place)
    manifest = manifest_at(place, read)
    found, done = [], 0
    for shard in manifest.shards:
        try:
            _verified(place, shard, read)
        except DataError as error:
            found.append(error.message)
        except (OSError, StoreError) as error:
            found.append(f"{place}/{shard.name} cannot be read: {error}")
        done += shard.size_bytes
        hear(done, manifest.size_bytes)
    return manifest, found


def copy(source: str, out: str, hear: Hear) -> TokenManifest:
    """Copies prepared data, or resumes a copy; verifies each copied shard. Returns the manifest.

    Args:
        source: the folder or URL to copy from.
        out: the folder or URL to copy to: a new one, or that of an interrupted copy.
        hear: called after each shard with (bytes copied, bytes in all), to show progress.

    Raises:
        ConfigError: `out` has other data, or another process writes to it.
        DataError: the source is unfinished or damaged.
        StoreError: an object cannot be read or stored.
    """
    read = reader(source)
    manifest = manifest_at(source, read)
    with alone_in(out):
        _check_free(out, json_bytes(manifest))
        store = writer(out)
        # If the copy is interrupted, this plan says of which data it was.
        store.put(PLAN, json_bytes(manifest))
        there = {info.name: info.size_bytes for info in store.list("")}
        done = 0
        for shard in manifest.shards:
            size = there.get(shard.name)
            if size not in (None, shard.size_bytes):
                # Objects are stored whole or not at all: this one was damaged later.
                store.delete(shard.name)
            if size != shard.size_bytes:
                store.put(shard.name, _verified(source, shard, read))
            done += shard.size_bytes
            hear(done, manifest.size_bytes)
        store.put(MANIFEST, json_bytes(manifest))
        tidy(out, store)
    return manifest


def _verified(place: str, shard: TokenShard, read: Read) -> bytes:
    """Reads a shard and returns its bytes, once they are verified.

    Raises:
        DataError: the shard is missing, or its size or digest is not the manifest's.
    """
    data = found_at(read, shard.name)
    if data is None:
        what = "is missing"
    elif len(data) != shard.size_bytes:
        what = f"has {len(data)} bytes, not {shard.size_bytes}"
    elif (digest := hashlib.sha256(data).hexdigest()) != shard.sha256:
        what = f"has the sha256 {digest}, not {shard.sha256}"
    else:
        return data
    raise DataError(
        f"{place}/{shard.name} {what}",
        hint="copy from another place, or prepare the data again",
    )


def _check_free(out: str, manifest: bytes) -> None:
    """Checks that a place is empty, or has this data or an unfinished copy of it.

    Args:
        out: the folder or URL to copy to.
        manifest: bytes of the manifest of the data to copy.

    Raises:
        ConfigError: the place has something else.
    """
    read = reader(out)
    begun = found_at(read, MANIFEST) or found_at(read, PLAN)
    if begun is None and (other := first_of(out)) is not None:
        raise ConfigError(f"{out!r} is not empty: it has {other!r}", hint="give a new folder")
    if begun is not None and begun != manifest:
        raise ConfigError(f"{out!r} has other prepared data", hint="give a new folder")
