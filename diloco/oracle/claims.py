"""What a manifest may claim: the reason for which it alone is rejected."""

from diloco.common import names, slices, wire
from diloco.common.config import RunSettings
from diloco.common.errors import WireError
from diloco.common.layout import Layout
from diloco.common.reasons import Reason
from diloco.common.shards import shard_bytes, shard_ranges


def wrong_claim(
    settings: RunSettings, layout: Layout, epoch: int, manifest: wire.Manifest
) -> str | None:
    """The reason to reject a manifest by itself, or None."""
    if manifest.layout != layout.digest:
        return Reason.LAYOUT
    if manifest.codec != settings.sync.codec:
        return Reason.CODEC
    return _wrong_shards(settings, layout, epoch, manifest)


def _wrong_shards(
    settings: RunSettings, layout: Layout, epoch: int, manifest: wire.Manifest
) -> str | None:
    """All blocks once, under the sender's prefix, each shard as large as its codec makes it."""
    sync, size = settings.sync, layout.fragments[manifest.fragment].size
    ranges = shard_ranges(size, sync.block, sync.shard_elements)
    longest = max(stop - start for start, stop in ranges) // sync.block
    try:
        held = [shard.slices for shard in manifest.shards]
        counts = slices.partition(held, size // sync.block, longest)
    except WireError as error:
        return error.reason
    prefix = names.shards_prefix(
        settings.run.name, manifest.learner, manifest.fragment, epoch, manifest.incarnation,
        manifest.seq,
    )  # fmt: skip
    known = set()
    for shard, count in zip(manifest.shards, counts, strict=True):
        own = shard.name.startswith(prefix) and names.is_index(shard.name.removeprefix(prefix))
        if not own or shard.name in known:
            return Reason.NAME
        known.add(shard.name)
        if shard.size_bytes != shard_bytes(sync.codec, count * sync.block, sync.block):
            return Reason.SIZE
    return None
