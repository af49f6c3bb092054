"""The configuration of a run: one TOML file, frozen records, checked when built.

The sections `run`, `task`, `sync`, `outer`, `staleness`, `quorum` and `bounds` define the run:
they go into its specification, and a daemon whose file disagrees is refused (`differences`).
The sections `bus`, `store`, `learner`, `aggregator`, `gc` and `metrics` say how one daemon does its
work, and may differ from machine to machine. docs/configuration.md lists every key.

The only module that reads the environment: DILOCO_<SECTION>_<KEY> overrides the daemon sections.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from diloco.common.errors import ConfigError, RunMismatchError
from diloco.common.layout import Rhythm
from diloco.common.names import NAME

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Steps = Annotated[int, Field(ge=1)]


# The built-in task, and its name in runs of 0.1.0, whose packages had top-level names.
BUILT_IN_TASK = "diloco.learner.model:build"
BUILT_IN_TASK_0_1 = "learner.model:build"
_BUILT_IN_NAMES = frozenset({BUILT_IN_TASK, BUILT_IN_TASK_0_1})


class Section(BaseModel):
    """A section of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSection(Section):
    """What is trained, and for how long.

    Attributes:
        steps: the run's length on its global clock, in inner steps.
        tokens: ends the run earlier, once so many tokens have been merged (0: no such limit).
    """

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
    steps: Steps
    tokens: Annotated[int, Field(ge=0)] = 0
    seed: int = 0


class TaskSection(Section):
    """The user's task: `build` names a function "package.module:function"."""

    build: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = BUILT_IN_TASK
    options: dict[str, Any] = {}


class SyncSection(Section):
    """How learners send and adopt.

    Attributes:
        interval_steps: H, inner steps between two updates of a fragment.
        warmup_steps: until the run's clock has come so far, `warmup_interval_steps` is H.
        fragments: P.
        codec: of updates; `delta_codec` of version deltas.
        block: elements that share one quantization scale.
        shard_elements: an update larger than this is cut into several objects.
        overlap_steps: tau, inner steps that an update and its version may take to travel.
        min_steps: fewest steps worth sending when a round is open.
        mode: "async", or "lockstep", in which learners wait for each version.
        adopt: "rebase" keeps the steps taken while an update travelled; "overwrite" mixes
            theta <- alpha x theta + (1 - alpha) x view (the paper's rule, alpha 0).
        anchor: where learners keep the views they have adopted: on the "device", or in the "host"'s
            memory, from where devices fetch them at each send and adoption.
        snapshot_every: C, versions between two stored views and outer states.
        announce_again_s: an update that no record has resolved for so long is announced again.
    """

    interval_steps: Steps = 24
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    warmup_interval_steps: Steps = 6
    fragments: Annotated[int, Field(ge=1, le=4096)] = 8
    codec: Literal["float32", "bfloat16", "int8", "int4"] = "int4"
    delta_codec: Literal["float32", "bfloat16", "int8", "int4"] = "int4"
    block: Literal[16, 32, 64, 128, 256, 512] = 64
    shard_elements: Annotated[int, Field(ge=1 << 10)] = 1 << 26
    overlap_steps: Annotated[int, Field(ge=0)] = 2
    min_steps: Steps = 6
    mode: Literal["async", "lockstep"] = "async"
    adopt: Literal["rebase", "overwrite"] = "rebase"
    alpha: Fraction = 0.0
    anchor: Literal["device", "host"] = "device"
    snapshot_every: Steps = 8
    announce_again_s: Annotated[float, Field(gt=0)] = 30.0

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
        if self.fragments > self.interval_steps:
            raise ValueError(
                f"fragments ({self.fragments}) is more than interval_steps "
                f"({self.interval_steps}): two would fall on one step"
            )
        if self.alpha and self.adopt != "overwrite":
            raise ValueError("alpha mixes only with adopt = 'overwrite'")
        return self

    def rhythm(self, fragment: int) -> Rhythm:
        """How often a fragment is due."""
        return Rhythm(
            fragment,
            self.fragments,
            self.interval_steps,
            self.warmup_steps,
            self.warmup_interval_steps,
        )


