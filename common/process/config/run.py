"""The sections that define a run; they are part of its specification."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from diloco.common.protocol.codecs import Codec
from diloco.common.protocol.errors import ConfigError, RunMismatchError
from diloco.common.protocol.layout import Fragment, Layout, Rhythm
from diloco.common.protocol.names import NAME

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Steps = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of the sections of the configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# JAX counts steps in 32 bits.
STEPS_MAX = 2**31 - 1
BUILT_IN_TASK = "diloco.models.bytes_lm:build"


class RunSection(Section):
    """The run's name and length."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")] = Field(
        description="name of the run: `[a-z0-9][a-z0-9-]{0,39}`; part of streams, subjects and"
        " object names"
    )
    steps: Annotated[int, Field(ge=1, le=STEPS_MAX)] = Field(
        description="length of the run on its global clock, which each version moves by H,"
        " however many steps went into it; that with which the run was created is also the"
        " horizon of the task's schedule"
    )
    tokens: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="stops the run earlier, once every fragment has merged this many tokens;"
        " 0: no limit",
    )
    seed: int = Field(default=0, description="seeds the first parameters; passed to the task")
    trust: Literal["own", "others"] = Field(
        default="own",
        description='owner of the learners; `"own"`: merged by `outer.merge`; `"others"`: some may'
        " lie (`docs/security.md`): centered clipping at the median learner's pace, a quorum of two"
        " thirds (of three until there is a version), no weight above the others' median",
    )
    tokens_per_step: Annotated[int, Field(ge=0)] | dict[str, Steps] = Field(
        default=0,
        description="tokens of one inner step of a learner whose training loop is its own, of all"
        " its hosts together: for all learners, or by name; 0: as the task says",
    )
    paused: bool = Field(
        default=False,
        description="true: learners wait at their next step boundary; `diloco run pause` sets it,"
        " `diloco run continue` unsets it",
    )

    data_shares: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="number of shares of one epoch of the data, where learners claim shares; a"
        " learner that divides the epoch otherwise is refused. 0: the first claim decides",
    )
    share_batches: Annotated[int, Field(ge=0)] = Field(
        default=0, description="batches of one such share; set it together with `data_shares`"
    )

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.data_shares > 0) != (self.share_batches > 0):
            raise ValueError("data_shares and share_batches say together how an epoch is divided")
        return self

    def tokens_of(self, learner: str) -> int:
        """Returns the tokens of one inner step of a learner; 0: its task determines them."""
        said = self.tokens_per_step
        return said.get(learner, 0) if isinstance(said, dict) else said


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in value]
    return value


class TaskSection(Section):
    """The task that learners train."""

    build: Annotated[str, Field(pattern=r"^([\w.]+:\w+)?$")] = Field(
        default=BUILT_IN_TASK,
        description='function that builds the task: `"package.module:function"`; `""`: none, all'
        " learners join from training loops of their own",
    )
    options: dict[str, Any] = Field(default={}, description="keyword arguments of that function")

    @field_validator("options", mode="after")
    @classmethod
    def _as_in_a_file(cls, options: dict[str, Any]) -> dict[str, Any]:
        # A message's arrays are tuples, a file's are lists; both mean the same setting.
        return {key: _with_lists(value) for key, value in options.items()}


