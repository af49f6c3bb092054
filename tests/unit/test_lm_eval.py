"""`diloco evaluate --lm-eval`: what it refuses, names of metrics, and scores of one version."""

import asyncio
import sys
from pathlib import Path

import pytest
from runlab import RUN, Lab

from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError
from diloco.run.model.evaluate import keep, read_scores
from diloco.run.model.lm_eval import LmEval, beside, metric_name


def test_files_are_local_task_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yml"
    for path in (one, other):
        path.write_text("task: x\n")
    found = LmEval.of_options(f"{one}, {other}", None)
    assert found == ((one, other), sys.executable)
    (tmp_path / "one.txt").write_text("task: x\n")
    for name in ("hellaswag", f"{one},{tmp_path}/none.yaml", str(tmp_path / "one.txt"), ""):
        with pytest.raises(ConfigError, match="expected the path of a task file"):
            LmEval.of_options(name, None)


def test_names_of_metrics_are_those_of_a_score() -> None:
    assert metric_name("pick-2", "acc_stderr") == "pick_2_acc_stderr"
    for task in ("2picks", "p" * 60):
        with pytest.raises(ConfigError, match="no valid name"):
            metric_name(task, "acc")


def test_metrics_of_the_task_stay() -> None:
    assert beside({"loss": 1.0}, {"pick_acc": 0.5}) == {"loss": 1.0, "pick_acc": 0.5}
    with pytest.raises(ConfigError, match="also measures 'pick_acc'"):
        beside({"pick_acc": 1.0}, {"pick_acc": 0.5})
    with pytest.raises(ConfigError, match="too many"):
        beside({"loss": 1.0}, {f"m{index}": 0.0 for index in range(64)})


SAYS = """
import json, pathlib, sys
pathlib.Path(sys.argv[2]).write_text(json.dumps({said}))
"""


def scored(folder: Path, python: str) -> dict[str, float]:
    return LmEval((folder / "task.yaml",), python)._scored(folder / "model")


def test_a_python_without_lm_eval_is_named(tmp_path: Path) -> None:
    """The project's own environment has none: this is the real program in a real process."""
    with pytest.raises(ConfigError, match="has no lm_eval") as error:
        scored(tmp_path, sys.executable)
    assert "diloco[lm-eval]" in str(error.value.hint)


def python_that(tmp_path: Path, program: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(0o755)
    return str(path)


def test_what_the_process_says_becomes_metrics_or_a_sentence(tmp_path: Path) -> None:
    says = {"figures": {"pick": {"acc": 0.5, "acc_stderr": 0.1}}}
    found = scored(tmp_path, python_that(tmp_path, SAYS.format(said=says)))
    assert found == {"pick_acc": 0.5, "pick_acc_stderr": 0.1}
    for said, wanted in (
        ({"error": "KeyError: 'x'"}, "cannot score these tasks: KeyError"),
        ({"figures": {"pick": {}}}, "no metric"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            scored(tmp_path, python_that(tmp_path, SAYS.format(said=said)))
    (tmp_path / "scores.json").unlink()
    with pytest.raises(ConfigError, match="status 3: out of memory"):
        scored(tmp_path, python_that(tmp_path, "import sys\nprint('out of memory', file="
                                               "sys.stderr)\nsys.exit(3)\n"))  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be started"):
        scored(tmp_path, str(tmp_path / "none"))


def test_a_version_scored_twice_has_the_metrics_of_both() -> None:
    lab = Lab()
    for metrics in ({}, {"pick_acc": 0.5}, {"accuracy": 0.25}):
        score = wire.Score(
            run=RUN, epoch=0, versions=(1,), record_seqs=(2,), global_step=3, tokens=8,
            at_s=1.0, loss=2.0, metrics=metrics,
        )  # fmt: skip
        asyncio.run(keep(lab.context, score))
    (found,) = asyncio.run(read_scores(lab.context))
    assert found.metrics == {"pick_acc": 0.5, "accuracy": 0.25}
    assert found.loss == 2.0
