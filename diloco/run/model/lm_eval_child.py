"""Scores a folder of transformers by lm_eval, in a Python that has lm_eval and nothing of diloco.

    PYTHON lm_eval_child.py OUT FOLDER TASK_FILE ...

It writes one JSON object into OUT: {"figures": {TASK: {METRIC: number}}}, {"missing": MODULE} or
{"error": TEXT}. lm_eval's own tasks are not known to it, and who starts it says by the environment
that nothing is fetched.
"""

import json
import sys
from pathlib import Path
from typing import Any

BATCH = 8
# Draws for the standard errors of metrics that are no means.
BOOTSTRAP = 1000


def main() -> None:
    """Scores, and writes the result or the reason why there is none."""
    out, folder, *files = sys.argv[1:]
    said: dict[str, Any]
    try:
        said = {"figures": figures(folder, files)}
    except ModuleNotFoundError as error:
        said = {"missing": error.name}
    except Exception as error:  # noqa: BLE001 - a task file may be wrong in any way
        said = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    Path(out).write_text(json.dumps(said))


def figures(folder: str, files: list[str]) -> dict[str, dict[str, float]]:
    """Returns the figures of each task and group, by metric; a filter's name follows a metric's."""
    import lm_eval.evaluator
    import lm_eval.tasks
    import torch

    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    names = [name for file in files for name in manager.load([file])["tasks"]]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two files define the task {twice[0]!r}")
    found = lm_eval.evaluator.simple_evaluate(
        model="hf",
        model_args={"pretrained": folder, "dtype": "float32"},
        tasks=files,
        task_manager=manager,
        batch_size=BATCH,
        device="cuda" if torch.cuda.is_available() else "cpu",
        bootstrap_iters=BOOTSTRAP,
        log_samples=False,
    )
    return {
        task: {
            key.removesuffix(",none").replace(",", "_"): float(value)
            for key, value in measured.items()
            if "," in key and isinstance(value, float | int)
        }
        for task, measured in found["results"].items()
    }


if __name__ == "__main__":
    # The folder of this file has names, such as `evaluate`, that lm_eval imports of others.
    sys.path.pop(0)
    main()
