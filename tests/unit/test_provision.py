"""`diloco provision`: what is refused, with which sentence, and what Terraform is given."""

import json
import math
import re
import shutil
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import jax
import pytest
import tomli_w
from small_release import archive_of, packed
from typer.testing import CliRunner

from diloco.common.protocol.errors import ConfigError
from diloco.infra.provision.files import read_run
from diloco.infra.provision.known import known
from diloco.infra.provision.plan import check
from diloco.learner.load_and_check_task import build_task
from diloco.learner.task import params_shapes
from diloco.operate.auth import nats_config_and_credentials as auth
from diloco.program import app

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "infra" / "terraform" / "examples"
MODELS = ROOT / "docs" / "models.md"
HOSTS = ["10.64.0.11", "10.64.0.12", "10.64.0.13"]
LEARNERS = ("central", "east", "east-two", "europe", "tokyo", "slice", "tester")
SLICE = {"zone": "us-east5-a", "kind": "v6e", "chips": 4}
Document = dict[str, Any]
# Kinds of resources by whether money is asked for them: of the bucket `diloco plan` says it.
PRICED = {
    "compute_instance", "compute_instance_group_manager", "compute_instance_template",
    "compute_disk", "compute_router_nat", "secret_manager_secret_version", "dns_managed_zone",
}  # fmt: skip
# By what the fleet's file does not say: snapshots, logs and their alerts, and the bucket, which
# `diloco plan` counts.
BY_USE = {
    "compute_resource_policy", "monitoring_alert_policy", "storage_bucket", "storage_bucket_object",
}  # fmt: skip
FREE = {
    "billing_budget", "compute_address", "compute_disk_resource_policy_attachment", "compute_firewall",
    "compute_health_check", "compute_network", "compute_router", "compute_subnetwork",
    "dns_managed_zone_iam_member", "dns_record_set",
    "project_iam_custom_role", "project_iam_member", "project_service", "secret_manager_secret",
    "secret_manager_secret_iam_member", "service_account", "service_account_iam_member",
    "storage_bucket_iam_member",
}  # fmt: skip


def make_auth(folder: Path, **changed: Any) -> None:
    learners = changed.pop("learners", LEARNERS)
    given = {"installed_at": Path("/etc/nats"), "streams_at": Path("/var/lib/nats/jetstream")}
    auth.init(folder, changed.pop("run", "demo"), changed.pop("hosts", HOSTS), **(given | changed))
    for name in ("aggregator-a", "aggregator-b"):
        auth.add(folder, name, "aggregator")
    for name in learners:
        auth.add(folder, name, "learner")
    auth.add(folder, "watch", "reader")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the files that an operator has before the file of the fleet."""
    folder = tmp_path_factory.mktemp("operator")
    make_auth(folder / "auth")
    for kind in ("cpu", "tpu"):
        archive_of(folder / f"{kind}.tar.gz", kind=kind)
    shutil.copy(EXAMPLES / "run.toml", folder)
    return folder


@pytest.fixture
def place(prepared: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may spoil."""
    return Path(shutil.copytree(prepared, tmp_path / "operator"))


def example(name: str = "small") -> Document:
    """A shipped fleet, over the files of `place`."""
    document = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    files = {"auth_folder": "auth", "run_toml": "run.toml"}
    return document | files | {"releases": {"cpu": "cpu.tar.gz", "tpu": "tpu.tar.gz"}}


def write(place: Path, document: Document) -> Path:
    path = place / "fleet.toml"
    path.write_text(tomli_w.dumps(document))
    return path


def sentences(path: Path) -> list[str]:
    """Returns the sentences of a refusal."""
    try:
        return [one.sentence for one in check(path).refused]
    except ConfigError as error:
        return [error.message]


def put(where: str, value: Any) -> Callable[[Document, Path], None]:
    """A change of one key of the file, such as "learners.east.spot"; None takes it out."""

    def spoil(document: Document, _: Path) -> None:
        *parents, last = where.split("/")
        for parent in parents:
            document = document[parent]
        if value is None:
            del document[last]
        else:
            document[last] = value

    return spoil


def learner(**keys: Any) -> Callable[[Document, Path], None]:
    """A learner in place of `east`, of these keys."""
    right = {"zone": "us-east5-a", "kind": "v6e"}
    return put("learners/east", right | keys)


def text(name: str, old: str, new: str) -> Callable[[Document, Path], None]:
    """A change of one of the files that the fleet names."""

    def spoil(_: Document, place: Path) -> None:
        path = place / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def made_again(**changed: Any) -> Callable[[Document, Path], None]:
    """Other credentials."""

    def spoil(_: Document, place: Path) -> None:
        shutil.rmtree(place / "auth")
        make_auth(place / "auth", **changed)

    return spoil


def released(*names: str, **changed: Any) -> Callable[[Document, Path], None]:
    """Another release for machines without accelerators."""
    return lambda _, place: archive_of(place / "cpu.tar.gz", *names, **changed) and None


def archive_of_source(_: Document, place: Path) -> None:
    packed(place / "cpu.tar.gz", {"pyproject.toml": ""})


def gone(name: str) -> Callable[[Document, Path], None]:
    return lambda _, place: (place / name).unlink()


def replaced(name: str, text: str) -> Callable[[Document, Path], None]:
    def spoil(_: Document, place: Path) -> None:
        (place / name).write_text(text)

    return spoil


