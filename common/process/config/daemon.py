"""The sections that configure one daemon; they may differ from machine to machine."""

import hashlib
import ipaddress
import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from diloco.common.process.config.run import NonNegative, RunSettings, Seconds, Section, Steps
from diloco.common.protocol.names import NAME

# The most hosts of a learner of several slices: each supervisor reports to all others, and is told
# the names of all in one variable.
MOST_SUPERVISORS = 1024
# The longest `learner.silent_s`: for that long, twice, no slice trains once a host is lost.
LONGEST_SILENCE_S = 600


class BusSection(Section):
    """The NATS servers, the client's identity, and the settings of the run's streams."""

    url: str = Field(
        default="nats://127.0.0.1:4222",
        description="NATS servers, `nats://host:4222` or `tls://host:4222`, several joined by `,`",
    )
    credentials: str | None = Field(
        default=None,
        description="path of a credentials file made by `diloco auth` (mode 0600), or of a"
        " `.creds` file of NATS's own tools; each party has its own",
    )
    tls_ca: str | None = Field(
        default=None,
        description="path of the CA certificate (PEM) that signed the servers'; without it, the"
        " system's CAs",
    )
    wait_for_run_s: NonNegative = Field(
        default=0.0,
        description="longest time that a daemon waits for a run that is not created yet; learners"
        " compile meanwhile",
    )
    replicas: Annotated[int, Field(ge=1, le=5)] = Field(
        default=1, description="replicas of the run's streams; read by `diloco run create`"
    )
    duplicate_window_s: Seconds = Field(
        default=120.0,
        description="how long the streams remember message ids; read by `diloco run create`",
    )
    tape_max_bytes: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="size at which the tape refuses all messages; warnings start at 80 %. 0: the"
        " disk's limit. Read by `diloco run create`",
    )
    ops_max_age_s: Seconds = Field(
        default=86400.0,
        description="age limit of the bounded stream; read by `diloco run create`",
    )
    ops_max_bytes: Annotated[int, Field(ge=1 << 16)] = Field(
        default=64 << 20,
        description="size limit of the bounded stream; read by `diloco run create`",
    )


class StoreSection(Section):
    """The settings of the object store."""

    url: str = Field(
        description="a bucket of a kind in docs/stores.md, such as `gs://bucket/prefix`, or"
        " a folder that all daemons share: a path, or `file:///absolute/path`"
    )
    emulator: bool = Field(
        default=False,
        description="for tests: `gs://` means the server at `STORAGE_EMULATOR_HOST`, without"
        " credentials",
    )
    cache: Annotated[str, Field(pattern=r"^(https?://[\w.:\[\]-]+(/[\w.=/-]*)?)?$")] = Field(
        default="",
        description="URL of a cache nearby, `http://host:port`, through which a learner reads"
        " versions (docs/stores.md); empty: none",
    )


# The axes of a learner's mesh, from the outermost one.
AXES = ("data", "fsdp", "expert", "tensor")


