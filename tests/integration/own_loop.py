"""A training loop of a user's own on one host of several: what `test_library_hosts.py` starts.

python -m own_loop CONFIG LEARNER COORDINATOR HOSTS HOST [fail|end|lag]: trains until `done`, or
raises or ends by itself after some steps, or compiles long as host 1. Prints the step at which it
saw `done`.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import diloco
from diloco.common.process import log

STEPS = 5
# Longer than the 30 s that gloo gives devices to find each other.
LAG_S = 40.0


def main() -> None:
    config, learner, coordinator, hosts, host, *rest = sys.argv[1:]
    log.configure("info")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(coordinator, int(hosts), int(host))
    # Tensors that are whole everywhere need no collective before the training step's own.
    mesh = jax.make_mesh((int(hosts), 2), ("hosts", "own"), axis_types=(AxisType.Auto,) * 2)
    cut, rows, whole = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("hosts",), (("hosts", "own"),), ())
    )
    lying = whole if rest == ["lag"] else cut
    shape = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=lying)

    def batch_at(position):
        whole_batch = np.full((mesh.size, 16), float(position), np.float32)
        return jax.make_array_from_callback(whole_batch.shape, rows, whole_batch.__getitem__)

    def moved(params, batch):
        gradient = jax.grad(lambda part: jnp.square(part["w"].sum(0) - batch).mean())(params)
        return jax.tree.map(lambda leaf, move: leaf - 0.01 * move, params, gradient)

    train_step = jax.jit(moved, donate_argnums=0)
    loss_of = jax.jit(lambda params: jnp.square(params["w"]).sum(), out_shardings=whole)

    def warm_up(params):
        if rest == ["lag"] and host == "1":
            time.sleep(LAG_S)
        loss_of(train_step(params, batch_at(0))).block_until_ready()

    taken = 0
    like = {"w": shape}
    with diloco.join(config, learner=learner, like=like, warm_up=warm_up) as island:
        params = island.params
        while not island.done:
            if taken == STEPS and rest == ["fail"]:
                raise RuntimeError("of a user's own program")
            if taken == STEPS and rest == ["end"]:
                break
            params = train_step(params, batch_at(island.position))
            params = island.step(params, loss=loss_of(params))
            taken += 1
    print(f"done after {taken} steps", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
