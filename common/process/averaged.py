"""Averaged state: the settings of a fragment that holds no parameters.

State that is averaged, such as batch statistics, is no direction in which somebody descends: its
version is the mean of what the learners have, weighted by tokens, and learners take it over as it
is. Numbers travel in float32, since a variance that is rounded below zero is none. What fits no
convex average is left out: an update on an older version would be added to a mean that has
moved meanwhile, so it counts for nothing.
"""

from diloco.common.process.config import RunSettings, SyncSection
from diloco.common.protocol.layout import Fragment, Layout

_SYNC = {"codec": "float32", "delta_codec": "float32", "adopt": "overwrite", "alpha": 0.0}
_OUTER = {
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "momentum": 0.0,
    "merge": "average",
    "participation": False,
}
# The discount of an update that is a version old is a millionth; a limit would reject it, which
# says of an honest learner that something is wrong.
_STALENESS = {"rule": "inverse", "rate": 1e6, "max_versions": 0}
# A mean needs no norm: numbers of state have sizes of their own.
_BOUNDS = {"norm_clip": 1e30}


def settings_of(settings: RunSettings, layout: Layout, fragment: int) -> RunSettings:
    """The settings by which a fragment is synchronized: the run's, or those of averaged state."""
    return averaged(settings) if layout.fragments[fragment].averaged else settings


def averaged(settings: RunSettings) -> RunSettings:
    """A run's settings as they hold for averaged state."""
    return settings.model_copy(
        update={
            "sync": settings.sync.model_copy(update=_SYNC),
            "outer": settings.outer.model_copy(update=_OUTER),
            "staleness": settings.staleness.model_copy(update=_STALENESS),
            "bounds": settings.bounds.model_copy(update=_BOUNDS),
        }
    )


def sync_of(sync: SyncSection, fragment: Fragment) -> SyncSection:
    """How learners send and adopt a fragment: as the run says, or as averaged state."""
    return sync.model_copy(update=_SYNC) if fragment.averaged else sync
