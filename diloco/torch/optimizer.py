"""The state of a PyTorch optimizer as a tree of arrays, for checkpoints."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

State = dict[str, np.ndarray]


def state_of(optimizer: torch.optim.Optimizer) -> State:
    """Its tensors, by number of the parameter and name."""
    return {
        f"{number}/{name}": _array(value)
        for number, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


@contextlib.contextmanager
def begun(optimizer: torch.optim.Optimizer) -> Iterator[tuple[State, Callable[[State], None]]]:
    """Give the shape of the optimizer's state, and a function that takes a state of that shape.

    PyTorch makes the state in the first step: here by one without a rate or gradients, which
    moves nothing. It is forgotten again unless a state is taken.
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
                    value.copy_(given.to(value.dtype))
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


def _array(value: torch.Tensor) -> np.ndarray:
    values = value.detach().to("cpu", copy=True)
    return np.asarray(values.float() if values.dtype == torch.bfloat16 else values)
