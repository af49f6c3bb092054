"""A learner of several hosts in the simulation: each block is uploaded by one of them, by chance.

What a learner's mesh is must make no difference to anybody else. The hosts store their shards side
by side; one process stands for all of them, and dies with all of them.
"""

import asyncio
import random
from typing import Any

import numpy as np
from simtensors import LightReplica

from diloco.common.protocol.quantization import Encoded
from diloco.learner.background import Context
from diloco.learner.core import sync
from diloco.learner.wire.publish import Uploader, UploadResult

# Runs of blocks of one host, of any length.
RUNS = 6


def _owners(rng: random.Random, hosts: int, blocks: int) -> np.ndarray:
    """A host for each block: a few runs, and single blocks where there are few."""
    cuts = sorted(rng.sample(range(1, blocks), min(RUNS, blocks) - 1))
    lengths = np.diff([0, *cuts, blocks])
    return np.repeat([rng.randrange(hosts) for _ in lengths], lengths)


class _Host:
    """A host's part of a replica: what `Uploader` asks for."""

    def __init__(self, replica: LightReplica, owned: list[np.ndarray]) -> None:
        self._replica = replica
        self._owned = owned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    def owned(self, fragment: int) -> np.ndarray:
        return self._owned[fragment]

    def collect(self, fragment: int, codes: Any) -> Encoded:
        scales, rows = self._replica.collect(fragment, codes)
        blocks = self._owned[fragment]
        rows = np.asarray(rows).reshape(len(self._replica.owned(fragment)), -1)
        return Encoded(scales[blocks] if np.size(scales) else scales, rows[blocks])


class MeshUploader:
    """`Uploader` of a learner whose blocks lie on several hosts."""

    def __init__(
        self, context: Context, replica: LightReplica, rng: random.Random, hosts: int
    ) -> None:
        owners = [
            _owners(rng, hosts, len(replica.owned(fragment.index)))
            for fragment in context.layout.fragments
        ]
        self._uploaders = [
            Uploader(
                context, _Host(replica, [np.flatnonzero(each == host) for each in owners]),
                host, hosts,
            )
            for host in range(hosts)
        ]  # fmt: skip

    async def store(self, incarnation: int, send: sync.Send, codes: Any) -> UploadResult:
        """As `Uploader.store`, of all hosts."""
        stored = await asyncio.gather(
            *(uploader.store(incarnation, send, codes) for uploader in self._uploaders)
        )
        entries = [entry for each in stored for entry in each.shards]
        return UploadResult(tuple(entries), max(each.encoded_at_s for each in stored))