class MeshSection(Section):
    """The devices of a learner, on all its hosts, as a mesh.

    Also parsed from text: "fsdp=4,tensor=2", or "4", which means fsdp=4.
    """

    data: Annotated[int, Field(ge=0)] = Field(
        default=1,
        description="data parallelism: copies of the parameters; batches are sharded over this"
        " axis, `fsdp` and `expert`",
    )
    fsdp: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="shards of each large tensor and its optimizer state; 0: all devices that the"
        " other axes leave",
    )
    expert: Annotated[int, Field(ge=0)] = Field(
        default=1,
        description="expert parallelism: shards of a mixture's experts, to which tokens travel;"
        " batches and other tensors are sharded over it too",
    )
    tensor: Annotated[int, Field(ge=0)] = Field(
        default=1,
        description="tensor parallelism: shards of matrix products; needs a task with a"
        " `partition`",
    )

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
        if self.sizes.count(0) > 1:
            raise ValueError(
                f"only one of {', '.join(AXES)} may be 0, which takes what the others leave"
            )
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """The configured sizes of the axes, in the order of `AXES`; one may be 0."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def given(self) -> int:
        """The product of the sizes that are not 0."""
        return math.prod(size for size in self.sizes if size)

    def shape(self, devices: int) -> tuple[int, ...] | None:
        """Returns the axes' sizes, in the order of `AXES`, on a mesh of `devices` devices.

        A size 0 becomes the devices that the other axes leave. Returns None if the product of the
        sizes is not `devices`.
        """
        found = tuple(size or devices // self.given for size in self.sizes)
        return found if math.prod(found) == devices else None

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True))


class IslandSection(Section):
    """Settings of one learner's hardware, in place of those for all learners.

    Where a setting is None, `learner.mesh`, `sync.anchor` or `learner.matmul_precision` applies.
    """

    mesh: MeshSection | None = Field(default=None, description="instead of `learner.mesh`")
    anchor: Literal["device", "host"] | None = Field(
        default=None, description="instead of `sync.anchor`"
    )
    options: dict[str, Any] = Field(default={}, description="over `learner.options`")
    compiler_options: dict[str, Any] = Field(
        default={}, description="over `learner.compiler_options`"
    )
    matmul_precision: str | None = Field(
        default=None, description="instead of `learner.matmul_precision`"
    )


class LearnerSection(Section):
    """The settings of a learner."""

    mesh: MeshSection = Field(
        default=MeshSection(), description="mesh over the devices of all its hosts"
    )
    hosts: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1, description="processes of the learner, each with a part of its devices"
    )
    host: Annotated[int, Field(ge=0)] = Field(
        default=0, description="index of this process, from 0; host 0 talks to NATS"
    )
    coordinator: str | None = Field(
        default=None,
        description='address of host 0, `"host:port"`, required with several hosts; `"auto"` where'
        " the platform provides it, `hosts` and `host` (Cloud TPU, Slurm)",
    )
    slices: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="groups of hosts with a whole copy of the model each; the learner continues"
        " with those that are left. `mesh` is then the mesh of one slice",
    )
    min_slices: Annotated[int, Field(ge=1)] = Field(
        default=1, description="fewest slices with which it trains"
    )
    peers: tuple[str, ...] = Field(
        default=(),
        description='with several slices, `"host:port"` of the supervisors of all hosts, slice by'
        " slice; `host` is an index in it",
    )
    silent_s: Seconds = Field(
        default=5.0,
        description="silence, 1 to 600, after which a host counts as lost; its training process,"
        " after twice as long",
    )
    keep_batch: bool = Field(
        default=True,
        description="a step of fewer slices takes the whole batch, in more parts; false: it takes"
        " their share of its rows",
    )
    formation: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(), description="slices that train now; the supervisor sets it"
    )
    cpu_devices: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="emulate this many devices on each host's CPU; 0: the devices that JAX finds",
    )
    options: dict[str, Any] = Field(
        default={},
        description="options of the task, over `task.options`, such as `batch` and `dtype`;"
        " nothing that changes the parameters",
    )
    compiler_options: dict[str, Any] = Field(
        default={}, description="XLA compiler options of the inner step"
    )
    matmul_precision: str | None = Field(
        default=None, description='JAX\'s default matmul precision, such as `"high"`'
    )
    islands: dict[str, IslandSection] = Field(
        default={}, description="overrides for single learners, by name"
    )
    speed: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        default={},
        description="emulate slow learners: share of full speed by name; the learner sleeps after"
        " each step",
    )
    heartbeat_interval_s: Seconds = Field(default=1.0, description="seconds between heartbeats")
    compilation_cache_dir: str | None = Field(
        default=None,
        description="folder of compiled programs; without it `$XDG_CACHE_HOME/diloco` or"
        " `~/.cache/diloco`, or where JAX's own settings say",
    )
    drain_timeout_s: NonNegative = Field(
        default=20.0,
        description="longest time that a clean exit spends on sending what is unsent",
    )
    checkpoint_dir: str | None = Field(
        default=None,
        description="folder for checkpoints of the inner optimizer, in `{run}/{learner}` below"
        " it; without it there are none",
    )
    checkpoint_interval_s: Seconds = Field(
        default=300.0,
        description="seconds between two checkpoints; a clean exit makes one too",
    )
    checkpoint_keep: Steps = Field(
        default=2, description="number of newest checkpoints that are kept"
    )
    snapshot_steps: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="steps between two snapshots: checkpoints with the work that is not sent yet,"
        " with which the next life goes on after a crash. Updates wait for the snapshot that"
        " knows them. 0: none, and that work is lost; needs `checkpoint_dir`, best in memory",
    )
    checkpoint_upload: bool = Field(
        default=False,
        description="upload checkpoints to the object store, for a restart on another machine;"
        " needs `checkpoint_dir`",
    )
    checkpoint_upload_every: Steps = Field(
        default=1,
        description="each so many-th checkpoint is uploaded, and the first of each life: of a large"
        " model all of them cost more than all else that leaves a region",
    )
    checkpoint_key: str | None = Field(
        default=None,
        description="file with the key, 64 hexadecimal digits, by which uploaded checkpoints are"
        " encrypted; without it who reads the run's store reads them, private leaves too",
    )
    warm_start: bool = Field(
        default=False,
        description="without a checkpoint of its own, a learner starts from an inner optimizer"
        " that another one uploaded",
    )
    watchdog_timeout_s: Seconds = Field(
        default=600.0,
        description="a training loop that makes no step for this long, and for 20 times its usual"
        " step time, is hung: `/livez` fails, and systemd restarts it",
    )

    @field_validator("peers", "formation", mode="before")
    @classmethod
    def _of_words(cls, value: Any) -> Any:
        return value.replace(" ", "").split(",") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> "LearnerSection":
        if self.snapshot_steps and self.checkpoint_dir is None:
            raise ValueError("snapshot_steps makes checkpoints in checkpoint_dir, which is not set")
        if self.checkpoint_upload and self.checkpoint_dir is None:
            raise ValueError(
                "checkpoint_upload uploads what is in checkpoint_dir, which is not set"
            )
        if self.checkpoint_key is not None and not self.checkpoint_upload:
            raise ValueError(
                "checkpoint_key encrypts what checkpoint_upload uploads, which is false"
            )
        if self.checkpoint_keep < 2 and (self.hosts > 1 or self.slices > 1):
            raise ValueError(
                "checkpoint_keep is 1, but hosts finish a checkpoint one after the other: of none"
                " would all have their part; keep 2 or more"
            )
        if self.slices > 1 and not self.formation:
            self._check_slices()
        elif self.slices == 1 and self.peers:
            raise ValueError(
                "peers names the hosts of several slices, but slices is 1: set slices, or leave"
                " peers out"
            )
        elif self.hosts > 1 and self.coordinator is None:
            raise ValueError("a learner of several hosts needs the address of its coordinator")
        elif self.host >= self.hosts:
            raise ValueError(f"host {self.host} of {self.hosts}: hosts are numbered from 0")
        return self

    def _check_slices(self) -> None:
        """Checks the settings of a supervisor.

        Raises:
            ValueError: they contradict each other.
        """
        if self.min_slices > self.slices:
            raise ValueError(f"min_slices is {self.min_slices}, but there are {self.slices} slices")
        self._check_peers()
        if self.warm_start:
            raise ValueError(
                "a learner of several slices begins from its own checkpoints: set warm_start to"
                " false"
            )
        if self.hosts > 1:
            raise ValueError("peers names the hosts of all slices: leave hosts out")
        if self.host >= len(self.peers):
            raise ValueError(f"host {self.host} of {len(self.peers)}: hosts are numbered from 0")
        if self.coordinator is not None:
            raise ValueError(
                "the supervisors choose the coordinator of several slices: leave it out"
            )
        if not 1 <= self.silent_s <= LONGEST_SILENCE_S:
            raise ValueError(
                f"silent_s is {self.silent_s:g}, but supervisors report every quarter of a second,"
                f" and no slice trains while a lost host is waited for: give 1 to"
                f" {LONGEST_SILENCE_S}"
            )
        if self.checkpoint_dir is None:
            raise ValueError(
                "slices pass the inner optimizer on by checkpoints: set checkpoint_dir"
            )

    def _check_peers(self) -> None:
        """Checks the addresses of a learner's hosts.

        Raises:
            ValueError: they are not equally many of each slice, too many, or no addresses.
        """
        if not self.peers or len(self.peers) % self.slices:
            raise ValueError(
                f"peers names {len(self.peers)} hosts, which {self.slices} slices cannot have in"
                " equal numbers"
            )
        if len(self.peers) > MOST_SUPERVISORS:
            raise ValueError(
                f"peers names {len(self.peers)} hosts, and {MOST_SUPERVISORS} supervisors can all"
                " hear each other"
            )
        if len(set(self.peers)) < len(self.peers):
            raise ValueError("peers names a host twice")
        for peer in self.peers:
            name, _, port = peer.rpartition(":")
            if not name or set("/[]") & set(name) or not port.isdecimal():
                raise ValueError(f"peers has {peer!r}, which is not host:port")
            if int(port) not in range(1, 1 << 16) or port.startswith("0"):
                raise ValueError(
                    f"peers has {peer!r}, and ports are 1 to 65535, without zeros before them"
                )
        self._check_machines()

    def _check_machines(self) -> None:
        """Checks that each address of a learner's hosts can be one machine's alone.

        Raises:
            ValueError: an address that each machine has as its own.
        """
        ours = [peer for peer in self.peers if _of_each_machine(peer)]
        # Of a learner whose hosts are all on one machine.
        alone = len(ours) == len(self.peers) and not any(peer.startswith("0.") for peer in ours)
        if ours and not alone:
            raise ValueError(
                f"peers has {ours[0]!r}, which each machine has as its own: give the address at"
                " which the other hosts reach it"
            )

    @property
    def slice_hosts(self) -> int:
        """The number of hosts of each slice."""
        return len(self.peers) // self.slices

    def number_of(self, rank: int) -> int:
        """Returns the number of the host whose training process has this rank.

        Of several slices those that train now have ranks, without gaps.
        """
        if not self.formation:
            return rank
        place, at = divmod(rank, self.slice_hosts)
        return self.formation[place] * self.slice_hosts + at

    def island(self, learner: str) -> IslandSection:
        """Returns one learner's hardware settings, filled up with those of this section.

        `anchor` stays None if it is not set for this learner: `sync.anchor` then applies.
        """
        own = self.islands.get(learner, IslandSection())
        return IslandSection(
            mesh=own.mesh or self.mesh,
            anchor=own.anchor,
            options=self.options | own.options,
            compiler_options=self.compiler_options | own.compiler_options,
            matmul_precision=own.matmul_precision or self.matmul_precision,
        )


class AggregatorSection(Section):
    """The settings of an aggregator."""

    name: Annotated[str, Field(pattern=f"^{NAME.pattern}$")] = Field(
        default="aggregator",
        description="shown in its records and in the server's monitoring; several may share it",
    )
    lease_ttl_s: Annotated[float, Field(ge=1)] = Field(
        default=5.0,
        description="lease on a fragment: another aggregator takes over an owner that is silent"
        " for this long",
    )
    checkpoint_interval_s: NonNegative = Field(
        default=600.0,
        description="a checkpoint of the run is made once the newest is this old; 0: only `diloco"
        " run checkpoint` makes one. One that takes long is made more rarely",
    )
    share_expiry_s: NonNegative = Field(
        default=600.0,
        description="silence after which an aggregator ends the life of a learner that holds shares"
        " of the data, and others get them; its unannounced work is lost; 0: never",
    )


class GcSection(Section):
    """The settings of garbage collection: what it keeps beyond the needs of recovery."""

    enabled: bool = Field(
        default=True,
        description="aggregators collect after each snapshot; else only `diloco run gc` does",
    )
    replay_window_s: NonNegative = Field(
        default=86400.0, description="age up to which versions can be replayed and rolled back to"
    )
    keep_checkpoints: Annotated[int, Field(ge=1)] = Field(
        default=3, description="number of newest run checkpoints whose objects are kept"
    )


class MetricsSection(Section):
    """The address at which a daemon serves /metrics, /livez and /readyz."""

    listen: str = Field(
        default="127.0.0.1",
        description="address to bind; the pages ask for no password, so keep it private",
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=0,
        description="TCP port; 0: no server. `--metrics-port` sets it for one daemon; `diloco"
        " local` counts up from it, one port for each daemon",
    )


class Config(RunSettings):
    """All sections of the configuration file."""

    store: StoreSection
    bus: BusSection = BusSection()
    learner: LearnerSection = LearnerSection()
    aggregator: AggregatorSection = AggregatorSection()
    gc: GcSection = GcSection()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def _carries(self) -> "Config":
        if self.learner.snapshot_steps and self.sync.adopt != "rebase":
            raise ValueError(
                f'learner.snapshot_steps is for sync.adopt = "rebase": with {self.sync.adopt!r}'
                " no life resumes unsent work; set it to 0"
            )
        return self

    def settings(self) -> RunSettings:
        """Returns the sections that define the run."""
        return RunSettings(**{name: getattr(self, name) for name in RunSettings.model_fields})

    def alike(self, learner: str) -> str:
        """Returns as text the settings by which all hosts of a learner must do the same.

        Those that are long have a digest: the settings of the run, and how this learner trains.
        """
        section = self.learner
        parts: dict[str, Any] = {
            "run": self.settings().model_dump(mode="json"),
            "learner": section.island(learner).model_dump(mode="json"),
            "peers": [section.cpu_devices, *section.peers],
        }
        digests = {
            name: hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=4)
            for name, part in parts.items()
        }
        return ", ".join(
            (
                f"slices {section.slices}, min_slices {section.min_slices}",
                f"keep_batch {section.keep_batch}, snapshot_steps {section.snapshot_steps}",
                *(f"{name} {digest.hexdigest()}" for name, digest in digests.items()),
            )
        )


def _of_each_machine(peer: str) -> bool:
    """Whether `host:port` names whichever machine reads it."""
    name = peer.rpartition(":")[0]
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return address.is_loopback or address.is_unspecified


DAEMON_SECTIONS = ("bus", "store", "learner", "aggregator", "gc", "metrics")
