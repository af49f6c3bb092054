"""What each learner of a local run has: devices as a mesh, and processes that share them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from diloco.common.accelerators import Accelerators
from diloco.common.config import LearnerSection, MeshSection
from diloco.common.errors import ConfigError
from diloco.local.division import Share, Wanted, divide

LEARNERS = 4
_MESHES = "for example --mesh 4,2,1,1; with other axes --mesh data=2/fsdp=2,tensor=2,1"


class Hardware(NamedTuple):
    """One learner's.

    Attributes:
        devices: of all its processes together.
        hosts: its processes.
        forced: whether JAX is told to take the CPU for so many devices.
        shares: the accelerators of each process; none for a learner on the CPU.
    """

    devices: int = 1
    hosts: int = 1
    forced: bool = False
    shares: tuple[Share, ...] = ()

    def arguments(self) -> list[str]:
        """What each of its processes is started with."""
        own = self.forced and not self.shares
        return ["--cpu-devices", str(self.devices // self.hosts)] if own else []

    def environments(self) -> list[dict[str, str | None]]:
        """Of each of its processes: what is to be changed in ours."""
        if not self.shares:
            return [{} for _ in range(self.hosts)]
        return [share.environment() for share in self.shares]

    def accelerators(self) -> set[str]:
        """Names of those it has."""
        return {name for share in self.shares for name in share.names}

    def words(self) -> str:
        """As people read it: "4 in 2 hosts", "GPU 0, 1"; "" for one device of the CPU."""
        if self.shares:
            return " and ".join(share.words() for share in self.shares)
        if self.hosts > 1:
            return f"{self.devices} in {self.hosts} hosts"
        return str(self.devices) if self.forced else ""


def count_learners(learners: int | None, mesh: str | None, hosts: str | None) -> int:
    """How many learners there are: as said, else as many as the lists have items."""
    if learners is not None:
        return learners
    listed = mesh if mesh is not None else hosts
    return LEARNERS if listed is None else len(listed.split(","))


def set_hardware(
    section: dict[str, Any], names: Sequence[str], mesh: str | None, hosts: str | None
) -> dict[str, Hardware]:
    """Put the meshes of --mesh into the section `learner` of a document; what each learner has.

    Where the lists are not given, that follows from the section.

    Raises:
        ConfigError: a list that cannot be understood, or does not fit.
    """
    if mesh is not None:
        islands = section.setdefault("islands", {})
        for name, item in zip(names, _items("--mesh", mesh, len(names), _MESHES), strict=True):
            sizes = _mesh(mesh, item).model_dump()
            islands[name] = {**islands.get(name, {}), "mesh": sizes}
    try:
        parsed = LearnerSection.model_validate(section)
    except ValidationError:
        return dict.fromkeys(names, Hardware())  # The whole file is checked, and refused, later.
    # Every process is told its own.
    for key in ("hosts", "host", "coordinator"):
        section.pop(key, None)
    counts = [parsed.hosts] * len(names) if hosts is None else _hosts(hosts, len(names))
    forced = mesh is not None or hosts is not None
    return {
        name: _hardware(parsed, name, count, forced=forced)
        for name, count in zip(names, counts, strict=True)
    }


def on_cpu(hardware: dict[str, Hardware]) -> dict[str, Hardware]:
    """The learners on the CPU, whatever else there is."""
    return {name: one._replace(forced=True) for name, one in hardware.items()}


def on_accelerators(hardware: dict[str, Hardware], found: Accelerators) -> dict[str, Hardware]:
    """The learners on accelerators.

    Raises:
        ConfigError: there are too few.
    """
    wanted = {
        name: Wanted(one.devices if one.forced else None, one.hosts)
        for name, one in hardware.items()
    }
    shares = divide(found, wanted)
    return {
        name: one._replace(
            shares=shares[name], devices=sum(len(share.names) for share in shares[name])
        )
        for name, one in hardware.items()
    }


def _hardware(section: LearnerSection, name: str, hosts: int, *, forced: bool) -> Hardware:
    mesh = section.island(name).mesh or MeshSection()
    given = math.prod(size for size in (mesh.data, mesh.fsdp, mesh.tensor) if size)
    # A size of 0 takes what the others leave: here, nothing more than there must be.
    open_sized = 0 in (mesh.data, mesh.fsdp, mesh.tensor)
    devices = math.lcm(given, hosts * max(1, section.cpu_devices)) if open_sized else given
    if devices % hosts:
        raise ConfigError(
            f"--hosts: {hosts} processes cannot share the {devices} devices of {name} equally",
            hint="for example --mesh 4,2,1,1 --hosts 2,1,1,1",
        )
    return Hardware(devices, hosts, forced or devices > 1)


def _items(option: str, text: str, learners: int, hint: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if len(items) != learners:
        raise ConfigError(
            f"{option} {text!r}: expected {learners} items joined by commas, one for each "
            f"learner, got {len(items)}",
            hint=hint,
        )
    return items


def _mesh(text: str, item: str) -> MeshSection:
    try:
        if not item.strip("0"):
            raise ValueError("no devices")
        return MeshSection.model_validate(item.replace("/", ","))
    except ValueError as error:
        raise ConfigError(
            f"--mesh {text!r}: expected for each learner a number of devices, or sizes of the axes "
            f"data, fsdp and tensor joined by '/', got {item!r}",
            hint=_MESHES,
        ) from error


def _hosts(text: str, learners: int) -> list[int]:
    hint = "processes of each learner, for example --hosts 2,1,1,1"
    items = _items("--hosts", text, learners, hint)
    if not all(item.isdecimal() and int(item) > 0 for item in items):
        raise ConfigError(
            f"--hosts {text!r}: expected whole numbers from 1 on, joined by commas", hint=hint
        )
    return [int(item) for item in items]
