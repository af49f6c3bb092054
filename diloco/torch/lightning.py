"""A callback with which Lightning's `Trainer` takes part in a run.

`trainer = Trainer(callbacks=[DilocoCallback("run.toml", learner="a")], ...)`
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from diloco.torch.order import check_workers, give_order
from diloco.torch.trainers import TrainerLoop, follow_clock


class DilocoCallback(Callback):  # type: ignore[misc] # of an untyped package
    """Makes a Lightning `Trainer` a learner of a run: it joins when `fit` begins to train.

    Arguments and errors are those of `diloco.torch.transformers.DilocoCallback`.
    """

    def __init__(self, file: str | Path, *, learner: str, **options: Any) -> None:
        self._loop = TrainerLoop(file, learner=learner, **options)
        self._resumed: dict[str, Any] | None = None
        self._losses: list[Any] = []
        self._stepped = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the names of run and learner, which Lightning stores in its checkpoints."""
        return self._loop.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the result of `state_dict` from the checkpoint from which training resumes."""
        self._resumed = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sets the order in which this learner reads examples, and joins the run.

        Raises:
            ConfigError: the order cannot be set, or the checkpoint is another learner's.
            DilocoError: as `diloco.torch.join`.
        """
        loop, loader = self._loop, trainer.train_dataloader
        check_workers(loader)
        if not loop.own_data:
            give_order(
                loader,
                learner=loop.learner,
                accumulated=trainer.accumulate_grad_batches,
                position=lambda: loop.island.position,
                batches=int(trainer.num_training_batches),
            )
        in_ddp = isinstance(trainer.model, DistributedDataParallel)
        loop.begin(trainer.model if in_ddp else pl_module, self._resumed)
        self._stepped = trainer.global_step
        if not loop.own_data:
            iter(trainer.fit_loop._data_fetcher)  # noqa: SLF001 - it has read in the old order
        self._follow_clock(trainer)

    def on_train_batch_start(self, *_: Any) -> None:
        """Sets the module's parameters to the learner's own again, after an evaluation."""
        self._loop.hide()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Takes a step boundary of the run if the optimizer has taken a step; may end training.

        Raises:
            ConfigError: the training step returned no loss.
            DilocoError: as `TorchLearner.step`.
        """
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._losses += [] if loss is None else [loss]
        if trainer.global_step == self._stepped:
            return
        self._stepped, losses = trainer.global_step, self._losses
        self._losses = []
        # Lightning has divided each loss by the number of batches.
        if self._loop.step(losses, summed=pl_module.automatic_optimization):
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0
        self._follow_clock(trainer)

    def on_validation_start(self, *_: Any) -> None:
        """Sets the module's parameters to the global ones, until the next training batch."""
        self._loop.show()

    def on_train_end(self, *_: Any) -> None:
        """Leaves the run; the module then has the run's newest parameters."""
        self._loop.end()

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002 - as Lightning gives it
        pl_module: LightningModule,  # noqa: ARG002
        exception: BaseException,
    ) -> None:
        """Leaves the run, as after a crash: unsent work is sent only after an interrupt or exit."""
        if isinstance(exception, KeyboardInterrupt | SystemExit):
            self._loop.end()
        else:
            self._loop.fail(exception)

    def _follow_clock(self, trainer: Trainer) -> None:
        for one in trainer.lr_scheduler_configs:
            if one.interval == "step":
                follow_clock(one.scheduler, self._loop.island.global_step)
