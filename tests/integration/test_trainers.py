"""Trainers of transformers and Lightning in a run, the real ones: `make test-extras`."""

import json
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from audit import read_tape
from harness import open_world

pytest.importorskip("transformers")
pytest.importorskip("lightning")
torch = pytest.importorskip("torch")

import gemma4_trainer  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import prepare_data_loader  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

import diloco.torch  # noqa: E402
from diloco.common.process.nats_server import free_port  # noqa: E402
from diloco.common.protocol.errors import ConfigError, RunMismatchError  # noqa: E402
from diloco.torch.lightning import DilocoCallback as OfLightning  # noqa: E402
from diloco.torch.order import LearnerOrder, check_workers, give_order  # noqa: E402
from diloco.torch.trainers import follow_clock  # noqa: E402
from diloco.torch.transformers import DilocoCallback as OfTransformers  # noqa: E402
from examples import trainers  # noqa: E402

# What its libraries say is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
RUN = {"steps": 120, "tokens_per_step": 128}
OUTER = {"optimizer": "sgd", "learning_rate": 0.7}
SYNC = {"interval_steps": 8, "fragments": 3, "block": 16, "min_steps": 3}


def begin(world, model=trainers.model):
    """Create the run of a tiny model, GPT-2 if no other is given, without a task."""
    del world.document["task"]
    world.document["sync"] = SYNC
    world.variant("run", {})
    diloco.torch.create(world.config_path, model())
    return world


def own_once_joined(world, *learners):
    """Start the owner once all have joined: a run of seconds would else end without who is late."""
    world.until(lambda: all(read_tape(world).lives(name) for name in learners), "all have joined")
    world.aggregator()


def kill_and_resume(world, train_a, first, other):
    """The new process of a; b, the other one, stands still until a is there, or would end the run."""
    first.kill()
    other.signal(signal.SIGSTOP)
    again, _ = train_a()
    world.until(lambda: len(read_tape(world).lives("a")) == 2 or not again.running, "a is back")
    other.signal(signal.SIGCONT)
    assert again.wait() == other.wait() == 0, again.log() + other.log()


