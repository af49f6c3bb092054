"""The simulation's object store, and each actor's faulty client of it."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from diloco.common.protocol.errors import (
    ObjectExistsError,
    ObjectMissingError,
    StoreUnavailableError,
)
from diloco.common.protocol.shards import Data
from diloco.common.storage.store import MemoryStore, ObjectInfo

if TYPE_CHECKING:
    from simactor import Actor


class SimStore(MemoryStore):
    """The world's objects.

    Attributes:
        stored: called with each object's name once the object is stored.
        deleting: called with each object's name before the object is deleted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored: Callable[[str], None] = lambda _name: None
        self.deleting: Callable[[str], None] = lambda _name: None
        # Names by folder, since daemons list many folders.
        self._folders: dict[str, dict[str, None]] = defaultdict(dict)
        # Objects that only their writers see before a time.
        self.hidden: dict[str, tuple[Actor, float]] = {}
        # Objects whose writers got no answer: they may be lost when the power fails.
        self.unsynced: dict[str, Actor] = {}
        # Shards that aggregators keep even if somebody removes them; shards that are slow to read.
        self.kept: set[str] = set()
        self.slow_until_s: dict[str, float] = {}
        # The undamaged bytes of objects that are damaged now.
        self.rotten: dict[str, bytes] = {}

    def put(self, name: str, data: Data) -> None:
        if name not in self._objects:
            super().put(name, data)
            self._folders[_folder(name)][name] = None
            self.stored(name)
        elif self.sound(name) != data:
            raise ObjectExistsError(f"object {name!r} exists with other bytes")

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        found = self._objects.get(name)
        if found is None or limit_bytes is not None:
            return super().get(name, limit_bytes, within_s)
        return found

    def rot(self, name: str) -> None:
        """Flips one bit of an object."""
        if name not in self.rotten:
            self.rotten[name] = self._objects[name]
            self._objects[name] = turned_over(self._objects[name])

    def cut_power(self, actor: "Actor") -> None:
        """Removes an actor's objects whose storing was not acknowledged."""
        for name in [name for name, writer in self.unsynced.items() if writer is actor]:
            del self.unsynced[name]
            if name in self._objects:
                del self._objects[name], self._folders[_folder(name)][name]
                actor.world.injected["power_cut"] += 1

    def sound(self, name: str) -> bytes:
        """Returns an object's undamaged bytes."""
        found = self.rotten.get(name) or self._objects.get(name)
        if found is None:
            raise ObjectMissingError(f"no object {name!r}")
        return found

    def delete(self, name: str) -> None:
        if name in self._objects:
            self.deleting(name)
            del self._folders[_folder(name)][name]
        super().delete(name)

    def remove(self, name: str) -> None:
        """Removes an object on behalf of its sender, unless aggregators keep it."""
        if name not in self.kept and self._objects.pop(name, None) is not None:
            del self._folders[_folder(name)][name]

    def list(self, prefix: str) -> list[ObjectInfo]:
        if not prefix.endswith("/"):
            return super().list(prefix)
        names = self._folders.get(prefix)
        if names is None:
            return super().list(prefix)
        return [ObjectInfo(name, len(self._objects[name])) for name in sorted(names)]

    def names(self) -> Collection[str]:
        """Returns the names of all objects."""
        return self._objects.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._objects


class SoundObjects:
    """The world's objects without damage, for the checkers to read."""

    def __init__(self, store: SimStore) -> None:
        self._store = store

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        return self._store.sound(name)


def turned_over(data: bytes) -> bytes:
    """Returns the bytes with one bit flipped."""
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]


def _is_of_version(name: str) -> bool:
    """Whether a name is that of a version's view, outer state or delta."""
    return "/global/" in name and "-record-" not in name and name.rsplit("/", 2)[1].isdecimal()


def _folder(name: str) -> str:
    return name[: name.rindex("/") + 1]


class ActorStore:
    """One actor's client of the world's store; its delays are those of `Actor._offload`."""

    def __init__(self, actor: "Actor") -> None:
        self._actor = actor

    @property
    def _inner(self) -> SimStore:
        return self._actor.world.store

    def put(self, name: str, data: Data) -> None:
        actor, faults = self._actor, self._actor.faults
        self._reach()
        is_synced = name in self._inner and name not in self._inner.unsynced
        self._inner.unsynced.pop(name, None)
        if actor.world.store_refuses_writes(actor.name, actor.world.loop.now_s):
            raise StoreUnavailableError(f"{actor.name}: the store refuses writes of this machine")
        if actor.world.is_full("store"):
            raise StoreUnavailableError(f"{actor.name}: the store's disk is full")
        actor.effect("put", name, lambda: self._inner.put(name, data))
        if "/update/" in name and actor.hit(faults.rot, "rot"):
            self._inner.rot(name)
        if "/global/" in name and actor.hit(faults.rot_version, "rot_version"):
            self._inner.rot(name)
            actor.world.damaged = True
        if actor.hit(faults.late_object, "late_object"):
            until_s = actor.world.loop.now_s + actor.lasting(faults.visible_s)
            self._inner.hidden[name] = (actor, until_s)
        try:
            self._answer()
        except StoreUnavailableError:
            # An object that stood before it was put again stays when the power fails.
            if not is_synced:
                self._inner.unsynced[name] = actor
            raise

    def get(
        self, name: str, limit_bytes: int | None = None, within_s: float | None = None
    ) -> bytes:
        self._reach()
        if self._inner.hidden and self._is_hidden(name):
            raise ObjectMissingError(f"no object {name!r} yet")
        actor = self._actor
        if self._inner.slow_until_s.get(name, 0.0) > actor.world.loop.now_s:
            raise StoreUnavailableError(f"{actor.name}: {name!r} takes long to read")
        data = self._inner.get(name, limit_bytes, within_s)
        if "/update/" in name and actor.hit(actor.faults.removed, "removed"):
            self._inner.remove(name)
        reads_badly = actor.name == actor.world.bad and actor.world.bad_at == "reads"
        if reads_badly and _is_of_version(name):
            actor.world.injected["bad_machine"] += 1
            return turned_over(data)
        return data

    def keep(self, name: str, _limit_bytes: int) -> None:
        """Keeps an object, as `ProtectsObjects.keep` does."""
        self._reach()
        self._inner.kept.add(name)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        self._reach()
        if self._inner.hidden and self._is_hidden(name):
            raise ObjectMissingError(f"no object {name!r} yet")
        return self._inner.get_range(name, start, stop)

    def list(self, prefix: str) -> list[ObjectInfo]:
        self._reach()
        return [info for info in self._inner.list(prefix) if not self._is_hidden(info.name)]

    def walk(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self.list(prefix))

    def delete(self, name: str) -> None:
        self._reach()
        self._actor.effect("delete", name, lambda: self._inner.delete(name))
        self._answer()

    def _reach(self) -> None:
        actor = self._actor
        actor.check()
        if actor.world.store_is_away(actor.name, actor.world.loop.now_s):
            raise StoreUnavailableError(f"{actor.name}: the store does not answer this machine")
        if actor.store_is_cut() or actor.hit(actor.faults.store_refused, "store_refused"):
            raise StoreUnavailableError(f"{actor.name}: the store does not answer")

    def _answer(self) -> None:
        actor = self._actor
        if actor.hit(actor.faults.store_lost_answer, "store_lost_answer"):
            raise StoreUnavailableError(f"{actor.name}: the store's answer is lost")

    def _is_hidden(self, name: str) -> bool:
        writer, until_s = self._inner.hidden.get(name, (None, 0.0))
        return writer is not self._actor and self._actor.world.loop.now_s < until_s
