"""Names of streams, subjects and objects: all of a run's addresses, made and read in one place.

No other module takes subjects apart: `parse_subject` returns the parts of a subject.

Tape subjects, one stream per run (`tape_stream`):
    diloco.{run}.spec                        the run's specification, first message
    diloco.{run}.join.{learner}              a learner's new incarnation
    diloco.{run}.leave.{learner}             the clean end of an incarnation
    diloco.{run}.claim.{learner}             a learner's shares of the data
    diloco.{run}.update.{learner}.{fragment} manifests
    diloco.{run}.record.{fragment}           versions and verdicts: compare-and-swap
    diloco.{run}.settings                    settings changed while the run goes on
    diloco.{run}.quarantine.{learner}        a learner is quarantined, or released
    diloco.{run}.checkpoint                  a point from which the run can be resumed
    diloco.{run}.stop                        the stop rule was met: send what is unsent
    diloco.{run}.end                         nothing after this counts
Bounded stream (`ops_stream`): diloco.{run}.heartbeat.{learner}, diloco.{run}.rejected.{learner}
Leases, a bucket of keys and values (`leases_stream`): $KV.diloco-{run}_leases.fragment.{fragment},
    $KV.diloco-{run}_leases.aggregator.{life}, where {life} is a process's random id in hex
Broadcast, in no stream: diloco.{run}.round.{fragment}  a round is open
Objects: each learner has a prefix of its own, so that one access rule keeps a learner within it.
"""

import re
from functools import lru_cache
from typing import Literal, NamedTuple, cast

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_VERSION_OBJECT = re.compile(r"([0-9]{8,19})-(delta|view|outer|record)-[0-9a-f]{32}")
_INDEX = re.compile(r"[0-9]{1,19}")
_NAMED_BY_CONTENT = re.compile(rf"{NAME.pattern}/global/.*-([0-9a-f]{{32}})")
_RUN = rf"(?P<run>{NAME.pattern})"
_LEARNER = rf"(?P<learner>{NAME.pattern})"
# Without leading zeros, so that a fragment has exactly one subject.
_FRAGMENT = r"(?P<fragment>0|[1-9][0-9]{0,18})"
_SUBJECTS = tuple(
    re.compile(form)
    for form in (
        rf"diloco\.{_RUN}\.(?P<kind>update)\.{_LEARNER}\.{_FRAGMENT}",
        rf"diloco\.{_RUN}\.(?P<kind>record|round)\.{_FRAGMENT}",
        rf"diloco\.{_RUN}\.(?P<kind>join|leave|claim|quarantine|heartbeat|rejected)\.{_LEARNER}",
        rf"diloco\.{_RUN}\.(?P<kind>spec|settings|checkpoint|stop|end)",
        rf"\$KV\.diloco-{_RUN}_leases\.fragment\.{_FRAGMENT}",
        rf"\$KV\.diloco-{_RUN}_leases\.aggregator\.(?P<life>[0-9a-f]{{32}})",
    )
)
_SHARD = re.compile(
    rf"({NAME.pattern})/update/([0-9]{{1,19}})/"
    r"([0-9]{1,19})-([0-9]{1,19})-([0-9]{1,19})"
    rf"\.{_INDEX.pattern}"
)


def valid_name(name: str) -> bool:
    """True if `name` may name a run or a learner, as a subject token and a path component."""
    return NAME.fullmatch(name) is not None


def tape_stream(run: str) -> str:
    """Returns the name of the stream with the run's events, its tape."""
    return f"diloco-{run}"


def ops_stream(run: str) -> str:
    """Returns the name of the bounded stream of heartbeats and rejections.

    A run's name cannot contain '_', so this is never the name of another run's tape.
    """
    return f"diloco-{run}_ops"


def leases_bucket(run: str) -> str:
    """Returns the name of the leases' key-value bucket (NATS's term)."""
    return f"diloco-{run}_leases"


def leases_stream(run: str) -> str:
    """Returns the name of the stream that stores the leases' bucket."""
    return f"KV_{leases_bucket(run)}"


def leases_subjects(run: str) -> list[str]:
    """Returns a list with the one subject pattern that all leases match."""
    return [f"$KV.{leases_bucket(run)}.>"]


def streams(run: str) -> tuple[str, ...]:
    """Returns the names of a run's streams: its tape, heartbeats and rejections, leases."""
    return tape_stream(run), ops_stream(run), leases_stream(run)


def fragment_lease(run: str, fragment: int | str) -> str:
    """Returns the subject of the lease of a fragment."""
    return f"$KV.{leases_bucket(run)}.fragment.{fragment}"


def aggregator_lease(run: str, life: str) -> str:
    """Returns the subject of the lease by which an aggregator process shows that it runs.

    Args:
        run: the run's name.
        life: the process's random id, 32 hex digits.
    """
    return f"$KV.{leases_bucket(run)}.aggregator.{life}"