@pytest.fixture(scope="module")
def plain_loss(nats_server, tmp_path_factory):
    """On held-out data, of a run of as many steps by two loops of their own."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    with open_world("plain", folder, nats_server.url, create=False, run=RUN, outer=OUTER) as world:
        begin(world)
        learners = [train(world, name, "plain")[0] for name in ("a", "b")]
        own_once_joined(world, "a", "b")
        assert [learner.wait() for learner in learners] == [0, 0]
        return trainers.held_out_loss(world.config_path, trainers.model())


def train(world, name, kind):
    folder = world.folder / f"saved-{name}"
    arguments = (kind, str(world.config_path), name, str(folder))
    return world.start(name, *arguments, program=("examples.trainers",)), folder


@pytest.mark.parametrize(
    ("kind", "saved"),
    [("transformers", "checkpoint-*/trainer_state.json"), ("lightning", "last.ckpt")],
)
def test_two_learners_one_killed_and_resumed_from_the_trainers_own_checkpoint(
    new_world, plain_loss, kind, saved
):
    world = begin(new_world(create=False, run=RUN, outer=OUTER))
    first, folder = train(world, "a", kind)
    other, _ = train(world, "b", kind)
    own_once_joined(world, "a", "b")
    world.until(lambda: list(folder.glob(saved)), "a checkpoint of the trainer")
    kill_and_resume(world, lambda: train(world, "a", kind), first, other)
    tape = read_tape(world)
    sent = [manifest for _, manifest in tape.manifests]
    assert {one.learner for one in sent} == {"a", "b"}
    assert len({one.incarnation for one in sent if one.learner == "a"}) == 2
    check_trained(world, plain_loss)


def test_gemma_4_trains_and_resumes(new_world):
    """As docs/models.md says: per-layer embeddings, layers of two kinds, shared keys and values."""
    world = begin(new_world(create=False, run=RUN, outer=OUTER), gemma4_trainer.model)

    def learner(name):
        folder = world.folder / f"saved-{name}"
        where = (str(world.config_path), name, str(folder))
        return world.start(name, *where, program=("gemma4_trainer",)), folder

    (first, folder), (other, _) = learner("a"), learner("b")
    own_once_joined(world, "a", "b")
    world.until(lambda: list(folder.glob("checkpoint-*/trainer_state.json")), "a checkpoint")
    kill_and_resume(world, lambda: learner("a"), first, other)
    assert trainers.held_out_loss(world.config_path, gemma4_trainer.model()) < 2.0  # from 3.46


def check_trained(world, plain_loss):
    loss = trainers.held_out_loss(world.config_path, trainers.model())
    fresh = 3.47  # the loss of the first version
    assert fresh - loss > 0.8 * (fresh - plain_loss)


def train_ranks(world, kind, ranks=2):
    """Learner a, of so many ranks."""
    folder, port = world.folder / "saved", str(free_port())
    where = (kind, str(world.config_path), "a", str(folder), port, str(ranks))
    started = [
        world.start(f"a.{rank}", *where, str(rank), program=("trainer_ranks",))
        for rank in range(ranks)
    ]
    return started, folder


@pytest.mark.parametrize(
    ("kind", "saved"),
    [
        ("transformers", "checkpoint-*/trainer_state.json"),
        ("lightning", "last.ckpt"),
        ("sharded", "last.ckpt"),
    ],
)
def test_ranks_of_a_trainer_are_one_learner_and_resume(new_world, plain_loss, kind, saved):
    world = begin(new_world(create=False, run=RUN, outer=OUTER))
    world.aggregator()
    first, folder = train_ranks(world, kind)
    world.until(lambda: list(folder.glob(saved)), "a checkpoint of the trainer")
    first[1].kill()
    assert all(process.wait() != 0 for process in first)
    again, _ = train_ranks(world, kind)
    for process in again:
        assert process.wait() == 0, process.log()
    sent = [manifest for _, manifest in read_tape(world).manifests]
    assert {one.learner for one in sent} == {"a"}
    assert len({one.incarnation for one in sent}) == 2
    check_trained(world, plain_loss)


def test_an_error_in_a_trainer_ends_its_process_and_the_next_life_goes_on(new_world):
    world = begin(new_world(create=False, run=RUN, outer=OUTER))
    world.aggregator()
    (first,), _ = train_ranks(world, "raises", ranks=1)
    assert first.wait() == 1
    assert "of a user's own model" in first.log()
    (again,), _ = train_ranks(world, "transformers", ranks=1)
    assert again.wait() == 0, again.log()
    lives = {manifest.incarnation for _, manifest in read_tape(world).manifests}
    assert len(lives) == 2


class Noted(trainers.Sentences):
    """Notes which examples are read."""

    def __init__(self):
        super().__init__(0, 2000)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


class Looked(TrainerCallback):
    """The values that an evaluation, a checkpoint and the next step see."""

    def __init__(self, module):
        self.module, self.evaluated, self.trained = module, [], []

    def values(self):
        return {name: one.detach().clone() for name, one in self.module.named_parameters()}

    def on_prediction_step(self, *_args, **_kwargs):
        self.evaluated.append(self.values())

    def on_step_begin(self, *_args, **_kwargs):
        self.trained.append(self.values())


def trainer_of(
    world, folder, data, learner="a", steps=6, callbacks=None, data_collator=None, **changes
):
    module = trainers.model()
    told = {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "max_steps": steps}
    args = trainers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=3e-3, disable_tqdm=True, report_to=[], use_cpu=True, **told | changes,
    )  # fmt: skip
    if callbacks is None:
        callbacks = [OfTransformers(str(world.config_path), learner=learner), Looked(module)]
    return trainers.Trainer(
        model=module, args=args, train_dataset=data, eval_dataset=trainers.Sentences(1, 8),
        callbacks=callbacks, data_collator=data_collator,
    )  # fmt: skip


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture
def still(new_world):
    """A run whose version stays the first: nobody aggregates."""
    world = new_world(create=False, run=RUN, learner={"drain_timeout_s": 0.5})
    del world.document["task"]
    world.document["sync"] = SYNC
    world.variant("run", {})
    diloco.torch.create(world.config_path, trainers.model())
    return world


def test_who_evaluates_or_saves_sees_what_all_share_and_training_goes_on_from_its_own(
    still, tmp_path
):
    trainer = trainer_of(still, tmp_path, Noted(), eval_on_start=True)
    trainer.train()
    (looked,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, Looked))
    begun = dict(trainers.model().named_parameters())
    assert len(looked.evaluated) == 3
    assert all(same(values, begun) for values in looked.evaluated)
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert all(
        np.array_equal(saved[name], one.detach()) for name, one in begun.items() if name in saved
    )
    assert len(saved) > 10
    moved = [not same(values, begun) for values in looked.trained]
    assert moved == [False, True, True, True, True, True]
    assert same(looked.values(), begun)
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    told = {"run": still.name, "learner": "a"}
    assert state["stateful_callbacks"]["diloco"]["attributes"] == told


@pytest.fixture
def told(monkeypatch):
    """Returns the losses that learners of PyTorch tell the run, one for each step."""
    losses, step = [], diloco.torch.TorchLearner.step

    def noted(self, *, loss, **given):
        losses.append(float(loss))
        step(self, loss=loss, **given)

    monkeypatch.setattr(diloco.torch.TorchLearner, "step", noted)
    return losses


def test_the_loss_of_a_step_is_the_trainers_own(still, tmp_path, told):
    data = trainers.Sentences(0, 40)
    trainer = trainer_of(
        still, tmp_path, data, steps=-1, logging_steps=1, num_train_epochs=1, logging_first_step=True,
        eval_strategy="epoch", save_strategy="epoch",
    )  # fmt: skip
    trainer.train()
    logged = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert len(told) == 5
    assert told == pytest.approx(logged, abs=1e-4)
    (tmp_path / "l").mkdir()
    del told[:]
    seen, read = [], []

    class Looks(trainers.Tiny):
        def training_step(self, batch):
            loss = super().training_step(batch)
            seen.append(float(loss))
            read.append(batch["input_ids"])
            return loss

    saves = trainers.ModelCheckpoint(tmp_path / "l", every_n_train_steps=2, save_top_k=-1)
    own = OfLightning(still.config_path, learner="b", table=trainers.TABLE)
    trainer = trainers.pl.Trainer(
        max_steps=4, accumulate_grad_batches=2, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[saves, own],
    )  # fmt: skip
    # Its worker has begun to read in another order, before the learner joins.
    trainer.fit(Looks(), DataLoader(trainers.TRAINED, 4, shuffle=True, num_workers=1))
    assert told == pytest.approx([(a + b) / 2 for a, b in zip(seen[::2], seen[1::2], strict=True)])
    order = LearnerOrder(2000, learner="b", step=8, steps=250, position=lambda: 0)
    assert torch.equal(torch.cat(read), trainers.TRAINED.tokens[[*order][:32]])
    # It was saved without an evaluation before.
    begun = dict(trainers.model().named_parameters())
    for path in (tmp_path / "l").glob("*.ckpt"):
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert all(torch.equal(saved[f"net.{name}"], one) for name, one in begun.items())


def test_a_resume_reads_on_behind_what_the_run_has(still, tmp_path):
    first = Noted()
    trainer_of(still, tmp_path, first).train()
    # Six steps of two batches of four, which were sent, and three of them in the checkpoint.
    again = Noted()
    resumed = trainer_of(still, tmp_path, again, steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    order = LearnerOrder(2000, learner="a", step=8, steps=250, position=lambda: 0, seed=42)
    assert [*first.read[:48], *again.read[:16]] == [*order][: 48 + 16]
    other = LearnerOrder(2000, learner="b", step=8, steps=250, position=lambda: 0, seed=42)
    assert len(set([*order][:48]) & set([*other][:48])) < 24


def test_the_best_model_is_the_best_of_what_all_share_and_stays(new_world, tmp_path):
    """The best by the greatest loss, which is an early version's: what was trained is better."""
    world = begin(new_world(create=False, run=RUN, outer=OUTER))
    world.aggregator()

    class Clocks(TrainerCallback):
        seen = []

        def on_step_end(self, _args, _state, _control, lr_scheduler, **_):
            self.seen.append((lr_scheduler.last_epoch, own._loop.island.global_step))

    own = OfTransformers(str(world.config_path), learner="a")
    trainer = trainer_of(
        world, tmp_path, Noted(), steps=10**6, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True, data_collator=trainers.slow,
        callbacks=[own, Clocks()], eval_steps=16, save_steps=16,
    )  # fmt: skip
    trainer.train()
    assert all(ours == runs for ours, runs in Clocks.seen)
    assert Clocks.seen[-1][1] >= RUN["steps"]
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}").is_dir()
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    now = dict(trainer.model.named_parameters())
    assert all(
        np.array_equal(best[name], one.detach()) for name, one in now.items() if name in best
    )
    evaluated = trainer.evaluate()["eval_loss"]
    assert trainer.state.best_metric == pytest.approx(evaluated, rel=1e-5)
    # What was sent is what was trained, and not the best model that the trainer had loaded.
    assert trainers.held_out_loss(world.config_path, trainers.model()) < 0.8 * evaluated


