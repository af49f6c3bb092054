"""A learner in the training loop of another library's trainer: the code that all callbacks share.

The callbacks (`transformers.py`, `lightning.py`) map events of their trainers to calls of
`TrainerLoop`. The module has either the learner's own parameters, for training, or the global ones
(those of the adopted versions), to evaluate and save them.
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
        own_data: no other learner has this learner's examples, so that the trainer's order is kept.

    Attributes:
        life: the stack of what is to be closed when training ends, such as the membership.
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
        """The PyTorch loop's membership in the run.

        Raises:
            DilocoError: training has not begun.
        """
        if self._joined is None:
            raise DilocoError("the trainer's loop has not joined the run")
        return self._joined

    @property
    def trains(self) -> bool:
        """True if the learner has joined the run and has not left."""
        return self._joined is not None

    def begin(
        self,
        module: torch.nn.Module,
        checkpoint: Mapping[str, Any] | None,
        *,
        replicated: bool = False,
    ) -> None:
        """Joins the run: the module's parameters become those of the newest version.

        Args:
            module: the module that is trained.
            checkpoint: the result of `state` that is stored in the trainer's checkpoint; None: the
                trainer does not resume from a checkpoint.
            replicated: as in `diloco.torch.join`.

        Raises:
            ConfigError: the checkpoint is another learner's.
            DilocoError: as `diloco.torch.join`.
        """
        self.fail(None)  # an earlier training may have raised without telling its callbacks
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
        # The trainer's saves during training get the global parameters.
        saved = module.module if isinstance(module, DistributedDataParallel) else module
        hook = saved.register_state_dict_pre_hook(lambda *_: self.show())
        self.life.callback(hook.remove)

    def state(self) -> dict[str, str]:
        """Returns the names of run and learner, for a trainer's checkpoint.

        The checkpoint needs no data position, which comes from the run.
        """
        return {"run": load_config(Path(self._file)).run.name, "learner": self.learner}

    def step(self, losses: list[Any], *, summed: bool) -> bool:
        """Takes a step boundary after a step of the optimizer; returns True if training is to end.

        Any error ends the membership, as by `fail`.

        Args:
            losses: losses of the step's batches.
            summed: True: the step's loss is the sum of `losses`; False: their mean.

        Raises:
            ConfigError: `losses` is empty.
            DilocoError: as `TorchLearner.step`.
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
        """Sets the module's parameters to the global ones, until `hide` is called."""
        if self.trains and not self._shown:
            self._view.enter_context(self.island.viewed())
            self._shown = True

    def hide(self) -> None:
        """Sets the module's parameters to the learner's own again, after `show`."""
        self._view.close()
        self._shown = False

    def check_shown(self) -> None:
        """Checks, after an evaluation, that the module had the global parameters.

        Raises:
            ConfigError: the module had the learner's own parameters.
        """
        with self.failing():
            if self.trains and not self._shown:
                raise ConfigError(
                    "the trainer has evaluated this learner's own parameters, not what all share",
                    hint="give DilocoCallback as the last callback, after the one that evaluates",
                )

    def end(self, *, keep: bool = False) -> None:
        """Sends unsent work, and leaves the run; does nothing if the learner has not joined.

        Args:
            keep: True: the module keeps its parameters, such as the best ones; False: it gets the
                newest global parameters.
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
        """Calls `fail` on any error of the block, since trainers tell callbacks of no error."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException | None) -> None:
        """Leaves the run as after a crash: nothing is sent. Does nothing if it has not joined.

        Args:
            error: the error that ends training; None: it is not known.
        """
        if self.trains:
            self._joined = None
            self.hide()
            why = error or DilocoError("the trainer's loop ended by an error of its own")
            with contextlib.suppress(type(why)):
                self.life.__exit__(type(why), why, why.__traceback__)


def follow_clock(schedule: Any, global_step: int) -> None:
    """Sets a PyTorch learning-rate schedule to the run's global step, if it is a `LambdaLR`.

    Other schedules are not changed, since only a `LambdaLR` is a function of the step.
    """
    if isinstance(schedule, LambdaLR) and schedule.last_epoch != global_step:
        schedule.last_epoch = global_step - 1
        with warnings.catch_warnings():  # of a schedule that moves before the first step
            warnings.simplefilter("ignore", UserWarning)
            schedule.step()
