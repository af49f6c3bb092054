"""Trains models of Keras and keras-hub on JAX: `task.build = "diloco.models.keras:build"`.

A model is made once; each step calls its `stateless_call` with the step's values of its variables.
Variables that are not trained are state if a training call changes them, and frozen otherwise. The
seeds of random numbers are integers derived from each step's key; learners do not store or send
them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from diloco.common.process.config.environment import keras_on_jax
from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.learner.task import Batch, Evaluated, Params, Variables, kind
from diloco.models.modules import NetworkOptions, newest, task_of

keras_on_jax()
try:
    import keras
except ModuleNotFoundError as error:
    raise ConfigError(
        "this task trains a model of Keras, which is not installed",
        hint="pip install 'diloco[keras]'",
    ) from error


class _Call:
    """The model with given values of its variables, for one step.

    Attributes:
        values: value of each variable by path; a call stores the changed values here.
        penalty: sum of the model's regularization losses in all calls, a scalar.
    """

    def __init__(self, model: Any, values: Mapping[str, Any], training: bool) -> None:
        self._model, self.values, self._training = model, dict(values), training
        self.penalty: Any = 0.0

    def __call__(self, *inputs: Any, **told: Any) -> Any:
        """Returns the model's outputs; arguments are those of the Keras model's own call."""
        trainable, others = self._model.trainable_variables, self._model.non_trainable_variables
        outputs, changed, losses = self._model.stateless_call(
            [self.values[one.path] for one in trainable],
            [self.values[one.path] for one in others],
            *inputs,
            **{"training": self._training, **told},
            return_losses=True,
        )
        self.values |= {one.path: value for one, value in zip(others, changed, strict=True)}
        self.penalty = self.penalty + sum(losses)
        return outputs


class Keras:
    """A Keras model as functions of its variables; implements `Network`.

    Args:
        options: the options; `options.make()` returns a Keras model that is built.

    Raises:
        TaskError: `make` returns no built model, two of its variables have the same path, or a
            pattern fits no parameter.
        ConfigError: Keras has another backend than JAX.
    """

    def __init__(self, options: NetworkOptions) -> None:
        self._options, self._model = options, _made(options.make, options.seed)
        weights = {one.path: one.value for one in self._model.weights}
        could = {one.path for one in self._model.trainable_weights}
        options.chosen.check(could)
        # Seeds, and the metrics of a compiled model: not part of the run.
        self._beside = {
            one.path: one.value for one in self._model.variables if one.path not in weights
        }
        self._trained = {name: weights[name] for name in could if options.chosen(name)}
        self._others = {name: weights[name] for name in weights if name not in self._trained}
        self._means = self._changed()

    def _changed(self) -> set[str]:
        """Returns the paths of the untrained variables that a training call changes."""
        found: set[str] = set()

        def look(values: dict[str, Any]) -> None:
            call = _Call(self._model, values, training=True)
            self._options.measured(call, self._options.batch)
            found.update(name for name in self._others if call.values[name] is not values[name])

        jax.eval_shape(look, self._trained | self._others | self._beside)
        return found

    def init(self, key: jax.Array) -> Variables:  # noqa: ARG002 - as `Task.init`
        """Returns the weights with which `make` made the model; ignores `key`."""
        state = {name: self._others[name] for name in self._means}
        return Variables(self._trained, self.load_frozen(), state or None)

    def load_frozen(self) -> Params:
        """Returns the frozen weights as `make` made them on this machine, by path; None: none."""
        frozen = {name: leaf for name, leaf in self._others.items() if name not in self._means}
        return frozen or None

    def measure(self, variables: Variables, batch: Batch, key: jax.Array | None) -> Evaluated:
        """Returns a batch's loss, metrics and new state.

        Args:
            variables: the variables by path.
            batch: the batch.
            key: the step's typed key; None: evaluation, in which the loss has no regularization
                losses.
        """
        values = self._seeded(jax.random.key(0) if key is None else key)
        for part in variables:
            values |= part or {}
        call = _Call(self._model, values, training=key is not None)
        found = self._options.measured(call, batch)
        loss = found.loss if key is None else found.loss + call.penalty
        state = {name: call.values[name] for name in self._means}
        return Evaluated(loss, found.metrics, state or None)

    def _seeded(self, key: jax.Array) -> dict[str, Any]:
        """Returns the values of variables that are not weights, such as seeds, by path.

        Each seed is derived from the step's key and the seed's place in the order of paths.
        """
        return {
            name: jax.random.bits(jax.random.fold_in(key, place), value.shape, value.dtype)
            if jnp.issubdtype(value.dtype, jnp.unsignedinteger)
            else value
            for place, (name, value) in enumerate(sorted(self._beside.items()))
        }

    def is_mean(self, name: str) -> bool:
        """Returns True if a leaf of the state is floating, as batch statistics are.

        The fleet averages such leaves; the others stay each learner's own.

        Args:
            name: the leaf's name: "state/" and the variable's path.
        """
        value = self._others[name.removeprefix("state/")]
        return bool(jnp.issubdtype(value.dtype, jnp.floating))


def _made(make: Callable[[], Any], seed: int) -> Any:
    """Returns the model that `make` makes, with its weights in host memory.

    The learner's devices have the run's variables alone. `seed` is that of Keras's random weights.

    Raises:
        TaskError: `make` returns no built model, or two of its variables have the same path.
        ConfigError: Keras has another backend than JAX.
    """
    if (backend := keras.backend.backend()) != "jax":
        raise ConfigError(
            f"Keras computes by {backend} in this process, and was imported before the task was",
            hint="set KERAS_BACKEND=jax, or import diloco.models.keras before keras",
        )
    # Keras numbers layers across the process: the session is cleared, so that names are the same.
    keras.utils.clear_session()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        keras.utils.set_random_seed(seed)
        model = make()
    if not isinstance(model, keras.Model) or not model.built:
        raise TaskError(
            f"the option module must make a keras.Model that is built, but it made {kind(model)}",
            hint="call a model on an example, or model.build(shape), before make returns it",
        )
    paths = [one.path for one in model.variables]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise TaskError(
            f"two variables of the model have the path {twice[0]!r}",
            hint="give its layers names of their own: keras.layers.Dense(..., name=...)",
        )
    return model


def logits(model: Any, tokens_BxL: jax.Array) -> jax.Array:
    """Returns next-token logits [B, L, V] of a causal language model of keras-hub.

    Args:
        model: the model; it takes `token_ids` and `padding_mask`.
        tokens_BxL: token ids, int.
    """
    given = {"token_ids": tokens_BxL, "padding_mask": jnp.ones_like(tokens_BxL)}
    logits_BxLxV: jax.Array = model(given)
    return logits_BxLxV


def load_model(run: str | Path, make: Callable[[], Any]) -> Any:
    """Returns a Keras model with the newest global weights of a run of this task.

    Args:
        run: the run's TOML file, the folder of a local run, a run's name, or a bundle.
        make: the function that the task's option `module` names.

    Raises:
        RunMismatchError: the model lacks a weight of the run, or has it in another shape.
        DilocoError: there is no such run, bus or store is unreachable, or an object is damaged.
    """
    model = _made(make, 0)
    weights = {one.path: one for one in model.weights}
    shapes = {name: tuple(one.shape) for name, one in weights.items()}
    for name, values in newest(run, shapes).items():
        weights[name].assign(values)
    return model


build = task_of("keras", Keras, logits)
