"""A training loop of one's own, around a flax.nnx model: scikit-learn's handwritten digits.

python examples/own_loop.py create run.toml                # once
python examples/own_loop.py train run.toml island-a        # on each island
python examples/own_loop.py accuracy run.toml
"""

import sys
import zlib

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import diloco

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = (IMAGES / 16).astype(np.float32)  # 1797 images of 64 pixels


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.output = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images):
        return self.output(nnx.relu(self.hidden(images)))


def model():
    graph, params = nnx.split(Net(nnx.Rngs(0)))
    return graph, nnx.to_pure_dict(params)  # plain dictionaries of arrays


def train(file, learner):
    graph, like = model()
    optimizer = optax.scale_by_adam()
    rate = optax.cosine_decay_schedule(0.01, diloco.load_config(file).run.steps)

    @jax.jit
    def train_step(params, state, batch, global_step):
        def loss_of(params):
            images, labels = batch
            logits = nnx.merge(graph, nnx.State(params))(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradient = jax.value_and_grad(loss_of)(params)
        direction, state = optimizer.update(gradient, state, params)
        moved = jax.tree.map(lambda leaf, d: leaf - rate(global_step) * d, params, direction)
        return moved, state, loss

    def batch_at(position):
        rng = np.random.default_rng([zlib.crc32(learner.encode()), position])
        picked = rng.integers(1500, size=32)
        return IMAGES[picked], LABELS[picked]

    def warm_up(params):
        train_step(params, optimizer.init(params), batch_at(0), 0)

    with diloco.join(file, learner=learner, like=like, warm_up=warm_up) as island:
        params = island.params
        state = island.restore(optimizer.init(params))
        while not island.done:
            batch = batch_at(island.position)
            params, state, loss = train_step(params, state, batch, island.global_step)
            params = island.step(params, loss=loss, save=state)


def accuracy(file):
    graph, like = model()
    logits = nnx.merge(graph, nnx.State(diloco.load(file, like=like)))(IMAGES[1500:])
    return float((logits.argmax(-1) == LABELS[1500:]).mean())


if __name__ == "__main__":
    match sys.argv[1:]:
        case "create", file:
            diloco.create(file, model()[1])
        case "train", file, learner:
            train(file, learner)
        case "accuracy", file:
            print(f"{accuracy(file):.3f}")
        case _:
            sys.exit(__doc__)
