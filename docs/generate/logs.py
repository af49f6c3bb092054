"""docs/logs.md: every event that the code logs, with its level, fields and meaning."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from diloco.common.protocol import wire
from docs.generate.markdown import table

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "aggregator", "learner", "diloco")
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
# Files whose actions are the kinds of these messages, logged with their fields.
NAMED_BY_DATA = {"aggregator/stop_and_end.py": (wire.Stop, wire.End)}
# By action; where an action is logged in two ways, also by action and a field that only one has.
MEANINGS = {
    "cache_failed": (
        "the region's cache is away, slow or gives wrong bytes: the bucket is read for half a"
        " minute"
    ),
    "formation": "a supervisor: the slices that train together from now on, and how often in a row"
    " each has broken a formation, for which it stays out longer each time",
    "work_carried": "this life goes on with what the life before had not sent",
    "announced_uncovered": "an update was announced before a snapshot of it was stored",
    "parts_copied": "a supervisor has copied the parts of `count` checkpoints from another slice",
    "part_not_copied": "an older checkpoint is taken; see the other supervisor's log",
    "supervisor_refused": "who called does not know this learner's credentials",
    "supervisor_unreached": "calls to that address of `learner.peers` fail for ten seconds",
    "supervisor_unexpected": "who called has another `learner.peers`, or this host's number",
    "supervisor_unreadable": "give all hosts of a learner the same release",
    "no_spare_process": "the next training process imports what it needs within the pause",
    "training_ended": "a training process has failed; its own lines say why",
    "training_silent": "a training process hangs and is killed",
    "cache_unusable": "compiled programs cannot be kept or read: they are compiled again",
    "rehearsing": "a learner of several slices compiles the step of one slice fewer, for its loss",
    "rehearsal_failed": "that step is compiled when a slice is lost",
    "compiled": "the merge is compiled, at the first start on a machine",
    "started fragments": "an aggregator: the number of fragments, or those that it is pinned to",
    "started every_s": "`diloco evaluate --follow` scores from now on",
    "started position": (
        "a learner has joined, and trains from this data position; how long it took"
    ),
    "warned": "Python's `warnings` of a library. Of the compilation cache: empty its folder",
    "accelerator_unused": (
        "JAX trains on the CPU of a machine with accelerators ([installing](install.md))"
    ),
    "operators_credentials": (
        "a daemon has the operator's credentials: give it [its own](operations.md#credentials)"
    ),
    "configuration": "a setting is known to train badly",
    "no_gradient": (
        "the gradient of these trained leaves was zero: the loss does not use them, or they "
        "belong to the frozen tree"
    ),
    "recovered": "a fragment is at its newest record; `merged_again` versions were recomputed",
    "committed": "a record is on the tape; `took_s` since the round closed",
    "overtaken": (
        "another owner, or a rollback, has committed a record of this fragment; it is "
        "recovered from there"
    ),
    "fenced": "these fragments have another owner now; this aggregator stands by",
    "renewals_lost": (
        "no renewal of the leases was stored for 8 s: [disk full](../runbooks/disk-full.md), "
        "[NATS unreachable](../runbooks/nats-away.md)"
    ),
    "cut_off_from_store": (
        "the store does not answer this aggregator, which owns `fragments`: those that it answers"
        " take them over: [the store is away](../runbooks/store-away.md)"
    ),
    "store_answers_again": "after `cut_off_from_store`: it serves fragments again",
    "renewals_resumed": "after `renewals_lost`: a renewal is stored again",
    "leases_left": "NATS was unreachable at the end; leases expire after this time",
    "collected": "garbage is deleted: `objects` by kind; version `floor` is the oldest that stays",
    "not_collected": "tried again after the next snapshot",
    "checkpoint_made": "the run's checkpoint is in the store",
    "checkpoint_overtaken": (
        "garbage collection was quicker; a checkpoint of newer versions is made"
    ),
    "checkpoint_failed": "the run's newest checkpoint cannot be read, or none be made; told once",
    "scores_unread": "held-out losses cannot be read for [metrics](metrics.md); told once",
    "check_broke": "a bug in the check of checkpoints or scores, with its trace; it is made again",
    "collection_failed": "a bug, with its trace; training continues",
    "unreadable": "an invalid message that is no update; it is skipped",
    "state_skipped": "a stored view or outer state is damaged or gone; the one before is taken",
    "snapshot_skipped": "a stored view is damaged or gone; the one before is loaded",
    "fragment_refused": (
        "stored objects did not give this aggregator the digests: it gives the fragment up, and "
        "others try ([runbook](../runbooks/fragment-stopped.md))"
    ),
    "fragment_stopped": (
        "every live aggregator that may serve the fragment refuses it: it is stalled "
        "([runbook](../runbooks/digest-mismatch.md))"
    ),
    "ignored detail": (
        "messages that are no updates, `count` since the last line ([reasons](protocol.md#reasons))"
    ),
    "alert_refused": "the webhook refused a message, which is dropped ([alerts](watch.md#alerts))",
    "guarding": "`diloco host guard` reads the tape",
    "unwatched": "the guard cannot ask this server what its connections send; told once",
    "revoked": (
        "a learner flooded tape or servers; its credentials are revoked "
        "([runbook](../runbooks/credentials.md))"
    ),
    "reload_failed": "reload the servers by hand",
    "quarantined": (
        "a learner sent too much that cannot be merged "
        "([runbook](../runbooks/quarantined-learner.md))"
    ),
    "ignored": "changed settings that cannot be read",
    "settings": "changed settings are in force",
    "rejection_not_shown": "the copy of a verdict for people was lost",
    "stop": "the stop is on the tape",
    "end": "the end is on the tape",
    "ended": "the end was read",
    "tape_nearly_full": (
        "80 % of `bus.tape_max_bytes` or more ([runbook](../runbooks/tape-full.md))"
    ),
    "life_expired": (
        "a silent learner's shares are free from this position on; `lost`: batches before it "
        "that are in no update, by fragment"
    ),
    "stopped": "the aggregator ends in order",
    "waiting": "NATS or the store is unreachable; it is tried again",
    "resumed": "after `waiting`: it works again",
    "reloading": "a delta or record is gone or damaged; the newest view is loaded",
    "record_skipped": (
        "a record is missing or damaged; a later one, or the newest view, takes its place"
    ),
    "version_skipped": (
        "a follower cannot have this version ([runbook](../runbooks/missing-object.md)); the next "
        "one takes its place"
    ),
    "served": "`diloco follow`: `latest` is this version",
    "run_over": "the run has ended, and what follows it ends too",
    "command_failed": "what `--exec` names failed; the version stays as it is",
    "tape_changed": "a follower goes on with the run's new tape, once that is there",
    "stale_read": "a lagging replica answered; the message that the leader names is read instead",
    "work_lost": "a crash lost so many batches of each fragment; data resumes behind them",
    "checkpoint_saved": "a checkpoint is on disk; training waited for `stall_s`",
    "checkpoint_uploaded": "a checkpoint is in the object store too",
    "checkpoint_failed local_step": (
        "a checkpoint could not be made or uploaded; training continues"
    ),
    "checkpoint_restored global_step": (
        "the inner optimizer resumes from a checkpoint; `where` is `folder`, `store` or "
        "`warm_start`, `of` its learner"
    ),
    "checkpoint_restored": "one host of several resumes from its part",
    "checkpoint_skipped": "damaged, unfinished or of something else; the one before is tried",
    "progress": "on a terminal only: how training goes",
    "left": "nothing was trained",
    "left local_step": "the leave is announced",
    "left_unsent": (
        "after `learner.drain_timeout_s`: these steps, summed over these fragments, are lost"
    ),
    "left_silently": "the leave could not be announced in time",
    "sent": "an update, built on `version`, is announced",
    "arrived": "a version is adopted at the next step",
    "reading_failed": "a bug, with its trace; it is tried again",
    "merging_failed": "a bug, with its trace; the sum is recomputed with this update last",
    "heartbeat_lost": "one heartbeat was not stored",
    "heartbeats_lost": (
        "none was stored for 8 s: the learner counts as dead: [disk "
        "full](../runbooks/disk-full.md), [NATS unreachable](../runbooks/nats-away.md)"
    ),
    "heartbeats_resumed": "after `heartbeats_lost`: a heartbeat is stored again",
    "rounds_outrun": (
        "three updates in a row covered ten times H steps ([`run.steps`](library.md#the-rules))"
    ),
    "unanswered": "no record for longer than a round takes: there may be no aggregator",
    "answered": "after `unanswered`: a record has come",
    "stopped_following": "the learner reads no more records",
}


class Event(NamedTuple):
    """A way in which an action is logged: by a call of a logger, at a level, with these fields."""

    action: str
    level: str
    fields: tuple[str, ...]

    @property
    def key(self) -> str:
        """The key in `MEANINGS`: action and a field if there is such a key, else the action."""
        named = (f"{self.action} {field}" for field in self.fields)
        return next((key for key in named if key in MEANINGS), self.action)


def logged() -> Iterator[Event]:
    """Yields the events of the code: calls of a method of `LEVELS` on a name ending in "logger"."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in LEVELS
                    and ast.unparse(node.func.value).endswith("logger")
                ):
                    yield from _events_of(node, node.func.attr, file)


def _events_of(call: ast.Call, level: str, file: str) -> Iterator[Event]:
    action = call.args[0]
    if isinstance(action, ast.Constant):
        yield Event(str(action.value), level, tuple(key.arg or "**" for key in call.keywords))
        return
    assert file in NAMED_BY_DATA, f"{file}: an action that cannot be found by searching for it"
    for message in NAMED_BY_DATA[file]:
        fields = tuple(name for name in message.model_fields if name != "run")
        yield Event(str(message.kind), level, fields)


def events() -> list[Event]:
    """Returns every event once, sorted by action; its fields are in the order of its first call."""
    found = {(one.action, one.level, frozenset(one.fields)): one for one in reversed([*logged()])}
    return sorted(found.values())


def blocks() -> dict[str, str]:
    """Returns the block "events": the table of all events."""
    rows = [
        (
            f"`{one.action}`",
            one.level,
            ", ".join(f"`{field}`" for field in one.fields) or "-",
            MEANINGS[one.key],
        )
        for one in events()
    ]
    return {"events": table(["action", "level", "fields", "meaning"], rows)}