class SyncSection(Section):
    """The settings by which learners send updates and adopt versions."""

    interval_steps: Steps = Field(
        default=24, description="H: inner steps between two updates of a fragment"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="until this global step, H is `warmup_interval_steps`"
    )
    warmup_interval_steps: Steps = Field(
        default=6, description="H during the warm-up; at least `min_steps`"
    )
    fragments: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=8,
        description="P: greatest number of fragments; a small model has as many as its tensors"
        " fill. If P is more than H, several are due at one step",
    )
    codec: Codec = Field(default="int4", description="codec of updates")
    delta_codec: Codec = Field(default="int4", description="codec of version deltas")
    block: Literal[16, 32, 64, 128, 256, 512] = Field(
        default=64, description="quantization block: elements that share one scale"
    )
    shard_elements: Annotated[int, Field(ge=1 << 10)] = Field(
        default=1 << 26, description="an update of more elements is cut into several shards"
    )
    overlap_steps: Annotated[int, Field(ge=0)] = Field(
        default=2,
        description="τ: inner steps that an update and its version may travel; the grace window"
        " follows from it",
    )
    min_steps: Steps = Field(
        default=6,
        description="fewest inner steps worth sending when a round is open; at most H",
    )
    mode: Literal["async", "lockstep"] = Field(
        default="async",
        description='`"lockstep"`: learners wait for each version, rounds for'
        " `quorum.min_learners`; for tests and baselines",
    )
    adopt: Literal["rebase", "blend", "overwrite"] = Field(
        default="rebase",
        description='`"rebase"` keeps the steps taken while an update travelled; `"blend"` keeps'
        ' `blend` of them where the update was merged; `"overwrite"` mixes θ ← α θ + (1 - α) view',
    )
    blend: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.7,
        description='a of `adopt = "blend"`: share that is kept of the steps taken while an update'
        " travelled",
    )
    alpha: Fraction = Field(
        default=0.0, description='α of `adopt = "overwrite"`; 0 is the paper\'s rule'
    )
    anchor: Literal["device", "host"] = Field(
        default="device",
        description="memory that holds the adopted views, which are as large as the parameters:"
        " the device's, or the host's, from where devices fetch them to send and to adopt",
    )
    snapshot_interval_versions: Steps = Field(
        default=8, description="versions of a fragment between two stored views and outer states"
    )
    check_interval_versions: Annotated[int, Field(ge=0)] = Field(
        default=16,
        description="versions of a fragment after which a learner says again, with its next update,"
        " which view it really holds; 0: never",
    )
    reannounce_timeout_s: Seconds = Field(
        default=30.0, description="an update without a verdict for this long is announced again"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "SyncSection":
        if self.min_steps > self.interval_steps:
            raise ValueError(
                f"min_steps ({self.min_steps}) is more than interval_steps ({self.interval_steps})"
            )
        if self.warmup_steps and self.min_steps > self.warmup_interval_steps:
            raise ValueError(
                f"min_steps ({self.min_steps}) is more than warmup_interval_steps "
                f"({self.warmup_interval_steps})"
            )
        if self.alpha and self.adopt != "overwrite":
            raise ValueError("alpha mixes only with adopt = 'overwrite'")
        return self

    def rhythm(self, fragment: int) -> Rhythm:
        """Returns the intervals at which learners send updates of the fragment with this index."""
        return Rhythm(
            fragment,
            self.fragments,
            self.interval_steps,
            self.warmup_steps,
            self.warmup_interval_steps,
        )


# An average is shorter than the updates; with this learning rate its steps are as long as RDA's.
ROBUST_LEARNING_RATE = 1.25


class OuterSection(Section):
    """The merge and the outer optimizer."""

    optimizer: Literal["sgd", "momentum", "nesterov", "delayed_nesterov"] = Field(
        default="sgd", description="outer optimizer"
    )
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=0.9,
        description='outer learning rate; where `run.trust` is `"others"` by default 1.25, and more'
        " in rounds of more than five learners: times sqrt(min(n, 8) / 5)",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.9, description="outer momentum; unused by `sgd`"
    )
    delay_rounds: Steps = Field(
        default=4, description="N of Delayed Nesterov: rounds between two updates of the momentum"
    )
    delay_fraction: Fraction = Field(
        default=0.0,
        description="c of Delayed Nesterov: share of the momentum applied in the other rounds",
    )
    merge: Literal["rda", "average"] = Field(
        default="rda",
        description='with `run.trust = "own"`: `"rda"`: radial-directional averaging where the'
        ' layout says so, weighted averaging elsewhere; `"average"`: weighted averaging everywhere',
    )
    clip_radius: Annotated[float, Field(gt=0)] = Field(
        default=0.8,
        description='with `run.trust = "others"`: an update counts in full up to this many times'
        " the median learner's distance from the previous merge; the further beyond, the less",
    )
    participation: bool = Field(
        default=False,
        description="a round that holds a share f of the live fleet's weight takes f of an outer"
        " step: learning rate × f, momentum^f",
    )