def own_loops(parameters: int | None, **aggregator: str) -> Callable[[Document, Path], None]:
    """A run whose learners join from loops of their own; nothing but the fleet says its size."""

    def spoil(document: Document, place: Path) -> None:
        text("run.toml", "diloco.models.bytes_lm:build", "")(document, place)
        document["aggregators"]["aggregator-a"].update(aggregator)
        if parameters is not None:
            document["parameters"] = parameters

    return spoil


def slices(settings: str = "", **keys: Any) -> Callable[[Document, Path], None]:
    """A learner of several slices in place of `east`, and settings of the run's [learner]."""

    def spoil(document: Document, place: Path) -> None:
        learner(**({"topology": "4x4", "slices": 2} | keys))(document, place)
        text("run.toml", "[quorum]", f"[learner]\n{settings}\n[quorum]")(document, place)

    return spoil


def many(document: Document, place: Path) -> None:
    for number in range(49):
        document["learners"][f"l{number}"] = {"zone": "us-east5-a", "kind": "v6e", "chips": 1}


def swapped(document: Document, place: Path) -> None:
    """The credentials of a learner under the name of another one."""
    folder = place / "auth" / "credentials"
    shutil.copy(folder / "tokyo.toml", folder / "east.toml")


def open_to_all(_: Document, place: Path) -> None:
    (place / "auth" / "credentials" / "east.toml").chmod(0o644)


