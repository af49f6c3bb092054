"""Low-rank adapters (LoRA) over a frozen base: only the adapters travel.

python examples/lora.py base base.npz                      # a base, trained on the digits 0 to 4
python examples/lora.py create run.toml
python examples/lora.py train run.toml island-a base.npz         # on each island
python examples/lora.py accuracy run.toml base.npz
"""

import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import diloco

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = (IMAGES / 16).astype(np.float32)  # 1797 images of 64 pixels
WIDTH, RANK = 512, 2
OPTIMIZER = optax.adam(0.003)


def logits_of(base, adapters, images):
    def layer(name, inputs):
        low = inputs @ adapters[name]["down"] @ adapters[name]["up"]
        return inputs @ base[name] + low

    return layer("output", jax.nn.relu(layer("hidden", images)))


def new_adapters():
    rng = np.random.default_rng(0)
    sizes = {"hidden": (64, WIDTH), "output": (WIDTH, 10)}
    return {
        name: {
            "down": rng.normal(size=(inputs, RANK)).astype(np.float32) / 8,
            "up": np.zeros((RANK, outputs), np.float32),
        }
        for name, (inputs, outputs) in sizes.items()
    }


def loss_of(base, adapters, batch):
    logits = logits_of(base, adapters, batch[0])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def make_base(path):
    """Trained on the digits 0 to 4 alone."""
    rng = np.random.default_rng(1)
    base = {"hidden": rng.normal(size=(64, WIDTH)) / 8, "output": rng.normal(size=(WIDTH, 10)) / 16}
    base, few, adapters = jax.tree.map(jnp.float32, base), LABELS[:1500] < 5, new_adapters()
    state, batch = OPTIMIZER.init(base), (IMAGES[:1500][few], LABELS[:1500][few])
    gradient = jax.jit(jax.grad(loss_of))
    for _ in range(50):
        moves, state = OPTIMIZER.update(gradient(base, adapters, batch), state)
        base = optax.apply_updates(base, moves)
    np.savez(path, **base)


def train(file, learner, base_path):
    base = dict(np.load(base_path))  # frozen: each learner has it from a file of its own

    @jax.jit
    def train_step(adapters, state, batch):
        loss, gradient = jax.value_and_grad(loss_of, argnums=1)(base, adapters, batch)
        moves, state = OPTIMIZER.update(gradient, state)
        return optax.apply_updates(adapters, moves), state, loss

    with diloco.join(
        file, learner=learner, like=jax.tree.map(jnp.asarray, new_adapters())
    ) as island:
        adapters = island.params
        state = island.restore(OPTIMIZER.init(adapters))
        while not island.done:
            rng = np.random.default_rng([zlib.crc32(learner.encode()), island.position])
            picked = rng.integers(1500, size=32)
            adapters, state, loss = train_step(adapters, state, (IMAGES[picked], LABELS[picked]))
            adapters = island.step(adapters, loss=loss, save=state)


def accuracy(adapters, base_path):
    logits = logits_of(dict(np.load(base_path)), adapters, IMAGES[1500:])
    return float((logits.argmax(-1) == LABELS[1500:]).mean())


if __name__ == "__main__":
    match sys.argv[1:]:
        case "base", path:
            make_base(path)
        case "create", file:
            diloco.create(file, new_adapters())
        case "train", file, learner, path:
            train(file, learner, path)
        case "accuracy", file, path:
            before = accuracy(new_adapters(), path)
            after = accuracy(diloco.load(file, like=new_adapters()), path)
            print(f"{before:.3f} before, {after:.3f} after")
        case _:
            sys.exit(__doc__)
