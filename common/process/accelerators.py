"""Finds the accelerators of this machine without occupying them.

JAX would occupy the accelerators that it finds. So this module asks the driver's own tool, and
reads the kernel's files.
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
# Google's PCI devices that are TPU chips: v3, v4, v5p, v5e, v6e, 7x.
TPU_CHIPS = {"0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"}
Kind = Literal["cuda", "tpu"]
# The packages of which JAX needs one for each kind.
PLUGINS: dict[Kind, tuple[str, ...]] = {
    "cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "tpu": ("libtpu",),
}


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """The machine's accelerators of one kind.

    Attributes:
        names: index of each accelerator, as text, in the form that CUDA_VISIBLE_DEVICES or
            TPU_VISIBLE_CHIPS takes.
        memory_bytes: memory of the smallest accelerator; 0 if unknown, as for TPU chips.
        usable: True if the installed JAX has a plugin for this kind of accelerator.
    """

    kind: Kind
    names: tuple[str, ...]
    memory_bytes: int = 0
    usable: bool = True

    @property
    def noun(self) -> str:
        """The word for one accelerator of this kind."""
        return "GPU" if self.kind == "cuda" else "TPU chip"

    def count(self, number: int) -> str:
        """Returns `number` with the noun of this kind, such as "2 GPUs"."""
        return f"{number} {self.noun}{'' if number == 1 else 's'}"


def find_accelerators(root: Path = Path("/")) -> Accelerators | None:
    """Returns the accelerators that this process may use; None if there are none.

    On a machine with TPU chips, GPUs are ignored.

    Args:
        root: root folder of the file system that has /sys and /dev.
    """
    chips = _allowed(_tpu_chips(root), "TPU_VISIBLE_CHIPS")
    if chips:
        return Accelerators(kind="tpu", names=chips, usable=_usable("tpu"))
    gpus = _gpus(root)
    if gpus:
        # Work is shared equally, so the smallest memory counts.
        least = min(gpus.values())
        return Accelerators(
            kind="cuda", names=tuple(gpus), memory_bytes=least, usable=_usable("cuda")
        )
    return None


def unused(found: Accelerators) -> str:
    """Returns the sentence to print if JAX sees none of the machine's accelerators."""
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
    """Returns index -> memory in bytes (0: unknown) of each NVIDIA GPU that may be used."""
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
    """Returns (index, UUID, memory in bytes) of each GPU that `nvidia-smi` reports.

    Returns [] if `nvidia-smi` is not installed or fails.
    """
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
        return []  # The tool fails without a driver; the caller then looks at the device files.


def _usable(kind: Kind) -> bool:
    return any(importlib.util.find_spec(plugin) is not None for plugin in PLUGINS[kind])
