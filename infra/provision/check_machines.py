"""Checks that a fleet's machine types exist, and that its images can run the releases. Pure."""

import re
from collections.abc import Iterator

from diloco.infra.provision.fleet import FleetFile, FleetFinding
from diloco.infra.provision.known import Known

# Machine types with a share of a core and at most 4 GB of memory.
_SHARED = frozenset({"e2-micro", "e2-small", "e2-medium", "f1-micro", "g1-small"})
# Series of which machines of any size may be had, by names such as n2-custom-4-8192.
_CUSTOM = re.compile(r"(n1|n2|n2d|e2)-custom(-\w+)?-[0-9]+-[0-9]+(-ext)?|custom-[0-9]+-[0-9]+")
# Releases run on these images.
_TRIED = re.compile(r"debian-1[23]\b|ubuntu\D*2[2-6]04|(rocky-linux|rhel|centos-stream)-10\b")
# Images of Google's public projects without TPU drivers.
_PLAIN = re.compile(r"projects/(debian|ubuntu-os|rocky-linux|rhel|centos|fedora)-cloud/")
# Patterns of images that lack what releases need: Linux on x86-64, systemd, Python 3.10.
_UNFIT = {
    r"arm64|aarch64": "is for ARM, and releases are for x86-64",
    r"windows": "is Windows, and releases are for Linux",
    r"cos-cloud|cos-stable": "has no interpreter of Python and cannot be written to",
    r"debian-(8|9|10|11)\b": "has a Python before 3.10",
    r"ubuntu\D*(16|18|20)[01][0-9]": "has a Python before 3.10",
    r"(rocky-linux|rhel|centos|centos-stream)-(6|7|8|9)\b": "has a Python before 3.10",
}


def check_machines(fleet: FleetFile, known: Known) -> Iterator[FleetFinding]:
    """Yields a finding for each machine type or image of a fleet that is unfit or unknown.

    Machine types are those of NATS servers, aggregators and learners without accelerators.
    """
    named = [("nats.machine_type", fleet.nats.machine_type)]
    named += [(f"aggregators.{n}", one.machine_type or "") for n, one in fleet.aggregators.items()]
    named += [(f"learners.{n}", one.machine_type or "") for n, one in fleet.learners.items()]
    for where, machine in named:
        fault, certain = _fault(machine, known) if machine else ("", True)
        if fault:
            refused = certain or (certain is False and not fleet.allow_unlisted)
            yield FleetFinding(f"{where}: {fault}", refused=refused)
    yield from _images(fleet, known)


def _fault(machine: str, known: Known) -> tuple[str, bool | None]:
    """Returns (what is wrong with a machine type, whether that is certain); ("", True): nothing.

    It is not certain if `known` lacks the type, since Google may have added the type; None: the
    type's series is there, and its sizes are not known.
    """
    name, _, rest = machine.partition("-")
    series = known.series.get(name)
    if machine in _SHARED:
        return f"{machine} has a share of a core, too little for any part of a run: take n2", True
    if _CUSTOM.fullmatch(machine):
        return "", True
    if series is None:
        have = ", ".join(sorted(known.series))
        return (
            f"{machine} is of no series that Google has (read on {known.as_of}: {have}); "
            "allow_unlisted = true if Google has it since"
        ), False
    if series.arm:
        return f"{machine} has processors of ARM, and releases are for x86-64: take n2", True
    if series.paid:
        return f"{machine} has {series.paid} that nothing here would use: take n2", True
    if series.hyperdisk:
        return f"{machine} takes no pd-balanced disk, which the modules give it: take n2", True
    kind = rest.partition("-")[0]
    if not series.classes:
        return f"whether there is {machine} is not known here", None
    if kind not in series.classes:
        return f"{machine}: {name} has the classes {', '.join(series.classes)}, not {kind}", False
    if known.size_of(machine) is None:
        sizes = ", ".join(map(str, series.classes[kind].cores))
        return f"{machine}: {name}-{kind} has {sizes} cores", False
    if rest.count("-") > 1 and not machine.endswith("-lssd"):
        return f"{machine}: {name}-{kind} has no {rest.rpartition('-')[2]}", False
    return "", True


def _images(fleet: FleetFile, known: Known) -> Iterator[FleetFinding]:
    """Yields a finding for each image that, by its name, does not fit its kind of machine."""
    given = [(f"images.{kind}", kind, image) for kind, image in fleet.images if image]
    given += [(f"learners.{n}.image", one.kind, one.image) for n, one in fleet.learners.items()]
    for where, kind, image in given:
        if image is None:
            continue
        named = {one for one in known.kinds if re.search(rf"\b{one}\b", image)}
        unfit = [why for pattern, why in _UNFIT.items() if re.search(pattern, image)]
        if unfit:
            yield FleetFinding(f"{where}: {image} {unfit[0]}")
        elif named and kind not in named:
            yield FleetFinding(
                f"{where}: {image} is for {', '.join(sorted(named))}, not for {kind}"
            )
        elif kind != "cpu" and _PLAIN.match(image):
            yield FleetFinding(f"{where}: {image} has no drivers of TPUs: leave it out")
        elif not named and (kind != "cpu" or not _TRIED.search(image)):
            yield FleetFinding(
                f"{where}: whether {image} fits {kind} is not known here", refused=False
            )
