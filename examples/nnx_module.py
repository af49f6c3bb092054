"""An unchanged flax.nnx module, trained by the task diloco.models.nnx:build."""

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.output = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, images):
        return self.output(self.dropout(nnx.relu(self.norm(self.hidden(images)))))


def make(rngs):
    return Net(rngs)


def data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def loss(net, batch):
    images, labels = batch
    logits = net(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}
