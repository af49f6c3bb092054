"""A vision model with BatchNorm: parameters are synchronized, batch statistics stay local.

python examples/batch_norm.py create run.toml
python examples/batch_norm.py train run.toml island-a      # on each island
python examples/batch_norm.py accuracy run.toml
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
IMAGES = (IMAGES / 16).astype(np.float32).reshape(-1, 8, 8, 1)
OPTIMIZER = optax.adam(0.003)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.output = nnx.Linear(8 * 8 * 16, 10, rngs=rngs)

    def __call__(self, images):
        hidden = nnx.relu(self.norm(self.conv(images)))
        return self.output(hidden.reshape(len(images), -1))


def model():
    """The graph; parameters and batch statistics, as plain dictionaries of arrays."""
    graph, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(stats)


GRAPH, PARAMS, STATS = model()


def forward(params, stats, images):
    """Logits in training, and the statistics after them."""
    net = nnx.merge(GRAPH, nnx.State(params), nnx.State(stats))
    logits = net(images)
    return logits, nnx.to_pure_dict(nnx.split(net, nnx.Param, ...)[2])


@jax.jit
def train_step(params, stats, state, batch):
    def loss_of(params):
        logits, after = forward(params, stats, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean(), after

    (loss, stats), gradient = jax.value_and_grad(loss_of, has_aux=True)(params)
    moves, state = OPTIMIZER.update(gradient, state)
    return optax.apply_updates(params, moves), stats, state, loss


def train(file, learner):
    with diloco.join(file, learner=learner, like=PARAMS) as island:
        params = island.params
        state, stats = island.restore((OPTIMIZER.init(params), STATS))
        while not island.done:
            rng = np.random.default_rng([zlib.crc32(learner.encode()), island.position])
            picked = rng.integers(1500, size=32)
            batch = IMAGES[picked], LABELS[picked]
            params, stats, state, loss = train_step(params, stats, state, batch)
            params = island.step(params, loss=loss, save=(state, stats))


def accuracy(file):
    """Of the global parameters, with statistics taken anew from training data."""
    params, stats = diloco.load(file, like=PARAMS), STATS
    for batch in np.split(IMAGES[:1500], 30):
        _, stats = forward(params, stats, batch)
    net = nnx.merge(GRAPH, nnx.State(params), nnx.State(stats))
    net.eval()
    return float((net(IMAGES[1500:]).argmax(-1) == LABELS[1500:]).mean())


if __name__ == "__main__":
    match sys.argv[1:]:
        case "create", file:
            diloco.create(file, PARAMS)
        case "train", file, learner:
            train(file, learner)
        case "accuracy", file:
            print(f"{accuracy(file):.3f}")
        case _:
            sys.exit(__doc__)