class OuterSection(Section):
    """The outer optimizer and the merge.

    Attributes:
        delay: N of delayed Nesterov; `delay_fraction` its c.
        merge: "rda" follows the layout's rule for each tensor; "average" averages all plainly.
        participation: a round that holds a share f of the fleet's weight takes f of a step.
    """

    optimizer: Literal["sgd", "momentum", "nesterov", "delayed_nesterov"] = "sgd"
    learning_rate: Annotated[float, Field(gt=0)] = 0.9
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    delay: Steps = 4
    delay_fraction: Fraction = 0.0
    merge: Literal["rda", "average"] = "rda"
    participation: bool = False


class StalenessSection(Section):
    """The discount S(s) of an update s versions old (PAPER.md, section 4).

    Attributes:
        power: p of "polynomial" (1+s)^-p. `rate`: a of "exponential" exp(-a s), of "hinge"
            1/(a (s-b) + 1) beyond b = `knee`, and lambda of "inverse" 1/(1 + lambda s).
        maximum: an update staler than this is rejected; 0 for no limit.
    """

    rule: Literal["constant", "polynomial", "hinge", "exponential", "inverse"] = "polynomial"
    power: NonNegative = 0.5
    rate: NonNegative = 0.25
    knee: Annotated[int, Field(ge=0)] = 4
    maximum: Annotated[int, Field(ge=0)] = 0


class QuorumSection(Section):
    """When a round opens and closes.

    Attributes:
        min_learners: K; the effective quorum is min(K, live learners).
        grace_fraction: gamma of the grace window gamma x (tau x step - quorum - sync).
        grace_cap_s: the longest grace.
        deadline_s: a round ends so long after it opened with what was announced for it.
        read_timeout_s: after a round's end the aggregator reads so long what was announced for it;
            what is not here by then waits for the next one.
        pace: a round opens no sooner after the last one closed than the fastest live learner
            needs for pace x H steps; 0 for no such rule.
        live_s: a learner not heard of for so long is not waited for.
    """

    min_learners: Steps = 1
    grace_fraction: Fraction = 0.9
    grace_cap_s: NonNegative = 30.0
    deadline_s: Annotated[float, Field(gt=0)] = 60.0
    read_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    pace: NonNegative = 0.9
    live_s: Annotated[float, Field(gt=0)] = 10.0


class BoundsSection(Section):
    """What the aggregator believes.

    Attributes:
        max_tokens_per_step: tokens that one inner step may claim.
        max_steps_per_s: inner steps a learner may claim for the time since its last update.
        norm_clip: an update whose norm per step exceeds so many running medians is clipped to it.
        norm_refuse: beyond so many medians it is rejected.
        max_updates_per_s: updates of one fragment that a learner may announce, on average over
            ten seconds; a rejected one counts as ten. What is more is dropped unanswered.
        quarantine_offences: a learner is shut out once so many more of its updates of a fragment
            were rejected for what they are than were merged; 0: never.
    """

    max_tokens_per_step: Annotated[int, Field(ge=1)] = 1 << 32
    max_steps_per_s: Annotated[float, Field(gt=0)] = 1000.0
    norm_clip: Annotated[float, Field(gt=1)] = 10.0
    norm_refuse: Annotated[float, Field(gt=1)] = 100.0
    max_updates_per_s: Annotated[float, Field(gt=0)] = 20.0
    quarantine_offences: Annotated[int, Field(ge=0)] = 16


class BusSection(Section):
    """Where NATS is, who we are there, and how the run's streams are made.

    Attributes:
        credentials: file made by `diloco auth`, or a `.creds` file; None for a server that asks
            for none.
        tls_ca: PEM file with the authority of the server's certificate; None: those the system
            trusts.
        tape_max_bytes: size at which the tape takes no more; 0 for no limit but the disk's.
    """

    url: str = "nats://127.0.0.1:4222"
    credentials: str | None = None
    tls_ca: str | None = None
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    duplicate_window_s: Annotated[float, Field(gt=0)] = 120.0
    tape_max_bytes: Annotated[int, Field(ge=0)] = 0
    ops_max_age_s: Annotated[float, Field(gt=0)] = 86400.0
    ops_max_bytes: Annotated[int, Field(ge=1 << 16)] = 64 << 20


class StoreSection(Section):
    """Where objects are: gs://bucket/prefix, a path, or file:///absolute/path.

    Attributes:
        emulator: gs:// means the server at STORAGE_EMULATOR_HOST, without credentials; for tests.
    """

    url: str
    emulator: bool = False


