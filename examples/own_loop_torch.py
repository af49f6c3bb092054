"""A training loop of one's own, around a PyTorch module; other learners of its run may use JAX.

python examples/own_loop_torch.py train run.toml island-b       # beside examples/own_loop.py
python examples/own_loop_torch.py accuracy run.toml
"""

import math
import sys
import zlib

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import diloco
import diloco.torch
from diloco.torch import Leaf

IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES, LABELS = torch.tensor(IMAGES / 16, dtype=torch.float32), torch.tensor(LABELS)
# PyTorch has a row for each output, flax a column.
TABLE = {"0.weight": Leaf("hidden/kernel", (1, 0)), "0.bias": "hidden/bias",
         "2.weight": Leaf("output/kernel", (1, 0)), "2.bias": "output/bias"}  # fmt: skip


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(file, learner):
    module, steps = model(), diloco.load_config(file).run.steps
    optimizer = torch.optim.Adam(module.parameters())
    with diloco.torch.join(file, learner=learner, module=module, table=TABLE) as island:
        island.restore(optimizer)
        while not island.done:
            rng = np.random.default_rng([zlib.crc32(learner.encode()), island.position])
            picked = torch.from_numpy(rng.integers(1500, size=32))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(IMAGES[picked]), LABELS[picked])
            loss.backward()
            optimizer.param_groups[0]["lr"] = 0.005 * (
                1 + math.cos(math.pi * island.global_step / steps)
            )
            optimizer.step()
            island.step(loss=loss, save=optimizer)


def accuracy(file):
    module = model()
    diloco.torch.load(file, module, table=TABLE)
    return float((module(IMAGES[1500:]).argmax(-1) == LABELS[1500:]).float().mean())


if __name__ == "__main__":
    match sys.argv[1:]:
        case "create", file:
            diloco.torch.create(file, model(), table=TABLE)
        case "train", file, learner:
            train(file, learner)
        case "accuracy", file:
            print(f"{accuracy(file):.3f}")
        case _:
            sys.exit(__doc__)
