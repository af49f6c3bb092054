"""From a stored version to the devices: what to read, and one host's reading of it."""

from typing import Any

from diloco.common.process.averaged import sync_of
from diloco.common.protocol import shards, wire
from diloco.common.storage.tape import get_object
from diloco.common.storage.views import Loaded, assemble_view
from diloco.learner.context import Context
from diloco.learner.core import sync
from diloco.learner.core.catchup import Change
from diloco.learner.tensors.replica import Replica


def start_at(loaded: Loaded) -> sync.Start:
    """The core's start with a fragment of which a learner has loaded this version."""
    record = loaded.record
    return sync.Start(record.version, record.view_digest, loaded.record_seq, record.global_step)


def whole(loaded: Loaded) -> Change:
    """The change that leads to a view from nothing."""
    record = loaded.record
    return Change(
        record.fragment, loaded.record_seq, record.view_digest, loaded.snapshot, loaded.deltas
    )


class VersionFetcher:
    """Fetches and decodes what one host holds of versions, and puts it on its devices."""

    def __init__(self, context: Context, tensors: Replica) -> None:
        self._context = context
        self._tensors = tensors

    async def fetch(self, change: Change) -> Any:
        """The payload of a change.

        Raises:
            ObjectMissingError: garbage collection has taken an object.
            IntegrityError: an object is damaged.
        """
        if change.snapshot is None:
            return await self._context.runtime.call(self._delta, change)
        return await self._context.runtime.call(self._view, change, change.snapshot)

    async def place(self, loaded: Loaded) -> Any:
        """The payload of a view that is here already."""
        place = self._tensors.place_view
        return await self._context.runtime.call(place, loaded.record.fragment, loaded.view)

    def _delta(self, change: Change) -> Any:
        context, (ref,) = self._context, change.deltas
        fragment = context.layout.fragments[change.fragment]
        section, size = sync_of(context.settings.sync, fragment), fragment.size
        held = self._tensors.local_blocks(change.fragment)
        codec, block = section.delta_codec, section.block
        if held.size * block == size:
            data = get_object(context.store, ref)
            context.traffic.bytes_down += len(data)
            rows = shards.unpack_delta(data, codec=codec, count=size, block=block)
        else:
            rows = shards.read_blocks(
                self._reader(ref), codec=codec, count=size, block=block, blocks=held
            )
        return self._tensors.place(change.fragment, rows)

    def _reader(self, ref: wire.ObjectRef) -> shards.Read:
        def read(start: int, stop: int) -> bytes:
            data = self._context.store.get_range(ref.name, start, stop)
            self._context.traffic.bytes_down += len(data)
            return data

        return read

    def _view(self, change: Change, snapshot: wire.ObjectRef) -> Any:
        view, read_bytes = assemble_view(
            self._context, change.fragment, change.view_digest, snapshot, change.deltas
        )
        self._context.traffic.bytes_down += read_bytes
        return self._tensors.place_view(change.fragment, view)