class MeshSection(Section):
    """A learner's devices, of all its hosts, as a mesh.

    "fsdp=4,tensor=2" is read too, and "4", which is fsdp=4.

    Attributes:
        data: copies of the model; a batch is cut along this axis and `fsdp`.
        fsdp: parts that each tensor is cut into; 0 for the devices that the other axes leave.
        tensor: parts that matrix products are cut into.
    """

    data: Annotated[int, Field(ge=0)] = 1
    fsdp: Annotated[int, Field(ge=0)] = 0
    tensor: Annotated[int, Field(ge=0)] = 1

    @model_validator(mode="before")
    @classmethod
    def _of_words(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.isdecimal():
            return {"fsdp": value}
        pairs = [word.partition("=") for word in value.replace(" ", "").split(",") if word]
        return {axis: size for axis, _, size in pairs}

    @model_validator(mode="after")
    def _consistent(self) -> "MeshSection":
        if [self.data, self.fsdp, self.tensor].count(0) > 1:
            raise ValueError("only one of data, fsdp and tensor may be 0, what the others leave")
        return self


class IslandSection(Section):
    """What is special about one learner's hardware; None: as the section `learner` says.

    Attributes:
        anchor: as `sync.anchor`. The others are as those of `LearnerSection`; options and compiler
            options are added to those there.
    """

    mesh: MeshSection | None = None
    anchor: Literal["device", "host"] | None = None
    options: dict[str, Any] = {}
    compiler_options: dict[str, Any] = {}
    matmul_precision: str | None = None


class LearnerSection(Section):
    """How a learner works.

    Attributes:
        mesh: its devices.
        hosts: processes that it consists of, each with some of its devices.
        host: which of them this one is, from 0.
        coordinator: address, host:port, of host 0, where the others find it; "auto" where the
            platform knows all three (Cloud TPU, Slurm); None for a learner of one host.
        cpu_devices: devices that a host's CPU is taken for; 0 for JAX's own choice.
        options: of the task, instead of the run's; such as `batch` and `dtype`, but nothing that
            changes the parameters.
        compiler_options: of XLA, for the inner step.
        matmul_precision: JAX's name of a precision of matrix products; None for its default.
        islands: other values of these for single learners, by name.
        speed: shares of full speed in (0, 1], by learner; a slow one sleeps after each step.
        heartbeat_s: seconds between heartbeats.
        compile_cache: folder in which compiled programs are kept between lives.
        leave_s: longest wait, at a clean end, until all that was trained is sent.
        checkpoint_dir: folder of checkpoints of the inner optimizer, in {run}/{learner} below it;
            None for no checkpoints.
        checkpoint_every_s: seconds between two checkpoints.
        checkpoint_keep: newest checkpoints that are kept.
        checkpoint_upload: also put them into the object store.
        warm_start: a learner that has no checkpoint of its own begins with another learner's
            inner optimizer, from the object store.
        hang_s: a training loop that has not turned for so long, and for 20 steps' time, hangs.
    """

    mesh: MeshSection = MeshSection()
    hosts: Annotated[int, Field(ge=1, le=4096)] = 1
    host: Annotated[int, Field(ge=0)] = 0
    coordinator: str | None = None
    cpu_devices: Annotated[int, Field(ge=0, le=1024)] = 0
    options: dict[str, Any] = {}
    compiler_options: dict[str, Any] = {}
    matmul_precision: str | None = None
    islands: dict[str, IslandSection] = {}
    speed: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    compile_cache: str | None = None
    leave_s: NonNegative = 20.0
    checkpoint_dir: str | None = None
    checkpoint_every_s: Annotated[float, Field(gt=0)] = 300.0
    checkpoint_keep: Steps = 2
    checkpoint_upload: bool = False
    warm_start: bool = False
    hang_s: Annotated[float, Field(gt=0)] = 600.0

    @model_validator(mode="after")
    def _consistent(self) -> "LearnerSection":
        if self.checkpoint_upload and self.checkpoint_dir is None:
            raise ValueError(
                "checkpoint_upload uploads what is in checkpoint_dir, which is not set"
            )
        if self.hosts > 1 and self.coordinator is None:
            raise ValueError("a learner of several hosts needs the address of its coordinator")
        if self.host >= self.hosts:
            raise ValueError(f"host {self.host} of {self.hosts}: hosts are numbered from 0")
        return self

    def island(self, learner: str) -> IslandSection:
        """What a learner's hardware is, with all that is said for all learners."""
        own = self.islands.get(learner, IslandSection())
        return IslandSection(
            mesh=own.mesh or self.mesh,
            anchor=own.anchor,
            options=self.options | own.options,
            compiler_options=self.compiler_options | own.compiler_options,
            matmul_precision=own.matmul_precision or self.matmul_precision,
        )


class AggregatorSection(Section):
    """How an aggregator works.

    Attributes:
        lease_s: a fragment whose owner was not heard of for so long is taken over by another.
    """

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")] = "aggregator"
    lease_s: Annotated[float, Field(ge=1)] = 5.0


class GcSection(Section):
    """What garbage collection leaves beyond what recovery needs.

    Attributes:
        enabled: aggregators collect after each snapshot; else only `diloco gc` does.
        replay_s: seconds for which versions can be merged again, and gone back to.
        keep_checkpoints: the newest so many keep their objects.
    """

    enabled: bool = True
    replay_s: NonNegative = 86400.0
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3


class MetricsSection(Section):
    """Where a daemon serves /metrics and /healthz.

    Attributes:
        listen: address of the interface.
        port: 0 for no server.
    """

    listen: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0


class RunSettings(Section):
    """The sections that all parties of a run share; they go into its specification."""

    run: RunSection
    task: TaskSection = TaskSection()
    sync: SyncSection = SyncSection()
    outer: OuterSection = OuterSection()
    staleness: StalenessSection = StalenessSection()
    quorum: QuorumSection = QuorumSection()
    bounds: BoundsSection = BoundsSection()


class Config(RunSettings):
    """The whole file."""

    store: StoreSection
    bus: BusSection = BusSection()
    learner: LearnerSection = LearnerSection()
    aggregator: AggregatorSection = AggregatorSection()
    gc: GcSection = GcSection()
    metrics: MetricsSection = MetricsSection()

    def settings(self) -> RunSettings:
        """The part that defines the run."""
        return RunSettings(**{name: getattr(self, name) for name in RunSettings.model_fields})


DAEMON_SECTIONS = ("bus", "store", "learner", "aggregator", "gc", "metrics")


def load_config(path: Path) -> Config:
    """The configuration in the TOML file `path`.

    Raises:
        ConfigError: no such file, not TOML, or a key that is missing, unknown or out of range.
    """
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no configuration file {str(path)!r}",
            hint="give its path with --config; docs/configuration.md shows one",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return make_config(_with_environment(document, os.environ), source=str(path))


def placed_config(document: Mapping[str, Any]) -> Config:
    """As `make_config`, with what the environment says of the daemon sections.

    Raises:
        ConfigError: a key is missing, unknown or out of range.
    """
    return make_config(_with_environment(document, os.environ), source="the command line")


def store_url() -> str | None:
    """The object store that the environment names."""
    return os.environ.get("DILOCO_STORE_URL")


def storage_emulator(*, asked_for: bool) -> str | None:
    """Address of the server that stands for Google Cloud Storage in tests; None for the real one.

    Raises:
        ConfigError: the environment has one that the configuration did not ask for, or lacks it.
    """
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if asked_for and not host:
        raise ConfigError(
            "store.emulator is true, but STORAGE_EMULATOR_HOST is not set",
            hint="set it to the server's address, such as http://127.0.0.1:9000",
        )
    if host and not asked_for:
        raise ConfigError(
            f"STORAGE_EMULATOR_HOST is set to {host!r}, but store.emulator is false: it would"
            " take the place of Google Cloud Storage, without credentials",
            hint="unset it; for a test, set store.emulator = true",
        )
    return host if not host or "://" in host else f"http://{host}"


class ServiceManager(NamedTuple):
    """The systemd that started this process.

    Attributes:
        address: of the socket on which it wants to hear of the process; "" for none.
        watchdog_s: it wants to hear from the main loop within so many seconds; 0 for never.
    """

    address: str = ""
    watchdog_s: float = 0.0


def service_manager() -> ServiceManager:
    """Who started this process and asks to be told how it fares."""
    watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watchdog_us = os.environ.get("WATCHDOG_USEC", "0") if watched else "0"
    return ServiceManager(os.environ.get("NOTIFY_SOCKET", ""), int(watchdog_us) / 1e6)


def make_config(document: Mapping[str, Any], *, source: str) -> Config:
    """A checked configuration from the sections in `document`; `source` is named in errors.

    Raises:
        ConfigError: a key is missing, unknown or out of range.
    """
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise ConfigError(
            f"{source}: {_explain(error)}", hint="docs/configuration.md lists every key"
        ) from error


def with_mesh(config: Config, learner: str, mesh: str) -> Config:
    """The configuration with another mesh for one learner: "fsdp=4,tensor=2".

    Raises:
        ConfigError: it is no mesh.
    """
    document = config.model_dump()
    islands = document["learner"]["islands"]
    islands[learner] = {**islands.get(learner, {}), "mesh": mesh}
    return make_config(document, source=f"--mesh {mesh!r}")


def parse_settings(fields: Mapping[str, Any]) -> RunSettings:
    """The settings of a run's specification.

    Raises:
        ConfigError: this program does not know such settings: it is older or newer than the run.
    """
    try:
        return RunSettings.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(
            f"the run's specification: {_explain(error)}",
            hint="was the run created by another version of this program?",
        ) from error


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r}")
        elif item["type"] == "missing":
            lines.append(f"{key!r} is missing")
        else:
            lines.append(f"{key!r}: {item['msg']}, got {item['input']!r}"[:300])
    return "; ".join(lines)


