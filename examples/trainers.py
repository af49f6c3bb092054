"""A tiny GPT-2 in a run, trained by transformers' Trainer, by Lightning, or by a plain loop.

python examples/trainers.py create run.toml                          # once
python examples/trainers.py transformers run.toml island-a folder    # or lightning, or plain
python examples/trainers.py loss run.toml

A learner resumes from the checkpoint in its folder, if there is one.
"""

import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import diloco
import diloco.torch
import diloco.torch.lightning
import diloco.torch.transformers

TOKENS, LENGTH, BATCH, ACCUMULATED, RATE = 32, 16, 4, 2, 3e-3
STEP_S = 0.02  # seconds of a step at least, so that a tiny model is no faster than rounds
ENDLESS = 1_000_000  # the run says when it is over


class Sentences(Dataset):
    """Random sentences: nine of ten tokens follow from the token before."""

    def __init__(self, first, count):
        rng = np.random.default_rng(first)
        tokens = rng.integers(TOKENS, size=(count, LENGTH))
        for at in range(1, LENGTH):
            follows = (5 * tokens[:, at - 1] + 3) % TOKENS
            tokens[:, at] = np.where(rng.random(count) < 0.9, follows, tokens[:, at])
        self.tokens = torch.from_numpy(tokens)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


TRAINED, HELD_OUT = Sentences(0, 2000), Sentences(1, 200)


def model():
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, **size, **dropout, **ends)
    )


# By Lightning's names, so that learners of all kinds may train in one run.
TABLE = {f"net.{name}": name.replace(".", "/") for name, _ in model().named_parameters()}


def slow(batch):
    time.sleep(STEP_S / ACCUMULATED)
    return {name: torch.stack([one[name] for one in batch]) for name in batch[0]}


def of_transformers(file, learner, folder, module=None):
    args = TrainingArguments(
        output_dir=folder, max_steps=ENDLESS, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED, learning_rate=RATE, optim="adamw_torch",
        lr_scheduler_type="constant", eval_strategy="steps", eval_steps=20, save_steps=20,
        save_total_limit=2, load_best_model_at_end=True, per_device_eval_batch_size=200,
        logging_steps=20, disable_tqdm=True, report_to=[], use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model=module or model(), args=args, train_dataset=TRAINED, eval_dataset=HELD_OUT,
        data_collator=slow,
        callbacks=[diloco.torch.transformers.DilocoCallback(file, learner=learner)],
    )  # fmt: skip
    last = get_last_checkpoint(folder) if Path(folder).is_dir() else None
    trainer.train(resume_from_checkpoint=last)


class Tiny(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()

    def training_step(self, batch):
        return self.net(**batch).loss

    def validation_step(self, batch):
        self.log("loss", self.net(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), RATE)


def of_lightning(file, learner, folder, module=None, **options):
    saves = ModelCheckpoint(folder, monitor="loss", save_last=True)
    trainer = pl.Trainer(
        max_steps=ENDLESS, accumulate_grad_batches=ACCUMULATED, val_check_interval=40,
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            saves, diloco.torch.lightning.DilocoCallback(file, learner=learner, table=TABLE),
        ], **options,
    )  # fmt: skip
    batches = DataLoader(TRAINED, BATCH, shuffle=True, collate_fn=slow)
    last = Path(folder) / "last.ckpt"
    trainer.fit(
        module or Tiny(),
        batches,
        DataLoader(HELD_OUT, 100),
        ckpt_path=last if last.exists() else None,
    )


def plain(file, learner, _folder):
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), RATE)
    with diloco.torch.join(file, learner=learner, module=module) as island:
        island.restore(optimizer)
        while not island.done:
            rng = np.random.default_rng([*learner.encode(), island.position])
            time.sleep(STEP_S)
            batch = TRAINED.tokens[rng.integers(len(TRAINED), size=BATCH * ACCUMULATED)]
            loss = module(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            island.step(loss=loss, save=optimizer)


def held_out_loss(file, module):
    diloco.torch.load(file, module)
    with torch.no_grad():
        return module(input_ids=HELD_OUT.tokens, labels=HELD_OUT.tokens).loss.item()


if __name__ == "__main__":
    match sys.argv[1:]:
        case "create", file:
            diloco.torch.create(file, model())
        case "transformers", file, learner, folder:
            of_transformers(file, learner, folder)
        case "lightning", file, learner, folder:
            of_lightning(file, learner, folder)
        case "plain", file, learner, folder:
            plain(file, learner, folder)
        case "loss", file:
            print(f"{held_out_loss(file, model()):.3f}")
        case _:
            sys.exit(__doc__)
