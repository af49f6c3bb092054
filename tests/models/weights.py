"""Weights and tokens of a case, the same in every environment: they follow from its name."""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

POSITIONS = 400
# Of a tensor's gradient, flattened, every so many elements are kept; of the logits every so many rows.
STRIDE, ROWS = 61, 50
# Tokens that a generation begins with, and those that it adds.
PROMPT, GENERATED = 16, 24


def weight(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor by its foreign name; attention's have a deviation of 0.3, so that it attends."""
    drawn = _rng(case, name).standard_normal(shape).astype(np.float32)
    if name.endswith(("_min", "_max")):  # of what a clipped product is given, and gives
        side = 1 if name.endswith("max") else -1
        return np.asarray(side * (0.5 + np.abs(drawn)), np.float32)
    if "scal" in name:
        return 0.2 * drawn + 1
    if "gemma4" in case and "q_norm" in name:
        # Its scores are not scaled: far from these, rounding alone would be 1e-4 of its logits.
        return 0.05 * drawn + 0.25
    if "norm" in name:
        return 0.2 * drawn + (0 if "gemma" in case and "gemma4" not in case else 1)
    return (0.3 if "self_attn" in name else 0.1) * drawn


def parts(case: str, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """The tensors of a file that are one parameter in memory, and the place of each in it.

    There the gate and up of all experts are one; files have each expert's by itself.
    """
    module, *matrices = ("mlp", "gate_proj", "up_proj", "down_proj")
    if "mixtral" in case:
        module, *matrices = ("block_sparse_moe", "w1", "w3", "w2")
    layer, _, fused = name.rpartition(".mlp.experts.")
    whole, half = slice(None), shape[1] // 2 if len(shape) == 3 else 0
    halves = {"gate_up_proj": (slice(0, half), slice(half, None)), "down_proj": (whole,)}
    if fused not in halves:
        yield name.replace(".mlp.gate.weight", f".{module}.gate.weight"), ...
        return
    named = matrices[:2] if fused == "gate_up_proj" else matrices[2:]
    for number in range(shape[0]):
        for matrix, part in zip(named, halves[fused], strict=True):
            yield f"{layer}.{module}.experts.{number}.{matrix}.weight", (number, part)


def tokens(case: str, vocab: int) -> np.ndarray:
    """One row; without token 0, whose embedding torch gives no gradient where it is the padding."""
    return _rng(case, "tokens").integers(1, vocab, size=(1, POSITIONS)).astype(np.int32)


# Width and height in patches of the images of `pictured`, and the patches that each is padded to.
IMAGES, PATCHES = ((4, 6), (8, 2)), 28
# Every 31st number of their embeddings in transformers, of the case gemma4-whole in float64.
SHOWN = (-1.05554, -1.07008, -0.28767, -0.60807, 0.02455, 0.23473, -0.15494, -0.07527)
SHOWN += (0.11725, -0.38947, 0.31307)


def pictured(patch: int, side: int, image: int, number: int = 0) -> dict[str, np.ndarray]:
    """A row of text with two images, as a processor gives it; another for each number.

    Args:
        patch: pixels along a patch.
        side: patches along the side of the square that is one token.
        image: the token that stands for images.
        number: of the row.
    """
    rng = _rng("any", f"row {number}")
    text = [rng.integers(1, 80, size=count) for count in (9, 1, 30)]
    tokens, pixels, places = [text[0]], [], []
    for (wide, high), after in zip(IMAGES, text[1:], strict=True):
        count = wide * high
        tokens += [[image] * (count // side**2), after]
        shown = rng.random((count, 3 * patch**2)).astype(np.float32)
        pixels.append(np.pad(shown, ((0, PATCHES - count), (0, 0))))
        place = np.stack(np.meshgrid(np.arange(wide), np.arange(high)), -1).reshape(-1, 2)
        places.append(np.pad(place, ((0, PATCHES - count), (0, 0)), constant_values=-1))
    row = np.concatenate(tokens)[None].astype(np.int64)
    return {
        "input_ids": row,
        "mm_token_type_ids": (row == image).astype(np.int64),
        "pixel_values": np.stack(pixels),
        "image_position_ids": np.stack(places),
    }


def _rng(case: str, name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
