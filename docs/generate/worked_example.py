"""docs/protocol.md: one update from learner to version, byte for byte, made by the code of both."""

import json

import numpy as np

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.core.updates import Admitted, UpdateCredit
from diloco.aggregator.owner.download_and_verify import read_payload
from diloco.common.process.config import RunSettings
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.codecs import Codec, decode_numpy
from diloco.common.protocol.layout import Tensor, layout_bytes, make_layout
from diloco.common.storage.store import MemoryStore
from diloco.learner.tensors.quantize_and_pack import encode
from docs.generate.markdown import fence

CODEC: Codec = "int4"
BLOCK = 16
RUN = "demo"
LEARNER = "learner-0"
INCARNATION = 7


SETTINGS = RunSettings.model_validate(
    {
        "run": {"name": RUN, "steps": 24},
        "sync": {"fragments": 1, "block": BLOCK, "codec": CODEC, "delta_codec": CODEC},
        "outer": {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0},
    }
)
LAYOUT = make_layout([Tensor(name="w", shape=(4, 8), dtype="float32")], fragments=1, block=BLOCK)
UPDATE = (np.arange(32, dtype=np.float32) - 16) / 8


def manifest_of(packed: bytes, base_digest: str) -> wire.Manifest:
    """Returns the manifest of the example's update, which has one shard.

    Args:
        packed: the bytes of the shard.
        base_digest: digest of the view that the update is anchored on.
    """
    shard = wire.Shard(
        name=names.shard(RUN, LEARNER, 0, 0, INCARNATION, 1, 0),
        size_bytes=len(packed),
        crc32c=shards.crc32c(packed),
        slices=slices.of_range(0, 32, BLOCK),
    )
    # fmt: off
    return wire.Manifest(
        run=RUN, learner=LEARNER, epoch=0, incarnation=INCARNATION, seq=1, fragment=0,
        base_version=0, base_digest=base_digest, layout=LAYOUT.digest, codec=CODEC, shards=(shard,),
        tokens=2400, steps=24, position=24, local_step=24, loss=2.5,
        step_time_s=0.25, encode_s=0.0, upload_s=0.0, attempt=0, final=False,
    )
    # fmt: on


def sent(packed: bytes, manifest: wire.Manifest) -> dict[str, str]:
    """Returns the learner's messages, objects and values as text, by name of their block."""
    join = wire.Join(run=RUN, learner=LEARNER, layout=LAYOUT.digest, host="island-a")
    decoded = decode_numpy(CODEC, shards.unpack(packed, codec=CODEC, count=32, block=BLOCK), BLOCK)
    return {
        "layout": hexdump(layout_bytes(LAYOUT)) + f"\ndigest {LAYOUT.digest}",
        "join": hexdump(wire.encode(join)),
        "update-values": numbers(UPDATE),
        "shard": hexdump(packed),
        "shard-values": numbers(decoded),
        "manifest-fields": json.dumps(manifest.model_dump(), indent=1),
        "manifest": hexdump(wire.encode(manifest)),
    }


def merged(packed: bytes, manifest: wire.Manifest, arrays: FragmentArrays) -> dict[str, str]:
    """Returns the round's message, the merge, the delta and the view as text, by name of block.

    Args:
        packed: the bytes of the update's shard.
        manifest: the update's manifest.
        arrays: the fragment at version 0; the function merges the update into it.
    """
    store = MemoryStore()
    store.put(manifest.shards[0].name, packed)
    payload = read_payload(store, manifest, arrays.grid)
    weight = manifest.tokens**2 / manifest.steps
    credit = UpdateCredit(manifest.steps, manifest.tokens, weight)
    admitted = Admitted(manifest, 9, credit, 0, 1.0, 1.0, payload.norm)
    arrays.merge(payload, admitted)
    made = arrays.close_round([admitted], 1.0)
    delta = names.version_object(RUN, 0, 1, "delta", shards.digest(made.delta))
    figures = [
        f"weight        {weight!r}",
        f"weight_unit   {made.inputs[0].weight_unit}",
        f"norm          {payload.norm!r}",
        f"coefficients  {made.inputs[0].coefficients.hex()}",
        f"factors       {made.factors.hex()}",
        f"view_digest   {made.view_digest}",
        f"outer_digest  {made.outer_digest}",
    ]
    return {
        "round": hexdump(wire.encode(wire.RoundOpen(fragment=0, version=1))),
        "merge": "\n".join(figures),
        "delta": f"{delta}\n{hexdump(made.delta)}",
        "view-values": numbers(arrays.view),
    }


def example() -> dict[str, str]:
    """Returns the text of each block of the page's example, by name without "example "."""
    view = np.zeros(LAYOUT.fragments[0].size, np.float32)
    arrays = FragmentArrays.from_view(SETTINGS, LAYOUT, 0, view)
    packed = shards.pack(CODEC, encode(CODEC, UPDATE, BLOCK), BLOCK)
    manifest = manifest_of(packed, shards.digest(view))
    return sent(packed, manifest) | merged(packed, manifest, arrays)


def hexdump(data: bytes) -> str:
    """Returns bytes as hexadecimal text: 16 a line in groups of four, after the line's offset."""
    lines = []
    for start in range(0, len(data), 16):
        groups = [data[i : i + 4].hex() for i in range(start, min(start + 16, len(data)), 4)]
        lines.append(f"{start:04x}  {' '.join(groups)}")
    return "\n".join(lines)


def numbers(values: np.ndarray) -> str:
    """Returns values as text, eight a line; their number is a multiple of eight."""
    rows = values.reshape(-1, 8).tolist()
    return "\n".join(" ".join(f"{value:g}" for value in row) for row in rows)


def blocks() -> dict[str, str]:
    """Returns the blocks of the example."""
    return {f"example {name}": fence("text", text) for name, text in example().items()}
