"""The hardware of each learner of a local run: devices as a mesh, and processes that share them.

Each learner gets whole accelerators if there are enough. If not, learners share GPUs: each reserves
an equal part of a GPU's memory, and they compete for its time. A TPU chip serves one process.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from diloco.common.process.accelerators import Accelerators, Kind
from diloco.common.process.config import AXES, LearnerSection, MeshSection
from diloco.common.protocol.errors import ConfigError
from diloco.run.cli.format_numbers import human_bytes

# Memory of a GPU that each process uses outside JAX's reservation: CUDA's context, kernels.
CONTEXT_BYTES = 768 << 20
# With less memory there is no room for a useful model.
LEAST_BYTES = 1 << 30
# The part of a GPU's memory that its processes reserve together; JAX itself takes 0.75.
RESERVED = 0.9
# By number of chips, the bounds (x,y,z) of the block of TPU chips that one process can have.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


class ProcessAccelerators(NamedTuple):
    """The accelerators that one process uses, whole or in part.

    Attributes:
        names: names of its accelerators, such as GPU indices.
        memory: the fraction of their memory that it reserves; None for JAX's default.
        whole_machine: whether these are all accelerators of the machine.
    """

    kind: Kind
    names: tuple[str, ...]
    memory: float | None = None
    whole_machine: bool = False

    def environment(self) -> dict[str, str | None]:
        """Returns the variables by which JAX uses these accelerators alone; None removes one."""
        found: dict[str, str | None] = {"JAX_PLATFORMS": f"{self.kind},cpu"}
        if self.kind == "cuda":
            found |= {
                "CUDA_VISIBLE_DEVICES": ",".join(self.names),
                # The order in which the driver's tool counts them too.
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            }
            if self.memory is not None:
                # JAX refuses an environment with both the newer and the older name.
                found |= {
                    "XLA_CLIENT_MEM_FRACTION": f"{self.memory:.3f}",
                    "XLA_PYTHON_CLIENT_MEM_FRACTION": None,
                }
            return found
        if self.whole_machine:
            return found
        return found | {
            "TPU_VISIBLE_CHIPS": ",".join(self.names),
            "TPU_CHIPS_PER_PROCESS_BOUNDS": TPU_BOUNDS[len(self.names)],
            "TPU_PROCESS_BOUNDS": "1,1,1",
        }

    def words(self) -> str:
        """Returns the accelerators as text: "GPU 0, 1", "45 % of GPU 0"."""
        noun = "GPU" if self.kind == "cuda" else "TPU chip"
        part = "" if self.memory is None else f"{self.memory:.0%} of "
        return f"{part}{noun} {', '.join(self.names)}"


class Hardware(NamedTuple):
    """The hardware of one learner.

    Attributes:
        devices: number of devices of all its processes.
        hosts: number of its processes.
        forced: whether the user gave the number of devices; without accelerators JAX emulates
            them on the CPU.
        per_process: the accelerators of each process; empty for a learner on the CPU.
    """

    devices: int = 1
    hosts: int = 1
    forced: bool = False
    per_process: tuple[ProcessAccelerators, ...] = ()

    def arguments(self) -> list[str]:
        """Returns the arguments for each of its processes: the number of devices to emulate."""
        own = self.forced and not self.per_process
        return ["--cpu-devices", str(self.devices // self.hosts)] if own else []

    def environments(self) -> list[dict[str, str | None]]:
        """Returns, for each of its processes, the changes to the environment of `diloco local`."""
        if not self.per_process:
            return [{} for _ in range(self.hosts)]
        return [one.environment() for one in self.per_process]

    def accelerators(self) -> set[str]:
        """Returns the names of the learner's accelerators."""
        return {name for one in self.per_process for name in one.names}

    def words(self) -> str:
        """Returns the hardware as text: "4 in 2 hosts", "GPU 0, 1"; "" for one CPU device."""
        if self.per_process:
            return " and ".join(one.words() for one in self.per_process)
        if self.hosts > 1:
            return f"{self.devices} in {self.hosts} hosts"
        return str(self.devices) if self.forced else ""

    @property
    def asked(self) -> int | None:
        """The number of devices that the user asked for; None: the machine's accelerators."""
        return self.devices if self.forced else None


def divide(
    found: Accelerators, wanted: Mapping[str, Hardware]
) -> dict[str, tuple[ProcessAccelerators, ...]]:
    """Divides accelerators among the processes of each learner.

    Args:
        found: the machine's accelerators.
        wanted: by learner, the hardware that it is to have.

    Returns:
        By learner, the accelerators of each of its processes.

    Raises:
        ConfigError: there are too few accelerators.
    """
    shared = len(found.names) < len(wanted)
    if not shared:
        return _whole(found, wanted)
    if found.kind == "tpu" or any(want.forced or want.hosts > 1 for want in wanted.values()):
        asked = sum(max(want.asked or 1, want.hosts) for want in wanted.values())
        raise _too_few(found, wanted, asked)
    return _parts(found, list(wanted))


