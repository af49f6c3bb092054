"""What a store had before a tape was read: eight bytes a name, of however many objects."""

from array import array
from collections.abc import Iterable, Mapping

import numpy as np
import xxhash

from diloco.common import names
from diloco.common.errors import IntegrityError, RunMismatchError, WireError
from diloco.common.tape import RunContext, last_record


class Listing:
    """Names of objects, as hashes, for who only asks whether one was there.

    Args:
        listed: the names.
        newer: those of them that a tape which is read later may not have come to.
    """

    def __init__(self, listed: Iterable[str], newer: Iterable[str] = ()) -> None:
        hashes = array("Q", (xxhash.xxh3_64_intdigest(name.encode()) for name in listed))
        self._hashes = np.sort(np.frombuffer(hashes, np.uint64))
        self.newer = [*newer]

    def __contains__(self, name: object) -> bool:
        wanted = np.uint64(xxhash.xxh3_64_intdigest(str(name).encode()))
        index = int(np.searchsorted(self._hashes, wanted))
        return index < len(self._hashes) and bool(self._hashes[index] == wanted)


async def read_listing(context: RunContext) -> Listing:
    """The run's objects; call it before the tape is read.

    Raises:
        BusError, StoreError: bus or store are away.
    """
    fragments = range(len(context.layout.fragments))
    newest = {index: await _newest_version(context, index) for index in fragments}
    last_seq = await context.bus.last_sequence(context.tape)
    there = await context.runtime.call(context.store.list, f"{context.run}/")
    listed = [info.name for info in there]
    newer = [name for name in listed if _may_be_newer(context.run, name, newest, last_seq)]
    return Listing(listed, newer)


async def _newest_version(context: RunContext, fragment: int) -> int:
    try:
        return (await last_record(context, fragment))[0].version
    except (IntegrityError, RunMismatchError, WireError):
        # All its objects may be newer; whoever reads the tape says what is wrong with it.
        return -1


def fragment_of(run: str, name: str) -> int | None:
    """The fragment that an object is of; None for what is the whole run's."""
    if (sent := names.parse_shard(run, name)) is not None:
        return sent.fragment
    fragment = name.removeprefix(names.global_prefix(run)).partition("/")[0]
    return int(fragment) if fragment.isdecimal() else None


def _may_be_newer(run: str, name: str, newest: Mapping[int, int], last_seq: int) -> bool:
    """Whether an object is of something later than these versions and this sequence.

    `diloco.check.evidence.newer_objects` judges by the tape, once it is read.
    """
    if name.startswith(names.checkpoint_prefix(run)):
        return True
    if (sent := names.parse_shard(run, name)) is not None:
        return sent.incarnation > last_seq
    fragment, _, rest = name.removeprefix(names.global_prefix(run)).partition("/")
    version = rest.partition("-")[0]
    known = fragment.isdecimal() and version.isdecimal() and int(fragment) in newest
    return known and int(version) > newest[int(fragment)]