def test_lightning_evaluates_and_saves_what_all_share_and_trains_its_own(still, tmp_path):
    seen = {"evaluated": [], "trained": []}

    class Looks(trainers.Tiny):
        def validation_step(self, batch):
            seen["evaluated"].append(Looked.values(trainer))
            super().validation_step(batch)

    class Looked(trainers.pl.Callback):
        @staticmethod
        def values(trainer):
            named = trainer.lightning_module.net.named_parameters()
            return {name: one.detach().clone() for name, one in named}

        def on_train_batch_start(self, trainer, *_):
            seen["trained"].append(self.values(trainer))

    saves = trainers.ModelCheckpoint(tmp_path, monitor="loss", every_n_train_steps=None)
    own = OfLightning(still.config_path, learner="a", table=trainers.TABLE)
    trainer = trainers.pl.Trainer(
        max_steps=6, val_check_interval=3, num_sanity_val_steps=0, accelerator="cpu", devices=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[saves, own, Looked()],
    )  # fmt: skip
    batches = DataLoader(trainers.TRAINED, 8, shuffle=True)
    trainer.fit(Looks(), batches, DataLoader(trainers.HELD_OUT, 200))
    begun = dict(trainers.model().named_parameters())
    assert len(seen["evaluated"]) == 2
    assert all(same(values, begun) for values in seen["evaluated"])
    moved = [not same(values, begun) for values in seen["trained"]]
    assert moved == [False, True, True, True, True, True]
    saved = torch.load(saves.best_model_path, weights_only=False)["state_dict"]
    assert all(torch.equal(saved[f"net.{name}"], one) for name, one in begun.items())
    assert same(Looked.values(trainer), begun)


