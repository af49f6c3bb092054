"""Who gets which accelerators of one machine: a pure division among the learners of a local run.

Each learner gets whole ones where there are enough. Fewer GPUs than learners are shared: equal
parts of a GPU's memory, with its speed divided as it comes. A TPU chip belongs to one process.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diloco.cli.units import human_bytes
from diloco.common.accelerators import Accelerators, Kind
from diloco.common.errors import ConfigError

# What each process keeps outside the memory that JAX reserves: CUDA's own context, kernels.
CONTEXT_BYTES = 768 << 20
# With less there is no room for a model of any use.
LEAST_BYTES = 1 << 30
# Of a GPU's memory, what processes that share it reserve together; JAX itself takes 0.75.
RESERVED = 0.9
# Sizes of the block of chips that one process can have.
TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


class Wanted(NamedTuple):
    """What a learner asks for.

    Attributes:
        devices: so many; None for what there is.
        hosts: processes that share them.
    """

    devices: int | None = None
    hosts: int = 1


class Share(NamedTuple):
    """What one process gets.

    Attributes:
        names: of its accelerators.
        memory: its part of their memory; None for all that JAX takes.
        whole_machine: whether these are all that the machine has.
    """

    kind: Kind
    names: tuple[str, ...]
    memory: float | None = None
    whole_machine: bool = False

    def environment(self) -> dict[str, str | None]:
        """What makes JAX take these and no others."""
        found: dict[str, str | None] = {"JAX_PLATFORMS": f"{self.kind},cpu"}
        if self.kind == "cuda":
            found |= {
                "CUDA_VISIBLE_DEVICES": ",".join(self.names),
                # By which the driver's tool counts them too.
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            }
            if self.memory is not None:
                # The older name beside the newer one is an error.
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
        """As people read it: "GPU 0, 1", "45 % of GPU 0"."""
        noun = "GPU" if self.kind == "cuda" else "TPU chip"
        part = "" if self.memory is None else f"{self.memory:.0%} of "
        return f"{part}{noun} {', '.join(self.names)}"


def divide(found: Accelerators, wanted: Mapping[str, Wanted]) -> dict[str, tuple[Share, ...]]:
    """The shares of each learner's processes.

    Raises:
        ConfigError: there are too few.
    """
    shared = len(found.names) < len(wanted)
    if not shared:
        return _whole(found, wanted)
    if found.kind == "tpu" or any(want != Wanted() for want in wanted.values()):
        asked = sum(max(want.devices or 1, want.hosts) for want in wanted.values())
        raise _too_few(found, wanted, asked)
    return _parts(found, list(wanted))


def _whole(found: Accelerators, wanted: Mapping[str, Wanted]) -> dict[str, tuple[Share, ...]]:
    each = _power_of_two(len(found.names) // len(wanted))
    if len(wanted) == 1:
        each = len(found.names)
    counts = {name: want.devices or max(each, want.hosts) for name, want in wanted.items()}
    if sum(counts.values()) > len(found.names):
        raise _too_few(found, wanted, sum(counts.values()))
    left = list(found.names)
    shares = {}
    for name, want in wanted.items():
        mine, left = left[: counts[name]], left[counts[name] :]
        shares[name] = _processes(found, name, mine, want.hosts)
    return shares


def _processes(
    found: Accelerators, learner: str, mine: Sequence[str], hosts: int
) -> tuple[Share, ...]:
    """One learner's accelerators, divided among its processes."""
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
        Share(found.kind, tuple(mine[size * i : size * (i + 1)]), whole_machine=whole)
        for i in range(hosts)
    )


def _parts(found: Accelerators, learners: Sequence[str]) -> dict[str, tuple[Share, ...]]:
    """Parts of GPUs' memory; learners go round the GPUs."""
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
        name: (Share(found.kind, (found.names[i % gpus],), _part(found, sharing[i % gpus])),)
        for i, name in enumerate(learners)
    }


def _part(found: Accelerators, sharing: int) -> float | None:
    """The part of a GPU's memory that each of so many learners reserves."""
    if sharing == 1:
        return None
    context = CONTEXT_BYTES / found.memory_bytes if found.memory_bytes else 0.0
    return RESERVED / sharing - context


def _too_few(found: Accelerators, wanted: Mapping[str, Wanted], asked: int) -> ConfigError:
    shared = " A TPU chip cannot be shared." if found.kind == "tpu" else ""
    return ConfigError(
        f"{len(wanted)} learners want {found.count(asked)}, and this machine has "
        f"{found.count(len(found.names))}.{shared}",
        hint="fewer --learners, a smaller --mesh, or devices emulated on the CPU: --cpu",
    )


def _power_of_two(number: int) -> int:
    """The largest power of two that is no larger: batches divide by it, and chips' blocks do."""
    return 1 << (number.bit_length() - 1)
