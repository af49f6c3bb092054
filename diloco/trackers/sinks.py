"""TensorBoard and Weights & Biases, as sinks of points."""

from pathlib import Path
from typing import Any, Protocol

from diloco.common.errors import ConfigError
from diloco.trackers.points import Point


class Sink(Protocol):
    """Takes a run's figures."""

    def write(self, point: Point) -> None:
        """Keep a point."""

    def close(self) -> None:
        """Have everything kept."""


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise _missing("tensorboard", error) from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, point: Point) -> None:
        """Keep a point."""
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.step, point.at_s)

    def close(self) -> None:
        """Have everything kept."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases.

    Args:
        project: where it appears.
        run: the run's name.
        settings: the run's, as its configuration there.
        offline: keep it in a folder `wandb`, for `wandb sync`.
    """

    def __init__(self, project: str, run: str, settings: dict[str, Any], *, offline: bool) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise _missing("wandb", error) from error
        mode: Any = "offline" if offline else "online"
        try:
            self._run: Any = wandb.init(project=project, name=run, config=settings, mode=mode)
        except wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases refuses: {error}", hint="log in with `wandb login`, or --offline"
            ) from error
        # Messages of learners overtake each other: a step of W&B's own would have to rise.
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def write(self, point: Point) -> None:
        """Keep a point."""
        self._run.log({**point.values, "global_step": point.step})

    def close(self) -> None:
        """Have everything kept."""
        self._run.finish()


def _missing(extra: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(
        f"{error.name} is not installed here", hint=f"install diloco[{extra}]: docs/trackers.md"
    )
