"""Checks a fleet's networks, names, zones and accelerators against what Google Cloud has. Pure."""

import ipaddress
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

from diloco.infra.provision.fleet import (
    MULTI_REGIONS,
    FleetFile,
    FleetFinding,
    FleetLearner,
    hosts_of,
    machines_of,
    region_of,
)
from diloco.infra.provision.known import Accelerator, Known

# The most service accounts of learners, each with three IAM bindings on the bucket
# (docs/security.md).
MOST_IDENTITIES = 30
LIVENESS_PORT = 9463
# The port of the supervisors of several slices, as in infra/terraform/main.tf.
SUPERVISOR_PORT = 9466
# Ports of JAX's coordinator and libtpu, which the firewall of modules/learner opens.
TPU_PORTS = range(8470, 8491)
# The number of addresses of a range that Google reserves.
OF_GOOGLE = 4
_RESERVED = ("operator", "guard", "keeper", "watch")
_OURS = re.compile(r"nats-[0-9]+|cache-.*")
# Ports at which a learner's hosts speak to each other, as modules/learner opens them, besides.
_EPHEMERAL_PORTS, _SLICE_PORT = range(32768, 61000), 8081
_CUBE = (4, 8, 12, 16, 20, 24)
_SMALL = ("2x2x2", "2x2x4", "2x4x4")


def check_places(fleet: FleetFile, known: Known) -> Iterator[FleetFinding]:
    """Yields a finding for each fault in a fleet's networks, names, zones and accelerators."""
    yield from _subnets(fleet)
    yield from _regions(fleet, known)
    yield from _names(fleet)
    yield from _sites(fleet)
    yield from _bucket(fleet)
    for name, learner in fleet.learners.items():
        if learner.kind != "cpu":
            yield from _accelerated(name, learner, known, unlisted=fleet.allow_unlisted)
    yield from _slices(fleet)
    yield from _caches(fleet)


def _placed(fleet: FleetFile) -> list[tuple[str, str]]:
    """Returns (the key in the file, the zone) of each NATS server, aggregator, cache, learner."""
    return [
        *((f"nats.zones: {zone}", zone) for zone in fleet.nats.zones),
        *((f"aggregators.{name}", one.zone) for name, one in fleet.aggregators.items()),
        *((f"caches: {zone}", zone) for zone in fleet.caches),
        *(
            (f"learners.{name}", zone)
            for name, one in fleet.learners.items()
            for zone in dict.fromkeys(one.slice_zones)
        ),
    ]


def _regions(fleet: FleetFile, known: Known) -> Iterator[FleetFinding]:
    """Yields a finding for each zone or region that Google does not have."""
    hint = f"(read on {known.as_of}); allow_unlisted = true if Google has it since"
    named = [*((f"subnets.{region}", region) for region in fleet.subnets)]
    if fleet.bucket() not in MULTI_REGIONS:
        named.append(("bucket_location", fleet.bucket()))
    for where, region in named:
        if region not in known.regions:
            yield FleetFinding(
                f"{where}: Google has no region {region} {hint}", refused=not fleet.allow_unlisted
            )
    for where, zone in _placed(fleet):
        letters = known.regions.get(region_of(zone))
        letter = zone.rpartition("-")[2]
        if letters is not None and len(letter) > 1:
            yield FleetFinding(f"{where}: whether there is {zone} is not known here", refused=False)
        elif letters is not None and letter not in letters:
            yield FleetFinding(
                f"{where}: {region_of(zone)} has no zone {zone}, but those of the letters "
                f"{', '.join(letters)} {hint}",
                refused=not fleet.allow_unlisted,
            )


def _slices(fleet: FleetFile) -> Iterator[FleetFinding]:
    """Yields a finding for a `metrics_port` that is in use, and for slices without a keeper.

    Google does not recreate slices of several hosts or flex-start machines; the keeper does.
    """
    large = [name for name, one in fleet.learners.items() if machines_of(one) > 1]
    if fleet.metrics_port == LIVENESS_PORT:
        yield FleetFinding(f"metrics_port {LIVENESS_PORT} is where machines answer health checks")
    for ports in (TPU_PORTS, _EPHEMERAL_PORTS, range(_SLICE_PORT, _SLICE_PORT + 1)):
        if large and fleet.metrics_port in ports:
            yield FleetFinding(
                f"metrics_port {fleet.metrics_port} is among {ports.start} to {ports.stop - 1}, at "
                f"which the hosts of {large[0]} speak to each other"
            )
    if any(one.slices > 1 for one in fleet.learners.values()) and (
        fleet.metrics_port == SUPERVISOR_PORT
    ):
        yield FleetFinding(
            f"metrics_port {SUPERVISOR_PORT} is where the supervisors of several slices listen: "
            "take another, such as 9464"
        )
    flex = [name for name, one in fleet.learners.items() if one.flex_start_hours]
    lost = sorted({*(name for name in large if hosts_of(fleet.learners[name]) > 1), *flex})
    if lost and not fleet.keeper:
        yield FleetFinding(
            f"keeper = false, and Google does not make {', '.join(lost)} anew: slices of several "
            "hosts and flex-start, once lost, would never return"
        )


