"""`diloco evaluate --lm-eval` beside lm_eval itself, on a real run of a tiny decoder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from token_lab import VOCABULARY, make_texts, make_tokenizer

from diloco.common.protocol.errors import ConfigError, Exit
from diloco.learner.tensors.tree import named_leaves
from diloco.models.decoders import checkpoint, model
from diloco.models.decoders.config import parse_config
from diloco.run.model import lm_eval_child
from diloco.run.model.lm_eval import LmEval
from tests.models.cases import LLAMA

PYTHON = os.environ.get("DILOCO_TEST_LM_EVAL")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs lm_eval: make test-lm-eval"),
    pytest.mark.timeout(1800),
]
LM_EVAL = ("--lm-eval-python", PYTHON, "--no-keep", "--json", "--lm-eval")
# Of two texts, which the model would rather write.
PICKS = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["(x) ", "class "]
doc_to_target: right
metric_list:
  - metric: {metric}
    aggregation: mean
    higher_is_better: true
"""


def said(*words):
    command = [sys.executable, "-m", "diloco", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def ran(*words):
    code, out, error = said(*words)
    assert code == 0, out + error
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run's folder "run", of a tiny decoder with a tokenizer, and task files."""
    place = tmp_path_factory.mktemp("lm-eval")
    config = parse_config(LLAMA | {"vocab_size": VOCABULARY}, source="")
    params = model.init_params(config, jax.random.key(3))
    arrays = {name: np.asarray(leaf) for name, leaf in named_leaves(params)}
    checkpoint.write_checkpoint(place / "model", config, arrays, file_bytes=20_000)
    make_tokenizer(place / "model")
    make_texts(place / "texts", 60)
    words = ["--tokenizer", place / "model", "--held-out", "0.2", "--out", place / "data"]
    ran("data", "prepare", place / "texts", *words)
    options = [f'model="{place / "model"}"', f'data="{place / "data"}"', "length=64", "batch=2"]
    options = [f"task.options.{option}" for option in [*options, "learning_rate=1e-2"]]
    options += ["sync.fragments=2", "sync.interval_steps=10", "sync.overlap_steps=2"]
    settings = [word for option in options for word in ("--set", option)]
    ran("local", "--steps", 60, "--task", "diloco.models.decoders:build", "--run-dir",
        place / "run", "--cpu", "--learners", 2, "--kill", "none", *settings)  # fmt: skip
    docs = [{"prompt": f"def f{index} ", "right": int(index > 1)} for index in range(8)]
    (place / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    for name, metric in (("pick", "acc"), ("pick-again", "acc_norm"), ("bad", "no_such")):
        text = PICKS.format(name=name, data=place / "docs.jsonl", metric=metric)
        (place / f"{name}.yaml").write_text(text)
    return place


def of_lm_eval(folder: Path, version: str, *names: str) -> dict[str, float]:
    """What lm_eval itself says of an exported version."""
    out = folder / f"by-hand-{version}"
    ran("export", folder / "run", out, "--format", "hf", "--version", version)
    command = [PYTHON, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--tasks",
               ",".join(str(folder / f"{name}.yaml") for name in names), "--model_args",
               f"pretrained={out},dtype=float32", "--output_path", out / "scores.json"]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(list(map(str, command)), env=environment, check=True)
    (path,) = out.rglob("scores*.json")
    found = json.loads(path.read_text())["results"]
    return {
        f"{task}_{key}".replace("-", "_").replace(",none", ""): value
        for task, figures in found.items()
        for key, value in figures.items()
        if "," in key
    }


def test_two_versions_are_scored_as_lm_eval_scores_them(folder: Path) -> None:
    files = ",".join(str(folder / f"{name}.yaml") for name in ("pick", "pick-again"))
    options = ["--lm-eval-python", PYTHON, "--json", "--lm-eval", files]
    first, later = (
        json.loads(ran("evaluate", folder / "run", "--version", version, *options))
        for version in ("0", "2")
    )
    wanted = of_lm_eval(folder, "2", "pick", "pick-again")
    assert {"pick_acc", "pick_again_acc_norm"} <= wanted.keys()
    assert {name: later["metrics"][name] for name in wanted} == pytest.approx(wanted)
    assert first["metrics"].keys() == later["metrics"].keys()
    assert first["loss"] != later["loss"]
    # They are kept beside the loss, by version, and shown where scores are.
    page = folder / "report.html"
    ran("report", folder / "run", "--out", page)
    assert "pick_acc" in page.read_text()


@pytest.fixture(scope="module")
def exported(folder):
    ran("export", folder / "run", folder / "exported", "--format", "hf")
    return folder / "exported"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("bad.yaml", "these tasks have no metric"),
        ("empty.yaml", "lm_eval cannot score these tasks"),
        ("pick.yaml,twice.yaml", "two files define the task 'pick'"),
    ],
)
def test_wrong_tasks_are_a_sentence(folder, exported, tmp_path, names, wanted):
    (folder / "empty.yaml").write_text("nothing: here\n")
    (folder / "twice.yaml").write_text((folder / "pick.yaml").read_text())
    files = ",".join(str(folder / name) for name in names.split(","))
    (tmp_path / "model").symlink_to(exported)
    with pytest.raises(ConfigError, match=wanted):
        LmEval.of_options(files, PYTHON)._scored(tmp_path / "model")


def test_a_model_without_a_tokenizer_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    hidden = list((folder / "model").glob("tokenizer*"))
    for path in hidden:
        path.rename(tmp_path / path.name)
    try:
        code, _, error = said("evaluate", folder / "run", *LM_EVAL, folder / "pick.yaml")
    finally:
        for path in hidden:
            (tmp_path / path.name).rename(path)
    assert code == Exit.CONFIG
    assert "the run's model has no tokenizer" in error


def test_the_other_python_needs_nothing_of_ours() -> None:
    imported = [line for line in Path(lm_eval_child.__file__).read_text().splitlines()
                if line.strip().startswith(("import ", "from "))]  # fmt: skip
    assert not any("diloco" in line for line in imported)
