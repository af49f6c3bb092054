"""A module's parameters and an optimizer's state of PyTorch as NumPy arrays in host memory."""

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
    """Reads and writes the parameters of a module that require gradients, by parameter name.

    Copies from and to CUDA run on a separate CUDA stream.

    Raises:
        ConfigError: a parameter is not float64, float32, float16 or bfloat16.
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
        """Returns the shape and dtype of each parameter, by name."""
        return {
            name: (tuple(one.shape), _DTYPES[one.dtype]) for name, one in self._parameters.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Returns a parameter's values in host memory; waits for the device.

        On CPU the array shares memory with the parameter. With several ranks, returns this rank's
        part of the parameter.
        """
        values = self._local(name)
        with self._aside(values):
            values = values.to("cpu")
        if values.dtype == torch.bfloat16:  # NumPy has no bfloat16
            return np.asarray(values.view(torch.int16)).view(ml_dtypes.bfloat16)
        return np.asarray(values)

    def write(self, name: str, values: np.ndarray) -> None:
        """Sets a parameter's values in place; with several ranks, those of this rank's part."""
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
        """Returns this process's part of a parameter, on its device; here all of it."""
        return self._parameters[name].detach()

    def _set(self, name: str, values: torch.Tensor) -> None:
        self._parameters[name].copy_(values)

    @contextlib.contextmanager
    def _aside(self, tensor: torch.Tensor) -> Any:
        """Runs the block's copies on another CUDA stream, after what is queued on the current one.

        Later operations on the current stream wait for the copies. Does nothing for other devices.
        """
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
    """Returns copies of an optimizer's state tensors in host memory, for a checkpoint.

    Keys are "parameter's number/name of the state tensor". bfloat16 becomes float32. Of a tensor
    that ranks divide, each rank returns its own part.
    """
    return {
        f"{number}/{name}": _array(_own(value))
        for number, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


@contextlib.contextmanager
def begun(optimizer: torch.optim.Optimizer) -> Iterator[tuple[State, Callable[[State], None]]]:
    """Yields an optimizer's fresh state as `state_of` returns it, and a function that sets a state.

    PyTorch creates the state in the first step. So a step with learning rate and gradients 0 is
    taken, which changes no parameter. If the function is not called in the block, the state is
    cleared at its end.
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
    """Returns this rank's part of a tensor that ranks divide; other tensors unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def _array(value: torch.Tensor) -> np.ndarray:
    values = value.detach().to("cpu", copy=True)
    return np.asarray(values.float() if values.dtype == torch.bfloat16 else values)
