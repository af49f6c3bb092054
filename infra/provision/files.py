"""Checks the files that a fleet's file names: run, releases, credentials, NATS configurations."""

import ipaddress
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from diloco.common.process.config import Config, make_config, read_document
from diloco.common.process.credentials import load_credentials
from diloco.common.protocol.errors import ConfigError
from diloco.infra.install_release import ReleaseRefused, manifest_of
from diloco.infra.provision.certificates import check_certificates
from diloco.infra.provision.fleet import FleetFile, FleetFinding, region_of
from diloco.operate.auth.nats_config_and_credentials import OPERATOR, identities, public_key
from diloco.show.alerts.webhook import Webhook

# Words that Google does not allow in a project's id.
RESTRICTED = ("google", "null", "undefined", "ssl")
INSTALLED_AT, STREAMS_AT = "/etc/nats", "/var/lib/nats/jetstream"
# Of a subnet's name, diloco-RUN-REGION, and such.
MOST_RUN_AND_REGION = 63 - len("diloco--")
# The reader whose credentials the watch on the keeper's machine has.
WATCH = "watch"
# The architecture of the default images, and of every machine with TPUs.
ARCHITECTURE = "x86_64"
# The sections of a run's file that Terraform writes, with stand-ins for the mandatory keys.
_OURS = {"bus": {}, "store": {"url": "gs://bucket"}, "metrics": {}}
# What the units and Terraform say of [learner]; the run's file may have another folder.
_FOLDER = {"checkpoint_dir": "/var/lib/diloco-learner"}
_UPLOADS = {"checkpoint_upload": True}


def nats_addresses(fleet: FleetFile) -> list[str]:
    """Returns the IP addresses of the three NATS servers, computed as in infra/terraform/main.tf.

    Every server's region must have a range in `fleet.subnets`.
    """
    ranges = [ipaddress.ip_network(fleet.subnets[region_of(zone)]) for zone in fleet.nats.zones]
    return [str(one[11 + index]) for index, one in enumerate(ranges)]


def read_run(path: Path) -> Config:
    """Reads the run's file, adds the sections that Terraform will write, and checks the whole.

    Raises:
        ConfigError: the file is not a valid run's file, or has one of these sections itself.
    """
    document = read_document(path)
    if ours := sorted(document.keys() & _OURS.keys()):
        raise ConfigError(f"{path} has the section [{ours[0]}], which Terraform writes: remove it")
    learner = document.get("learner", {})
    if isinstance(learner, dict):
        document["learner"] = _FOLDER | learner | _UPLOADS
    return make_config(document | _OURS, source=str(path))


def check_names(fleet: FleetFile, run: str) -> Iterator[FleetFinding]:
    """Yields a finding for each name of which Google's resources cannot be named.

    Also for a `stop_at` that is in the past.

    Args:
        fleet: the fleet's file.
        run: the run's name.
    """
    bucket = f"{fleet.project}-{run}"
    for word in RESTRICTED:
        if word in fleet.project:
            yield FleetFinding(f"project {fleet.project!r}: Google allows no {word!r} in it")
    if fleet.project.startswith("goog") or any(word in bucket for word in ("google", "g00gle")):
        yield FleetFinding(f"Google allows no bucket {bucket!r}: neither goog first nor its name")
    if run.endswith("-"):
        yield FleetFinding(f"the run's name {run!r} ends in a hyphen: names of machines must not")
    if len(bucket) > 49:
        yield FleetFinding(
            "project and run have more than 48 characters together: too many for a bucket"
        )
    if fleet.stop_at and datetime.fromisoformat(fleet.stop_at) <= datetime.now(UTC):
        yield FleetFinding(f"stop_at {fleet.stop_at} is over: no learner would have machines")
    yield from _lengths(fleet, run)


def _lengths(fleet: FleetFile, run: str) -> Iterator[FleetFinding]:
    cached = {region_of(zone) for zone in fleet.caches}
    for region in fleet.subnets:
        most = MOST_RUN_AND_REGION - len("-cache") * (region in cached)
        if len(run + region) > most:
            yield FleetFinding(
                f"subnets.{region}: the run's name and {region} have more than {most} characters "
                "together, and names of Google's resources 63 at most: take a shorter name of the "
                "run"
            )
    for name in [*fleet.aggregators, *fleet.learners]:
        if len(run + name) > 45:
            yield FleetFinding(f"{name!r} and the run's name have more than 45 characters together")


def check_outside(fleet: FleetFile, run: str) -> Iterator[FleetFinding]:
    """Yields a finding for channels and data of the wrong project or bucket.

    Args:
        fleet: the fleet's file.
        run: the run's name.
    """
    for channel in fleet.notification_channels:
        if channel.split("/")[1] != fleet.project:
            yield FleetFinding(f"notification_channels: {channel} is of another project")
    if fleet.data is not None and fleet.data.startswith(f"gs://{fleet.project}-{run}-diloco"):
        yield FleetFinding(
            f"data: {fleet.data} is in the run's own bucket, which is emptied when the run is "
            "destroyed: prepare the data into one of yours"
        )


