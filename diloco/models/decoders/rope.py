"""Rotary positions (arXiv 2104.09864), with the frequency scalings that the families use.

Shapes: K width of a head.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

_ORIGINAL = "original_max_position_embeddings"
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": (),
    "yarn": ("factor", _ORIGINAL),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        _ORIGINAL,
    ),
}
KINDS = tuple(_KEYS)
_OPTIONAL = {
    "proportional": ("factor", "partial_rotary_factor"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of heads by positions: each pair of a head's numbers has a frequency.

    Attributes:
        theta: base of the frequencies.
        kind: how the frequencies are scaled (`rope_type` in config.json):
            "default": not at all;
            "linear": all are divided by `factor`;
            "llama3": low frequencies are divided by `factor`, high ones are not, with a ramp
            between them (Llama 3.1);
            "yarn": as "llama3" with another ramp; queries and keys are also multiplied by
            `amplitude` (arXiv 2309.00071);
            "dynamic": as "default", but only up to the length that the model was trained for;
            "proportional": only the first pairs of a head are rotated, a share
            `partial_rotary_factor` of all pairs (Gemma 4).
        scaling: (key in config.json, value) of each parameter of the kind.
    """

    theta: float
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, kind: Any, given: Mapping[str, Any], positions: Any = None) -> Self:
        """Parses the keys of a config.json.

        Args:
            kind: the value of `rope_type`.
            given: the values of the other keys.
            positions: the length in tokens that the model was trained for, if `given` lacks it.

        Raises:
            ValueError: the kind is unknown; or a key is missing, unknown or not a positive number.
        """
        if kind not in _KEYS:
            raise ValueError(f"rope_type {kind!r} is not known")
        if _ORIGINAL in _KEYS[kind] and positions is not None:
            given = {_ORIGINAL: positions, **given}
        wanted, more = {"rope_theta", *_KEYS[kind]}, _OPTIONAL.get(kind, ())
        if wrong := sorted((set(given) - set(more)) ^ wanted):
            raise ValueError(f"{', '.join(wrong)} missing or unknown for rope_type {kind!r}")
        for name, value in given.items():
            if name == "truncate" and isinstance(value, bool):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a number above 0, but it is {value!r}")
        if given.get("partial_rotary_factor", 1.0) > 1:
            raise ValueError("partial_rotary_factor must be at most 1")
        if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
            raise ValueError("high_freq_factor must be above low_freq_factor")
        scaling = tuple((name, given[name]) for name in (*_KEYS[kind], *more) if name in given)
        return cls(float(given["rope_theta"]), kind, scaling)

    def parameters(self) -> dict[str, Any]:
        """Returns the value of `rope_parameters` in a `config.json`."""
        return {"rope_type": self.kind, "rope_theta": self.theta, **dict(self.scaling)}

    def document(self) -> dict[str, Any]:
        """Returns the entries of a config.json, in both spellings that transformers has had."""
        scaling = {"rope_type": self.kind, **dict(self.scaling)}
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.kind == "default" else scaling,
            "rope_parameters": self.parameters(),
        }

    @property
    def amplitude(self) -> float:
        """The factor by which rotated queries and keys are multiplied; 1 unless kind is "yarn"."""
        if self.kind != "yarn":
            return 1.0
        said = dict(self.scaling)
        if "attention_factor" in said:
            return float(said["attention_factor"])

        def grown(scale: float) -> float:
            return 0.1 * scale * math.log(said["factor"]) + 1.0 if said["factor"] > 1 else 1.0

        if "mscale" in said and "mscale_all_dim" in said:
            return grown(said["mscale"]) / grown(said["mscale_all_dim"])
        return grown(1.0)

    def frequencies(self, head_width: int) -> np.ndarray:
        """Returns the angle by which each position turns each pair, in radians, float32 [K/2]."""
        exponent_K2 = np.arange(0, head_width, 2, dtype=np.float32) / np.float32(head_width)
        power_K2 = (self.theta ** exponent_K2.astype(np.float64)).astype(np.float32)
        plain_K2 = np.float32(1) / power_K2
        scaling = dict(self.scaling)
        if self.kind == "linear":
            return (plain_K2 / np.float32(scaling["factor"])).astype(np.float32)
        if self.kind == "proportional":
            turning = int(scaling.get("partial_rotary_factor", 1.0) * head_width // 2)
            plain_K2 = np.where(np.arange(head_width // 2) < turning, plain_K2, np.float32(0))
            return (plain_K2 / np.float32(scaling.get("factor", 1.0))).astype(np.float32)
        if self.kind == "yarn":
            return _yarn(power_K2, self.theta, scaling)
        return _llama3(plain_K2, **scaling) if self.kind == "llama3" else plain_K2


def _yarn(power_K2: np.ndarray, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """Returns the frequencies of kind "yarn", float32 [K/2].

    A frequency is divided by `factor` if its pair makes few turns in the length that the model was
    trained for, and stays if the pair makes many.

    Args:
        power_K2: the inverse of each frequency of kind "default".
        theta: base of the frequencies.
        scaling: parameters by their keys in config.json.
    """
    pairs = len(power_K2)

    def pair_of(turns: float) -> float:
        """Returns the index, with a fraction, of the pair that makes `turns` turns."""
        return pairs * math.log(scaling[_ORIGINAL] / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(scaling.get("beta_fast", 32)), pair_of(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last = last + 0.001 if first == last else last
    # Rounded as in transformers: at distant positions, a last bit is 1e-5 of a turn.
    one, factor = np.float32(1), np.float32(scaling["factor"])
    place_K2 = np.arange(pairs, dtype=np.float32) - np.float32(first)
    kept_K2 = one - np.clip(place_K2 / np.float32(last - first), 0, 1)
    scaled: np.ndarray = one / (factor * power_K2) * (one - kept_K2) + one / power_K2 * kept_K2
    return scaled


def _llama3(
    plain_K2: np.ndarray,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> np.ndarray:
    """Returns the frequencies of kind "llama3", float32 [K/2].

    A frequency is divided by `factor` if it has few waves in the length that the model was trained
    for, and stays if it has many. `plain_K2`: the frequencies of kind "default".
    """
    waves_K2 = original_max_position_embeddings * plain_K2.astype(np.float64) / (2 * math.pi)
    ramp_K2 = (waves_K2 - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept_K2 = np.clip(ramp_K2, 0, 1)
    scaled: np.ndarray = (kept_K2 + (1 - kept_K2) / factor) * plain_K2
    return scaled.astype(np.float32)
