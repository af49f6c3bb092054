"""docs/continue.md, command by command, on a tiny checkpoint: from files to a chat."""

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

from diloco.learner.causal_lm import checkpoint, model
from diloco.learner.causal_lm.config import parse_config
from diloco.learner.task import named_leaves
from tests.models.cases import LLAMA

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "continue.md").read_text()
ORACLE = os.environ.get("DILOCO_TEST_ORACLE")
# What is smaller here than on the page.
OPTIONS = {"length": 64, "batch": 4, "learning_rate": 3e-3, "eval_batches": 4, "dtype": "float32"}
SMALLER = {
    "prepare": ["--held-out", "0.2"],
    "local": ["--cpu", "--kill", "none"],
}


def page_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    """What the page wants: a checkpoint, documents and the file of the run."""
    make_texts(tmp_path / "documents", 60)
    config = parse_config(LLAMA | {"vocab_size": VOCABULARY}, source="")
    params = model.init_params(config, jax.random.key(3))
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(params)}
    checkpoint.write_checkpoint(tmp_path / "checkpoint", config, arrays, file_bytes=20_000)
    make_tokenizer(tmp_path / "checkpoint")
    (text,) = page_blocks("toml")
    document = tomllib.loads(text)
    document["run"]["steps"] = 60
    document["task"]["options"] |= OPTIONS
    document["sync"] |= {"fragments": 2, "interval_steps": 10, "overlap_steps": 2}
    (tmp_path / "continue.toml").write_text(tomli_w.dumps(document))
    (code,) = page_blocks("python")
    (tmp_path / "chat").write_text(code)
    return tmp_path


def run_command(words: list[str], folder: Path, given: str = "") -> str:
    done = subprocess.run(
        words, cwd=folder, input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_page_leads_from_files_to_a_chat(folder):
    said = {}
    for line in "".join(page_blocks("sh")).splitlines():
        program, *words = shlex.split(line)
        assert program == "diloco"
        if words[:2] == ["data", "copy"]:
            continue
        name = words[1] if words[0] == "data" else words[0]
        command = [sys.executable, "-m", "diloco", *words, *SMALLER.get(name, [])]
        said[name] = run_command(command, folder)
    assert list(said) == ["prepare", "check", "task", "local", "export"]
    assert "vocabulary 320" in said["prepare"]
    assert said["check"] == said["prepare"]
    assert "a learner would take it" in said["task"]
    [(before, after)] = re.findall(r"held-out loss ([\d.]+) → ([\d.]+)", said["local"])
    assert float(after) < float(before) - 0.5
    names = {path.name for path in (folder / "continued").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    if ORACLE:
        talk = run_command([ORACLE, "chat"], folder, "def abc\nclass\n")
        assert talk.startswith("def abc")
        assert "\nclass" in talk
