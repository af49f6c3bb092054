"""A vision model with BatchNorm. Its name is examples.batch_norm:build.

Parameters are trained. Batch statistics are state: no optimizer changes them, and learners adopt
the fleet's mean of them.
"""

import zlib

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from diloco import Task, TensorHint, Variables


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.output = nnx.Linear(8 * 8 * 16, 10, rngs=rngs)

    def __call__(self, images):
        hidden = nnx.relu(self.norm(self.conv(images)))
        return self.output(hidden.reshape(len(images), -1))


def build(*, steps: int, seed: int, average: bool = True) -> Task:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    graph = nnx.split(Net(nnx.Rngs(0)))[0]

    def init(key):
        _, params, statistics = nnx.split(Net(nnx.Rngs(key)), nnx.Param, ...)
        return Variables(
            trained=nnx.to_pure_dict(params), state=nnx.to_pure_dict(statistics)
        )  # plain dictionaries of arrays

    def network(variables):
        return nnx.merge(graph, nnx.State(variables.trained), nnx.State(variables.state))

    def measured(logits, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}

    def loss(variables, batch, key):
        net = network(variables)
        loss, metrics = measured(net(batch[0]), batch[1])
        return loss, metrics, nnx.to_pure_dict(nnx.split(net, nnx.Param, ...)[2])

    def batches(learner, position):
        while True:
            rng = np.random.default_rng([seed, zlib.crc32(learner.encode()), position])
            picked = rng.integers(1500, size=32)
            yield images[picked], labels[picked]
            position += 1

    def evaluate(variables):
        net = network(variables)
        net.eval()  # normalizes by the state, not by this batch
        loss, metrics = measured(net(images[1500:]), labels[1500:])
        return {"loss": loss, **metrics}

    def hint(name, shape):
        return TensorHint(kind="averaged" if average and name.startswith("state/") else "trained")

    rate = optax.cosine_decay_schedule(0.003, steps)
    return Task(init=init, loss=loss, batches=batches, evaluate=evaluate, tokens_per_batch=32,
                optimizer=optax.adam(rate), hint=hint)  # fmt: skip