WRONG: dict[str, tuple[Callable[[Document, Path], None], str]] = {
    # The file itself.
    "a key that is not one": (put("spott", True), "unknown key 'spott'"),
    "a typo in a learner": (learner(chips=4, spott=True), "learners.east.spott"),
    "a typo in an aggregator": (put("aggregators/aggregator-a/machine", "n2-highmem-8"), "machine"),
    "a typo in nats": (put("nats/disk_gb", 50), "nats.disk_gb"),
    "a typo in images": (put("images", {"v7x": "x"}), "images.v7x"),
    "a typo in backstops": (put("bucket_backstop_days", {"update": 30}), "update"),
    "no project": (put("project", None), "'project' is missing"),
    "no parameters of own loops": (own_loops(None), "parameters is missing"),
    "no subnets": (put("subnets", None), "'subnets' is missing"),
    "no aggregators": (put("aggregators", {}), "aggregators"),
    "no zone": (put("learners/east", {"kind": "v6e", "chips": 4}), "learners.east.zone"),
    "no kind": (put("learners/east", {"zone": "us-east5-a", "chips": 4}), "learners.east.kind"),
    "a project with capitals": (put("project", "My-Project"), "'project'"),
    "a project that ends in a hyphen": (put("project", "my-project-"), "'project'"),
    "a short project": (put("project", "abc"), "'project'"),
    "no model": (put("parameters", 0), "'parameters'"),
    "a model of text": (put("parameters", "12B"), "'parameters'"),
    "a number as spot": (learner(chips=4, spot=1), "learners.east.spot"),
    "text as spot": (learner(chips=4, spot="true"), "learners.east.spot"),
    "text as chips": (learner(chips="4"), "learners.east.chips"),
    # Networks.
    "ranges that overlap": (put("subnets/us-east5", "10.64.8.0/21"), "overlap"),
    "the same range twice": (put("subnets/us-east5", "10.64.0.0/20"), "overlap"),
    "a public range": (put("subnets/us-east5", "34.64.0.0/20"), "not a private range"),
    "a range half public": (put("subnets/us-east5", "172.0.0.0/8"), "not a private range"),
    "a tiny range": (put("subnets/us-east5", "10.64.16.0/28"), "fewer than 32"),
    "a range with bits of hosts": (put("subnets/us-east5", "10.64.16.1/20"), "host bits"),
    "a range that is none": (put("subnets/us-east5", "10.64.16.0"), "fewer than 32"),
    "a range of words": (put("subnets/us-east5", "internal"), "not an address range"),
    "a range of the other protocol": (put("subnets/us-east5", "fd00::/64"), "not a private range"),
    "a zone as region": (put("subnets/us-east5-a", "10.65.0.0/20"), "us-east5-a"),
    "a region without range": (put("subnets/us-east5", None), "us-east5 has no range"),
    "a server without range": (
        put("nats/zones", ["us-central1-a", "us-central1-b", "us-east1-c"]),
        "us-east1 has no range",
    ),
    "an aggregator without range": (
        put("aggregators/aggregator-a/zone", "us-west1-a"),
        "us-west1 has no range",
    ),
    "metrics for the internet": (put("monitoring_ranges", ["0.0.0.0/0"]), "not a private range"),
    # NATS.
    "two servers": (put("nats/zones", ["us-central1-a", "us-central1-b"]), "three different"),
    "two servers in a zone": (put("nats/zones", ["us-central1-a"] * 3), "three different"),
    "a server in a region": (put("nats/zones", ["us-central1"] * 3), "must be a zone"),
    "a disk of less than nothing": (put("nats/disk_gib", -5), "nats.disk_gib"),
    "a disk that is too small": (put("nats/disk_gib", 5), "nats.disk_gib"),
    "no snapshots": (put("nats/snapshot_days", 0), "nats.snapshot_days"),
    "a machine with blanks": (put("nats/machine_type", "n2 standard"), "nats.machine_type"),
    # Names.
    "a learner called operator": (put("learners/operator", {}), "learners.operator"),
    "an operator as learner": (
        put("learners/operator", SLICE),
        "what the run calls its own",
    ),
    "a guard as learner": (
        put("learners/guard", SLICE),
        "what the run calls its own",
    ),
    "the watch as learner": (
        put("learners/watch", SLICE),
        "what the run calls its own",
    ),
    "a server as learner": (
        put("learners/nats-1", SLICE),
        "what the run calls its own",
    ),
    "an aggregator as learner": (
        put("learners/aggregator-a", SLICE),
        "a learner and an aggregator",
    ),
    "a learner as aggregator": (
        put("aggregators/east", {"zone": "us-east5-a"}),
        "and an aggregator",
    ),
    "a name that ends in a hyphen": (
        put("learners/east-", SLICE),
        "east-",
    ),
    "a name with capitals": (
        put("learners/East", SLICE),
        "East",
    ),
    "a name that is too long": (
        put("learners/" + 41 * "a", SLICE),
        "aaaa",
    ),
    "a name too long with the run's": (
        put("learners/" + 40 * "a", SLICE),
        "aaaa",
    ),
    "more learners than bindings": (
        many,
        "51 learners without a site, and sites, are more than the 30",
    ),
    "a learner that is not named after its site": (
        learner(chips=4, site="berlin"),
        "name it after that: 'berlin-1'",
    ),
    "a learner that is named after a site of others": (
        put("learners/east-two", SLICE | {"site": "east"}),
        "learners.east: is named like a learner of the site 'east'",
    ),
    "a site of another alphabet": (learner(chips=4, site="Berlin"), "site"),
    # Accelerators and zones.
    "v6e where there is none": (
        put("learners/east", {"zone": "us-east5-c", "kind": "v6e", "chips": 4}),
        "us-east5-c has no v6e",
    ),
    "v5p where there is none": (learner(zone="us-central1-b", kind="v5p", chips=4), "has no v5p"),
    "tpu7x where there is none": (learner(kind="tpu7x", chips=4), "us-east5-a has no tpu7x"),
    "an unknown kind": (learner(kind="v9", chips=4), "learners.east.kind"),
    "a v5e": (learner(kind="v5e", chips=4), "comes by the Cloud TPU API alone"),
    "flex-start for a month": (learner(chips=4, flex_start_hours=720), "must be at most 168"),
    "flex-start of spot": (learner(chips=4, spot=True, flex_start_hours=24), "not both"),
    "flex-start that nobody mends": (
        lambda document, place: (
            learner(chips=4, flex_start_hours=24)(document, place) or document.update(keeper=False)
        ),
        "once lost, would never return",
    ),
    "a graphics card": (learner(kind="h100", chips=8), "learners.east.kind"),
    "three chips": (learner(chips=3), "has 1, 4, 8 chips, not 3"),
    "eight chips of v5p": (learner(zone="us-east5-a", kind="v5p", chips=8), "has 1, 2, 4 chips"),
    "one chip of tpu7x": (learner(zone="us-central1-c", kind="tpu7x", chips=1), "has 4 chips"),
    "no chips": (learner(chips=0), "not 0"),
    "neither chips nor topology": (learner(), "either chips or topology"),
    "chips and topology": (learner(chips=4, topology="4x4"), "either chips or topology"),
    "a topology of one host": (learner(topology="2x4"), "no slice of several hosts"),
    "a topology of three sides": (learner(topology="4x4x4"), "no slice of several hosts"),
    "a topology of two sides": (learner(kind="v5p", topology="4x4"), "no slice of several hosts"),
    "an odd topology": (learner(kind="v5p", topology="4x4x5"), "no slice of several hosts"),
    "a topology that is too large": (
        learner(kind="v5p", topology="24x24x24"),
        "6144 chips at most",
    ),
    "a topology of words": (learner(topology="large"), "learners.east.topology"),
    "a TPU's machine type": (learner(chips=4, machine_type="ct6e-standard-4t"), "no machine_type"),
    "a machine without type": (learner(kind="cpu"), "takes machine_type"),
    "a machine with chips": (
        learner(kind="cpu", machine_type="n2-standard-8", chips=4),
        "neither chips nor topology",
    ),
    "spot of a reservation": (learner(chips=4, spot=True, reservation="mine"), "not both"),
    "a reservation with blanks": (learner(chips=4, reservation="my own"), "reservation"),
    "a zone that is none": (learner(zone="us-east5", chips=4), "must be a zone"),
    "a zone of another cloud": (learner(zone="eu-west-1a", chips=4), "must be a zone"),
    "a learner's disk": (learner(chips=4, disk_gib=-5), "learners.east.disk_gib"),
    "an image of another kind": (
        put("images", {"v6e": "projects/p/global/images/family/ubuntu-2404-amd64-tpu-tpu7x"}),
        "is for tpu7x, not for v6e",
    ),
    "a runtime version as image": (put("images", {"v6e": "v2-alpha-tpuv6e"}), "images.v6e"),
    "a learner's image": (
        learner(chips=4, image="projects/p/global/images/ubuntu-tpu-v5p"),
        "is for v5p, not for v6e",
    ),
    # Bucket, people, the rest.
    "a bucket in a zone": (put("bucket_location", "us-central1-a"), "bucket_location"),
    "a bucket nowhere": (put("bucket_location", "EARTH"), "bucket_location"),
    "a backstop of a day": (put("bucket_backstop_days", {"updates": 1}), "updates"),
    "everybody as operator": (put("operators", ["allUsers"]), "operators"),
    "an operator without domain": (put("operators", ["user:ann"]), "operators"),
    "a port of the system": (put("metrics_port", 80), "metrics_port"),
    "the port of health checks": (put("metrics_port", 9463), "answer health checks"),
    "a label with capitals": (put("labels", {"Team": "a"}), "labels"),
    # Data.
    "data of a web server": (put("data", "https://example.org/tokens"), "'data' must be a folder"),
    "data that is a bucket": (put("data", "gs://my-data"), "'data' must be a folder of prepared"),
    "text that is on no machine": (
        text("run.toml", 'corpus = "stdlib"', 'corpus = "/srv/texts"'),
        "names /srv/texts, which is on no machine",
    ),
    "data that nobody copies": (
        text("run.toml", 'corpus = "stdlib"', 'corpus = "/var/lib/diloco-data/tokens"'),
        "and nothing is copied there: set data",
    ),
    # Aggregators' memory.
    "a machine that is too small": (
        own_loops(12_000_000_000, machine_type="n2-highmem-8"),
        "n2-highmem-8 has 64 GB of memory",
    ),
    "a model for no known machine": (own_loops(100_000_000_000), "none known here"),
    # The run's file.
    "no run's file": (put("run_toml", "none.toml"), "no configuration file"),
    "a run's file that is no TOML": (text("run.toml", "[run]", "[run"), "not valid TOML"),
    "an unknown key of the run": (text("run.toml", "fragments", "fragmets"), "fragmets"),
    "a value of the run out of range": (
        text("run.toml", "fragments = 8", "fragments = 0"),
        "fragments",
    ),
    "a mesh of another slice": (
        text("run.toml", "[quorum]", '[learner]\nmesh = "fsdp=8"\n[quorum]'),
        "learners.east: the mesh of the run's file (data=1, fsdp=8, expert=1, tensor=1) does not fit its 4",
    ),
    "an island's mesh that leaves a part of a device": (
        text("run.toml", "[quorum]", '[learner.islands.east]\nmesh = "tensor=3"\n[quorum]'),
        "does not fit its 4 chips",
    ),
    "a section that Terraform writes": (text("run.toml", "[quorum]", "[bus]\n[quorum]"), "[bus]"),
    "a run that ends in a hyphen": (text("run.toml", '"demo"', '"demo-"'), "ends in a hyphen"),
    "names too long for a bucket": (
        text("run.toml", '"demo"', f'"{40 * "a"}"'),
        "too many for a bucket",
    ),
    "a run of other credentials": (text("run.toml", '"demo"', '"other"'), "of the run 'other'"),
    # Credentials.
    "no folder of credentials": (put("auth_folder", "none"), "holds no credentials"),
    "credentials of another run": (made_again(run="other"), "of the run 'demo'"),
    "servers elsewhere": (
        made_again(hosts=["10.65.0.11", "10.65.0.12", "10.65.0.13"]),
        "--host 10.",
    ),
    "one server": (made_again(hosts=["10.64.0.11"]), "diloco auth init"),
    "servers installed elsewhere": (made_again(installed_at=Path("/opt")), "--installed-at"),
    "streams elsewhere": (made_again(streams_at=Path("/srv")), "store_dir"),
    "streams larger than the disk": (made_again(max_file_bytes=90 << 30), "nine tenths"),
    "servers that lose messages": (
        text("auth/nats-1.conf", "sync_interval: always", "sync_interval: 2m"),
        "sync_interval",
    ),
    "a learner without credentials": (
        put("learners/west", SLICE),
        "add-learner",
    ),
    "an aggregator without credentials": (
        put("aggregators/aggregator-c", {"zone": "us-central1-a"}),
        "add-aggregator",
    ),
    "a learner with an aggregator's": (
        lambda document, _: (
            document["aggregators"].pop("aggregator-b")
            and document["learners"].update({"aggregator-b": SLICE})
        ),
        "those of a aggregator",
    ),
    "another's credentials": (swapped, "is not of the learner 'east'"),
    "no credentials of the watch": (
        lambda _, place: auth.revoke(place / "auth", "watch") and None,
        "add-reader",
    ),
    "a webhook that is not there": (put("webhook_file", "none.env"), "webhook_file: cannot read"),
    "a webhook without its key": (put("webhook_file", "run.toml"), "no line DILOCO_WEBHOOK_URL="),
    "a webhook that is no URL": (
        lambda document, place: (
            (place / "hook.env").write_text("DILOCO_WEBHOOK_URL=hooks.example.org\n")
            and document.update(webhook_file="hook.env")
        ),
        "is not an HTTP URL",
    ),
    "a webhook and nobody who watches": (
        lambda document, _: document.update(webhook_file="run.toml", keeper=False),
        "webhook_file needs the keeper's machine",
    ),
    "a budget of nothing": (put("budget", {"dollars": 0}), "budget.dollars"),
    "a budget without dollars": (put("budget", {}), "budget.dollars"),
    "a typo in a budget": (put("budget", {"dollars": 5, "a_day": 1}), "budget.a_day"),
    "a billing account of words": (
        put("budget", {"dollars": 5, "billing_account": "mine"}),
        "012345-6789AB-CDEF01",
    ),
    "a budget that nobody keeps": (
        lambda document, _: document.update(budget={"dollars": 5}, keeper=False),
        "budget needs the keeper's machine",
    ),
    "a machine for nothing": (learner(chips=4, dollars_hour=0), "dollars_hour"),
    "credentials that are gone": (gone("auth/credentials/east.toml"), "no credentials file"),
    "credentials that all can read": (open_to_all, "others can read it"),
    # Several slices.
    "unequal slices": (
        slices(topology=["4x4", "4x8"]),
        "lists 2 slices, and those of one learner are equal: give one value",
    ),
    "slices one by one": (
        slices(slices=[{"topology": "4x4"}, {"topology": "4x8"}]),
        "lists 2 slices, and those of one learner are equal: give one value",
    ),
    "no slices": (slices(slices=0), "learners.east.slices"),
    "half a slice": (slices(slices=1.5), "learners.east.slices"),
    "slices of two regions": (
        slices(zones=["us-east5-a", "us-central1-b"]),
        "zones has us-central1-b, and zone is us-east5-a: the slices of a learner are in one region",
    ),
    "a zone for one of two slices": (
        slices(zones=["us-east5-a"]),
        "zones names 1 zones, and slices is 2: name one for each slice",
    ),
    "zones of one slice": (
        learner(chips=4, zones=["us-east5-a", "us-east5-b"]),
        "zones names 2 zones, and slices is 1",
    ),
    "a slice where there are no chips": (
        slices(zones=["us-east5-a", "us-east5-c"]),
        "learners.east: us-east5-c has no v6e",
    ),
    "slices that the run's file counts otherwise": (
        slices('slices = 4\npeers = ["a:1", "b:1", "c:1", "d:1"]\ncheckpoint_dir = "/c"'),
        "learners.east: the fleet gives it 2 slices, and the run's file has learner.slices = 4",
    ),
    "slices of the run's file that the fleet has not": (
        slices('slices = 2\npeers = ["a:1", "b:1"]\ncheckpoint_dir = "/c"'),
        "learners.central: the fleet gives it 1 slices, and the run's file has learner.slices = 2",
    ),
    "more slices needed than there are": (
        slices("min_slices = 3"),
        "the run's learner.min_slices is 3, and the fleet gives it 2 slices, so that it would",
    ),
    "a silence that a lost packet makes": (
        slices("silent_s = 1.5"),
        "learner.silent_s is 1.5, and between slices a report may be 2 s late",
    ),
    "a coordinator of the run's own": (
        slices('coordinator = "auto"'),
        "the run's file has learner.coordinator = 'auto': leave it out",
    ),
    "a batch that two slices cannot divide": (
        slices("options = { batch = 16 }\nmin_slices = 2"),
        "learners.east: a batch of 16 rows cannot be divided over 2 of 2 slices, in 32 parts; choose",
    ),
    "more hosts than are told of each other": (
        slices(topology="16x16", slices=17),
        "learners.east: 17 slices have 1088 hosts, and a learner of several slices has 1024",
    ),
    "metrics where supervisors listen": (
        lambda document, place: (
            slices()(document, place) or document.update(metrics_port=9466)  # type: ignore[func-returns-value]
        ),
        "metrics_port 9466 is where the supervisors of several slices listen",
    ),
    "a learner named like a slice of another": (
        lambda document, place: (
            slices()(document, place) or document["learners"].update({"east-s1": SLICE})  # type: ignore[func-returns-value]
        ),
        "learners.east-s1: is named like slice 1 of learners.east",
    ),
    # The releases.
    "a key of an earlier diloco": (put("bundles", {}), "'bundles' is called 'releases' now"),
    "no release": (put("releases/cpu", "none.tar.gz"), "is no release"),
    "no release for NATS servers": (put("releases/cpu", None), "releases.cpu"),
    "no release for TPUs": (put("releases/tpu", None), "make release KIND=tpu"),
    "a release for a kind that is not on Google Cloud": (
        put("releases/cuda", "x"),
        "releases.cuda",
    ),
    "a release of another name": (put("releases/cpu", "run.toml"), "is no .tar.gz"),
    "a release that is text": (replaced("cpu.tar.gz", "diloco"), "is no release"),
    "an archive of something else": (archive_of_source, "is no release of format"),
    "releases that are exchanged": (put("releases/cpu", "tpu.tar.gz"), "is a release for tpu"),
    "a release of a format to come": (released(format=99), "is no release of format"),
    "a release without a least glibc": (released(glibc=None), "is no release"),
    "a release for ARM": (released(architecture="aarch64"), "is for aarch64"),
}


