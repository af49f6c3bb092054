"""The walk-throughs, command by command, on a tiny checkpoint: from files to a chat."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import tomli_w
from token_lab import VOCABULARY, make_texts, make_tokenizer

from diloco.learner.tensors.tree import named_leaves
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import parse_config
from tests.models import tiny
from tests.models.cases import LLAMA

ROOT = Path(__file__).parents[2]
WHOLE, _, ADAPTERS = (ROOT / "docs" / "continue.md").read_text().partition("## Adapters (LoRA)")
TOKENS = WHOLE[WHOLE.index("## Make tokens") : WHOLE.index("## Try the task")]
PAGES = {"continue": WHOLE, "adapters": TOKENS + ADAPTERS}
ORACLE = os.environ.get("DILOCO_TEST_ORACLE")
# What is smaller here than on the page.
OPTIONS = {"length": 64, "batch": 4, "learning_rate": 3e-3, "eval_batches": 4, "dtype": "float32"}
SMALLER = {
    "prepare": ["--held-out", "0.2"],
    "local": ["--cpu"],
}


def page_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def make_folder(tmp_path: Path, page: str, file: str) -> None:
    """Makes the folder of a walk-through: a checkpoint, documents and the file of the run."""
    make_texts(tmp_path / "documents", 60)
    config = parse_config(LLAMA | {"vocab_size": VOCABULARY}, source="")
    params = model.init_params(config, jax.random.key(3))
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(params)}
    checkpoint.write_checkpoint(tmp_path / "checkpoint", config, arrays, file_bytes=20_000)
    make_tokenizer(tmp_path / "checkpoint")
    (text,) = page_blocks(page, "toml")
    document = tomllib.loads(text)
    document["run"]["steps"] = 60
    document["task"]["options"] |= OPTIONS
    document["sync"] = {"fragments": 2, "interval_steps": 10, "overlap_steps": 2}
    (tmp_path / file).write_text(tomli_w.dumps(document))
    (code,) = page_blocks(page, "python")
    (tmp_path / "chat").write_text(code)


def run_command(words: list[str], folder: Path, given: str = "") -> str:
    done = subprocess.run(
        words, cwd=folder, input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def follow(page: str, folder: Path) -> dict[str, str]:
    """Run a walk-through's commands; what each said, the last of its name."""
    said = {}
    for line in "".join(page_blocks(page, "sh")).splitlines():
        program, *words = shlex.split(line)
        assert program == "diloco"
        if words[:2] == ["data", "copy"]:
            continue
        name = "task" if words[-1].endswith(".toml") else words[words[0] == "data"]
        command = [sys.executable, "-m", "diloco", *words, *SMALLER.get(name, [])]
        said[name] = run_command(command, folder)
    return said


def assert_chats(folder: Path) -> None:
    if ORACLE:
        talk = run_command([ORACLE, "chat"], folder, "def abc\nclass\n")
        assert talk.startswith("def abc")
        assert "\nclass" in talk


@pytest.mark.long
def test_the_page_leads_from_files_to_a_chat(tmp_path):
    make_folder(tmp_path, "continue", "continue.toml")
    said = follow("continue", tmp_path)
    assert list(said) == ["prepare", "check", "task", "local", "export"]
    assert "vocabulary 320" in said["prepare"]
    assert said["check"] == said["prepare"]
    assert "a learner would take it" in said["task"]
    [(before, after)] = re.findall(r"held-out loss ([\d.]+) → ([\d.]+)", said["local"])
    assert float(after) < float(before) - 0.5
    assert "killed" not in said["local"], "who trains a run of their own has not asked for it"
    names = {path.name for path in (tmp_path / "continued").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert_chats(tmp_path)


@pytest.mark.long
def test_the_page_of_adapters_leads_from_files_to_a_chat(tmp_path):
    make_folder(tmp_path, "adapters", "adapt.toml")
    said = follow("adapters", tmp_path)
    assert list(said) == ["prepare", "check", "task", "local", "export"]
    assert "never sent" in said["task"]
    [(before, after)] = re.findall(r"held-out loss ([\d.]+) → ([\d.]+)", said["local"])
    assert float(after) < float(before) - 0.05
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not (tmp_path / "adapter" / "config.json").exists()
    config, rows = tiny.open_folder(tmp_path / "merged")
    first = tiny.open_folder(tmp_path / "checkpoint")[1]
    assert np.abs(np.asarray(rows["layers/q"]) - np.asarray(first["layers/q"])).max() > 1e-3
    np.testing.assert_allclose(np.asarray(rows["embed"]), np.asarray(first["embed"]), rtol=2**-8)
    assert config.vocab == VOCABULARY
    assert_chats(tmp_path)
