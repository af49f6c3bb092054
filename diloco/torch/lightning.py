"""A callback by which Lightning's `Trainer` takes part in a run.

`trainer = Trainer(callbacks=[DilocoCallback("run.toml", learner="a")], ...)`
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from diloco.torch.order import check_workers, give_order
from diloco.torch.trainers import TrainerLoop, follow_clock


class DilocoCallback(Callback):  # type: ignore[misc] # of an untyped package
    """A Lightning `Trainer`'s place in a run, for as long as `fit` trains.

    Args and errors as of `diloco.torch.transformers.DilocoCallback`.
    """

    def __init__(self, file: str | Path, *, learner: str, **options: Any) -> None:
        self._loop = TrainerLoop(file, learner=learner, **options)
        self._resumed: dict[str, Any] | None = None
        self._losses: list[Any] = []
        self._stepped = 0

    def state_dict(self) -> dict[str, Any]:
        """This learner's entry in a trainer's checkpoint."""
        return self._loop.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this learner's entry of the checkpoint that training resumes from."""
        self._resumed = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the run, and see that the data is this learner's own."""
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
            iter(trainer.fit_loop._data_fetcher)  # noqa: SLF001 - it has begun in the old order
        self._follow_clock(trainer)

    def on_train_batch_start(self, *_: Any) -> None:
        """Train on with the learner's own parameters."""
        self._loop.hide()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Take the run's step boundary, where the optimizer has taken a step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._losses += [] if loss is None else [loss]
        if trainer.global_step == self._stepped:
            return
        self._stepped, losses = trainer.global_step, self._losses
        self._losses = []
        # Lightning has divided each one by the number of batches.
        if self._loop.step(losses, summed=pl_module.automatic_optimization):
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = 0
        self._follow_clock(trainer)

    def on_validation_start(self, *_: Any) -> None:
        """Show what all learners share; the next step hides it."""
        self._loop.show()

    def on_train_end(self, *_: Any) -> None:
        """Leave the run; the module is the run's newest."""
        self._loop.end()

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002 - as Lightning gives it
        pl_module: LightningModule,  # noqa: ARG002
        exception: BaseException,
    ) -> None:
        """Leave in order where somebody asked for it; else end as by a crash."""
        if isinstance(exception, KeyboardInterrupt | SystemExit):
            self._loop.end()
        else:
            self._loop.fail(exception)

    def _follow_clock(self, trainer: Trainer) -> None:
        for one in trainer.lr_scheduler_configs:
            if one.interval == "step":
                follow_clock(one.scheduler, self._loop.island.global_step)