def test_there_are_many_wrong_fleets() -> None:
    assert len(WRONG) >= 80


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_fleet_is_refused_with_a_sentence(place: Path, case: str) -> None:
    spoil, sentence = WRONG[case]
    document = example()
    spoil(document, place)
    found = sentences(write(place, document))
    assert any(sentence in one for one in found), found


def test_a_learner_of_several_slices_is_told_to_terraform_and_counted_whole(place: Path) -> None:
    document = example()
    slices("options = { batch = 96 }", slices=3, dollars_hour=5.5)(document, place)
    document["budget"] = {"dollars": 5000}
    one = document["learners"]["east"]
    checked = check(write(place, document))
    assert checked.refused == []
    assert checked.variables is not None
    assert checked.variables["learners"]["east"]["slices"] == 3
    costs = {cost.what: cost.dollars for cost in checked.costs}
    assert costs["east: 48 chips of v6e, on demand"] == pytest.approx(24 * 48 * 2.70)
    assert costs["names of slices' hosts: 1 zones"] == pytest.approx(0.20 * 12 / 365.25)
    # 12 hosts in the place of 4.
    assert checked.variables["budget"]["learners"]["east"] == pytest.approx(4 * 2.70)
    one["spot"] = True
    spot = {cost.what: cost.dollars for cost in check(write(place, document)).costs}
    assert spot["east: 48 chips of v6e, spot"] == pytest.approx(24 * 12 * 5.5)
    one["slices"] = 1
    less = {cost.what: cost.dollars for cost in check(write(place, document)).costs}
    assert spot["disks: 1200 GiB of hyperdisk-balanced"] == pytest.approx(
        3 * (less["disks: 400 GiB of hyperdisk-balanced"] or 0)
    )
    assert "gateways: 2 regions, 19 machines" in spot
    assert "gateways: 2 regions, 11 machines" in less
    document["subnets"]["us-east5"] = "10.64.16.0/27"
    one["slices"] = 8
    found = sentences(write(place, document))
    assert any("has 28 addresses beside Google's 4, and 32 machines" in said for said in found)


