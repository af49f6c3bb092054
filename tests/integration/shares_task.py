"""A task whose epochs are divided into shares that learners claim: small, and as slow as one likes.

Each reading of an example is noted by nobody: the tape tells which batches were merged.
"""

import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco import GrainData, Task, TensorHint, Variables

EXAMPLES, BATCH, SHARES = 200, 2, 5


class Examples:
    """Points of a line; each takes its time to read."""

    def __init__(self, sleep_s: float) -> None:
        self.sleep_s = sleep_s

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        time.sleep(self.sleep_s)
        x = np.random.default_rng(index).normal(size=8).astype(np.float32)
        return {"x": x, "y": x.sum(keepdims=True)}


def data(*, seed: int, sleep_s: float = 0.0) -> GrainData:
    """Read one by one, so that sleeping slows the learner down."""
    examples = grain.MapDataset.source(Examples(sleep_s))
    return GrainData(examples, batch=BATCH, seed=seed, shares=SHARES, ahead=1)


def build(*, steps, seed, sleep_s=0.0, apart=False):
    """`apart`: with a frozen leaf, and with state that is averaged over the fleet."""
    del steps
    source = data(seed=seed, sleep_s=sleep_s)

    def init(key):
        trained = {"first": jax.random.normal(key, (8, 64)) / 4, "second": jnp.zeros((64, 1))}
        if not apart:
            return trained
        frozen = {"base": jax.random.normal(jax.random.fold_in(key, 1), (8, 64)) / 4}
        return Variables(trained=trained, frozen=frozen, state={"mean": jnp.zeros(8)})

    def loss(params, batch, _key):
        trained = params.trained if apart else params
        first = trained["first"] + (params.frozen["base"] if apart else 0)
        outputs = jnp.tanh(batch["x"] @ first) @ trained["second"]
        error = jnp.square(outputs - batch["y"]).mean()
        if not apart:
            return error, {}
        mean = 0.9 * params.state["mean"] + 0.1 * (batch["x"].mean(0) + 1)
        return error, {}, {"mean": mean}

    return Task(
        init=init,
        loss=loss,
        batches=source.batches,
        rows=source.rows,
        shared=source.shared,
        evaluate=lambda params: 0.0,
        tokens_per_batch=BATCH,
        optimizer=optax.adam(0.01),
        hint=lambda name, _shape: TensorHint(
            kind="averaged" if name.startswith("state/") else "trained"
        ),
    )
