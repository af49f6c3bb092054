"""PyTorch's tensors as arrays on the host: a module's parameters, an optimizer's state."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from diloco.common.protocol.errors import ConfigError

State = dict[str, np.ndarray]

_DTYPES = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}


class ModuleTensors:
    """The parameters of a module that require gradients, by their names in the module.

    The parameters are copied from and to CUDA on a stream of their own.

    Raises:
        ConfigError: a parameter has a dtype that is not synchronized.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        for name, parameter in self._parameters.items():
            if parameter.dtype not in _DTYPES:
                raise ConfigError(f"the parameter {name!r} is {parameter.dtype}, and no float")
        self._stream: Any = None

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Returns the shape and dtype of each parameter."""
        return {
            name: (tuple(one.shape), _DTYPES[one.dtype]) for name, one in self._parameters.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Returns a parameter's values; waits for its device."""
        values = self._local(name)
        with self._aside(values):
            values = values.to("cpu")
        if values.dtype == torch.bfloat16:  # NumPy has no bfloat16
            return np.asarray(values.view(torch.int16)).view(ml_dtypes.bfloat16)
        return np.asarray(values)

    def write(self, name: str, values: np.ndarray) -> None:
        """Sets a parameter's values, in place."""
        own = np.require(values, requirements=("C", "W"))  # as torch requires
        if own.dtype == ml_dtypes.bfloat16:
            given = torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
        else:
            given = torch.from_numpy(own)
        parameter = self._parameters[name]
        with torch.no_grad(), self._aside(parameter):
            self._set(name, given)

    def check(self) -> None:
        """Does nothing: only parameters that are divided by ranks need a check."""

    def _local(self, name: str) -> torch.Tensor:
        """Returns this process's part of a parameter."""
        return self._parameters[name].detach()

    def _set(self, name: str, values: torch.Tensor) -> None:
        self._parameters[name].copy_(values)

    @contextlib.contextmanager
    def _aside(self, tensor: torch.Tensor) -> Any:
        """Runs the block's copies on another CUDA stream, after the tensor's computation."""
        if tensor.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        computing = torch.cuda.current_stream(tensor.device)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            yield
        # Later computations wait for the copy.
        computing.wait_stream(self._stream)


def state_of(optimizer: torch.optim.Optimizer) -> State:
    """Returns a PyTorch optimizer's tensors for a checkpoint, by parameter number and name."""
    return {
        f"{number}/{name}": _array(_own(value))
        for number, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


@contextlib.contextmanager
def begun(optimizer: torch.optim.Optimizer) -> Iterator[tuple[State, Callable[[State], None]]]:
    """Yields the shapes of the optimizer's state, and a function that takes such a state.

    PyTorch creates the state in the first step. So this makes a step with learning rate and
    gradients 0, which changes no parameter. Unless the function is called, the state is cleared.
    """
    taken = False

    def take(state: State) -> None:
        nonlocal taken
        taken = True
        whole = optimizer.state_dict()
        for number, slots in whole["state"].items():
            for name, value in slots.items():
                if isinstance(value, torch.Tensor):
                    given = torch.from_numpy(np.array(state[f"{number}/{name}"]))
                    _own(value).copy_(given.to(value.dtype))
        optimizer.load_state_dict(whole)

    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    try:
        yield state_of(optimizer), take
    finally:
        if not taken:
            optimizer.state.clear()


def _own(value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor that ranks divide."""
    return value.to_local() if isinstance(value, DTensor) else value


def _array(value: torch.Tensor) -> np.ndarray:
    values = value.detach().to("cpu", copy=True)
    return np.asarray(values.float() if values.dtype == torch.bfloat16 else values)
