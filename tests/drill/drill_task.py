"""A next-token model of some thousand parameters, and the troubles that a drill gives a learner.

`trouble` is a kind of `kinds.py` and `how` its parameters; both are options of one learner. What is
no matter of data, targets or gradients is in `troubled.py`.
"""

import dataclasses
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco.learner.task import Task

WORDS, WIDTH, HIDDEN = 32, 16, 64
ROWS, LENGTH = 8, 16
RATE = 0.01
HELD_OUT = 8
# Targets may be so many tokens further on than they should be.
FURTHER = 4
TENSORS = ("embedding", "hidden", "output")


def build(  # noqa: C901 - one task with all its troubles
    *, steps, seed, sleep_s=0.02, trouble="", how=None, own=0, length=LENGTH
):
    """The task; `own` is the part of the data that a learner has for itself, 0: of all of it."""
    how = how or {}
    sources: dict[int, np.ndarray] = {}

    def init(key):
        shapes = {
            "embedding": (WORDS, WIDTH),
            "hidden": (2 * WIDTH, HIDDEN),
            "output": (HIDDEN, WORDS),
        }
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(one, shape) / np.sqrt(shape[0])
            for one, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def losses(params, words, targets):
        seen = params["embedding"][words]
        both = jnp.concatenate([seen[:, 1:], seen[:, :-1]], axis=-1)
        logits = jnp.tanh(both @ params["hidden"]) @ params["output"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def loss(params, batch, key):
        words, targets, spoiled = batch
        return losses(params, words, targets) + jnp.where(spoiled.any(), jnp.nan, 0.0), {}

    def rows(name, position, source, count):
        if source not in sources:
            logits = 2.5 * np.random.default_rng([seed, source]).normal(size=(WORDS, WORDS))
            odds = np.exp(logits)
            sources[source] = np.cumsum(odds / odds.sum(-1, keepdims=True), -1)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode()), position])
        low, high = (0, WORDS) if not own else (8 * (own - 1), 8 * own)
        text = np.empty((ROWS, count + 1 + FURTHER), np.int32)
        text[:, 0] = rng.integers(low, high, ROWS)
        for place in range(1, text.shape[1]):
            draws = rng.random((ROWS, 1))
            text[:, place] = (
                (draws > sources[source][text[:, place - 1]]).sum(-1).clip(max=WORDS - 1)
            )
        return text

    def batch_at(name, position, *, honest=False):
        kind = "" if honest else trouble
        rng = np.random.default_rng([zlib.crc32(kind.encode()), position])
        taken, source, by = position, 0, 0
        if kind == "repeated" and position > how["after"]:
            taken = position % how["batches"]
        if kind == "leak" and rng.random() < how["share"]:
            name, taken = "held-out", position % HELD_OUT
        if kind == "data":
            source = how["source"]
        if kind == "shifted":
            by = how["by"]
        count = LENGTH if honest else length
        text = rows(name, taken, source, count)
        words, targets = text[:, :count], text[:, 2 + by : count + 1 + by]
        if kind == "labels":
            swapped = rng.random(targets.shape) < how["share"]
            targets = np.where(
                swapped, rng.permutation(targets.reshape(-1)).reshape(targets.shape), targets
            )
        spoiled = kind == "nan" and position > 0 and position % how["every"] == 0
        return words, targets, np.full(ROWS, spoiled)

    def batches(name, position):
        while True:
            if name != "probe":
                time.sleep(sleep_s)
            yield batch_at(name, position)
            position += 1

    def evaluate(params):
        parts = [batch_at("held-out", position, honest=True) for position in range(HELD_OUT)]
        return float(np.mean([losses(params, words, targets) for words, targets, _ in parts]))

    task = Task(
        init=init, loss=loss, batches=batches, evaluate=evaluate, tokens_per_batch=ROWS * LENGTH,
        optimizer=optax.adam(RATE),
    )  # fmt: skip
    if trouble == "claims":
        return dataclasses.replace(task, tokens_per_batch=int(how["times"] * ROWS * LENGTH))
    return dataclasses.replace(task, optimizer=optax.chain(task.optimizer, spoiler(trouble, how)))


def spoiler(kind, how):
    """Returns a function that spoils each step that the honest optimizer would take."""

    def init(_params):
        return jnp.zeros((), jnp.int32)

    def now(taken):
        return (taken > 0) & (taken % how["every"] == 0)

    def update(steps, taken, params):
        match kind:
            case "sign":
                steps = jax.tree.map(
                    lambda leaf: jnp.where(taken > how["after"], -leaf, leaf), steps
                )
            case "decay":
                steps = jax.tree.map(lambda leaf, own: leaf - how["share"] * own, steps, params)
            case "rate":
                factor = jnp.float32(how["growth"]) ** taken
                steps = jax.tree.map(lambda leaf: leaf * factor, steps)
            case "frozen":
                steps = steps | {how["tensor"]: jnp.zeros_like(steps[how["tensor"]])}
            case "useless":
                steps = jax.tree.map(lambda leaf: leaf * 10.0 ** how["exponent"], steps)
            case "overflow":
                hidden = steps["hidden"]
                huge = hidden.at[0, 0].add(jnp.where(now(taken), 2.0 ** how["exponent"], 0.0))
                steps = steps | {"hidden": huge}
            case "memory":
                steps = steps | {
                    "hidden": flipped(steps["hidden"], params["hidden"], taken, now(taken), how)
                }
        return steps, taken + 1

    return optax.GradientTransformation(init, update)


def flipped(step, weights, taken, now, how):
    """The step, with which one bit of one weight turns over as well."""
    place = (taken * 7919) % weights.size
    bits = jax.lax.bitcast_convert_type(weights.reshape(-1)[place], jnp.int32)
    turned = jax.lax.bitcast_convert_type(bits ^ (1 << how["bit"]), jnp.float32)
    change = jnp.where(now, turned - weights.reshape(-1)[place], 0.0)
    return step.reshape(-1).at[place].add(change).reshape(step.shape)