class StalenessSection(Section):
    """The discount of old updates."""

    rule: Literal["constant", "polynomial", "hinge", "exponential", "inverse"] = Field(
        default="polynomial", description="discount S(s) of an update s versions old"
    )
    power: NonNegative = Field(default=0.5, description='p of `"polynomial"`')
    rate: NonNegative = Field(
        default=0.25, description='a of `"hinge"` and `"exponential"`, λ of `"inverse"`'
    )
    threshold: Annotated[int, Field(ge=0)] = Field(default=4, description='b of `"hinge"`')
    max_versions: Annotated[int, Field(ge=0)] = Field(
        default=0, description="staler updates are rejected; 0: no limit"
    )


class QuorumSection(Section):
    """The rules by which a round opens and closes."""

    min_learners: Steps = Field(
        default=1, description="K: the quorum of a round is min(K, live learners)"
    )
    grace_fraction: Fraction = Field(
        default=0.9,
        description="γ of the grace window γ × (τ × step time - time to quorum - sync time)",
    )
    grace_cap_s: NonNegative = Field(default=30.0, description="longest grace window")
    deadline_s: Seconds = Field(
        default=60.0,
        description="hard deadline: a round ends this long after it opened, with the updates"
        " announced by then; likewise the run ends this long after its stop",
    )
    read_timeout_s: Seconds = Field(
        default=60.0,
        description="longest time after a round's end for which the aggregator reads the updates"
        " announced for it; those not read by then wait for the next round",
    )
    pace: NonNegative = Field(
        default=0.9,
        description="shortest time from one round's close to the next one's opening, as a multiple"
        " of the time that the fastest live learner needs for H steps, at least half of the median"
        " learner's; once all have announced, the round opens at once; 0: no such time",
    )
    liveness_timeout_s: Seconds = Field(
        default=10.0, description="rounds stop waiting for a learner that is silent for this long"
    )


class LearnerBounds(Section):
    """Limits that an operator declares for one learner; 0: not declared."""

    max_steps_per_s: NonNegative = Field(
        default=0.0,
        description="inner steps that the learner is credited with for each second, whatever the"
        " others do",
    )
    max_tokens_per_step: Annotated[int, Field(ge=0)] = Field(
        default=0, description="most tokens of one inner step that the learner is credited with"
    )


UNDECLARED = LearnerBounds()


class BoundsSection(Section):
    """Limits up to which the aggregator believes what manifests claim."""

    max_tokens_per_step: Annotated[int, Field(ge=1)] = Field(
        default=1 << 32, description="most tokens of one inner step that a learner is credited with"
    )
    max_steps_per_s: Annotated[float, Field(gt=0)] = Field(
        default=1000.0,
        description="most inner steps that a learner is credited with for each second; below it,"
        " twice those that it was seen to take, and ten times those of the median of the others",
    )
    learners: dict[Annotated[str, Field(pattern=f"^{NAME.pattern}$")], LearnerBounds] = Field(
        default={},
        description="by name, what is known of a learner: `max_steps_per_s`, `max_tokens_per_step`."
        " With both, its weight is not capped by the others'",
    )
    norm_clip: Annotated[float, Field(gt=1)] = Field(
        default=10.0,
        description="an update whose norm per step exceeds this many times the median of the other"
        " learners' last merged updates is scaled down to that, if there are two others",
    )
    max_updates_per_s: Annotated[float, Field(gt=0)] = Field(
        default=20.0,
        description="rate limit: updates of one fragment that a learner may announce, averaged"
        " over ten seconds; each counts once for every 4 KiB of its manifest, ten times if it is"
        " rejected. The excess is dropped unread",
    )
    quarantine_offences: Annotated[int, Field(ge=0)] = Field(
        default=16,
        description="a learner is quarantined when its count in one fragment reaches this: +1 for"
        " an offence, -1 for a merged update, never below 0, 0 at a release; 0: never quarantined",
    )

    def of(self, learner: str) -> LearnerBounds:
        """Returns the limits that are declared for a learner."""
        return self.learners.get(learner, UNDECLARED)


