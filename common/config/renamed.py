"""Keys that had another name once, or are gone.

A file with an old name is refused with the new one. A run's specification is on its tape and cannot
be edited, so there the old names are read as the new ones.
"""

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "sync.snapshot_every": "sync.snapshot_interval_versions",
    "sync.announce_again_s": "sync.reannounce_timeout_s",
    "outer.delay": "outer.delay_rounds",
    "staleness.knee": "staleness.threshold",
    "staleness.maximum": "staleness.max_versions",
    "quorum.live_s": "quorum.liveness_timeout_s",
    "learner.heartbeat_s": "learner.heartbeat_interval_s",
    "learner.compile_cache": "learner.compilation_cache_dir",
    "learner.leave_s": "learner.drain_timeout_s",
    "learner.checkpoint_every_s": "learner.checkpoint_interval_s",
    "learner.hang_s": "learner.watchdog_timeout_s",
    "aggregator.lease_s": "aggregator.lease_ttl_s",
    "gc.replay_s": "gc.replay_window_s",
}

# Keys that mean nothing any more, with the reason; a specification's are passed over.
_NORMS = "an update that is too long is shortened, and never rejected"
REMOVED = {"bounds.norm_reject": _NORMS, "bounds.norm_refuse": _NORMS}


def with_new_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """Sections with the names of today; a key that has both names keeps both, and is refused."""
    return {name: _renamed(name, section) for name, section in document.items()}


def _renamed(name: str, section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    new = {key: RENAMED.get(f"{name}.{key}", "").partition(".")[2] for key in section}
    return {
        new[key] if new[key] and new[key] not in section else key: value
        for key, value in section.items()
        if f"{name}.{key}" not in REMOVED
    }