def test_slices_that_google_may_not_join_are_a_warning(place: Path) -> None:
    document = example()
    slices("options = { batch = 96 }", chips=4, topology=None, zones=["us-east5-a", "us-east5-b"])(
        document, place
    )
    del document["learners"]["east"]["topology"]
    checked = check(write(place, document))
    assert checked.refused == []
    said = [one.sentence for one in checked.findings]
    assert any(
        "its slices are in 2 zones, and Google joins slices of v6e within one" in one
        for one in said
    )
    assert any(
        "its slices have one host each, and Google joins slices of several" in one for one in said
    )


def test_forty_learners_of_a_site_have_one_account(place: Path) -> None:
    document = example()
    for number in range(40):
        auth.add(place / "auth", f"berlin-{number}", "learner")
        document["learners"][f"berlin-{number}"] = SLICE | {"site": "berlin"}
    checked = check(write(place, document))
    assert not checked.refused
    assert checked.variables is not None
    assert checked.variables["learners"]["berlin-7"]["site"] == "berlin"


@pytest.mark.parametrize("name", ["small", "mixed"])
def test_the_shipped_fleets_are_right(place: Path, name: str) -> None:
    path = write(place, example(name))
    checked = check(path)
    assert not checked.refused
    assert checked.variables is not None
    assert checked.variables["run"] == "demo"