def _caches(fleet: FleetFile) -> Iterator[FleetFinding]:
    """Yields a finding for two caches of a region, and for one that saves nothing."""
    learners = Counter(region_of(one.zone) for one in fleet.learners.values())
    for region, count in Counter(map(region_of, fleet.caches)).items():
        if count > 1:
            yield FleetFinding(f"caches: {region} has {count}, and its learners use one")
        elif region == fleet.bucket() or learners[region] < 2:
            why = "the bucket is there" if region == fleet.bucket() else "fewer than two learners"
            yield FleetFinding(f"caches: that of {region} saves nothing: {why}", refused=False)


def _subnets(fleet: FleetFile) -> Iterator[FleetFinding]:
    ranges = {region: ipaddress.ip_network(text) for region, text in fleet.subnets.items()}
    for (one, first), (other, second) in itertools.combinations(ranges.items(), 2):
        if first.overlaps(second):
            yield FleetFinding(
                f"subnets: the ranges of {one} and {other} overlap: {first}, {second}"
            )
    for where, zone in _placed(fleet):
        if region_of(zone) not in fleet.subnets:
            yield FleetFinding(f"{where}: the region {region_of(zone)} has no range in subnets")
    hosts: Counter[str] = Counter()
    for learner in fleet.learners.values():
        hosts[region_of(learner.zone)] += machines_of(learner)
    others = [*fleet.nats.zones, *fleet.caches, *(one.zone for one in fleet.aggregators.values())]
    hosts.update(region_of(zone) for zone in others)
    hosts[region_of(fleet.nats.zones[0])] += fleet.keeper
    for region, count in hosts.items():
        free = ranges[region].num_addresses - OF_GOOGLE if region in ranges else count
        if count > free:
            yield FleetFinding(
                f"subnets.{region}: {ranges[region]} has {free} addresses beside Google's "
                f"{OF_GOOGLE}, and {count} machines are there"
            )


def _names(fleet: FleetFile) -> Iterator[FleetFinding]:
    for name in sorted(fleet.learners.keys() & fleet.aggregators.keys()):
        yield FleetFinding(
            f"{name!r} is a learner and an aggregator: their credentials are one file"
        )
    for name in [*fleet.aggregators, *fleet.learners]:
        if name in _RESERVED or _OURS.fullmatch(name):
            yield FleetFinding(f"{name!r} is what the run calls its own: take another name")
    for name, learner in fleet.learners.items():
        for number in range(learner.slices if learner.slices > 1 else 0):
            if (other := f"{name}-s{number}") in fleet.learners:
                yield FleetFinding(
                    f"learners.{other}: is named like slice {number} of learners.{name}, and their "
                    "machines would have the same names: rename one"
                )
    zones = {one.zone for one in fleet.aggregators.values()}
    if len(fleet.aggregators) == 1:
        yield FleetFinding(
            "there is one aggregator: no other takes over if its machine is lost", refused=False
        )
    elif len(zones) == 1:
        yield FleetFinding(
            f"all aggregators are in {min(zones)}: none takes over if that zone is lost",
            refused=False,
        )
    continents = {zone.partition("-")[0] for zone in fleet.nats.zones}
    if len(continents) > 1:
        yield FleetFinding(
            f"nats.zones are on {len(continents)} continents ({', '.join(sorted(continents))}): "
            "each message waits for two of the three servers",
            refused=False,
        )


