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
    from diloco.learner.task import Batch, Params, Task, check_task, load_task
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
    "Learner",
    "Matrices",
    "Params",
    "RunMismatchError",
    "StoreError",
    "Task",
    "TaskError",
    "TensorHint",
    "__version__",
    "adamw",
    "check_task",
    "constrain",
    "create",
    "join",
    "load",
    "load_config",
    "load_task",
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
    "adamw": "diloco.learner.optimizer",
    "check_task": "diloco.learner.task",
    "constrain": "diloco.learner.mesh",
    "create": "diloco.operate.from_params",
    "join": "diloco.learner.library",
    "load": "diloco.model.load",
    "load_config": "diloco.common.config",
    "load_task": "diloco.learner.task",
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