def test_islands_of_nobody_are_a_warning(place: Path) -> None:
    text("run.toml", "[quorum]", '[learner.islands.esat]\nmesh = "4"\n[quorum]')({}, place)
    checked = check(write(place, example()))
    assert not checked.refused
    assert any("[learner.islands.esat]" in one.sentence for one in checked.findings)


def test_the_fleet_of_the_12b_is_right_and_its_links_and_aggregators_hold_it(
    tmp_path: Path,
) -> None:
    """`diloco provision` and `diloco plan` on the shipped files of one run."""
    document = example("gemma-12b")
    make_auth(tmp_path / "auth", run="gemma-12b", learners=document["learners"])
    for kind in ("cpu", "tpu"):
        archive_of(tmp_path / f"{kind}.tar.gz", kind=kind)
    shutil.copy(EXAMPLES / "gemma-12b-run.toml", tmp_path / "run.toml")
    checked = check(write(tmp_path, document))
    assert checked.findings == []
    assert checked.variables is not None
    assert len({one["zone"].rpartition("-")[0] for one in document["learners"].values()}) == 4
    assert {one["kind"] for one in document["learners"].values()} == {"v5p", "v6e"}
    config = read_run(tmp_path / "run.toml")
    batches = []
    for name in document["learners"]:
        options = config.learner.island(name).options
        task = build_task(config.task.build, steps=1, seed=0, options=config.task.options | options)
        batches.append(task.tokens_per_batch)
        assert task.tokens_per_batch % (64 * config.task.options["length"]) == 0
    leaves = jax.tree.leaves(params_shapes(task))
    parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    # As the page of the models gives it.
    command = re.search(r"diloco plan infra\S+((?:[ \\\n]+--[\w-]+ \S+)+)", MODELS.read_text())
    assert command is not None
    options = command[1].replace("\\", "").split()
    assert options[options.index("--step-tokens") + 1] == ",".join(map(str, batches))
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "run.toml"), *options, "--json"])
    assert done.exit_code == 0, done.output
    planned = json.loads(done.output)
    assert planned["parameters"] == parameters
    assert planned["participants"] == 4
    assert [one["carried"] for one in planned["intervals"] if one["steps"] == 24] == [True]


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma-4-31b", "qwen3-30b-a3b"])
def test_fleets_of_larger_models_are_right_and_their_links_hold_them(
    tmp_path: Path, name: str
) -> None:
    document = example(name)
    make_auth(tmp_path / "auth", run=name, learners=document["learners"])
    for kind in ("cpu", "tpu"):
        archive_of(tmp_path / f"{kind}.tar.gz", kind=kind)
    shutil.copy(EXAMPLES / f"{name}-run.toml", tmp_path / "run.toml")
    checked = check(write(tmp_path, document))
    assert checked.findings == []
    assert checked.variables is not None
    # As the page of the models gives it.
    command = re.search(
        r"diloco plan infra\S+qwen3\S+((?:[ \\\n]+--[\w-]+ \S+)+)", MODELS.read_text()
    )
    assert command is not None
    options = command[1].replace("\\", "").split()
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "run.toml"), *options, "--json"])
    assert done.exit_code == 0, done.output
    planned = json.loads(done.output)
    assert [one["carried"] for one in planned["intervals"] if one["steps"] == 48] == [True]
    assert (planned["active_parameters"] is None) == (name == "gemma-4-31b")


