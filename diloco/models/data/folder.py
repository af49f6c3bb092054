"""Prepared data that is whole: shown, checked against its digests, copied."""

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
from diloco.run.cli.screen import Hear, say_plainly
from diloco.run.cli.units import human_bytes, human_count


def show(place: str, manifest: TokenManifest) -> None:
    """Print counts by source and side, and how a task names the folder."""
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
    """The manifest of a place, and a sentence for each shard that is not what it says.

    Raises:
        DataError: there is no manifest.
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
                store.put(shard.name, _verified(source, shard, read))
            done += shard.size_bytes
            hear(done, manifest.size_bytes)
        store.put(MANIFEST, json_bytes(manifest))
        tidy(out, store)
    return manifest


def _verified(place: str, shard: TokenShard, read: Read) -> bytes:
    """A shard's bytes.

    Raises:
        DataError: it is missing, or not what the manifest says.
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
    """Refuse a place that has something else.

    Raises:
        ConfigError: the place has something else.
    """
    read = reader(out)
    begun = found_at(read, MANIFEST) or found_at(read, PLAN)
    if begun is None and (other := first_of(out)) is not None:
        raise ConfigError(f"{out!r} is not empty: it has {other!r}", hint="give a new folder")
    if begun is not None and begun != manifest:
        raise ConfigError(f"{out!r} has other prepared data", hint="give a new folder")