class RunSettings(Section):
    """The settings that all parties of a run share; they are part of its specification."""

    run: RunSection
    task: TaskSection = TaskSection()
    sync: SyncSection = SyncSection()
    outer: OuterSection = OuterSection()
    staleness: StalenessSection = StalenessSection()
    quorum: QuorumSection = QuorumSection()
    bounds: BoundsSection = BoundsSection()

    @model_validator(mode="before")
    @classmethod
    def _rate_by_trust(cls, document: Any) -> Any:
        run, outer = ((document.get(name) or {}) for name in ("run", "outer"))
        if not isinstance(run, dict) or run.get("trust") != "others" or not isinstance(outer, dict):
            return document
        return {**document, "outer": {"learning_rate": ROBUST_LEARNING_RATE, **outer}}

    @property
    def robust(self) -> bool:
        """True if learners may be malicious, so that updates are merged by centered clipping."""
        return self.run.trust == "others"

    @property
    def merge(self) -> Literal["rda", "average", "centered_clipping"]:
        """The rule by which updates are merged."""
        return "centered_clipping" if self.robust else self.outer.merge


# Settings that may change while a run goes on: section -> keys, None for all of them.
CHANGEABLE: dict[str, frozenset[str] | None] = {
    "run": frozenset({"steps", "tokens", "paused"}),
    "sync": frozenset({"interval_steps", "min_steps", "overlap_steps", "reannounce_timeout_s"}),
    "outer": frozenset({"learning_rate", "momentum", "participation", "clip_radius"}),
    "staleness": None,
    "quorum": None,
    "bounds": None,
}


def is_changeable(section: str, key: str) -> bool:
    """True if a setting may change while a run goes on."""
    keys = CHANGEABLE.get(section, frozenset())
    return keys is None or key in keys


def differences(ours: RunSettings, theirs: RunSettings) -> list[str]:
    """Returns a text for each setting in which two configurations differ.

    A text has both values: "outer.momentum: 0.9 here, 0.8 in the run". Differences in the section
    `task` do not count if one of the two has no task.
    """
    # A run without a task is defined by its parameters, and the layouts compare those.
    taskless = not (ours.task.build and theirs.task.build)
    return [
        f"{key}: {ours!r} here, {theirs!r} in the run"
        for key, ours, theirs in _unequal(ours, theirs)
        if not (taskless and key.startswith("task."))
    ]


def changes(before: RunSettings, after: RunSettings) -> list[str]:
    """Returns a text for each setting that differs, such as "outer.learning_rate: 0.9 -> 0.5"."""
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in _unequal(before, after)]


def check_changeable(ours: RunSettings, theirs: RunSettings) -> None:
    """Compares settings before and after a change, given in either order.

    Raises:
        ConfigError: names each key that differs and cannot change.
    """
    fixed = [key for key, _, _ in _unequal(ours, theirs) if not is_changeable(*key.split(".", 1))]
    if fixed:
        allowed = ", ".join(
            f"{section}.*" if keys is None else ", ".join(f"{section}.{k}" for k in sorted(keys))
            for section, keys in CHANGEABLE.items()
        )
        raise ConfigError(
            f"a run that exists cannot change {', '.join(fixed)}",
            hint=f"it can change {allowed}; for the rest create another run",
        )


