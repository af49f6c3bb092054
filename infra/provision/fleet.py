"""The TOML file of a fleet on Google Cloud, as typed records: docs/provision.md describes each key.

A record checks its own values when it is made; `plan.py` checks how values fit together.
"""

import ipaddress
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from diloco.common.process.config import explain, read_document
from diloco.common.protocol.errors import ConfigError
from diloco.infra.provision.known import Kind

ZONE = re.compile(r"([a-z]+-[a-z]+[0-9]+)-(ai[0-9])?[a-z]")
PRIVATE = [ipaddress.IPv4Network(one) for one in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")]
MULTI_REGIONS = ("US", "EU", "ASIA", "NAM4", "EUR4", "EUR5", "EUR7", "EUR8", "ASIA1")
MOST_LABELS = 63
_MOMENT = "%Y-%m-%dT%H:%M:%SZ"
# The number of chips of each host of a slice of several hosts.
CHIPS_OF_HOST = 4
_HINT = "docs/provision.md describes every key"


def region_of(zone: str) -> str:
    """Returns the region of a zone, such as us-central1 of us-central1-a; "" if it is no zone."""
    found = ZONE.fullmatch(zone)
    return found[1] if found else ""


def _shape(pattern: str, expected: str) -> AfterValidator:
    """Returns a check that a text matches `pattern`; `expected` says in words what it must be."""
    compiled = re.compile(pattern)

    def checked(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"must be {expected}")
        return text

    return AfterValidator(checked)


def _kind(kind: object) -> object:
    if kind in {"v5e", "v5litepod"}:
        raise ValueError("comes by the Cloud TPU API alone: docs/provision.md#v5e has the way")
    return kind


def _of_all_slices(given: object) -> object:
    match given:
        case [*values]:
            raise ValueError(
                f"lists {len(values)} slices, and those of one learner are equal: give one value,"
                " and their number as slices; slices that differ are different learners"
            )
    return given


def _private(text: str) -> str:
    try:
        found = ipaddress.ip_network(text)
    except ValueError as error:
        raise ValueError(f"is not an address range, such as 10.64.0.0/20: {error}") from error
    if isinstance(found, ipaddress.IPv6Network) or not any(map(found.subnet_of, PRIVATE)):
        raise ValueError("is not a private range, such as 10.64.0.0/20")
    return text


def _subnet(text: str) -> str:
    if ipaddress.ip_network(_private(text)).prefixlen > 27:
        raise ValueError("has fewer than 32 addresses")
    return text


def _moment(given: object) -> object:
    """Returns a time in UTC as text like 2026-12-24T00:00:00Z, from such text or TOML's own type.

    Raises:
        ValueError: `given` is not such a time, or has another time zone.
    """
    text = f"{given:{_MOMENT}}" if isinstance(given, datetime) else given
    try:
        moment = datetime.strptime(str(text), _MOMENT)
    except ValueError as error:
        raise ValueError("must be a time in UTC, such as 2026-12-24T00:00:00Z") from error
    if isinstance(given, datetime) and given != moment.replace(tzinfo=UTC):
        raise ValueError("must be in UTC: its last letter is Z")
    return text


def _few(labels: dict[str, str]) -> dict[str, str]:
    if len(labels) > MOST_LABELS:
        raise ValueError(f"has {len(labels)} labels, and a resource takes {MOST_LABELS} beside one")
    return labels


def _text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


# A name also ends in a letter or digit, as it becomes part of host names and account names.
Name = Annotated[
    str,
    _shape(
        "[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?",
        "a name of up to 40 lower-case letters, digits and hyphens, none of these at an end",
    ),
]
SiteName = Annotated[
    str,
    _shape(
        "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?",
        "a name of up to 32 lower-case letters, digits and hyphens, none of these at an end",
    ),
]
Project = Annotated[
    str,
    _shape(
        "[a-z][a-z0-9-]{4,28}[a-z0-9]",
        "a project's id: 6 to 30 lower-case letters, digits and hyphens, a letter first and no "
        "hyphen last",
    ),
]
Zone = Annotated[str, _shape(ZONE.pattern, "a zone, such as us-central1-a")]
Private = Annotated[str, AfterValidator(_private)]
Subnet = Annotated[str, AfterValidator(_subnet)]
Region = Annotated[str, _shape("[a-z]+-[a-z]+[0-9]+", "a region, such as us-central1")]
Location = Annotated[
    str,
    _shape(
        f"[a-z]+-[a-z]+[0-9]+|{'|'.join(MULTI_REGIONS)}",
        f"a region, such as us-central1, or one of {', '.join(MULTI_REGIONS)}",
    ),
]
Machine = Annotated[
    str, _shape("[a-z][a-z0-9]+(-[a-z0-9]+){1,3}", "a machine type, such as n2-highmem-8")
]
Image = Annotated[
    str,
    _shape(
        "projects/[^/ ]+/global/images/(family/)?[^/ ]+",
        "an image, such as projects/debian-cloud/global/images/family/debian-12",
    ),
]
Topology = Annotated[str, _shape("[0-9]+(x[0-9]+){1,2}", "a topology, such as 4x4 or 4x4x4")]
Reservation = Annotated[
    str,
    _shape(
        "(projects/[^/ ]+/reservations/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?",
        "the name of a reservation, such as my-reservation, or of a shared one, such as "
        "projects/its-project/reservations/its-name",
    ),
]
Channel = Annotated[
    str,
    _shape(
        r"projects/[^/]+/notificationChannels/[0-9]+",
        "a channel's name, such as projects/my-project/notificationChannels/123",
    ),
]
Member = Annotated[
    str,
    _shape(
        r"(user|group):[^ @]+@[^ @]+\.[^ @]+|serviceAccount:[^ @]+@[^ @]+\.gserviceaccount\.com",
        "a known person, group or service account, such as user:ann@example.org, "
        "group:team@example.org or serviceAccount:ci@my-project.iam.gserviceaccount.com",
    ),
]
BillingAccount = Annotated[
    str,
    _shape(
        "[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}",
        "a billing account's id, such as 012345-6789AB-CDEF01",
    ),
]
LabelKey = Annotated[
    str,
    _shape(
        "(?!goog)[a-z][a-z0-9_-]{0,62}",
        "a label's key: up to 63 lower-case letters, digits, hyphens and underscores, a letter "
        "first, and not goog, which Google keeps",
    ),
]
Label = Annotated[
    str,
    _shape(
        "[a-z0-9_-]{0,63}",
        "a label: up to 63 lower-case letters, digits, hyphens and underscores",
    ),
]
DataPlace = Annotated[
    str,
    _shape(
        "gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/[A-Za-z0-9._-]+)+",
        "a folder of prepared data in a bucket, such as gs://my-data/tokens",
    ),
]
Disk = Annotated[int, Field(ge=20, le=65536)]
FilePath = Annotated[str, Field(min_length=1), AfterValidator(_text)]


class FleetFinding(NamedTuple):
    """A fault of a fleet.

    Attributes:
        sentence: the fault, and what to do, for people.
        refused: True if Terraform must not run with this fault; False for a warning.
    """

    sentence: str
    refused: bool = True


class FileSection(BaseModel):
    """Base of the file's sections: refuses unknown keys, and values of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Nats(FileSection):
    """The three NATS servers.

    Attributes:
        zones: a zone for each server.
        machine_type: machine type of each.
        disk_gib: GiB of the disk of each server's streams.
        snapshot_days: days for which snapshots of these disks are kept.
    """

    zones: list[Zone]
    machine_type: Machine = "e2-standard-2"
    disk_gib: Disk = 50
    snapshot_days: Annotated[int, Field(ge=1, le=365)] = 7

    @model_validator(mode="after")
    def _three(self) -> "Nats":
        if len(self.zones) != 3 or len(set(self.zones)) != 3:
            raise ValueError(
                "zones must be three different ones: a run must survive the loss of one"
            )
        return self


class Aggregator(FileSection):
    """One aggregator.

    Attributes:
        zone: its machine's zone.
        machine_type: its machine's type; None: the smallest with enough memory for the run's model.
        disk_gib: GiB of its disk.
    """

    zone: Zone
    machine_type: Machine | None = None
    disk_gib: Disk = 50


class FleetLearner(FileSection):
    """One learner: its machines.

    Attributes:
        zone: zone of all its machines, unless `zones` is set.
        kind: the accelerator, or "cpu".
        chips: chips of its one host; None without accelerators, or with a topology.
        topology: shape of a slice of several hosts, such as 4x4; None: one host.
        slices: the number of its slices, which are equal; it continues with those that are left.
        zones: zone of each slice, in the region of `zone`; None: all are in `zone`.
        machine_type: type of a machine without accelerators; None with accelerators.
        spot: whether machines are preemptible.
        reservation: the reservation that machines are from; None: none.
        dollars_hour: what one of its machines costs an hour, where no list price is known.
        flex_start_hours: longest time in hours for which flex-start machines run; None: machines
            are not flex-start.
        image: image of the boot disk; None: the default of the kind.
        disk_gib: GiB of each machine's disk.
        warm_start: whether the learner may read all learners' checkpoints, as the run's key
            `learner.warm_start` needs.
        paused: whether the learner has no machines for now.
        site: name of the group of learners that share a service account; None: an account alone.
    """

    zone: Zone
    kind: Annotated[Kind, BeforeValidator(_kind)]
    chips: Annotated[int | None, BeforeValidator(_of_all_slices)] = None
    topology: Annotated[Topology | None, BeforeValidator(_of_all_slices)] = None
    slices: Annotated[int, Field(ge=1, le=64), BeforeValidator(_of_all_slices)] = 1
    zones: list[Zone] | None = None
    machine_type: Machine | None = None
    spot: bool = False
    reservation: Reservation | None = None
    flex_start_hours: Annotated[int, Field(ge=1, le=168)] | None = None
    dollars_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    image: Image | None = None
    disk_gib: Disk = 100
    warm_start: bool = False
    paused: bool = False
    site: SiteName | None = None

    @model_validator(mode="after")
    def _size(self) -> "FleetLearner":
        if self.kind == "cpu" and (
            self.machine_type is None or self.chips is not None or self.topology is not None
        ):
            raise ValueError("kind 'cpu' takes machine_type, and neither chips nor topology")
        if self.kind != "cpu" and self.machine_type is not None:
            raise ValueError(f"kind {self.kind!r} takes chips or topology, and no machine_type")
        if self.kind != "cpu" and (self.chips is None) == (self.topology is None):
            raise ValueError(f"kind {self.kind!r} takes either chips or topology")
        ways = (self.spot, self.reservation is not None, self.flex_start_hours is not None)
        if sum(ways) > 1:
            raise ValueError("is one of spot, of a reservation, and flex-start, not both")
        if self.kind == "cpu" and self.flex_start_hours is not None:
            raise ValueError("kind 'cpu' takes no flex_start_hours")
        return self

    @model_validator(mode="after")
    def _places(self) -> "FleetLearner":
        if len(self.slice_zones) != self.slices:
            raise ValueError(
                f"zones names {len(self.slice_zones)} zones, and slices is {self.slices}: name one"
                " for each slice, or leave zones out"
            )
        if others := [one for one in self.slice_zones if region_of(one) != region_of(self.zone)]:
            raise ValueError(
                f"zones has {others[0]}, and zone is {self.zone}: the slices of a learner are in"
                " one region; make those of another region a learner of their own"
            )
        return self

    @property
    def slice_zones(self) -> list[str]:
        """The zone of each slice."""
        return self.zones or [self.zone] * self.slices


def chips_of(learner: FleetLearner) -> int:
    """Returns the number of chips of one slice of a learner; 0 without accelerators."""
    if learner.topology is None:
        return learner.chips or 0
    return math.prod(int(side) for side in learner.topology.split("x"))


def hosts_of(learner: FleetLearner) -> int:
    """Returns the number of machines of one slice, as infra/terraform/modules/learner counts."""
    return 1 if learner.topology is None else max(1, chips_of(learner) // CHIPS_OF_HOST)


def machines_of(learner: FleetLearner) -> int:
    """Returns the number of machines of all slices of a learner."""
    return learner.slices * hosts_of(learner)


class Budget(FileSection):
    """The most that the run may cost.

    Attributes:
        dollars: once these are spent, the keeper deletes all machines of learners.
        traffic_dollars_day: dollars a day of the bucket and its traffic, as `diloco plan --regions`
            counts them; 0: they are not counted.
        billing_account: id of the billing account, for a budget of Google's that tells people too;
            None: no such budget.
    """

    dollars: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    traffic_dollars_day: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    billing_account: BillingAccount | None = None


class Backstops(FileSection):
    """Ages in days at which lifecycle rules of the bucket delete objects, by sort of object."""

    updates: Annotated[int, Field(ge=7)] = 30
    checkpoints: Annotated[int, Field(ge=7)] = 90


class Images(FileSection):
    """Images of boot disks to use instead of the defaults, by kind of machine."""

    v5p: Image | None = None
    v6e: Image | None = None
    tpu7x: Image | None = None
    cpu: Image | None = None


class ReleaseFiles(FileSection):
    """Paths of the releases that machines run, by kind of release."""

    cpu: FilePath
    tpu: FilePath | None = None


class FleetFile(FileSection):
    """The whole file of a fleet.

    Attributes:
        project: the Google Cloud project's id.
        run_toml: path of the run's file; this and other paths are relative to the fleet's file.
        auth_folder: path of the folder that `diloco auth init` made.
        releases: the releases that machines run.
        parameters: number of the model's parameters, for a run without a task that states it.
        subnets: address range of each region.
        nats: the NATS servers.
        aggregators: the aggregators, by name.
        learners: the learners, by name.
        data: bucket folder of prepared tokens, which each learner's machine copies before the
            learner starts.
        bucket_location: region or multi-region of the bucket; None: the first aggregator's region.
        bucket_backstop_days: ages at which the bucket deletes objects that the run has not deleted.
        images: images of boot disks.
        hourly_checkpoints: whether a timer makes a checkpoint of the run each hour.
        paused: whether no learner has machines for now.
        caches: zones of caches, through which learners of the zone's region read versions.
        keeper: whether a machine recreates learners' lost machines (infra/keeper.py).
        stop_at: time in UTC from which on the keeper deletes all machines of learners.
        budget: dollars after which the keeper deletes all machines of learners.
        webhook_file: path of a file with the line DILOCO_WEBHOOK_URL=https://..., to which the
            keeper's machine posts the run's alerts.
        notification_channels: channels of Cloud Monitoring that get alerts of errors in the logs.
        operators: people and groups that may operate the run.
        metrics_port: TCP port of the daemons' metrics.
        monitoring_ranges: private address ranges that may read metrics.
        labels: labels of all resources.
        allow_unlisted: only warn of what known.toml does not list, as Google may have added it
            since.
    """

    project: Project
    run_toml: FilePath
    auth_folder: FilePath
    releases: ReleaseFiles
    parameters: Annotated[int, Field(ge=1)] | None = None
    subnets: Annotated[dict[Region, Subnet], Field(min_length=1)]
    nats: Nats
    aggregators: Annotated[dict[Name, Aggregator], Field(min_length=1)]
    learners: dict[Name, FleetLearner] = {}
    data: DataPlace | None = None
    bucket_location: Location | None = None
    bucket_backstop_days: Backstops = Backstops()
    images: Images = Images()
    hourly_checkpoints: bool = False
    paused: bool = False
    caches: list[Zone] = []
    keeper: bool = True
    stop_at: Annotated[str, BeforeValidator(_moment)] | None = None
    budget: Budget | None = None
    webhook_file: FilePath | None = None
    notification_channels: list[Channel] = []
    operators: list[Member] = []
    metrics_port: Annotated[int, Field(ge=1024, le=65535)] = 9464
    monitoring_ranges: list[Private] = []
    # One of the 64 labels is the run's own.
    labels: Annotated[dict[LabelKey, Label], AfterValidator(_few)] = {}
    allow_unlisted: bool = False

    @model_validator(mode="after")
    def _done_by_the_keeper(self) -> "FleetFile":
        for key in ("stop_at", "budget", "webhook_file"):
            if getattr(self, key) and not self.keeper:
                raise ValueError(f"{key} needs the keeper's machine: keeper = true")
        return self

    def bucket(self) -> str:
        """Returns the bucket's location: `bucket_location`, else the first aggregator's region.

        The first aggregator is the first by name.
        """
        return self.bucket_location or region_of(self.aggregators[min(self.aggregators)].zone)


def read_fleet(path: Path) -> FleetFile:
    """Reads a fleet's file.

    Raises:
        ConfigError: the file cannot be read, or a key is missing, unknown or out of range.
    """
    try:
        document = read_document(path)
    except ConfigError as error:
        raise ConfigError(error.message, hint=_HINT) from error
    if "bundles" in document:
        raise ConfigError(f"{path}: 'bundles' is called 'releases' now", hint=_HINT)
    try:
        return FleetFile.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error)}", hint=_HINT) from error