def _sites(fleet: FleetFile) -> Iterator[FleetFinding]:
    """Yields a finding for each learner whose name does not fit its site, and for too many sites.

    Learners of one site share a service account, which may write objects below the prefix
    `SITE-`. So their names begin with it, and no other learner's name does.
    """
    sites = {one.site for one in fleet.learners.values() if one.site}
    for name, learner in fleet.learners.items():
        if learner.site and not name.startswith(f"{learner.site}-"):
            yield FleetFinding(
                f"learners.{name}: of the site {learner.site!r}, so name it after that: "
                f"'{learner.site}-1' and so on"
            )
        for site in sorted(sites - {learner.site}):
            if name == site or name.startswith(f"{site}-"):
                yield FleetFinding(
                    f"learners.{name}: is named like a learner of the site {site!r}, "
                    "whose account could write its objects"
                )
    accounts = len(sites) + sum(one.site is None for one in fleet.learners.values())
    if accounts > MOST_IDENTITIES:
        yield FleetFinding(
            f"{accounts} learners without a site, and sites, are more than the {MOST_IDENTITIES} "
            "accounts that a bucket and a project take easily: give learners a site, whose account "
            "they share; docs/security.md says what they may then do to each other"
        )


def _bucket(fleet: FleetFile) -> Iterator[FleetFinding]:
    place = fleet.bucket()
    if place in MULTI_REGIONS:
        yield FleetFinding(
            f"bucket_location {place!r} is a multi-region: it survives the loss of a region, and "
            "the copy of every byte is billed, and every read; leave it out for one beside the "
            f"aggregators; compare: diloco plan --regions {','.join(sorted(fleet.subnets))}",
            refused=False,
        )
        return
    for name, one in fleet.aggregators.items():
        if region_of(one.zone) != place:
            yield FleetFinding(
                f"aggregators.{name}: is in {region_of(one.zone)}, and the bucket in {place}: each "
                "update that it reads is billed as traffic between regions",
                refused=False,
            )


def _accelerated(
    name: str, learner: FleetLearner, known: Known, *, unlisted: bool
) -> Iterator[FleetFinding]:
    kind = known.kinds[learner.kind]
    where = f"learners.{name}"
    if learner.chips is not None and learner.chips not in kind.chips:
        have = ", ".join(map(str, kind.chips))
        yield FleetFinding(
            f"{where}: a host of {learner.kind} has {have} chips, not {learner.chips}"
        )
    if learner.topology is not None:
        yield from _topology(where, learner.kind, learner.topology, kind)
    for zone in dict.fromkeys(learner.slice_zones):
        if zone in kind.zones:
            continue
        if region_of(zone).partition("-")[0] in kind.read and "-ai" not in zone:
            zones = ", ".join(sorted(kind.zones))
            yield FleetFinding(
                f"{where}: {zone} has no {learner.kind} (read on {known.as_of}: {zones}); "
                "allow_unlisted = true if Google has it since, or has promised it to you",
                refused=not unlisted,
            )
        else:
            yield FleetFinding(
                f"{where}: whether {zone} has {learner.kind} is not known here", refused=False
            )
    if learner.slices > 1:
        yield from _joined(where, learner)


def _joined(where: str, learner: FleetLearner) -> Iterator[FleetFinding]:
    """Yields warnings where Google's pages on joining slices (Multislice) say less than is asked.

    docs.cloud.google.com/tpu/docs/multislice-introduction, and "Deploy TPU Multislices in GKE".
    """
    if len(set(learner.slice_zones)) > 1:
        yield FleetFinding(
            f"{where}: its slices are in {len(set(learner.slice_zones))} zones, and Google joins "
            f"slices of {learner.kind} within one: put them into one zone",
            refused=False,
        )
    if hosts_of(learner) == 1:
        yield FleetFinding(
            f"{where}: its slices have one host each, and Google joins slices of several hosts of "
            f"{learner.kind}: give it a topology",
            refused=False,
        )


def _topology(where: str, name: str, topology: str, kind: Accelerator) -> Iterator[FleetFinding]:
    sides = [int(side) for side in topology.split("x")]
    whole = len(sides) == kind.dimensions and all(side in _CUBE for side in sides)
    right = topology in kind.topologies if kind.topologies else whole or topology in _SMALL
    if not right:
        shapes = ", ".join(kind.topologies) or f"{', '.join(_SMALL)}, or three multiples of 4"
        yield FleetFinding(f"{where}: {topology} is no slice of several hosts of {name}: {shapes}")
    elif len(sides) == 3 and sides != sorted(sides):
        yield FleetFinding(
            f"{where}: {topology}: Google writes the smaller sides of a slice first: "
            f"{'x'.join(map(str, sorted(sides)))}"
        )
    elif kind.most_chips and math.prod(sides) > kind.most_chips:
        yield FleetFinding(f"{where}: a slice of {name} has {kind.most_chips} chips at most")
