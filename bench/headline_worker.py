"""One worker of this system in lockstep, for `bench.headline_round`.

Prints a line for each synchronization round: the seconds from parameters that are computed, at the
end of an inner step, to the new global parameters, computed too. (`stall_s` of heartbeats is not
that: where a step is still computing when its boundary begins, it has the step in it, and what
adopting computes after the boundary it has not.)
"""

import argparse
import time

import jax

import diloco
from bench.devices import plain
from diloco.learner.task import Params, params_shapes


def main() -> None:
    """Take rounds, one after each inner step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--learner", required=True)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    like = params_shapes(plain(steps=1, seed=0, matrices=args.parameters))
    sign = 1 if args.learner.endswith("0") else -2

    @jax.jit
    def inner(params: Params) -> Params:
        return jax.tree.map(lambda w: w + sign * 1e-3 * w * w, params)

    with diloco.join(args.config, learner=args.learner, like=like, tokens_per_step=1) as island:
        params = island.params
        for _ in range(args.rounds):
            params = jax.block_until_ready(inner(params))
            began_s = time.perf_counter()
            params = jax.block_until_ready(island.step(params, loss=1.0))
            print(time.perf_counter() - began_s, flush=True)


if __name__ == "__main__":
    main()
