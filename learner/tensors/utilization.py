"""Peak FLOP/s and memory of devices, and the figures for model FLOPs utilization (MFU).

MFU is that of PaLM (arXiv 2204.02311, appendix B): the FLOP/s that a model's forward and backward
passes need, without recomputation to save memory, divided by the devices' bfloat16 peak FLOP/s.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

T = TypeVar("T")

# Dense bfloat16 FLOP/s of one device, by a prefix of JAX's `device_kind`; the longest one counts.
# Sources: Google's pages of TPU versions and NVIDIA's data sheets, without sparsity.
PEAK_FLOPS: Final = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
}
# Bytes of memory of one device, from the same pages.
MEMORY_BYTES: Final = {
    "TPU v4": 32 << 30,
    "TPU v5 lite": 16 << 30,
    "TPU v5e": 16 << 30,
    "TPU v5": 95 << 30,
    "TPU v5p": 95 << 30,
    "TPU v6 lite": 32 << 30,
    "TPU v6e": 32 << 30,
    "NVIDIA H100 80GB": 80 << 30,
    "NVIDIA H200": 141 * 10**9,
}


def flops_per_token(multiplied: int, attended: int) -> float:
    """Returns the floating-point operations of a training step per token.

    Args:
        multiplied: the number of parameters with which a token is multiplied: all matrices, the
            head too, but not the embedding, of which a token takes one row.
        attended: the sum over layers of heads * head width * positions that a token may attend to,
            without subtracting the positions that a causal mask removes.
    """
    # A product and a sum each, once forward and twice backward; scores and their use in attention.
    return 6.0 * multiplied + 12.0 * attended


def peak_flops(kind: str) -> float | None:
    """Returns the peak FLOP/s of a device whose kind JAX names `kind`; None if unknown."""
    return _of_kind(PEAK_FLOPS, kind)


def memory_bytes(kind: str) -> int | None:
    """Returns the memory of a device whose kind JAX names `kind`, in bytes; None if unknown."""
    return _of_kind(MEMORY_BYTES, kind)


def _of_kind(table: Mapping[str, T], kind: str) -> T | None:
    fitting = [beginning for beginning in table if kind.startswith(beginning)]
    return table[max(fitting, key=len)] if fitting else None


def full_tokens_per_s(devices: Iterable[Any], per_token: float | None) -> float:
    """Returns the tokens a second that `devices` would train together at their peak FLOP/s.

    Args:
        devices: JAX's devices.
        per_token: FLOPs of training on one token; None: unknown.

    Returns:
        Tokens a second; 0.0 if `per_token` or the peak of a device is unknown, or without devices.
    """
    peaks = [peak_flops(device.device_kind) for device in devices]
    if per_token is None or not peaks or None in peaks:
        return 0.0
    return sum(peak for peak in peaks if peak is not None) / per_token