@pytest.mark.parametrize("name", ["small", "mixed", "gemma-12b"])
def test_the_shipped_variables_have_the_learners_of_the_shipped_fleets(name: str) -> None:
    lines = re.findall(
        r'^  ([\w-]+) += \{ zone = "([\w-]+)", kind = "(\w+)"',
        (EXAMPLES / f"{name}.tfvars").read_text(),
        re.MULTILINE,
    )
    learners = example(name)["learners"]
    assert lines == [(one, learners[one]["zone"], learners[one]["kind"]) for one in learners]


def test_the_bucket_is_beside_the_aggregators_and_their_machines_hold_the_model(
    place: Path,
) -> None:
    document = example()
    own_loops(12_000_000_000)(document, place)
    variables = check(write(place, document)).variables
    assert variables is not None
    assert variables["bucket_location"] == "us-central1"
    machine = variables["aggregators"]["aggregator-a"]["machine_type"]
    held = known().memory_bytes(machine)
    assert held is not None
    assert held > 16 * 12_000_000_000


@pytest.mark.parametrize(
    ("place_of_bucket", "sentence"),
    [("US", "is a multi-region"), ("us-east5", "and the bucket in us-east5")],
)
def test_a_dear_bucket_is_a_warning(place: Path, place_of_bucket: str, sentence: str) -> None:
    checked = check(write(place, example() | {"bucket_location": place_of_bucket}))
    assert not checked.refused
    assert sentence in checked.findings[0].sentence


def test_what_is_not_known_is_a_warning_and_what_has_changed_since_can_be_allowed(
    place: Path,
) -> None:
    said = [one.sentence for one in check(write(place, example("mixed"))).findings]
    assert any("asia-northeast1-b has v6e is not known here" in one for one in said)
    document = example()
    document["learners"]["east"]["zone"] = "us-east5-c"
    assert check(write(place, document)).refused
    assert not check(write(place, document | {"allow_unlisted": True})).refused


def test_the_costs_are_those_of_every_resource_that_is_made(tmp_path: Path) -> None:
    """Of the fleet of the 12B, counted here from the modules by hand."""
    document = example("gemma-12b")
    for one in document["learners"].values():
        one["spot"] = False
    make_auth(tmp_path / "auth", run="gemma-12b", learners=document["learners"])
    for kind in ("cpu", "tpu"):
        archive_of(tmp_path / f"{kind}.tar.gz", kind=kind)
    shutil.copy(EXAMPLES / "gemma-12b-run.toml", tmp_path / "run.toml")
    found = check(write(tmp_path, document)).costs
    hours = 3 * 0.067006 + 2 * 2.096192 + 0.033503 + 128 * 4.20 + 128 * 2.70
    # Of four regions the first has three servers, two aggregators and the keeper besides.
    hours += (22 + 16 + 16 + 16) * 0.0014 + 4 * 0.005
    month = (3 * 20 + 2 * 50 + 20 + 32 * 100) * 0.10 + 32 * 100 * 0.08 + 3 * 50 * 0.17
    month += (3 + 2 + 4 + 1) * 0.06
    # Each hour the two moments of 11.8 billion parameters, from three regions to the first.
    uploads = 24 * 87.66 * (0.02 + 0.02 + 0.05)
    by_hand = 24 * hours + month * 12 / 365.25 + uploads
    assert sum(one.dollars or 0.0 for one in found) == pytest.approx(by_hand, rel=2e-6)
    document["learners"]["coast"]["spot"] = True
    unknown = [one.what for one in check(write(tmp_path, document)).costs if one.dollars is None]
    assert unknown == [
        "coast: 64 chips of v6e, spot",
        "snapshots of the streams",
        "logs and alerts",
    ]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"stop_at": "2026-13-24T00:00:00Z"}, "a time in UTC, such as 2026-12-24T00:00:00Z"),
        ({"stop_at": "tomorrow"}, "a time in UTC, such as 2026-12-24T00:00:00Z"),
        ({"stop_at": 20261224}, "a time in UTC, such as 2026-12-24T00:00:00Z"),
        (
            {"stop_at": datetime(2126, 12, 24, tzinfo=timezone(timedelta(hours=1)))},
            "must be in UTC",
        ),
        ({"stop_at": datetime(2126, 12, 24)}, "must be in UTC"),
        ({"stop_at": "2126-12-24T00:00:00Z", "keeper": False}, "needs the keeper"),
        ({"stop_at": "2025-12-24T00:00:00Z"}, "2025-12-24T00:00:00Z is over"),
        ({"notification_channels": ["mail"]}, "projects/my-project/notificationChannels/123"),
    ],
)
def test_a_stop_that_would_not_stop_is_refused(
    place: Path, changed: dict[str, Any], sentence: str
) -> None:
    done = CliRunner().invoke(app, ["check", str(write(place, example() | changed))])
    assert done.exit_code != 0
    assert sentence in f"{done.output} {done.exception}"


def test_a_stop_and_channels_are_variables(place: Path) -> None:
    channel = "projects/my-project/notificationChannels/1"
    changed = {"stop_at": "2126-12-24T00:00:00Z", "notification_channels": [channel]}
    found = check(write(place, example() | changed))
    assert found.variables is not None
    assert found.variables.items() >= changed.items()
    unquoted = changed | {"stop_at": datetime(2126, 12, 24, tzinfo=UTC)}
    assert check(write(place, example() | unquoted)).variables == found.variables
    assert "stop_at" not in (check(write(place, example())).variables or {})


