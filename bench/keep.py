"""A half-done object in a file, between two pieces of a long run on a machine that is lent shortly.

It is pickled, and only read by the same program: an emulated world (`bench/emulate.py`) is its
learners, aggregators and what is to happen. What cannot be pickled is named and found again: what
the program compiles from its command line, and the devices.
"""

import os
import pickle
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import jax
import numpy as np

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.arrays.outer import OuterOptimizer

Named = Mapping[str, Any]


def save(thing: Any, path: Path, named: Named) -> None:
    """Put `thing` into a file, whole or not at all; `named` are the objects that stay outside."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        _Pickler(file, named).dump(thing)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def load(path: Path, named: Named) -> Any:
    """What `save` put there, with the same names of what stays outside."""
    with path.open("rb") as file:
        return _Unpickler(file, named).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: BinaryIO, named: Named) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = {id(value): name for name, value in named.items()}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, jax.Device):
            return "device", (obj.platform, obj.id)
        name = self._names.get(id(obj))
        return None if name is None else ("named", name)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, jax.Array):
            return jax.device_put, (np.asarray(obj), obj.sharding)
        if isinstance(obj, MappingProxyType):
            return _read_only, (dict(obj),)
        if isinstance(obj, FragmentArrays):
            # Its outer optimizer is functions, which follow from its settings.
            kept = {k: v for k, v in vars(obj).items() if not isinstance(v, OuterOptimizer)}
            return _fragment_arrays, tuple(kept.pop(f.name) for f in fields(obj)), kept
        return NotImplemented


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


def _fragment_arrays(*values: Any) -> FragmentArrays:
    return FragmentArrays(*values)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, named: Named) -> None:
        super().__init__(file)
        self._named = named

    def persistent_load(self, pid: Any) -> Any:
        kind, key = pid
        if kind == "named":
            return self._named[key]
        platform, number = key
        return next(d for d in jax.devices(platform) if d.id == number)
