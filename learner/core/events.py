"""The rules of the learner's core, the events that it takes, and the effects that it returns."""

from dataclasses import dataclass
from typing import NamedTuple

from diloco.common.process.config import SyncSection
from diloco.common.protocol.layout import Layout


# The rules are an argument of every call and no part of the state: the run's settings may change
# at any message, and the state's meaning must not depend on earlier settings.
@dataclass(frozen=True, kw_only=True, slots=True)
class SyncRules:
    """The run's settings that the core needs."""

    interval_steps: int
    warmup_steps: int
    warmup_interval_steps: int
    min_steps: int
    overlap_steps: int
    reannounce_timeout_s: float
    lockstep: bool
    overwrite: bool
    blend: float
    averaged: tuple[int, ...] = ()
    paused: bool = False


def sync_rules(
    sync: SyncSection, layout: Layout | None = None, *, paused: bool = False
) -> SyncRules:
    """Returns the rules of a run's learners; without `layout` no fragment is averaged state."""
    fragments = layout.fragments if layout is not None else ()
    return SyncRules(
        interval_steps=sync.interval_steps,
        warmup_steps=sync.warmup_steps,
        warmup_interval_steps=sync.warmup_interval_steps,
        min_steps=sync.min_steps,
        overlap_steps=sync.overlap_steps,
        reannounce_timeout_s=sync.reannounce_timeout_s,
        lockstep=sync.mode == "lockstep",
        overwrite=sync.adopt == "overwrite",
        blend=sync.blend if sync.adopt == "blend" else 1.0,
        averaged=tuple(fragment.index for fragment in fragments if fragment.averaged),
        paused=paused,
    )


# Events


# A record enters the core only once its tensors are on the devices: so `Adopt` is a small step
# at the boundary that has it, whatever the network does (never waits).
class Ready(NamedTuple):
    """A record that has arrived and whose delta, if it has one, is decoded.

    `resolved_seq`: the highest update of this incarnation that the record resolves; `rolled_back`:
    a rollback lies between the version adopted before and this one; `merged_seq`: this
    incarnation's newest update known to be in this version, 0 for none; `made_at_s`: when the
    record was made, 0 if unknown.
    """

    fragment: int
    record_seq: int
    version: int
    view_digest: str
    global_step: int
    resolved_seq: int
    rolled_back: bool = False
    merged_seq: int = 0
    made_at_s: float = 0.0


# The only event that is a boundary. It comes after the step whose work it counts, so that an
# update sent at this boundary covers that step.
class Stepped(NamedTuple):
    """An inner step was taken over `tokens` tokens; `steps` is 0 for the flush after the end."""

    now_s: float
    tokens: int
    steps: int = 1


class RoundOpened(NamedTuple):
    """The aggregator has opened a round that makes `version`."""

    fragment: int
    version: int


class Published(NamedTuple):
    """The manifest of an update is on the tape."""

    now_s: float
    fragment: int
    seq: int


class Changed(NamedTuple):
    """The run's settings have changed; the core is called with `rules` from now on."""

    rules: SyncRules


class Stop(NamedTuple):
    """The run's stop message arrived."""


class End(NamedTuple):
    """Event: the run's end was read; updates still in flight get no further answer."""


class Leave(NamedTuple):
    """Event: this learner was asked to leave."""


Event = Stepped | Ready | RoundOpened | Published | Changed | Stop | End | Leave


# Effects


class Adopt(NamedTuple):
    """Apply a record's delta to view and parameters; drop the update in flight if `resolved`.

    After a rollback (`ready.rolled_back`) the parameters become the view, and codes in flight are
    forgotten. With `blended`, only a share of the training since the resolved update stays.
    """

    ready: Ready
    resolved: bool
    blended: bool = False


class Send(NamedTuple):
    """Encode the fragment's unsent work, keep its codes as in flight, upload, publish."""

    fragment: int
    seq: int
    base_version: int
    base_digest: str
    steps: int
    tokens: int
    final: bool


class Republish(NamedTuple):
    """Announce again an update that no record has resolved for long."""

    fragment: int
    seq: int
    attempt: int


# Without it, the last round would wait its whole deadline for a learner with nothing to send.
class Finished(NamedTuple):
    """Tell the aggregator that no more updates of these fragments follow."""

    fragments: tuple[int, ...]


Effect = Adopt | Send | Republish | Finished


class Start(NamedTuple):
    """The version of a fragment with which a learner begins."""

    version: int
    view_digest: str
    record_seq: int
    global_step: int
