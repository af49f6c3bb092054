"""Trains unchanged modules of flax.nnx: `task.build = "diloco.models.nnx:build"`.

A module is split into a static graph and variables. `Param`s are trained or frozen; all other
variables except random streams (`nnx.RngState`) are state. Random streams are derived from each
step's key, so that a learner that resumes after a kill draws the same dropout masks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from diloco.common.protocol.errors import ConfigError, TaskError
from diloco.learner.task import Batch, Evaluated, Params, Variables, kind
from diloco.models.modules import NetworkOptions, newest, task_of

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ConfigError(
        "this task trains a module of flax.nnx, and flax is not installed",
        hint="pip install 'diloco[nnx]'",
    ) from error


class Nnx:
    """A module of flax.nnx as functions of its variables; implements `Network`.

    Args:
        options: the options; `options.make` takes `nnx.Rngs` and returns the module.

    Raises:
        TaskError: `make` returns no module, or a pattern fits no parameter.
    """

    def __init__(self, options: NetworkOptions) -> None:
        self._options = options
        shapes = nnx.eval_shape(lambda: self._made(jax.random.key(options.seed)))
        options.chosen.check(_by_path(nnx.state(shapes, nnx.Param)))
        self._graph, *_, state, self._streams = self._split(shapes)
        self._state = _by_path(state)

    def _made(self, key: jax.Array) -> Any:
        module = self._options.make(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise TaskError(
                f"the option module must make a flax.nnx.Module, but it made {kind(module)}",
                hint="def make(rngs): return MyModule(..., rngs=rngs)",
            )
        return module

    def _split(self, module: Any) -> tuple[Any, ...]:
        """Splits a module into (graph, trained parameters, frozen parameters, state, streams)."""
        nnx.pop(module, nnx.Intermediate)

        def is_trained(path: tuple[Any, ...], value: Any) -> bool:
            return issubclass(_type(value), nnx.Param) and self._options.chosen(_name(path))

        graph, *parts = nnx.split(module, is_trained, nnx.Param, nnx.RngState, ...)
        trained, frozen, streams, state = parts
        return graph, trained, frozen, state, streams

    def init(self, key: jax.Array) -> Variables:
        """Returns the variables of a module that `make` makes from `key`, as nested dictionaries.

        A part without variables is None.
        """
        _, *parts, _ = self._split(self._made(key))
        return Variables(*(nnx.to_pure_dict(part) or None for part in parts))

    def load_frozen(self) -> Params:
        """Returns the frozen parameters as `make` makes them on this machine; None: none."""
        return self.init(jax.random.key(self._options.seed)).frozen

    def measure(self, variables: Variables, batch: Batch, key: jax.Array | None) -> Evaluated:
        """Returns a batch's loss, metrics and new state.

        Args:
            variables: the variables, as `init` returns them.
            batch: the batch.
            key: the step's typed key; None: the module is in evaluation mode (`module.eval`).
        """
        streams = self._streams_of(jax.random.key(0) if key is None else key)
        parts = (nnx.State(part or {}) for part in variables)
        module = nnx.merge(self._graph, *parts, streams)
        (module.eval if key is None else module.train)()
        found = self._options.measured(module, batch)
        *_, state, _ = self._split(module)
        return found._replace(state=nnx.to_pure_dict(state) or None)

    def _streams_of(self, key: jax.Array) -> Any:
        """Returns all random streams at count 0, each with a key derived from the step's key."""
        leaves, structure = jax.tree.flatten(self._streams)
        drawn = [
            jax.random.split(jax.random.fold_in(key, place), leaf.shape)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros(leaf.shape, leaf.dtype)
            for place, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, drawn)

    def is_mean(self, name: str) -> bool:
        """Returns True if a leaf of the state is a `BatchStat`, which the fleet averages.

        Args:
            name: the leaf's name: "state/" and the variable's path.
        """
        return _type(self._state[name.removeprefix("state/")]) is nnx.BatchStat


def _by_path(state: Any) -> dict[str, Any]:
    return {_name(path): value for path, value in nnx.to_flat_state(state)}


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _type(value: Any) -> type:
    found: type = getattr(value, "type", type(value))
    return found


def logits(module: Any, tokens_BxL: jax.Array) -> jax.Array:
    """Returns next-token logits [B, L, V] of a module that takes tokens int [B, L]."""
    logits_BxLxV: jax.Array = module(tokens_BxL)
    return logits_BxLxV


def load_model(run: str | Path, make: Callable[..., Any]) -> Any:
    """Returns a module of flax.nnx with the newest global variables of a run of this task.

    Args:
        run: the run's TOML file, the folder of a local run, a run's name, or a bundle.
        make: the function that the task's option `module` names.

    Raises:
        RunMismatchError: the module lacks a variable of the run, or has it in another shape.
        DilocoError: there is no such run, bus or store is unreachable, or an object is damaged.
    """
    module = make(nnx.Rngs(0))
    state = nnx.state(module)
    variables = _by_path(state)
    shapes = {name: jnp.shape(value.get_value()) for name, value in variables.items()}
    for name, values in newest(run, shapes).items():
        variables[name].set_value(jnp.asarray(values))
    nnx.update(module, state)
    return module


build = task_of("nnx", Nnx, logits)
