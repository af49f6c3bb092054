"""The cost of a layer of experts on this machine, over one MLP that does as many products.

    python -m tests.models.experts_cost

Forward and gradient, by groups (`jax.lax.ragged_dot`) and by blocks of several sizes; smallest of
three.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from diloco.models.decoders import experts

# E, C, T, D, F.
SHAPES = ((8, 2, 512, 256, 512), (32, 4, 512, 256, 256), (64, 8, 512, 256, 64))


def measured(layer, *given):
    """Seconds."""
    total = jax.value_and_grad(lambda *given: jnp.sum(layer(*given) ** 2), tuple(range(len(given))))
    step, took = jax.jit(total), []
    for _ in range(4):
        began = time.perf_counter()
        jax.block_until_ready(step(*given))
        took.append(time.perf_counter() - began)
    return min(took[1:])


def mlp(rows, gate, up, down):
    return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down


def over(whole, sizes, rows, gate, up, down, way):
    """As many times as long as the one MLP."""
    layer = partial(_rows_through, way, sizes)
    return measured(layer, rows, gate, up, down) / whole


def _rows_through(way, sizes, rows, *three):
    return way(jax.nn.silu, rows, sizes, *three)


def main():
    rng = np.random.default_rng(0)
    for count, chosen, tokens, width, inner in SHAPES:
        rows = rng.standard_normal((tokens * chosen, width), np.float32)
        shapes = ((count, width, inner), (count, width, inner), (count, inner, width))
        matrices = [rng.standard_normal(shape, np.float32) for shape in shapes]
        sizes = np.bincount(rng.integers(count, size=len(rows)), minlength=count)
        whole = measured(mlp, rows, *(matrix[0] for matrix in matrices))

        sized = partial(over, whole, jnp.asarray(sizes), rows, *matrices)
        said = [f"groups {sized(experts.by_groups):.1f}"]
        sizes = [experts.block_rows(len(rows), count) * part // 2 for part in (1, 2, 4, 8)]
        ways = {size: partial(experts.by_blocks, size=size) for size in sizes}
        said += [f"blocks of {size} {sized(way):.1f}" for size, way in ways.items()]
        print(f"E={count} C={chosen} T={tokens} D={width} F={inner}: {', '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
