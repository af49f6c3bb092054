"""A callback with which transformers' `Trainer` takes part in a run.

`trainer = Trainer(model, args, callbacks=[DilocoCallback("run.toml", learner="a")], ...)`
"""

from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.common.protocol.errors import ConfigError
from diloco.torch.order import check_workers, give_order
from diloco.torch.trainers import TrainerLoop, follow_clock

# This callback's name among the states of callbacks in `trainer_state.json`.
STATE = "diloco"


class DilocoCallback(TrainerCallback):  # type: ignore[misc] # of an untyped package
    """Makes a `Trainer` a learner of a run: joins when training begins, leaves when training ends.

    Args:
        file: the run's TOML file.
        learner: name of this learner in the run.
        options: `table` and `tokens_per_step` as in `diloco.torch.join`; `own_data=True`: no other
            learner has this learner's examples, so that the trainer's order of them is kept.

    Raises:
        ConfigError: when training begins: all learners would get the same batches, the trainer
            resumes from another learner's checkpoint, or a process trains on several devices or
            shards the model.
        RunMismatchError: when training begins: the model's parameters are not those of the run.
    """

    def __init__(self, file: str | Path, *, learner: str, **options: Any) -> None:
        self._loop = TrainerLoop(file, learner=learner, **options)
        self._losses: list[Any] = []
        self._summed, self._ranks = False, 1

    def __enter__(self) -> Self:
        """Supports `with callback:` around training, for a notebook.

        A notebook continues after a failed training, of which Trainer tells no callback.
        """
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Leaves the run as after a crash, if training has failed and the learner has not left."""
        self._loop.fail(error)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - as all events have it
        **given: Any,
    ) -> None:
        """Sets the order in which this learner reads examples, and joins the run.

        Raises:
            ConfigError: as in the class.
            DilocoError: as `diloco.torch.join`.
        """
        ranks = args.world_size
        if args.n_gpu > 1 or (ranks > 1 and (args.fsdp or args.deepspeed)):
            raise ConfigError(
                f"{ranks} process(es) with {args.n_gpu} device(s) each train one model, and this"
                " callback joins from one, or from several under DistributedDataParallel",
                hint="start a process for each device by torchrun, without fsdp and deepspeed; or"
                " show the Trainer one device, such as by CUDA_VISIBLE_DEVICES=0",
            )
        # Trainer divides a loss by the tokens of this number of ranks.
        self._ranks = ranks if args.average_tokens_across_devices else 1
        loop, module, loader = self._loop, given["model"], given["train_dataloader"]
        check_workers(loader)
        if not loop.own_data:
            give_order(
                loader,
                learner=loop.learner,
                accumulated=args.gradient_accumulation_steps,
                position=lambda: loop.island.position,
                trained=0 if args.ignore_data_skip else state.global_step,
                seed=args.seed if args.data_seed is None else args.data_seed,
            )
        checkpoint = state.stateful_callbacks.get(STATE, {}).get("attributes")
        loop.begin(module, checkpoint, replicated=ranks > 1)  # Trainer wraps it by itself
        state.stateful_callbacks[STATE] = {"args": {}, "attributes": loop.state()}
        loop.life.callback(module.register_forward_hook(self._see_loss, with_kwargs=True).remove)
        follow_clock(given["lr_scheduler"], loop.island.global_step)
        loop.show()

    def _see_loss(
        self, module: nn.Module, _inputs: Any, named: dict[str, Any], outputs: Any
    ) -> None:
        if not (module.training and self._loop.trains):
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else next(iter(outputs))
        if isinstance(loss, Tensor) and not loss.dim():
            # transformers' models return a batch's part of the mean over all tokens.
            self._summed = named.get("num_items_in_batch") is not None
            self._losses.append(loss.detach() * (self._ranks if self._summed else 1))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Sets the model's parameters to the learner's own again, after an evaluation or save."""
        self._loop.hide()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Sets the model's parameters to the learner's own, after an evaluation between batches."""
        self._loop.hide()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002 - as all events have it
        control: TrainerControl,
        **given: Any,
    ) -> None:
        """Takes a step boundary of the run after a step of the optimizer; may end training.

        Raises:
            ConfigError: the model's forward pass returned no loss.
            DilocoError: as `TorchLearner.step`.
        """
        losses, self._losses = self._losses, []
        if self._loop.step(losses, summed=self._summed):
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        follow_clock(given["lr_scheduler"], self._loop.island.global_step)
        if control.should_evaluate or control.should_save:
            self._loop.show()  # on all ranks, though only one saves

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Sets the model's parameters to the global ones, to evaluate and save these."""
        self._loop.show()

    def on_evaluate(
        self,
        args: TrainingArguments,  # noqa: ARG002 - as all events have it
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        metrics: dict[str, float],
        **_: Any,
    ) -> None:
        """Reports the evaluation's loss to the run, in this learner's heartbeats.

        Raises:
            ConfigError: the loss was measured on this learner's own parameters.
        """
        self._loop.check_shown()
        if self._loop.trains and "eval_loss" in metrics:
            self._loop.island.evaluated({"loss": metrics["eval_loss"]})

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - as all events have it
        **_: Any,
    ) -> None:
        """Leaves the run; the model gets the run's newest parameters.

        If Trainer has loaded the best model (`load_best_model_at_end`), that one is kept.
        """
        best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        self._loop.end(keep=best)