def _whole(
    found: Accelerators, wanted: Mapping[str, Hardware]
) -> dict[str, tuple[ProcessAccelerators, ...]]:
    each = _power_of_two(len(found.names) // len(wanted))
    if len(wanted) == 1:
        each = len(found.names)
    counts = {name: want.asked or max(each, want.hosts) for name, want in wanted.items()}
    if sum(counts.values()) > len(found.names):
        raise _too_few(found, wanted, sum(counts.values()))
    left = list(found.names)
    divided = {}
    for name, want in wanted.items():
        mine, left = left[: counts[name]], left[counts[name] :]
        divided[name] = _processes(found, name, mine, want.hosts)
    return divided


def _processes(
    found: Accelerators, learner: str, mine: Sequence[str], hosts: int
) -> tuple[ProcessAccelerators, ...]:
    """Divides one learner's accelerators (`mine`) among its processes.

    Raises:
        ConfigError: the accelerators cannot be divided so.
    """
    if found.kind == "tpu" and (hosts > 1 or len(mine) not in TPU_BOUNDS):
        raise ConfigError(
            f"{learner} would have {found.count(len(mine))} in {hosts} process(es); one process "
            f"has {', '.join(str(size) for size in TPU_BOUNDS)} of them, and no two share a "
            "learner's here",
            hint="choose such numbers with --mesh, leave --hosts out, or train on the CPU: --cpu",
        )
    if len(mine) % hosts:
        raise ConfigError(
            f"--hosts: {hosts} processes cannot share the {found.count(len(mine))} of {learner} "
            "equally",
            hint="for example --mesh 4,2 --hosts 2,1",
        )
    size = len(mine) // hosts
    whole = len(mine) == len(found.names) and hosts == 1
    return tuple(
        ProcessAccelerators(found.kind, tuple(mine[size * i : size * (i + 1)]), whole_machine=whole)
        for i in range(hosts)
    )


def _parts(
    found: Accelerators, learners: Sequence[str]
) -> dict[str, tuple[ProcessAccelerators, ...]]:
    """Assigns learners to GPUs in turn, and gives each an equal part of its GPU's memory.

    Raises:
        ConfigError: the parts would be too small.
    """
    gpus = len(found.names)
    sharing = [len(learners[index::gpus]) for index in range(gpus)]
    most = max(sharing)
    each = (found.memory_bytes * RESERVED - most * CONTEXT_BYTES) / most
    if found.memory_bytes and each < LEAST_BYTES:
        raise ConfigError(
            f"{most} learners cannot share one GPU of {human_bytes(found.memory_bytes)}: that "
            f"leaves less than {human_bytes(LEAST_BYTES)} for each, beside CUDA's own "
            f"{human_bytes(CONTEXT_BYTES)}",
            hint="fewer --learners, or train on the CPU: --cpu",
        )
    return {
        name: (
            ProcessAccelerators(
                found.kind, (found.names[i % gpus],), _part(found, sharing[i % gpus])
            ),
        )
        for i, name in enumerate(learners)
    }


def _part(found: Accelerators, sharing: int) -> float | None:
    """Returns the fraction of a GPU's memory that each of `sharing` learners reserves.

    None, JAX's default, for one.
    """
    if sharing == 1:
        return None
    context = CONTEXT_BYTES / found.memory_bytes if found.memory_bytes else 0.0
    return RESERVED / sharing - context


def _too_few(found: Accelerators, wanted: Mapping[str, Hardware], asked: int) -> ConfigError:
    shared = " A TPU chip cannot be shared." if found.kind == "tpu" else ""
    return ConfigError(
        f"{len(wanted)} learners want {found.count(asked)}, and this machine has "
        f"{found.count(len(found.names))}.{shared}",
        hint="fewer --learners, a smaller --mesh, or devices emulated on the CPU: --cpu",
    )


def _power_of_two(number: int) -> int:
    """Returns the largest power of two up to `number`, which batches and blocks of chips need."""
    return 1 << (number.bit_length() - 1)


LEARNERS = 4
_MESHES = "for example --mesh 4,2,1,1; with other axes --mesh data=2/fsdp=2,tensor=2,1"


def count_learners(learners: int | None, mesh: str | None, hosts: str | None) -> int:
    """Returns the number of learners: `learners`, else the length of the list in `mesh` or `hosts`.

    If all are None it is `LEARNERS`.
    """
    if learners is not None:
        return learners
    listed = mesh if mesh is not None else hosts
    return LEARNERS if listed is None else len(listed.split(","))


def set_hardware(
    section: dict[str, Any], names: Sequence[str], mesh: str | None, hosts: str | None
) -> dict[str, Hardware]:
    """Puts the meshes of --mesh into the section `learner`; returns each learner's hardware.

    Args:
        section: the section of the document, which is changed.
        names: the learners' names.
        mesh: the list of --mesh; None: the section's meshes.
        hosts: the list of --hosts; None: the section's number of hosts.

    Raises:
        ConfigError: a list is invalid, or has the wrong length.
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
    # Each process gets its own number of devices as an argument.
    for key in ("hosts", "host", "coordinator"):
        section.pop(key, None)
    counts = [parsed.hosts] * len(names) if hosts is None else _hosts(hosts, len(names))
    forced = mesh is not None or hosts is not None
    return {
        name: _hardware(parsed, name, count, forced=forced)
        for name, count in zip(names, counts, strict=True)
    }


def on_cpu(hardware: dict[str, Hardware]) -> dict[str, Hardware]:
    """Returns each learner's hardware with devices that are emulated on the CPU."""
    return {name: one._replace(forced=True) for name, one in hardware.items()}


def on_accelerators(hardware: dict[str, Hardware], found: Accelerators) -> dict[str, Hardware]:
    """Returns each learner's hardware with its part of the machine's accelerators.

    Raises:
        ConfigError: there are too few accelerators.
    """
    divided = divide(found, hardware)
    return {
        name: one._replace(
            per_process=divided[name], devices=sum(len(each.names) for each in divided[name])
        )
        for name, one in hardware.items()
    }


def _hardware(section: LearnerSection, name: str, hosts: int, *, forced: bool) -> Hardware:
    mesh = section.island(name).mesh or MeshSection()
    # A size of 0 takes the devices that the others leave: here, the fewest possible.
    fewest = math.lcm(mesh.given, hosts * max(1, section.cpu_devices))
    devices = fewest if 0 in mesh.sizes else mesh.given
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
            f"{', '.join(AXES)} joined by '/', got {item!r}",
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