def tape_subjects(run: str) -> list[str]:
    """Returns the subject patterns of all messages on the tape."""
    return [
        spec(run),
        join(run, "*"),
        leave(run, "*"),
        claim(run, "*"),
        update(run, "*", "*"),
        record(run, "*"),
        settings(run),
        quarantine(run, "*"),
        checkpoint(run),
        stop(run),
        end(run),
    ]


def ops_subjects(run: str) -> list[str]:
    """Returns the subject patterns of the stream of heartbeats and rejections."""
    return [heartbeat(run, "*"), rejected(run, "*")]


def spec(run: str) -> str:
    """Returns the subject of the run's specification."""
    return f"diloco.{run}.spec"


def join(run: str, learner: str) -> str:
    """Returns the subject of a learner's joins."""
    return f"diloco.{run}.join.{learner}"


def leave(run: str, learner: str) -> str:
    """Returns the subject on which a learner announces that it leaves the run."""
    return f"diloco.{run}.leave.{learner}"


def claim(run: str, learner: str) -> str:
    """Returns the subject of a learner's claims to shares of the data."""
    return f"diloco.{run}.claim.{learner}"


def update(run: str, learner: str, fragment: int | str) -> str:
    """Returns the subject of a learner's manifests for a fragment."""
    return f"diloco.{run}.update.{learner}.{fragment}"


def record(run: str, fragment: int | str) -> str:
    """Returns the subject of a fragment's records."""
    return f"diloco.{run}.record.{fragment}"


def settings(run: str) -> str:
    """Returns the subject of messages that change settings."""
    return f"diloco.{run}.settings"


def quarantine(run: str, learner: str) -> str:
    """Returns the subject of messages that quarantine or release a learner."""
    return f"diloco.{run}.quarantine.{learner}"


def checkpoint(run: str) -> str:
    """Returns the subject of the run's checkpoints."""
    return f"diloco.{run}.checkpoint"


def stop(run: str) -> str:
    """Returns the subject of the stop message."""
    return f"diloco.{run}.stop"


def end(run: str) -> str:
    """Returns the subject of the end message."""
    return f"diloco.{run}.end"


def heartbeat(run: str, learner: str) -> str:
    """Returns the subject of a learner's heartbeats."""
    return f"diloco.{run}.heartbeat.{learner}"


def rejected(run: str, learner: str) -> str:
    """Returns the subject of the copies of a learner's rejected updates."""
    return f"diloco.{run}.rejected.{learner}"


def round_open(run: str, fragment: int | str) -> str:
    """Returns the subject of the broadcast that a round is open."""
    return f"diloco.{run}.round.{fragment}"


Kind = Literal[
    "spec", "join", "leave", "claim", "update", "record", "settings", "quarantine", "checkpoint",
    "stop", "end", "heartbeat", "rejected", "round", "lease",
]  # fmt: skip


class Subject(NamedTuple):
    """The parts of a subject; a part that subjects of this kind lack is None.

    Attributes:
        life: the random id of an aggregator process, in the subject of its lease.
    """

    kind: Kind
    run: str
    learner: str | None = None
    fragment: int | None = None
    life: str | None = None


@lru_cache(maxsize=1 << 14)
def parse_subject(subject: str) -> Subject | None:
    """Parses a subject without wildcards; returns None if this project has no such subject."""
    for form in _SUBJECTS:
        if found := form.fullmatch(subject):
            said = found.groupdict()
            fragment = said.get("fragment")
            return Subject(
                cast("Kind", said.get("kind", "lease")),
                said["run"],
                said.get("learner"),
                None if fragment is None else int(fragment),
                said.get("life"),
            )
    return None


def subject_learner(subject: str) -> str | None:
    """Returns the learner that a subject names; None if it names none."""
    parsed = parse_subject(subject)
    return parsed.learner if parsed else None


def learners_prefix(run: str) -> str:
    """Returns the prefix of all learners' objects."""
    return f"{run}/learner/"


def learner_prefix(run: str, learner: str) -> str:
    """Returns the prefix of all objects that a learner may create."""
    return f"{learners_prefix(run)}{learner}/"


def updates_prefix(run: str, learner: str, fragment: int) -> str:
    """Returns the prefix of the shards of a learner's updates of a fragment."""
    return f"{learner_prefix(run, learner)}update/{fragment}/"


def shard(
    run: str, learner: str, fragment: int, epoch: int, incarnation: int, seq: int, index: int
) -> str:
    """Returns the name of shard `index` of an update; incarnations are unique within `epoch`."""
    return f"{shards_prefix(run, learner, fragment, epoch, incarnation, seq)}{index}"


def shards_prefix(
    run: str, learner: str, fragment: int, epoch: int, incarnation: int, seq: int
) -> str:
    """Returns the prefix of an update's shards."""
    return f"{updates_prefix(run, learner, fragment)}{epoch}-{incarnation}-{seq}."


def is_index(text: str) -> bool:
    """True if `text` may follow `shards_prefix` in a shard's name, as the shard's number."""
    return _INDEX.fullmatch(text) is not None


