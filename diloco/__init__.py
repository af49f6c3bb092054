"""Train one model on islands of accelerators that are far apart, unequal and unreliable.

What users import is named here, and nothing else is promised; docs/tasks.md says what each is for.
Names are loaded when they are asked for: `import diloco` loads neither JAX nor the network.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.common.config import Config, load_config
    from diloco.common.errors import (
        BusError,
        ConfigError,
        DilocoError,
        IntegrityError,
        RunMismatchError,
        StoreError,
        TaskError,
    )
    from diloco.common.layout import TensorHint
    from diloco.foreign.loop import create_tensors, join_tensors, load_tensors
    from diloco.foreign.table import Leaf
    from diloco.learner.contract import check_task, load_task
    from diloco.learner.library import Learner, join
    from diloco.learner.mesh import constrain
    from diloco.learner.optimizer import (
        Matrices,
        adamw,
        matrices_by_hint,
        muon,
        warmup_cosine,
    )
    from diloco.learner.reading import GrainData
    from diloco.learner.task import Batch, Params, Task, Variables
    from diloco.model.load import load
    from diloco.operate.from_params import create
    from diloco.replay.tables import open  # noqa: A004 - as `tarfile.open`

    __version__: str

__all__ = [
    "Batch",
    "BusError",
    "Config",
    "ConfigError",
    "DilocoError",
    "GrainData",
    "IntegrityError",
    "Leaf",
    "Learner",
    "Matrices",
    "Params",
    "RunMismatchError",
    "StoreError",
    "Task",
    "TaskError",
    "TensorHint",
    "Variables",
    "__version__",
    "adamw",
    "check_task",
    "constrain",
    "create",
    "create_tensors",
    "join",
    "join_tensors",
    "load",
    "load_config",
    "load_task",
    "load_tensors",
    "matrices_by_hint",
    "muon",
    "open",
    "warmup_cosine",
]

_ERRORS = "diloco.common.errors"
_HOMES = {
    "Batch": "diloco.learner.task",
    "BusError": _ERRORS,
    "Config": "diloco.common.config",
    "ConfigError": _ERRORS,
    "DilocoError": _ERRORS,
    "GrainData": "diloco.learner.reading",
    "IntegrityError": _ERRORS,
    "Learner": "diloco.learner.library",
    "Matrices": "diloco.learner.optimizer",
    "Params": "diloco.learner.task",
    "RunMismatchError": _ERRORS,
    "StoreError": _ERRORS,
    "Task": "diloco.learner.task",
    "TaskError": _ERRORS,
    "TensorHint": "diloco.common.layout",
    "Variables": "diloco.learner.task",
    "adamw": "diloco.learner.optimizer",
    "check_task": "diloco.learner.contract",
    "constrain": "diloco.learner.mesh",
    "create": "diloco.operate.from_params",
    "create_tensors": "diloco.foreign.loop",
    "join": "diloco.learner.library",
    "join_tensors": "diloco.foreign.loop",
    "load_tensors": "diloco.foreign.loop",
    "Leaf": "diloco.foreign.table",
    "load": "diloco.model.load",
    "load_config": "diloco.common.config",
    "load_task": "diloco.learner.contract",
    "matrices_by_hint": "diloco.learner.optimizer",
    "muon": "diloco.learner.optimizer",
    "open": "diloco.replay.tables",
    "warmup_cosine": "diloco.learner.optimizer",
}


def __getattr__(name: str) -> Any:  # PEP 562
    if name == "__version__":
        from importlib.metadata import version

        return version("diloco")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'diloco' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
