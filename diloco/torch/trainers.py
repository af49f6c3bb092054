"""A place in a run for loops that others own: what all callbacks share.

The adapters (`transformers.py`, `lightning.py`) say which of their events is which call here.
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
    """A trainer's place in a run, from one call of its training to the end of it.

    Args:
        file: the run's TOML file.
        learner: name of this learner in the run.
        table, tokens_per_step: as of `diloco.torch.join`.
        own_data: no other learner has this one's data, whatever order it is read in.

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
        """The place in the run.

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
        """Join the run: the module takes its newest version.

        Args:
            module: the one that is trained.
            checkpoint: the entry that `state` gave to the trainer's checkpoint, if it resumes.
            replicated: as of `diloco.torch.join`.

        Raises:
            ConfigError: the checkpoint is another learner's.
        """
        self.fail(None)  # of a training that raised, and told nobody
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
        # Threads stand still when the interpreter ends, and leaving would wait for them.
        atexit.register(self.fail, None)
        self.life.callback(atexit.unregister, self.fail)
        # Whoever saves while it trains saves what all share.
        saved = module.module if isinstance(module, DistributedDataParallel) else module
        hook = saved.register_state_dict_pre_hook(lambda *_: self.show())
        self.life.callback(hook.remove)

    def state(self) -> dict[str, str]:
        """This loop's entry in a trainer's checkpoint; the position comes from the run."""
        return {"run": load_config(Path(self._file)).run.name, "learner": self.learner}

    def step(self, losses: list[Any], *, summed: bool) -> bool:
        """Note a step of the optimizer; returns whether training is to end.

        Args:
            losses: of its batches.
            summed: the step's loss is their sum, and not their mean.

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
        """Let the module be what all learners share, until `hide`."""
        if self.trains and not self._shown:
            self._view.enter_context(self.island.viewed())
            self._shown = True

    def hide(self) -> None:
        """Let the module be this learner's own again."""
        self._view.close()
        self._shown = False

    def check_shown(self) -> None:
        """Refuse an evaluation that saw this learner's own parameters.

        Raises:
            ConfigError: the evaluation saw them.
        """
        with self.failing():
            if self.trains and not self._shown:
                raise ConfigError(
                    "the trainer has evaluated this learner's own parameters, not what all share",
                    hint="give DilocoCallback as the last callback, behind who asks to evaluate",
                )

    def end(self, *, keep: bool = False) -> None:
        """Leave the run in order.

        Args:
            keep: the module stays as it is, such as the best one; else it is the run's newest.
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
        """End the life on any error in the block: trainers tell their callbacks of none."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException | None) -> None:
        """End as by a crash: nothing is sent any more."""
        if self.trains:
            self._joined = None
            self.hide()
            why = error or DilocoError("the trainer's loop ended by an error of its own")
            with contextlib.suppress(type(why)):
                self.life.__exit__(type(why), why, why.__traceback__)


def follow_clock(schedule: Any, global_step: int) -> None:
    """Have a schedule that is a function of the step go by the run's clock."""
    if isinstance(schedule, LambdaLR) and schedule.last_epoch != global_step:
        schedule.last_epoch = global_step - 1
        with warnings.catch_warnings():  # of a schedule that moves before the first step
            warnings.simplefilter("ignore", UserWarning)
            schedule.step()
