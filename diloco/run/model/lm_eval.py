"""`diloco evaluate --lm-eval`: scores of lm_eval's tasks beside the loss, of each scored version.

The version is written as a folder of transformers, and lm_eval reads it in a process of its own: a
Python that may have other versions of everything, torch among it, than this one.
"""

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from diloco.common.process.config.environment import environment_with
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.wire import METRIC_NAME, MOST_METRICS
from diloco.common.storage.tape import RunContext

if TYPE_CHECKING:
    import numpy as np

    from diloco.learner.task import Task

OPTION = "--lm-eval"
CHILD = Path(__file__).with_name("lm_eval_child.py")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
ENDINGS = (".yaml", ".yml")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}


class LmEval(NamedTuple):
    """The tasks that lm_eval scores, and the Python that runs it.

    Attributes:
        files: task files of lm_eval, YAML; each defines a task or a group.
        python: the Python that has `lm_eval[hf]`.
    """

    files: tuple[Path, ...]
    python: str

    @classmethod
    def of_options(cls, tasks: str, python: str | None) -> Self:
        """Reads the options of the command.

        Args:
            tasks: paths of task files, joined by commas.
            python: path of a Python; None: this process's.

        Raises:
            ConfigError: one of the paths is no YAML file.
        """
        files = tuple(Path(name.strip()) for name in tasks.split(","))
        for path in files:
            if path.suffix not in ENDINGS or not path.is_file():
                raise ConfigError(
                    f"{OPTION} {str(path)!r}: expected the path of a task file of lm_eval (YAML)",
                    hint="names of lm_eval's own tasks are not taken, since their data would be "
                    "fetched: write a file with dataset_path: json and your data's path",
                )
        return cls(tuple(path.resolve() for path in files), python or sys.executable)

    async def measure(
        self,
        context: RunContext,
        task: "Task",
        views: Sequence["np.ndarray"],
        records: Sequence[wire.AnyRecord],
    ) -> dict[str, float]:
        """Returns metrics of the model that views make, by names that `metric_name` gives.

        Args:
            context: the run's context.
            task: the run's task.
            views: a view of each fragment, float32 [elements], in order of fragments.
            records: the records that made the views.

        Raises:
            ConfigError: the task writes no folder of transformers, or one without a tokenizer;
                lm_eval is not installed, or cannot score a task.
        """
        from diloco.learner.task import MergedFiles
        from diloco.run.model.files import write_model

        require_decoder(context, task)
        with tempfile.TemporaryDirectory(prefix="diloco-lm-eval-") as place:
            folder = Path(place) / "model"
            await write_model(
                folder,
                "hf",
                context,
                dict(enumerate(views)),
                dict(enumerate(records)),
                merge=isinstance(task.files, MergedFiles),
            )
            if not any((folder / name).exists() for name in TOKENIZERS):
                raise ConfigError(
                    f"{OPTION}: the run's model has no tokenizer, and lm_eval's tasks are text",
                    hint="put tokenizer.json and tokenizer_config.json into the folder that "
                    "task.options.model names",
                )
            return await asyncio.to_thread(self._scored, folder)

    def _scored(self, folder: Path) -> dict[str, float]:
        out, cache = folder.with_name("scores.json"), folder.with_name("datasets")
        words = [self.python, str(CHILD), str(out), str(folder), *map(str, self.files)]
        try:
            done = subprocess.run(  # noqa: S603 - the user's own Python and files
                words,
                env=environment_with(OFFLINE | {"HF_DATASETS_CACHE": str(cache)}),
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise ConfigError(
                f"--lm-eval-python {self.python!r} cannot be started: {error.strerror}",
                hint="give the path of a Python that has lm_eval[hf]",
            ) from error
        if not out.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ConfigError(f"{OPTION}: lm_eval ended with status {done.returncode}: {last}")
        return _metrics(json.loads(out.read_text()), self.python)


def require_decoder(context: RunContext, task: "Task") -> None:
    """Checks that the run's task writes folders of transformers.

    Raises:
        ConfigError: it does not.
    """
    if task.files is None:
        raise ConfigError(
            f"{OPTION}: the run's task, {context.settings.task.build!r}, writes no folder that "
            "transformers reads",
            hint="diloco.models.decoders:build does; score another model in Task.evaluate",
        )


def _metrics(said: Mapping[str, dict[str, dict[str, float]]], python: str) -> dict[str, float]:
    if "missing" in said:
        raise ConfigError(
            f"{OPTION}: {python} has no {said['missing']}",
            hint="pip install 'diloco[lm-eval]', or name a Python that has lm_eval[hf] by "
            "--lm-eval-python",
        )
    if "error" in said:
        raise ConfigError(
            f"{OPTION}: lm_eval cannot score these tasks: {said['error']}",
            hint="lm_eval validate says more of a task file; data must be local files",
        )
    found = {
        metric_name(task, metric): value
        for task, measured in said["figures"].items()
        for metric, value in measured.items()
    }
    if not found:
        raise ConfigError(f"{OPTION}: these tasks have no metric", hint="see metric_list")
    return found


def metric_name(task: str, metric: str) -> str:
    """Returns the name of a task's metric in a score, such as "arith_acc" or "arith_acc_stderr".

    Raises:
        ConfigError: the two give no valid name.
    """
    name = re.sub(r"[^a-zA-Z0-9_]", "_", f"{task}_{metric}")
    if re.fullmatch(METRIC_NAME, name) is None:
        raise ConfigError(
            f"{OPTION}: the metric {name!r} has no valid name",
            hint="rename the task: a letter first, and at most 50 letters, digits and _ in all",
        )
    return name


def beside(figures: dict[str, float], found: dict[str, float]) -> dict[str, float]:
    """Returns a task's own figures and those of lm_eval together.

    Raises:
        ConfigError: both have a metric of one name, or there are too many.
    """
    both = sorted(figures.keys() & found.keys())
    if both or len(figures) + len(found) > MOST_METRICS:
        what = f"the run's task also measures {both[0]!r}" if both else "these are too many metrics"
        raise ConfigError(
            f"{OPTION}: {what}",
            hint=f"rename lm_eval's task; a score has at most {MOST_METRICS} metrics",
        )
    return figures | found