def test_an_order_begins_where_the_run_is():
    at = [0]

    def order(**changes):
        return LearnerOrder(
            10, learner="a", step=4, steps=3, position=lambda: at[0], **changes
        )  # fmt: skip

    first = [*order()]
    at[0] = 3
    second = [*order()]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    at[0] = 2
    assert [*order()] == [*first[8:], *second[:8]]
    # A trainer that skips a step of the epoch is at step 2 then.
    resumed = order(skipped=1)
    assert [*resumed][4:6] == first[8:]
    assert [*resumed] == [*order()]
    # And one whose checkpoint is ahead of the run begins there, too.
    at[0] = 0
    assert [*order(skipped=2)][8:] == first[:2]


@pytest.mark.parametrize("kind", ["batches", "parts of batches", "examples"])
def test_ranks_read_each_example_of_a_learners_order_once(kind):
    def read(rank, at):
        data = list(range(26))
        if kind == "examples":  # as Lightning divides them
            loader = DataLoader(data, 2, sampler=DistributedSampler(data, 2, rank))
        else:  # as accelerate does
            split = kind == "parts of batches"
            whole = DataLoader(data, 4 if split else 2, shuffle=True)
            loader = prepare_data_loader(whole, None, 2, rank, split_batches=split)
        give_order(loader, learner="a", accumulated=2, position=lambda: at)
        return [[*map(int, batch)] for batch in loader]

    def steps(at):
        """Of each step, what both ranks trained on in two batches."""
        both = [read(rank, at) for rank in (0, 1)]
        assert len(both[0]) == len(both[1]) == 7
        pairs = [one + other for one, other in zip(*both, strict=True)]
        return [
            sorted(index for pair in pairs[first : first + 2] for index in pair)
            for first in range(0, 7, 2)
        ]

    order = [*LearnerOrder(26, learner="a", step=8, steps=4, position=lambda: 0)]
    begun = steps(0)
    assert begun[:3] == [sorted(order[first : first + 8]) for first in (0, 8, 16)]
    assert set(order[24:]) <= set(begun[3])
    assert steps(2)[:1] == begun[2:3]


def test_a_sampler_of_ones_own_that_lightning_divides_is_refused():
    data = list(range(8))
    loader = DataLoader(data, 2, sampler=DistributedSampler([*data], 2, 0))
    with pytest.raises(ConfigError, match="DistributedSampler's, which knows no learners"):
        give_order(loader, learner="a", accumulated=1, position=lambda: 0)


def test_data_that_all_learners_read_in_one_order_is_refused(still, tmp_path):
    trainer = trainer_of(still, tmp_path, Noted(), train_sampling_strategy="sequential")
    with pytest.raises(ConfigError, match=r"the same batches.*SequentialSampler"):
        trainer.train()
    batches = DataLoader(trainers.TRAINED, 4)
    with pytest.raises(ConfigError, match="the same batches"):
        give_order(batches, learner="a", accumulated=1, position=lambda: 0)
    lightning = trainers.pl.Trainer(
        max_steps=2, logger=False, enable_progress_bar=False, accelerator="cpu",
        callbacks=[OfLightning(still.config_path, learner="a")], enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="the same batches"):
        lightning.fit(trainers.Tiny(), batches)


