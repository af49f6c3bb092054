"""The doctor's findings on checkpoints, and on the store's owner and permissions."""

import os
from collections.abc import Iterator
from pathlib import Path

from diloco.common.protocol.errors import ConfigError, WireError
from diloco.common.storage import checkpoint_files
from diloco.common.storage.store import DirectoryStore, ObjectStore
from diloco.judge.doctor_findings import PERMISSIONS
from diloco.run.health_findings import CHECKPOINTS_FAIL
from diloco.run.history import History
from diloco.run.state import Finding

HOUR_S = 3600.0
# It is reported if the newest checkpoint is older than this; checkpoints are made every hour.
CHECKPOINT_S = 3 * HOUR_S
# A checkpoint's file is in the store this long after its message on the tape, or it has failed.
MAKING_S = 600.0
LISTED = 3


def newest_checkpoint(store: ObjectStore, run: str) -> tuple[str, float] | None:
    """Returns the newest complete checkpoint: its name, and its time in seconds since the epoch.

    None: there is none.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        file = checkpoint_files.load_file(store, run, None)
    except (ConfigError, WireError):
        return None
    return file.name, file.created_at_s


def checkpoints(
    history: History, made: tuple[str, float] | None, now_s: float
) -> Iterator[Finding]:
    """Yields the finding on the run's checkpoints, from which a lost NATS server is restored.

    Args:
        history: the tape.
        made: name and time of the newest complete checkpoint; None if there is none.
        now_s: the time now, in seconds since the epoch.
    """
    marks = {mark.name: mark.created_at_s for _, mark in history.checkpoints}
    since = f"the newest complete one is {made[0]}" if made else "no checkpoint is complete"
    created_s = history.specification.created_at_s
    begun = [name for name, at_s in sorted(marks.items())
             if at_s < now_s - MAKING_S and (made is None or name > made[0])]  # fmt: skip
    if begun:
        yield Finding(
            severity="error",
            about="checkpoints",
            sentence=f"{begun[-1]} was begun and is not in the store: {since}",
            advice="aggregators retry; the reason is checkpoint_failed in their logs",
            runbook=CHECKPOINTS_FAIL,
        )
    elif history.end is None and now_s - (made[1] if made else created_s) > CHECKPOINT_S:
        lost = "there is none: the run would be lost with the disk of its NATS server"
        yield Finding(
            severity="warning",
            about="checkpoints",
            sentence=f"the newest, {made[0]}, is {(now_s - made[1]) / HOUR_S:,.1f} hours old"
            if made
            else lost,
            advice="see checkpoint_failed in the aggregators' logs, and that one of them runs; by "
            "hand: diloco run checkpoint RUN",
            runbook=CHECKPOINTS_FAIL,
        )
    elif made is not None:
        yield Finding(severity="ok", about="checkpoints", sentence=f"the newest is {made[0]}")


def store_owner(store: ObjectStore) -> Iterator[Finding]:
    """Yields a finding if folders of a local store belong to another user than the store."""
    if not isinstance(store, DirectoryStore):
        return
    root = store.root
    foreign = [*_owned_by_others(root)]
    if foreign:
        listed = ", ".join(str(path) for path in foreign[:LISTED])
        more = f" and {len(foreign) - LISTED} more" if len(foreign) > LISTED else ""
        yield Finding(
            severity="error",
            about="store",
            sentence=f"{listed}{more}: not of user {root.stat().st_uid}, who owns the store: the "
            "run's daemons cannot write there",
            advice=f"chown -R --reference={root} {root}",
            runbook=PERMISSIONS,
        )


def store_fence(store: ObjectStore, *, credentials: bool) -> Iterator[Finding]:
    """Yields a warning if the store is a folder although each party has credentials on the bus."""
    if credentials and isinstance(store, DirectoryStore):
        yield Finding(
            severity="warning",
            about="store",
            sentence=f"{store.root} is a folder: a learner that can write to it can replace and "
            "delete the objects of all others, whatever its credentials allow on the bus",
            advice="use a bucket, with a prefix for each learner, where learners are not trusted",
            runbook=PERMISSIONS,
        )


def _owned_by_others(root: Path) -> Iterator[Path]:
    """Yields the folders below `root` that belong to another user."""
    owner = root.stat().st_uid
    for folder, folders, _ in os.walk(root):
        for name in folders:
            path = Path(folder) / name
            if path.stat().st_uid != owner:
                yield path


def accepts(store: ObjectStore, url: str) -> str:
    """Returns the sentence that a store accepts objects; of a folder, also from which user."""
    sentence = f"{url} accepts objects"
    if not isinstance(store, DirectoryStore):
        return sentence
    uid, owner = os.geteuid(), store.root.stat().st_uid
    if uid == owner:
        return f"{sentence} from the folder's owner, user {uid}"
    return (
        f"{sentence} from user {uid}; the folder belongs to user {owner}, as whom the run's "
        "daemons should run"
    )