def _with_environment(
    document: Mapping[str, Any], environment: Mapping[str, str]
) -> dict[str, Any]:
    """DILOCO_BUS_URL and the like override the daemon's sections."""
    merged = dict(document)
    for variable, value in environment.items():
        parts = variable.lower().split("_", 2)
        if len(parts) == 3 and parts[0] == "diloco" and parts[1] in DAEMON_SECTIONS:
            section = merged.get(parts[1], {})
            if isinstance(section, dict):  # What is no table is refused with the rest of the file.
                merged[parts[1]] = {**section, parts[2]: value}
    return merged


def differences(ours: RunSettings, theirs: RunSettings) -> list[str]:
    """Each setting in which two configurations of a run differ: 'sync.codec: int4 here, ...'."""
    return [
        f"{key}: {ours!r} here, {theirs!r} in the run"
        for key, ours, theirs in _unequal(ours, theirs)
        if key != "task.build" or {ours, theirs} != _BUILT_IN_NAMES
    ]


def changes(before: RunSettings, after: RunSettings) -> list[str]:
    """Each setting that is another after a change: 'outer.learning_rate: 0.9 -> 0.5'."""
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in _unequal(before, after)]


def _unequal(one: RunSettings, other: RunSettings) -> list[tuple[str, Any, Any]]:
    first, second = one.model_dump(), other.model_dump()
    return [
        (f"{section}.{key}", first[section][key], second[section][key])
        for section in RunSettings.model_fields
        for key in first[section]
        if first[section][key] != second[section][key]
    ]


# What a run may change while it goes on: section -> keys, None for all of them.
CHANGEABLE: dict[str, frozenset[str] | None] = {
    "sync": frozenset({"interval_steps", "min_steps", "overlap_steps", "announce_again_s"}),
    "outer": frozenset({"learning_rate", "momentum", "participation"}),
    "staleness": None,
    "quorum": None,
    "bounds": None,
}


def is_changeable(section: str, key: str) -> bool:
    """Whether a run may change a setting while it goes on."""
    keys = CHANGEABLE.get(section, frozenset())
    return keys is None or key in keys


def check_changeable(ours: RunSettings, theirs: RunSettings) -> None:
    """Refuse settings that a run cannot have come to from those it was created with.

    Raises:
        ConfigError: names each setting that differs and may not.
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
    """Refuse a daemon whose file or model is not the run's.

    Raises:
        RunMismatchError: names each difference, with both sides.
    """
    found = differences(ours, theirs)
    if our_layout != their_layout:
        found.append(f"layout digest: {our_layout} here, {their_layout} in the run")
    if found:
        raise RunMismatchError(
            f"this configuration is not that of run {theirs.run.name!r}: " + "; ".join(found),
            hint="use the file the run was created with, or create another run",
        )