def test_data_of_a_learners_own_is_read_as_the_trainer_has_it(still, tmp_path):
    data = Noted()
    own = OfTransformers(str(still.config_path), learner="a", own_data=True)
    trainer = trainer_of(
        still, tmp_path, data, steps=2, callbacks=[own], train_sampling_strategy="sequential"
    )
    trainer.train()
    assert data.read[:16] == list(range(16))
    assert isinstance(trainer.get_train_dataloader().sampler, SequentialSampler)


def test_a_checkpoint_of_another_learner_is_refused(still, tmp_path):
    trainer_of(still, tmp_path, Noted(), steps=3).train()
    other = trainer_of(still, tmp_path, Noted(), learner="b")
    with pytest.raises(ConfigError, match=r"checkpoint of learner 'a'.*this is 'b'"):
        other.train(resume_from_checkpoint=True)


def test_another_model_is_refused_before_a_step(still, tmp_path):
    trainer = trainer_of(still, tmp_path, Noted())
    trainer.model.lm_head.bias = torch.nn.Parameter(torch.zeros(trainers.TOKENS))
    with pytest.raises(RunMismatchError, match="lm_head/bias"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_loader_that_forks_is_refused():
    batches = DataLoader(trainers.TRAINED, 4, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ConfigError, match="hang in locks"):
        check_workers(batches)
    check_workers(DataLoader(trainers.TRAINED, 4, num_workers=1))


def test_a_loss_made_outside_of_the_model_is_refused(still, tmp_path):
    trainer = trainer_of(still, tmp_path, Noted(), label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="the loss of this step was not seen"):
        trainer.train()


def test_an_error_in_a_trainer_ends_the_life_behind_the_callback(still, tmp_path):
    """As in a notebook, whose process goes on."""

    def fails(_batch):
        raise RuntimeError("of a user's own data")

    def loops():
        return sum(one.name == "loop" for one in threading.enumerate())

    before = loops()
    callback = OfTransformers(str(still.config_path), learner="a")
    trainer = trainer_of(still, tmp_path, Noted(), callbacks=[callback], data_collator=fails)
    with pytest.raises(RuntimeError, match="own data"), callback:
        trainer.train()
    assert loops() == before
    with pytest.raises(RuntimeError, match="own data"):
        trainer.train()
    assert loops() == before + 1
    # The next training ends the one before.
    trainer = trainer_of(still, tmp_path, Noted(), callbacks=[callback])
    trainer.train()
    assert loops() == before


def test_an_evaluation_of_a_learners_own_parameters_is_refused(still, tmp_path):
    class Asks(TrainerCallback):
        def on_step_end(self, _args, _state, control, **_):
            control.should_evaluate = True

    callbacks = [OfTransformers(str(still.config_path), learner="a"), Asks()]
    trainer = trainer_of(still, tmp_path, Noted(), callbacks=callbacks)
    with pytest.raises(ConfigError, match="as the last callback"):
        trainer.train()


def test_a_schedule_follows_the_runs_clock():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    follow_clock(schedule, 4)
    assert optimizer.param_groups[0]["lr"] == 0.2
    optimizer.step()
    schedule.step()
    follow_clock(schedule, 9)
    assert schedule.get_last_lr() == [0.1]


def test_workers_are_spawned_while_a_learner_is_joined(still, recwarn):
    module = trainers.model()
    with diloco.torch.join(still.config_path, learner="a", module=module) as island:
        batches = DataLoader(trainers.TRAINED, 8, num_workers=1)
        loss = module(**next(iter(batches))).loss
        island.step(loss=loss)
    assert not [one for one in recwarn if "fork" in str(one.message)]


def test_a_script_has_three_lines_for_it_at_most():
    lines = (ROOT / "examples/trainers.py").read_text().splitlines()
    for kind in ("transformers", "lightning"):
        needed = f"diloco.torch.{kind}"
        assert 0 < sum(needed in line for line in lines) <= 3


def test_a_loop_of_accelerate_takes_the_optimizers_steps(still):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    module = trainers.model()
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters()), DataLoader(trainers.TRAINED, 4)
    )
    with diloco.torch.join(still.config_path, learner="a", module=model) as island:
        for _, batch in zip(range(6), loader, strict=False):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                island.step(loss=loss)
        assert island.position == 3
        trained = dict(module.named_parameters())
        kept = {name: one.detach().clone() for name, one in trained.items()}
        with island.viewed():
            assert same(trained, dict(trainers.model().named_parameters()))
        assert same(trained, kept)
        assert not same(trained, dict(trainers.model().named_parameters()))
