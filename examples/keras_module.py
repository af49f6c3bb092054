"""An unchanged Keras model, trained by the task diloco.models.keras:build."""

import keras

from examples.nnx_module import data  # noqa: F401 - of this task


def make():
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
    )


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return losses.mean(), {"accuracy": (logits.argmax(-1) == labels).mean()}
