"""A training loop of a user's own on one host of several: what `test_library_hosts.py` starts.

python -m own_loop CONFIG LEARNER COORDINATOR HOSTS HOST [fail|end]: trains until `done`, or raises
or ends by itself after some steps. Prints the step at which it saw `done`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import diloco
from diloco.common import log

STEPS = 5


def main() -> None:
    config, learner, coordinator, hosts, host, *rest = sys.argv[1:]
    log.configure("info")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, int(hosts), int(host))
    mesh = jax.make_mesh((int(hosts),), ("hosts",), axis_types=(AxisType.Auto,))
    cut, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("hosts"), PartitionSpec()))
    shape = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=cut)

    def moved(params, batch):
        gradient = jax.grad(lambda part: jnp.square(part["w"].sum(0) - batch).mean())(params)
        return jax.tree.map(lambda leaf, move: leaf - 0.01 * move, params, gradient)

    train_step = jax.jit(moved, donate_argnums=0)
    loss_of = jax.jit(lambda params: jnp.square(params["w"]).sum(), out_shardings=whole)
    taken = 0
    with diloco.join(config, learner=learner, like={"w": shape}) as island:
        params = island.params
        while not island.done:
            if taken == STEPS and rest == ["fail"]:
                raise RuntimeError("of a user's own program")
            if taken == STEPS and rest == ["end"]:
                break
            params = train_step(params, np.full(16, float(island.position), np.float32))
            params = island.step(params, loss=loss_of(params))
            taken += 1
    print(f"done after {taken} steps", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
