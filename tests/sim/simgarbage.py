"""The checker of garbage collection: computes by itself which objects recovery needs.

The checker reads each fragment's records as they are stored. By these records it checks every
object that is about to be deleted and every subject that is about to be trimmed.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from diloco.common.protocol import names, wire


class Made(NamedTuple):
    """A version: its record's stream sequence and time, and whether it was merged from updates."""

    version: int
    record_seq: int
    stored_at_s: float
    merged: bool


@dataclass
class Needs:
    """The objects that a fragment's records name.

    Attributes:
        wholes: versions whose view and outer state are stored, ascending.
        deltas, states, shards: the version to which each object belongs, by the object's name.
        pinned: (checkpoint, version) for each checkpoint with a file.
    """

    made: list[Made] = field(default_factory=list)
    wholes: list[int] = field(default_factory=list)
    deltas: dict[str, int] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)
    pinned: list[tuple[str, int]] = field(default_factory=list)
    newest_stored_s: float = 0.0
    position: int = 1

    def note(self, record: wire.Record, record_seq: int, stored_at_s: float) -> None:
        """Note a record that has just been stored."""
        self.newest_stored_s, self.position = stored_at_s, record.position
        if record.what == "verdict":
            return
        version = record.version
        merged = record.what == "version" and version > 0
        self.made.append(Made(version, record_seq, stored_at_s, merged))
        if record.snapshot_version == record.outer_version == version:
            self.wholes.append(version)
            self.states[record.snapshot.name] = self.states[record.outer.name] = version
        if record.delta is not None:
            self.deltas[record.delta.name] = version
        for taken in record.inputs:
            for shard in taken.shards:
                self.shards[shard.name] = version

    def floor(self, replay_window_s: float) -> Made:
        """Returns the oldest version from which recovery may begin, checkpoints aside."""
        since_s = self.newest_stored_s - replay_window_s
        floor = self.wholes[-2:][0]
        recent = next((made for made in self.made if made.stored_at_s > since_s), None)
        if recent is not None:
            below = [v for v in self.wholes if v < recent.version + (not recent.merged)]
            floor = min(floor, below[-1] if below else self.wholes[0])
        return next(made for made in self.made if made.version == floor)


class GarbageChecker:
    """Checks that no needed object is deleted and no needed message is trimmed.

    Args:
        run: the run's name.
        fragments: the number of fragments.
        replay_window_s, keep_checkpoints: the settings of the run's collectors.
        hold: raises a `Violation` unless its first argument is true.
        sent: returns whether the update of a shard may still be merged.
        stored: returns whether the store has an object.
    """

    def __init__(
        self,
        run: str,
        fragments: int,
        *,
        replay_window_s: float,
        keep_checkpoints: int,
        hold: Callable[[bool, str, object, str], None],
        sent: Callable[[names.ShardName], bool],
        stored: Callable[[str], bool],
    ) -> None:
        self._run = run
        self._replay_s = replay_window_s
        self._keep = keep_checkpoints
        self._hold = hold
        self._sent = sent
        self._stored = stored
        self.needs: Mapping[int, Needs] = {fragment: Needs() for fragment in range(fragments)}
        self._older: frozenset[str] = frozenset()
        self.deleted = 0
        self.trimmed = 0

    def note_checkpoint(self, file: wire.CheckpointFile) -> bool:
        """Note a checkpoint's file, whose versions must stay from now on; return if it is the newest.

        Before its file is stored a checkpoint is not made, and may be tried again.
        """
        for needs, record in zip(self.needs.values(), file.records, strict=True):
            needs.pinned.append((file.name, record.version))
        return max(self.needs[0].pinned)[0] == file.name

    def begin_epoch(self, file: wire.CheckpointFile, stored: Iterable[str]) -> None:
        """Begin anew, since a new tape begins with a checkpoint, and the store has these objects."""
        # None of the new tape's records will name those that its checkpoint does not need.
        self._older = frozenset(stored)
        pinned = [(file.name, record.version) for record in file.records]
        self.needs = {f: Needs(pinned=[one]) for f, one in enumerate(pinned)}

    def on_deleted(self, name: str) -> None:
        """Checks an object that is about to be deleted."""
        self.deleted += 1
        shard = names.parse_shard(self._run, name)
        if shard is not None:
            self._check_shard(name, shard)
            return
        for fragment, needs in self.needs.items():
            made = names.parse_version_object(self._run, fragment, name)
            if made is not None:
                self._check_made(f"fragment {fragment}", needs, name, made)
                return
        stale = name.startswith(names.checkpoint_prefix(self._run))
        self._hold(stale, "garbage", name, "is no garbage")

    def _check_shard(self, name: str, shard: names.ShardName) -> None:
        needs = self.needs[shard.fragment]
        about = f"fragment {shard.fragment}"
        self._hold(not self._sent(shard), "garbage", about, f"{name} may still be merged")
        version = needs.shards.get(name)
        floor = needs.floor(self._replay_s)
        free = version is None or version <= floor.version
        self._hold(free, "garbage", about, f"{name} made {version}, above {floor}")

    def _check_made(self, about: str, needs: Needs, name: str, made: names.VersionObject) -> None:
        newest, floor = needs.made[-1].version, needs.floor(self._replay_s)
        known = made.version <= newest or name in self._older
        self._hold(known, "garbage", about, f"{name} is not committed yet")
        state, delta = needs.states.get(name), needs.deltas.get(name)
        free = state is None or state < floor.version
        self._hold(free, "garbage", about, f"{name} is needed from {floor} on")
        free = delta is None or delta <= floor.version
        self._hold(free, "garbage", about, f"{name} is needed from {floor} on")
        # A file whose storing was not acknowledged may be lost when the power fails.
        whole = (
            (checkpoint, version)
            for checkpoint, version in needs.pinned
            if self._stored(names.checkpoint_object(self._run, checkpoint))
        )
        # The newest by name: a checkpoint's message may be stored after that of a later checkpoint.
        pinned = state is not None and state in dict(sorted(whole)[-self._keep :]).values()
        self._hold(not pinned, "garbage", about, f"{name} is kept by a checkpoint")

    def on_trimming(self, stream: str, subject: str, below_seq: int) -> None:
        """Checks a subject whose messages below a sequence are about to be removed."""
        self.trimmed += 1
        if stream != names.tape_stream(self._run):
            return
        about = names.parse_subject(subject)
        kind = about.kind if about else ""
        if about and about.fragment is not None:
            needs = self.needs[about.fragment]
            limit = needs.floor(self._replay_s).record_seq if kind == "record" else needs.position
            what = f"fragment {about.fragment}"
            self._hold(below_seq <= limit, "trim", what, f"{below_seq} is above {limit}")
        elif kind in ("join", "leave"):
            position = min(needs.position for needs in self.needs.values())
            self._hold(below_seq <= position, "trim", subject, f"{below_seq} is above {position}")
        else:
            self._hold(False, "trim", subject, "is never trimmed")
