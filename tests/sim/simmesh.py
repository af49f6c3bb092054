"""A learner of several hosts in the simulation: a randomly chosen host uploads each block.

A learner's mesh must make no difference to other processes. One actor simulates all hosts, which
store their shards at the same time. A host may be lost while it stores its shards: the other hosts'
shards are stored, no process announces them, and the actor ends.
"""

import asyncio
import random
from functools import partial
from typing import Any, NoReturn

import numpy as np
from simactor import Actor, Killed
from simtensors import LightReplica

from diloco.common.protocol.codecs import Encoded
from diloco.learner.background import Context
from diloco.learner.core.events import (
    Send,
)
from diloco.learner.wire.publish import Uploader, UploadResult

# Mean time until the other hosts end after one host is lost.
NOTICED_S = 3.0
# The most runs of consecutive blocks that belong to one host.
RUNS = 6


def _owners(rng: random.Random, hosts: int, blocks: int) -> np.ndarray:
    """Draws the host of each block, in at most `RUNS` runs of consecutive blocks."""
    cuts = sorted(rng.sample(range(1, blocks), min(RUNS, blocks) - 1))
    lengths = np.diff([0, *cuts, blocks])
    return np.repeat([rng.randrange(hosts) for _ in lengths], lengths)


class _Host:
    """The blocks of a replica on one host, with the methods that `Uploader` calls."""

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
    """The uploader of a learner whose blocks are on several hosts."""

    def __init__(self, context: Context, replica: LightReplica, actor: Actor, hosts: int) -> None:
        self._actor = actor
        owners = [
            _owners(actor.rng, hosts, len(replica.owned(fragment.index)))
            for fragment in context.layout.fragments
        ]
        self._uploaders = [
            Uploader(
                context, _Host(replica, [np.flatnonzero(each == host) for each in owners]),
                host, hosts,
            )
            for host in range(hosts)
        ]  # fmt: skip

    async def store(self, incarnation: int, send: Send, codes: Any) -> UploadResult:
        """Works as `Uploader.store` for all hosts; one host may be lost, which ends the process."""
        uploaders = self._uploaders
        if self._actor.hit(self._actor.faults.host_loss, "host_loss"):
            lost = self._actor.rng.randrange(len(uploaders))
            uploaders = [one for index, one in enumerate(uploaders) if index != lost]
            if lost == 0:
                self._die(uploaders, incarnation, send, codes)
            self._actor.later(self._actor.lasting(NOTICED_S), self._actor.kill)
        stored = await asyncio.gather(
            *(uploader.store(incarnation, send, codes) for uploader in uploaders)
        )
        if len(uploaders) < len(self._uploaders):
            await asyncio.Event().wait()
        entries = [entry for each in stored for entry in each.shards]
        return UploadResult(tuple(entries), max(each.encoded_at_s for each in stored))

    def _die(self, others: list[Uploader], incarnation: int, send: Send, codes: Any) -> NoReturn:
        """Kill the process, since host 0 is lost; the other hosts' shards are stored afterwards."""
        actor = self._actor
        for uploader in others:
            for shard, data in uploader._pack(incarnation, send, codes):
                put = partial(actor.world.store.put, shard.name, data)
                actor.later(actor.lasting(NOTICED_S), put)
        actor.kill()
        raise Killed
