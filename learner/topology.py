"""Devices of TPUs and GPUs that this machine lacks, for compiling only: `--platform tpu` or `cuda`.

libtpu compiles for any TPU slice without a chip, and XLA for a GPU whose properties are given. No
array can be put on these devices, and no program can run: shapes are lowered and compiled for the
devices, and the compiler reports figures. For GPUs these include memory, but not bytes accessed.
"""

import re
from typing import Any, Final, NamedTuple

from jax.experimental import topologies

from diloco.common.process.config import environment
from diloco.common.protocol.errors import ConfigError


class Gpu(NamedTuple):
    """The properties of a GPU that XLA needs, from NVIDIA's data sheets and tuning guides.

    Attributes:
        name: the name that the driver reports.
        capability: the major number of the compute capability; the minor number is 0.
        cores: the number of streaming multiprocessors.
        lanes: the number of float32 units of each multiprocessor.
        shared_bytes: bytes of shared memory of each multiprocessor.
        block_bytes: the most bytes of shared memory that one thread block may take.
        cache_bytes: bytes of the second-level cache.
        memory_bytes: bytes of the device's memory.
        bandwidth: bytes a second of the device's memory.
        ghz: highest clock rate, in GHz.
    """

    name: str
    capability: int
    cores: int
    lanes: int
    shared_bytes: int
    block_bytes: int
    cache_bytes: int
    memory_bytes: int
    bandwidth: int
    ghz: float


_KIB: Final = 1 << 10
GPUS: Final = {
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB", 8, 108, 64, 164 * _KIB, 163 * _KIB, 40 << 20,
        80 << 30, 2_039_000_000_000, 1.41,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3", 9, 132, 128, 228 * _KIB, 227 * _KIB, 50 << 20,
        80 << 30, 3_350_000_000_000, 1.98,
    ),
    "h200": Gpu(
        "NVIDIA H200", 9, 132, 128, 228 * _KIB, 227 * _KIB, 50 << 20,
        141_000_000_000, 4_800_000_000_000, 1.98,
    ),
}  # fmt: skip
_GPUS: Final = re.compile(r"([a-z]\d+)(?::[1-9]\d{0,3})?")

# libtpu's name of a slice: the generation of chip, and the number of chips along each axis.
_NAME = re.compile(r"v\d+[a-z]*:\d+(x\d+)*")


def tpu_devices(topology: str) -> list[Any]:
    """Returns the devices of a TPU slice, for compiling only.

    Args:
        topology: chip and shape of the slice as libtpu names them: `v5e:2x4`, `v5p:4x4x4`.

    Raises:
        ConfigError: libtpu is not installed, or has no such slice.
    """
    if not _NAME.fullmatch(topology):
        raise ConfigError(
            f"{topology!r} is not the name of a slice",
            hint="chip and shape, as v5e:2x4, v5p:4x4x4 or v6e:8x8",
        )
    environment.compile_without_tpu()
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        raise ConfigError(
            f"the TPU's compiler gives no slice {topology}: {str(error).splitlines()[0]}",
            hint="it is libtpu: pip install 'diloco[tpu]'; shapes are those of Cloud TPU",
        ) from error
    return list(found.devices)


def gpu_devices(topology: str) -> list[Any]:
    """Returns the devices of one machine with GPUs, for compiling only.

    Args:
        topology: a key of `GPUS`, and the number of GPUs: `h100:8`; `h100` is one GPU.

    Raises:
        ConfigError: JAX's CUDA plugin is not installed, or `GPUS` has no such GPU.
    """
    gpu, count = gpu_named(topology), topology.partition(":")[2] or 1
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x1x{count}",
            target_config=_described(gpu),
        )
    except Exception as error:
        raise ConfigError(
            f"XLA gives no compiler for {topology}: {str(error).splitlines()[0]}",
            hint="it is JAX's CUDA plugin: pip install 'diloco[cuda]'; no driver is needed",
        ) from error
    return list(found.devices)


def gpu_named(topology: str) -> Gpu:
    """Returns the properties of the GPU in a topology such as `h100:8`.

    Raises:
        ConfigError: `GPUS` has no such GPU.
    """
    match = _GPUS.fullmatch(topology)
    if match is None or match[1] not in GPUS:
        raise ConfigError(
            f"{topology!r} is not a GPU and a number of them",
            hint=f"one of {', '.join(GPUS)}, and how many, as h100:8",
        )
    return GPUS[match[1]]


def _described(gpu: Gpu) -> str:
    """Returns a GPU's properties as XLA's `GpuTargetConfigProto`, in protobuf's text format."""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: {48 * _KIB}
          shared_memory_per_core: {gpu.shared_bytes}
          shared_memory_per_block_optin: {gpu.block_bytes}
          threads_per_core_limit: 2048
          core_count: {gpu.cores}
          fpus_per_core: {gpu.lanes}
          block_dim_limit_x: {(1 << 31) - 1}
          block_dim_limit_y: {(1 << 16) - 1}
          block_dim_limit_z: {(1 << 16) - 1}
          registers_per_core_limit: {64 * _KIB}
          registers_per_block_limit: {64 * _KIB}
          memory_bandwidth: {gpu.bandwidth}
          l2_cache_size: {gpu.cache_bytes}
          clock_rate_ghz: {gpu.ghz}
          device_memory_size: {gpu.memory_bytes}
          cuda_compute_capability {{ major: {gpu.capability} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 }}
        device_description_str: "{gpu.name}"
    """