@pytest.mark.parametrize(
    ("caches", "sentence", "refused"),
    [
        (["us-east5-a", "us-east5-b"], "us-east5 has 2, and its learners use one", True),
        (["us-central1-a"], "that of us-central1 saves nothing: the bucket is there", False),
        (["europe-west4-b"], "saves nothing: fewer than two learners", False),
        (["us-south1-a"], "the region us-south1 has no range in subnets", True),
    ],
)
def test_caches_that_save_nothing_are_named(
    place: Path, caches: list[str], sentence: str, refused: bool
) -> None:
    found = check(write(place, example("mixed") | {"caches": caches}))
    said = [one for one in found.findings if sentence in one.sentence]
    assert [one.refused for one in said] == [refused]


def test_a_cache_is_a_machine_with_a_disk(place: Path) -> None:
    document = example("mixed")
    with_it = {one.what: one.dollars for one in check(write(place, document)).costs}
    del document["caches"]
    without = {one.what: one.dollars for one in check(write(place, document)).costs}
    assert with_it["caches: 1 x e2-standard-2"] == pytest.approx(24 * 0.067006)
    added = sum(v or 0 for v in with_it.values()) - sum(v or 0 for v in without.values())
    disk = 100 * 0.10 * 12 / 365.25
    assert added == pytest.approx(24 * (0.067006 + 0.0014) + disk)


def test_a_fleet_that_is_paused_pays_for_no_learner(place: Path) -> None:
    found = {
        one.what: one.dollars for one in check(write(place, example() | {"paused": True})).costs
    }
    assert not any("chips" in what for what in found)
    assert found["gateways: 1 regions, 6 machines"] == pytest.approx(24 * (6 * 0.0014 + 0.005))
    assert found["secrets: 8"] == pytest.approx(8 * 0.06 * 12 / 365.25)


def test_the_keeper_counts_by_the_planners_prices_and_names_what_it_does_not(place: Path) -> None:
    document = example()
    document["learners"] = {
        "central": {"zone": "us-central1-a", "kind": "v5p", "chips": 4},
        "east": SLICE | {"spot": True},
        "slice": {"zone": "us-east5-a", "kind": "v6e", "topology": "4x4", "spot": True, "dollars_hour": 5.5},
    }  # fmt: skip
    account = "012345-6789AB-CDEF01"
    document["budget"] = {"dollars": 5000, "billing_account": account}
    checked = check(write(place, document))
    assert checked.variables is not None
    budget = checked.variables["budget"]
    assert checked.variables["billing_account"] == account
    assert "dollars_hour" not in checked.variables["learners"]["slice"]
    # Of one machine: 4 chips at 4.20, and what the file says.
    assert budget["learners"] == pytest.approx({"central": 16.8, "slice": 5.5})
    all_day = sum(one.dollars or 0.0 for one in checked.costs)
    rest_day = all_day - 24 * (16.8 + 4 * 5.5)
    assert budget["dollars_hour"] == pytest.approx(rest_day / 24)
    assert budget["uncounted"] == [
        "east: 4 chips of v6e, spot", "snapshots of the streams", "logs and alerts",
        "the bucket and its traffic",
    ]  # fmt: skip
    warned = [one.sentence for one in checked.findings if not one.refused]
    assert {f"budget: not counted: {what}" for what in budget["uncounted"]} <= set(warned)
    document["budget"]["traffic_dollars_day"] = 427.0
    told = check(write(place, document)).variables
    assert told is not None
    assert told["budget"]["dollars_hour"] == pytest.approx((rest_day + 427.0) / 24)
    assert "the bucket and its traffic" not in told["budget"]["uncounted"]
    del document["budget"]
    assert "budget" not in (check(write(place, document)).variables or {})


def test_the_webhook_is_a_path_and_its_address_is_in_no_variable(place: Path) -> None:
    (place / "hook.env").write_text("DILOCO_WEBHOOK_URL=https://hooks.example.org/s3cr3t\n")
    found = check(write(place, example() | {"webhook_file": "hook.env"}))
    assert not found.refused
    assert found.variables is not None
    assert found.variables["webhook_file"] == str(place / "hook.env")
    assert "s3cr3t" not in json.dumps(found.variables)


def test_each_kind_of_resource_of_the_modules_has_a_price_or_is_free() -> None:
    """A kind that is new here costs something: say what, in infra/provision/costs.py."""
    text = "\n".join(path.read_text() for path in EXAMPLES.parent.rglob("*.tf"))
    assert (
        set(re.findall(r'^resource "google_(\w+)"', text, re.MULTILINE)) == PRICED | BY_USE | FREE
    )


def test_the_command_writes_the_variables_of_a_right_fleet_alone(place: Path) -> None:
    out = place / "terraform.tfvars.json"
    path = write(place, example())
    done = CliRunner().invoke(app, ["host", "provision", str(path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    written = json.loads(out.read_text())
    assert written["learners"]["east"]["spot"] is True
    assert written["run_toml"] == str(place / "run.toml")
    declared = re.findall(
        r'^variable "(\w+)"', (EXAMPLES.parent / "variables.tf").read_text(), re.MULTILINE
    )
    assert written.keys() <= set(declared)
    out.unlink()
    write(place, example() | {"metrics_port": 9463})
    for command in (["check", str(path)], ["host", "provision", str(path), "--out", str(out)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 1
        assert "refused: metrics_port 9463" in done.output
        # `diloco check` never writes.
        assert "\n1 refused\n" in done.output
        assert ("nothing was written" in done.output) == (command[0] == "host")
    assert not out.exists()
