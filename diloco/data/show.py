"""What prepared data holds, on the screen."""

import hashlib

from diloco.cli.screen import say_plainly
from diloco.cli.units import human_bytes, human_count
from diloco.common.token_manifest import SIDES, TokenManifest, json_bytes


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
        say_plainly(
            f"{side}: {human_count(counted.tokens)} tokens in {counted.documents:,} documents, "
            f"{len(manifest.of(side)):,} shards"
        )
    say_plainly(f"tokens.json: sha256 {hashlib.sha256(json_bytes(manifest)).hexdigest()}")
    say_plainly(
        f"{place}: {human_bytes(manifest.size_bytes)} of {manifest.dtype}, vocabulary "
        f"{manifest.tokenizer.vocabulary:,}, documents end in token {manifest.end}"
    )