def check_same_run(
    ours: RunSettings, theirs: RunSettings, our_layout: str, their_layout: str
) -> None:
    """Refuses a daemon whose configuration file or model is not the run's.

    Args:
        ours: settings from the daemon's file.
        theirs: settings of the run.
        our_layout: digest of the layout that the daemon computed from its model.
        their_layout: digest of the run's layout.

    Raises:
        RunMismatchError: names each difference, with the daemon's value and the run's.
    """
    found = differences(ours, theirs)
    if our_layout != their_layout:
        found.append(f"layout digest: {our_layout} here, {their_layout} in the run")
    if found:
        raise RunMismatchError(
            f"this configuration is not that of run {theirs.run.name!r}: " + "; ".join(found),
            hint="use the file the run was created with, or create another run",
        )


def _unequal(one: RunSettings, other: RunSettings) -> list[tuple[str, Any, Any]]:
    first, second = one.model_dump(), other.model_dump()
    return [
        (f"{section}.{key}", first[section][key], second[section][key])
        for section in RunSettings.model_fields
        for key in first[section]
        if first[section][key] != second[section][key]
    ]


def fitted(settings: RunSettings, layout: Layout) -> RunSettings:
    """Returns the settings with `sync.fragments` lowered to the layout's number of fragments."""
    fragments = min(settings.sync.fragments, len(layout.fragments))
    sync = settings.sync.model_copy(update={"fragments": fragments})
    return settings.model_copy(update={"sync": sync})


def unfilled(asked: RunSettings, fragments: int) -> str:
    """Returns a sentence if the run has fewer `fragments` than `asked.sync.fragments`; else ""."""
    if fragments >= asked.sync.fragments:
        return ""
    return (
        f"sync.fragments is {asked.sync.fragments}, but the model's tensors fill only {fragments}: "
        f"the run has {fragments}"
    )


# --- Averaged state: the settings of a fragment that holds no parameters
#
# Averaged state, such as batch statistics, is no gradient: its version is the mean of the learners'
# values, weighted by tokens, and learners adopt the mean unchanged. Values are sent in float32,
# since rounding could make a variance negative. Updates that fit no convex average are left out:
# an update on an older version would be added to a mean that has moved meanwhile.

_AVERAGED_SYNC = {"codec": "float32", "delta_codec": "float32", "adopt": "overwrite", "alpha": 0.0}
_AVERAGED_OUTER = {
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "momentum": 0.0,
    "merge": "average",
    "participation": False,
}
# An update that is one version old is discounted to a millionth. A limit would reject it, which
# would count against an honest learner.
_AVERAGED_STALENESS = {"rule": "inverse", "rate": 1e6, "max_versions": 0}
# No clipping: norms of state have no common scale.
_AVERAGED_BOUNDS = {"norm_clip": 1e30}


def settings_of(settings: RunSettings, layout: Layout, fragment: int) -> RunSettings:
    """Returns the settings that apply to a fragment: for averaged state `averaged_settings`."""
    return averaged_settings(settings) if layout.fragments[fragment].averaged else settings


def averaged_settings(settings: RunSettings) -> RunSettings:
    """Returns a run's settings as they apply to averaged state, such as batch statistics.

    Averaged state is sent in float32, and merged into the mean of the learners' values.
    """
    return settings.model_copy(
        update={
            "sync": settings.sync.model_copy(update=_AVERAGED_SYNC),
            "outer": settings.outer.model_copy(update=_AVERAGED_OUTER),
            "staleness": settings.staleness.model_copy(update=_AVERAGED_STALENESS),
            "bounds": settings.bounds.model_copy(update=_AVERAGED_BOUNDS),
        }
    )


def sync_of(sync: SyncSection, fragment: Fragment) -> SyncSection:
    """Returns the section `sync` as it applies to a fragment: changed if it is averaged state."""
    return sync.model_copy(update=_AVERAGED_SYNC) if fragment.averaged else sync