def learner_checkpoints(run: str, learner: str) -> str:
    """Returns the prefix of a learner's uploaded checkpoints."""
    return f"{learner_prefix(run, learner)}checkpoint/"


def checkpoint_part(host: int, hosts: int) -> str:
    """Returns the folder of one host's checkpoint parts.

    Args:
        host: the number of the host; in a learner of several slices, in its slice.
        hosts: the number of the learner's hosts, or of those of each slice.
    """
    return f"host-{host}-of-{hosts}/"


def learner_checkpoint(run: str, learner: str, local_step: int, digest: str, part: str = "") -> str:
    """Returns the name of the object with a learner's checkpoint.

    Args:
        run: the run's name.
        learner: the learner's name.
        local_step: the learner's inner steps at the checkpoint; names sort by it.
        digest: the checkpoint's digest, with which the name ends.
        part: of a learner of several hosts, the folder that `checkpoint_part` returns.
    """
    return f"{learner_checkpoints(run, learner)}{part}{local_step:012d}-{digest}"


def global_prefix(run: str) -> str:
    """Returns the prefix of all objects that aggregators may create."""
    return f"{run}/global/"


def fragment_prefix(run: str, fragment: int) -> str:
    """Returns the prefix of the objects that aggregators store for a fragment."""
    return f"{global_prefix(run)}{fragment}/"


def version_object(run: str, fragment: int, version: int, what: str, digest: str) -> str:
    """Returns the name of an object of a version; the name ends in the object's digest.

    `what` is the object's kind: "delta", "view", "outer" (outer state) or "record".
    """
    return f"{fragment_prefix(run, fragment)}{version:08d}-{what}-{digest}"


def content_digest(name: str) -> str | None:
    """Returns the digest of an object's bytes, which its name states; None if it states none.

    Names of all objects below `global_prefix` do: versions' objects, layouts, constants and tiles.
    """
    found = _NAMED_BY_CONTENT.fullmatch(name)
    return found[1] if found else None


class VersionObject(NamedTuple):
    """The version, and the kind `what`, in an object's name that `version_object` made."""

    version: int
    what: str


def parse_version_object(run: str, fragment: int, name: str) -> VersionObject | None:
    """Parses a name below `fragment_prefix`; returns None if it is not a version's object."""
    found = _VERSION_OBJECT.fullmatch(name.removeprefix(fragment_prefix(run, fragment)))
    return VersionObject(int(found[1]), found[2]) if found else None


class ShardName(NamedTuple):
    """The parts of a shard's name: the update that the shard belongs to."""

    learner: str
    fragment: int
    epoch: int
    incarnation: int
    seq: int


def parse_shard(run: str, name: str) -> ShardName | None:
    """Parses a name below `learners_prefix`; returns None if it is not a shard's."""
    found = _SHARD.fullmatch(name.removeprefix(learners_prefix(run)))
    return ShardName(found[1], *(int(found[part]) for part in range(2, 6))) if found else None


def checkpoint_prefix(run: str) -> str:
    """Returns the prefix of the run's checkpoint files."""
    return f"{run}/checkpoint/"


def checkpoint_object(run: str, name: str) -> str:
    """Returns the name of the object with the run's checkpoint `name`."""
    return f"{checkpoint_prefix(run)}{name}"


def scores_prefix(run: str) -> str:
    """Returns the prefix of the scores of the run's views."""
    return f"{run}/score/"


def score_object(run: str, epoch: int, global_step: int, digest: str) -> str:
    """Returns the name of a score's object; such names sort by epoch and global step."""
    return f"{scores_prefix(run)}{epoch:04d}-{global_step:012d}-{digest}"


def positions_object(run: str, epoch: int, digest: str) -> str:
    """Returns the name of the object with the data positions at the beginning of an epoch."""
    return f"{run}/positions/{epoch:04d}-{digest}"


def epoch_prefix(run: str) -> str:
    """Returns the prefix of the objects that reserve epochs."""
    return f"{run}/epoch/"


def epoch_object(run: str, epoch: int) -> str:
    """Returns the name of the object that reserves an epoch, so that two tapes never share one."""
    return f"{epoch_prefix(run)}{epoch:04d}"


def proof(prefix: str) -> str:
    """Returns the name of the object that proves that a daemon may write below `prefix`."""
    return f"{prefix}proof"


def layout_object(run: str, digest: str) -> str:
    """Returns the name of the object that holds the run's layout."""
    return f"{global_prefix(run)}layout-{digest}"


def constants_object(run: str, digest: str) -> str:
    """Returns the name of the index of the leaves that are not synchronized (`frozen.py`)."""
    return f"{global_prefix(run)}constants-{digest}"


def tile_object(run: str, digest: str) -> str:
    """Returns the name of one tile of a leaf that is not synchronized (`frozen.py`)."""
    return f"{global_prefix(run)}tile-{digest}"