def check_releases(fleet: FleetFile, paths: dict[str, Path]) -> Iterator[FleetFinding]:
    """Yields a finding for each release that is missing, or that machines cannot run.

    Args:
        fleet: the fleet's file.
        paths: path of each release's archive, by kind.
    """
    if "tpu" not in paths and any(one.kind != "cpu" for one in fleet.learners.values()):
        yield FleetFinding(
            "a learner has TPUs, and releases has no tpu; make it with: make release KIND=tpu"
        )
    for kind, path in paths.items():
        if not path.name.endswith(".tar.gz"):
            yield FleetFinding(f"releases.{kind}: {path} is no .tar.gz; make it with: make release")
            continue
        try:
            manifest = manifest_of(path)
        except ReleaseRefused as error:
            yield FleetFinding(f"releases.{kind}: {error} KIND={kind}")
            continue
        if manifest.kind != kind:
            yield FleetFinding(f"releases.{kind}: {path} is a release for {manifest.kind}")
        if manifest.architecture != ARCHITECTURE:
            yield FleetFinding(
                f"releases.{kind}: {path} is for {manifest.architecture}; the machines of these "
                f"modules are {ARCHITECTURE}"
            )


def check_webhook(path: Path | None) -> Iterator[FleetFinding]:
    """Yields a finding if the webhook's file cannot be read, or has no valid URL of a webhook.

    The URL is a secret, and no finding shows it.

    Args:
        path: the file that has the URL; None: the fleet has no webhook, which is no finding.
    """
    if path is None:
        return
    try:
        found = re.search(r"^DILOCO_WEBHOOK_URL=(\S+)$", path.read_text(), re.MULTILINE)
        if found is None:
            yield FleetFinding(
                f"webhook_file: {path} has no line DILOCO_WEBHOOK_URL=https://..., without quotes"
            )
        else:
            Webhook(found[1])
    except OSError as error:
        yield FleetFinding(f"webhook_file: cannot read {path}: {error.strerror}")
    except UnicodeDecodeError:
        yield FleetFinding(f"webhook_file: {path} is no text")
    except ConfigError as error:
        yield FleetFinding(f"webhook_file: {path}: {error.message}")


def check_auth(fleet: FleetFile, folder: Path, run: str) -> Iterator[FleetFinding]:
    """Yields a finding for whatever the folder of `diloco auth` lacks for this fleet.

    Checked are credentials, NATS configurations and certificates.

    Args:
        fleet: the fleet's file.
        folder: the folder that `diloco auth init` made.
        run: the run's name.
    """
    try:
        known = {one.name: one.role for one in identities(folder)}
    except ConfigError as error:
        yield FleetFinding(f"auth_folder: {error.message}; {_make_auth(fleet, folder, run)}")
        return
    wanted: dict[str, str] = dict.fromkeys(fleet.aggregators, "aggregator")
    wanted |= dict.fromkeys(fleet.learners, "learner")
    if fleet.keeper:
        wanted[WATCH] = "reader"
    for name, role in wanted.items():
        if known.get(name) != role:
            has = f"those of a {known[name]}" if name in known else "none"
            yield FleetFinding(
                f"auth_folder has no credentials of a {role} {name!r}, but {has}; make them with: "
                f"diloco auth add-{role} {folder} {name}"
            )
        else:
            yield from _credentials(folder / "credentials" / f"{name}.toml", name, role, run)
    if fleet.hourly_checkpoints:
        path = folder / "credentials" / f"{OPERATOR}.toml"
        yield from _credentials(path, OPERATOR, OPERATOR, run)
    if all(region_of(zone) in fleet.subnets for zone in fleet.nats.zones):
        yield from _servers(fleet, folder, run)
        yield from check_certificates(folder / "tls", nats_addresses(fleet), datetime.now(UTC))


def _credentials(path: Path, name: str, role: str, run: str) -> Iterator[FleetFinding]:
    try:
        found = load_credentials(path)
    except ConfigError as error:
        yield FleetFinding(f"auth_folder: {error.message}")
        return
    stated = found and (found.run, found.identity, found.role)
    if stated != (run, name, role):
        yield FleetFinding(
            f"{path} is not of the {role} {name!r} of the run {run!r}, but of {stated}"
        )
    accounts = path.parents[1] / "accounts.conf"
    if found and public_key(found) not in (accounts.read_text() if accounts.is_file() else ""):
        yield FleetFinding(
            f"{accounts} does not have the key of {path}, so that servers would refuse it: diloco "
            f"auth revoke, then add-{role}"
        )


def _servers(fleet: FleetFile, folder: Path, run: str) -> Iterator[FleetFinding]:
    addresses = nats_addresses(fleet)
    most_bytes = fleet.nats.disk_gib * (1 << 30) * 0.9
    for number in (1, 2, 3):
        path = folder / f"nats-{number}.conf"
        text = path.read_text() if path.is_file() else ""
        if not text:
            yield FleetFinding(f"auth_folder has no {path.name}: {_make_auth(fleet, folder, run)}")
            return
        wanted = [f'"tls://{one}:6222"' for one in addresses]
        wanted += [f'"{INSTALLED_AT}/tls/', f'store_dir: "{STREAMS_AT}/', "sync_interval: always"]
        if missing := [one for one in wanted if one not in text]:
            yield FleetFinding(f"{path} lacks {missing[0]}: {_make_auth(fleet, folder, run)}")
            return
        stated = re.search(r"max_file_store: ([0-9]+)", text)
        if stated and int(stated[1]) > most_bytes:
            yield FleetFinding(
                f"the streams in {path} take more than nine tenths of nats.disk_gib: give more "
                "there, or less with: diloco auth init --max-file-gib"
            )
            return


def _make_auth(fleet: FleetFile, folder: Path, run: str) -> str:
    hosts = " ".join(f"--host {one}" for one in nats_addresses(fleet))
    return (
        f"make it with: diloco auth init {folder} --run {run} --installed-at {INSTALLED_AT} "
        f"--streams-at {STREAMS_AT} {hosts}"
    )
