"""`diloco.create`: a run that begins with the parameters of a program of the user's own."""

from pathlib import Path

from diloco.common.config import load_config
from diloco.common.layout import Hint, default_hint
from diloco.learner.task import Params
from diloco.operate.create import begin, create_with


def create(file: str | Path, params: Params, *, hint: Hint = default_hint) -> None:
    """Create the run of a TOML file, which begins with these parameters.

    A run that exists already is completed. The file needs no `[task]`: learners join from training
    loops of their own.

    Args:
        file: the run's TOML file.
        params: any pytree of arrays; leaves that are no floats are the run's constants.
        hint: (tensor's name, shape) -> how the aggregator merges that tensor.

    Raises:
        DilocoError: what is wrong, with what to do.
    """
    config = load_config(Path(file))
    if "task" in config.model_fields_set:
        begin(config, params, hint)
    else:
        create_with(config, params, hint)
