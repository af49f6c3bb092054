"""Train one model on islands of accelerators that are far apart, unequal and unreliable.

The names in `__all__` are the public interface; docs/tasks.md says what each is for. A name's
module is imported at the first access, so `import diloco` loads neither JAX nor the network.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.common.process.config import Config, load_config
    from diloco.common.protocol.errors import (
        BusError,
        ConfigError,
        DilocoError,
        IntegrityError,
        RunMismatchError,
        StoreError,
        TaskError,
    )
    from diloco.common.protocol.layout import TensorHint
    from diloco.learner.library import Learner, join
    from diloco.learner.load_and_check_task import check_task, load_task
    from diloco.learner.select_examples import GrainData
    from diloco.learner.task import Batch, Params, Task, Variables
    from diloco.learner.tensors.inner_step import by_clock
    from diloco.learner.tensors.mesh import constrain
    from diloco.learner.tensors.optimizer import (
        Matrices,
        adamw,
        matrices_by_hint,
        muon,
        warmup_cosine,
    )
    from diloco.models.decoders.causal_lm import CausalLM
    from diloco.models.frameworks.loop import create_tensors, join_tensors, load_tensors
    from diloco.models.frameworks.tensors import Leaf
    from diloco.operate.create import create
    from diloco.replay.tables import open  # noqa: A004 - as `tarfile.open`
    from diloco.run.model.follow import follow
    from diloco.run.model.load import load
    from diloco.run.model.serving import EngineSink, feed

    __version__: str

__all__ = [
    "Batch",
    "BusError",
    "CausalLM",
    "Config",
    "ConfigError",
    "DilocoError",
    "EngineSink",
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
    "by_clock",
    "check_task",
    "constrain",
    "create",
    "create_tensors",
    "feed",
    "follow",
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

# By the module that has them.
_NAMES = {
    "diloco.common.process.config": ("Config", "load_config"),
    "diloco.common.protocol.errors": (
        "BusError",
        "ConfigError",
        "DilocoError",
        "IntegrityError",
        "RunMismatchError",
        "StoreError",
        "TaskError",
    ),
    "diloco.common.protocol.layout": ("TensorHint",),
    "diloco.models.decoders.causal_lm": ("CausalLM",),
    "diloco.models.frameworks.loop": ("create_tensors", "join_tensors", "load_tensors"),
    "diloco.models.frameworks.tensors": ("Leaf",),
    "diloco.learner.load_and_check_task": ("check_task", "load_task"),
    "diloco.learner.library": ("Learner", "join"),
    "diloco.learner.tensors.inner_step": ("by_clock",),
    "diloco.learner.tensors.mesh": ("constrain",),
    "diloco.learner.tensors.optimizer": (
        "Matrices",
        "adamw",
        "matrices_by_hint",
        "muon",
        "warmup_cosine",
    ),
    "diloco.learner.select_examples": ("GrainData",),
    "diloco.learner.task": ("Batch", "Params", "Task", "Variables"),
    "diloco.run.model.follow": ("follow",),
    "diloco.run.model.load": ("load",),
    "diloco.run.model.serving": ("EngineSink", "feed"),
    "diloco.operate.create": ("create",),
    "diloco.replay.tables": ("open",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:  # PEP 562
    if name == "__version__":
        from importlib.metadata import version

        return version("diloco")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'diloco' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
