"""The accelerators of this machine, found without touching them.

Who asks JAX takes them. So the driver's own tool, and the files of the kernel, are asked instead.
"""

import contextlib
import csv
import importlib.util
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from diloco.common.process.config import visible_devices

ASK_S = 20.0
GOOGLE = "0x1ae0"
# The PCI devices of that vendor that are TPU chips: v3, v4, v5p, v5e, v6e, 7x.
TPU_CHIPS = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
Kind = Literal["cuda", "tpu"]
# What JAX needs for each, of which one will do.
PLUGINS: dict[Kind, tuple[str, ...]] = {
    "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "tpu": ("libtpu",),
}


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """The machine's accelerators of one kind.

    Attributes:
        names: as the variable that makes them visible to a process takes them.
        memory_bytes: of each; 0 if it is not known.
        usable: whether JAX, as it is installed here, could use them.
    """

    kind: Kind
    names: tuple[str, ...]
    memory_bytes: int = 0
    usable: bool = True

    @property
    def noun(self) -> str:
        """The noun for one of them."""
        return "GPU" if self.kind == "cuda" else "TPU chip"

    def count(self, number: int) -> str:
        """A number of these accelerators, in words."""
        return f"{number} {self.noun}{'' if number == 1 else 's'}"


def find_accelerators(root: Path = Path("/")) -> Accelerators | None:
    """The accelerators that processes of this machine may use; None without any.

    Args:
        root: of the file system.
    """
    chips = _allowed(_tpu_chips(root), "TPU_VISIBLE_CHIPS")
    if chips:
        return Accelerators(kind="tpu", names=chips, usable=_usable("tpu"))
    gpus = _gpus(root)
    if gpus:
        # Shares are equal, so the smallest counts.
        least = min(gpus.values())
        return Accelerators(
            kind="cuda", names=tuple(gpus), memory_bytes=least, usable=_usable("cuda")
        )
    return None


def unused(found: Accelerators) -> str:
    """The sentence to print where JAX sees none of the machine's accelerators."""
    has = f"this machine has {found.count(len(found.names))}"
    if not found.usable:
        return (
            f"{has}, but JAX is installed without support for them, and trains on the CPU: "
            f"pip install 'diloco[{found.kind}]' (docs/install.md)"
        )
    return (
        f"{has}, but JAX does not see them, and trains on the CPU: another process may hold them, "
        "or the driver does not fit; ask `python -c 'import jax; jax.devices()'` (docs/install.md)"
    )


def _tpu_chips(root: Path) -> tuple[str, ...]:
    found = 0
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        with contextlib.suppress(OSError):
            device = vendor.with_name("device").read_text().strip()
            found += vendor.read_text().strip() == GOOGLE and device in TPU_CHIPS
    return tuple(str(index) for index in range(found))


def _allowed(names: tuple[str, ...], variable: str) -> tuple[str, ...]:
    allowed = visible_devices(variable)
    return names if allowed is None else tuple(name for name in names if name in allowed)


def _gpus(root: Path) -> dict[str, int]:
    """NVIDIA GPUs that may be used, by name, with their memory in bytes."""
    asked = _ask_driver()
    if not asked:
        indices = (path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*"))
        asked = [(index, "", 0) for index in sorted(indices, key=int)]
    allowed = visible_devices("CUDA_VISIBLE_DEVICES")
    return {
        index: memory
        for index, uuid, memory in asked
        if allowed is None or any(name == index or uuid.startswith(name) for name in allowed)
    }


def _ask_driver() -> list[tuple[str, str, int]]:
    """Index, UUID and bytes of memory of each GPU that the driver shows."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        said = subprocess.run(  # noqa: S603 - the driver's own tool
            [tool, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=ASK_S, check=True,
        )  # fmt: skip
        rows = csv.reader(said.stdout.splitlines(), skipinitialspace=True)
        return [(index, uuid, int(mebibytes) << 20) for index, uuid, mebibytes in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []  # A tool without a driver: the devices' files are as good an answer.


def _usable(kind: Kind) -> bool:
    return any(importlib.util.find_spec(plugin) is not None for plugin in PLUGINS[kind])
