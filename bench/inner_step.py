"""What the inner step's looks at its own gradient cost, by XLA's count for the compiled programs.

Three steps of the demo's model: one that looks at nothing, one that sees which leaves have no
gradient, and one that also judges in which direction it moves. Counts and not times: they are the
same on a busy machine.

    python -m bench.inner_step [--preset 10m] [--batch 8]
"""

import argparse
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from diloco.learner import inner_step
from diloco.learner.contract import load_task
from diloco.learner.task import Params


def blind(_gradient: Params) -> jax.Array:
    """Sees nothing."""
    return jnp.zeros(1, bool)


def main() -> None:
    """Compile the three, and print what the last two have more than the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="10m")
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    options = {"preset": arguments.preset, "batch": arguments.batch}
    task = load_task("diloco.learner.model:build", steps=100, seed=0, options=options)
    params = task.init(jax.random.key(0))
    given = (params, task.optimizer.init(params), next(task.batches("a", 0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{count:,} parameters, batch of {arguments.batch}")
    first: dict[str, float] = {}
    for name, sees, judging in (
        ("looks at nothing", False, False),
        ("sees still leaves", True, False),
        ("judges as well", True, True),
    ):
        looking = nullcontext() if sees else mock.patch.object(inner_step, "_still", blind)
        with looking:
            made: Any = inner_step.make_inner_step(task, judging=judging)
            found = made.lower(*given, np.int32(0), np.uint32(0)).compile().cost_analysis()
        first = first or found
        parts = [f"{key} {found[key] / first[key] - 1:+.2%}" for key in ("flops", "bytes accessed")]
        print(f"{name:18} {', '.join(parts)}")


if __name__ == "__main__":
    main()
