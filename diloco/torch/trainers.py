"""A learner inside a training loop of another library: the code that all callbacks share.

The adapters (`transformers.py`, `lightning.py`) map their events to calls of this module.
"""

import atexit
import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from diloco.common.process.config import load_config
from diloco.common.protocol.errors import ConfigError, DilocoError
from diloco.models.frameworks.tensors import Table
from diloco.torch import TorchLearner, join


class TrainerLoop:
    """A trainer's membership in a run, from the beginning of one training to its end.

    Args:
        file: the run's TOML file.
        learner: name of this learner in the run.
        table, tokens_per_step: as in `diloco.torch.join`.
        own_data: no other learner has this learner's data, in whatever order it is read.

    Attributes:
        life: closed when training ends.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        learner: str,
        table: Table | None = None,
        tokens_per_step: int | None = None,
        own_data: bool = False,
    ) -> None:
        self.own_data = own_data
        self._file, self.learner = file, learner
        self._table, self._tokens = table, tokens_per_step
        self._joined: TorchLearner | None = None
        self.life, self._view = contextlib.ExitStack(), contextlib.ExitStack()
        self._shown = False

    @property
    def island(self) -> TorchLearner:
        """The membership in the run.

        Raises:
            DilocoError: training has not begun.
        """
        if self._joined is None:
            raise DilocoError("the trainer's loop has not joined the run")
        return self._joined

    @property
    def trains(self) -> bool:
        """Whether training has begun, and has not ended."""
        return self._joined is not None

    def begin(
        self,
        module: torch.nn.Module,
        checkpoint: Mapping[str, Any] | None,
        *,
        replicated: bool = False,
    ) -> None:
        """Joins the run: the module takes its newest version.

        Args:
            module: the module that is trained.
            checkpoint: this loop's entry in the trainer's checkpoint, if it resumes from one.
            replicated: as in `diloco.torch.join`.

        Raises:
            ConfigError: the checkpoint is another learner's.
        """
        self.fail(None)  # left by a training that raised without telling its callbacks
        mine = self.state()
        if checkpoint and dict(checkpoint) != mine:
            raise ConfigError(
                f"the trainer resumes from a checkpoint of learner {checkpoint.get('learner')!r}"
                f" of run {checkpoint.get('run')!r}, and this is {self.learner!r} of"
                f" {mine['run']!r}",
                hint="give each learner of each run a folder of its own for checkpoints",
            )
        joining = join(
            self._file,
            learner=self.learner,
            module=module,
            table=self._table,
            tokens_per_step=self._tokens,
            replicated=replicated,
        )
        self._joined = self.life.enter_context(joining)
        # Threads do not run when the interpreter ends, and leaving would wait for them.
        atexit.register(self.fail, None)
        self.life.callback(atexit.unregister, self.fail)
        # A save during training saves the global parameters.
        saved = module.module if isinstance(module, DistributedDataParallel) else module
        hook = saved.register_state_dict_pre_hook(lambda *_: self.show())
        self.life.callback(hook.remove)

    def state(self) -> dict[str, str]:
        """Returns this loop's entry for a trainer's checkpoint; the position comes from the run."""
        return {"run": load_config(Path(self._file)).run.name, "learner": self.learner}

    def step(self, losses: list[Any], *, summed: bool) -> bool:
        """Notes a step of the optimizer; returns whether training is to end.

        Args:
            losses: losses of its batches.
            summed: the step's loss is their sum, not their mean.

        Raises:
            ConfigError: `losses` is empty.
        """
        with self.failing():
            if not losses:
                raise ConfigError(
                    "the loss of this step was not seen, and the run needs it",
                    hint="let the model's forward return it, or training_step of Lightning; a loss"
                    " that Trainer makes outside (label smoothing, compute_loss_func) is not seen",
                )
            self.hide()
            loss = torch.stack([one.detach() for one in losses]).sum()
            self.island.step(loss=loss if summed else loss / len(losses))
            return self.island.done

    def show(self) -> None:
        """Puts the global parameters into the module, until `hide`."""
        if self.trains and not self._shown:
            self._view.enter_context(self.island.viewed())
            self._shown = True

    def hide(self) -> None:
        """Puts the learner's own parameters back into the module."""
        self._view.close()
        self._shown = False

    def check_shown(self) -> None:
        """Refuses an evaluation of this learner's own parameters.

        Raises:
            ConfigError: the evaluation saw them.
        """
        with self.failing():
            if self.trains and not self._shown:
                raise ConfigError(
                    "the trainer has evaluated this learner's own parameters, not what all share",
                    hint="give DilocoCallback as the last callback, after the one that evaluates",
                )

    def end(self, *, keep: bool = False) -> None:
        """Leaves the run in order.

        Args:
            keep: the module stays, such as the best one; else it gets the newest parameters.
        """
        if not self.trains:
            return
        island, self._joined = self.island, None
        found = island.values() if keep else None
        self.hide()
        self.life.close()
        if found is None:
            island.show()
        else:
            island.take(found)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Ends the life on any error in the block, since trainers do not pass errors on."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException | None) -> None:
        """Ends as by a crash, without sending anything."""
        if self.trains:
            self._joined = None
            self.hide()
            why = error or DilocoError("the trainer's loop ended by an error of its own")
            with contextlib.suppress(type(why)):
                self.life.__exit__(type(why), why, why.__traceback__)


def follow_clock(schedule: Any, global_step: int) -> None:
    """Sets a learning-rate schedule that is a function of the step to the run's clock."""
    if isinstance(schedule, LambdaLR) and schedule.last_epoch != global_step:
        schedule.last_epoch = global_step - 1
        with warnings.catch_warnings():  # of a schedule that moves before the first step
            warnings.simplefilter("ignore", UserWarning)
            schedule.step()
