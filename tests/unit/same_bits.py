"""Digests of rounds on a made-up fragment: run by `test_outer.py` under several instruction sets.

    python same_bits.py [CODEC ...]

The vector is long enough for vectorized loops, their remainders and several chunks; weights,
discounts and norms are such that products of float32s would be rounded.
"""

import sys
from collections.abc import Sequence

import numpy as np

from diloco.aggregator.arrays.centering import distances
from diloco.aggregator.arrays.grid import make_grid
from diloco.aggregator.arrays.merge import Accumulator, Contribution, coefficients
from diloco.aggregator.arrays.outer import close_round, make_outer
from diloco.common.protocol.codecs import CODECS
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.common.protocol.shards import digest
from diloco.learner.tensors.placement import make_ownership
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.learner.tensors.send_and_adopt_kernels import make_kernels

OPTIMIZERS = ("sgd", "momentum", "nesterov", "delayed_nesterov")
SIZE = 200_000


def digests(codecs: Sequence[str] = CODECS) -> list[str]:
    """One line for each."""
    tensors = [
        Tensor(name="layers", shape=(4, SIZE // 5), dtype="float32"),
        Tensor(name="embedding", shape=(SIZE // 5,), dtype="float32"),
    ]
    layout = make_layout(tensors, fragments=1, block=64, hint=_hint)
    return [_rounds(layout, codec) for codec in codecs]


def _hint(name, _shape) -> TensorHint:
    return TensorHint(norm_axes=1) if name == "layers" else TensorHint(merge="average")


def _rounds(layout, codec) -> str:
    grid = make_grid(layout.fragments[0], layout.block, 1 << 17)
    kernels = make_kernels(layout, 0, codec=codec, delta_codec=codec)
    ownership = make_ownership(kernels)
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(grid.size).astype(np.float32)
    view, theirs = theta.copy(), ownership.place_view(theta)
    optimizer = make_outer(OPTIMIZERS[CODECS.index(codec) % len(OPTIMIZERS)], delay=2)
    state = optimizer.init(grid.size)
    accumulator, far = Accumulator(grid), []
    for _ in range(3):
        accumulator.reset()
        for _ in range(3):
            values = rng.standard_normal(grid.size).astype(np.float32)
            shards = [encode(codec, values[a:b], grid.block) for a, b in grid.ranges]
            # Made up, as a record would give them: norms may differ between processors.
            norms = rng.uniform(1, 1000, 5)
            update = Contribution(norms, rng.uniform(1, 9), rng.uniform(0.3, 1))
            radii = np.ones(5, np.float32)
            far.append(distances(grid, codec, shards, update, theta, radii))
            accumulator.add(codec, shards, coefficients(grid, update))
        factor_S = rng.uniform(0.1, 1, 5).astype(np.float32)
        delta = close_round(
            grid,
            accumulator,
            factor_S,
            theta_N=theta,
            view_N=view,
            state=state,
            optimizer=optimizer,
            learning_rate=0.7,
            momentum=0.9,
            delta_codec=codec,
        )
        theirs = kernels.advance(theirs, ownership.place(delta))
    blocks = [np.asarray(piece).reshape(-1) for piece in theirs]
    assert digest(np.concatenate(blocks)) == digest(view)
    results = [digest(array) for array in (theta, view, *state.values(), np.stack(far))]
    return f"{codec} {' '.join(results)}"


if __name__ == "__main__":
    print("\n".join(digests(sys.argv[1:] or CODECS)))
