"""The rules of the learner's core, the events that it takes, and the effects that it returns."""

from dataclasses import dataclass
from typing import NamedTuple

from diloco.common.process.config import SyncSection
from diloco.common.protocol.layout import Layout


# The rules are an argument of every call and no part of the state: the run's settings may change
# at any message, and the state's meaning must not depend on earlier settings.
@dataclass(frozen=True, kw_only=True, slots=True)
class SyncRules:
    """The run's settings that the core needs, named as in the configuration's section `sync`.

    Attributes:
        lockstep: `sync.mode` is "lockstep": a learner waits for the version of each update.
        overwrite: `sync.adopt` is "overwrite": a version replaces the learner's parameters.
        blend: the share of the steps since an update that stays when its version is adopted; 1 with
            another `sync.adopt` than "blend".
        averaged: indices of the fragments of averaged state, such as batch statistics.
        paused: the run is paused: no steps are taken.
    """

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
    """Returns the rules for the learners of a run.

    Args:
        sync: the run's sync section.
        layout: the run's layout, which tells the fragments of averaged state; None: there are none.
        paused: the run is paused.
    """
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
    """A record has arrived, and the tensors that it needs, if any, are on the devices.

    Attributes:
        fragment: index of the record's fragment.
        record_seq: the record's sequence in the stream.
        version: the version that the record states.
        view_digest: the digest of that version's view.
        global_step: the run's clock at the record.
        resolved_seq: `seq` of this incarnation's newest update that is merged or rejected; 0: none.
        rolled_back: the run was rolled back since the version that was adopted before.
        merged_seq: `seq` of this incarnation's newest update that is merged; 0: none is known.
        made_at_s: when the record was made, by this learner's clock; 0: unknown.
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
    """A step boundary has come, after an inner step over `tokens` tokens.

    `steps` is 1, or 0 if no step was taken: while the learner is paused, waits or sends its last
    updates. `now_s` is the time in seconds.
    """

    now_s: float
    tokens: int
    steps: int = 1


class RoundOpened(NamedTuple):
    """The aggregator has opened the round that makes `version` of a fragment."""

    fragment: int
    version: int


class Published(NamedTuple):
    """The manifest of the update `seq` of a fragment is stored on the tape, at time `now_s`."""

    now_s: float
    fragment: int
    seq: int


class Changed(NamedTuple):
    """The run's settings have changed; the core is called with `rules` from now on."""

    rules: SyncRules


class Stop(NamedTuple):
    """The run's stop message was read: learners send what is unsent, and train no more."""


class End(NamedTuple):
    """The run's end message was read: no record follows that could resolve an update."""


class Leave(NamedTuple):
    """This learner was asked to leave the run."""


Event = Stepped | Ready | RoundOpened | Published | Changed | Stop | End | Leave


# Effects


class Adopt(NamedTuple):
    """Move view and parameters to the version of a record.

    After a rollback (`ready.rolled_back`) the parameters are set to the view, and the codes of an
    update in flight are dropped.

    Attributes:
        ready: the record.
        resolved: the record resolves the update in flight, whose codes are then dropped.
        blended: only the share `sync.blend` of the training since that update stays.
    """

    ready: Ready
    resolved: bool
    blended: bool = False


class Send(NamedTuple):
    """Encode a fragment's unsent work as an update, upload its shards, publish its manifest.

    Attributes:
        fragment: the fragment's index.
        seq: the update's number among this life's updates of the fragment, from 1.
        base_version: the version that was adopted last, against whose view the codes are taken.
        base_digest: the digest of that view.
        steps: the inner steps that the update covers.
        tokens: the tokens of these steps.
        final: no further update of the fragment follows in this life.
    """

    fragment: int
    seq: int
    base_version: int
    base_digest: str
    steps: int
    tokens: int
    final: bool


class Republish(NamedTuple):
    """Announce an update again, since no record has resolved it for `reannounce_timeout_s`.

    `attempt` is 1 for the first repetition.
    """

    fragment: int
    seq: int
    attempt: int


# Without it, the last round would wait its whole deadline for a learner with nothing to send.
class Finished(NamedTuple):
    """Tell the aggregator that no more updates of these fragments follow."""

    fragments: tuple[int, ...]


Effect = Adopt | Send | Republish | Finished


class Start(NamedTuple):
    """The version of a fragment with which a learner begins, and its record's sequence.

    `floor` is the version of the fragment's newest rollback; 0: there was none.
    """

    version: int
    view_digest: str
    record_seq: int
    global_step: int
    floor: int = 0
