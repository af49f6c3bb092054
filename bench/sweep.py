"""The quality sweep: every case of `bench/cases.py` in virtual time, one line of JSON for each.

    .venv/bin/python -m bench.sweep --results FILE [--task language|student|transfer]
        [--only GROUP,...] [--seeds 0,1,...] [--named TEXT]

Cases that FILE has are not run again, so a sweep that was stopped goes on where it was.
"""

import argparse
import functools
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, get_args

import numpy as np

from bench import cases, emulate, loops, student, tasks
from bench.cases import Case, Inner, Kind
from diloco.common.config import RunSettings, make_config
from diloco.learner import tree
from diloco.learner.inner_step import InnerStep
from diloco.learner.task import Batch, Params, Task

# 41,000 parameters: a core takes 2.6 ms for a step over 256 bytes.
SIZE: dict[str, Any] = {"preset": "sweep", "batch": 4, "length": 64, "eval_batches": 256}
# Settings that fit the student's few tensors.
SMALL: cases.Settings = {"sync.fragments": 4, "sync.block": 16}
# Length of the schedule that every case's run is scaled to: so all share one compiled step.
SCHEDULE_STEPS = 1000


class Recipe(NamedTuple):
    """What is compiled: a task and its inner optimizer; a rate of 0 is the task's own."""

    kind: Kind
    optimizer: Inner
    rate: float

    @classmethod
    def of(cls, case: Case) -> Self:
        """A case's."""
        return cls(case.task, case.optimizer, case.rate or 0.0)


@functools.cache
def task_of(recipe: Recipe, seed: int) -> Task:
    """The task of a seed; it is measured with the functions of seed 0, which are compiled."""
    options: dict[str, Any] = {
        "optimizer": recipe.optimizer,
        "learning_rate": recipe.rate or None,
    }
    if recipe.kind == "student":
        task = student.build(steps=SCHEDULE_STEPS, seed=seed, **options)
    else:
        text = tasks.other_text() if recipe.kind == "transfer" else {}
        task = tasks.build(steps=SCHEDULE_STEPS, seed=seed, **text, **SIZE, **options)
    return task if seed == 0 else replace(task, evaluate=task_of(recipe, 0).evaluate)


@functools.cache
def _inner_step(recipe: Recipe) -> InnerStep:
    return loops.start(task_of(recipe, 0), 0).inner_step


def start_of(case: Case) -> loops.Start:
    """Where the case begins; its learning rate goes through its schedule once in its run."""
    recipe = Recipe.of(case)
    inner_step, scale = _inner_step(recipe), SCHEDULE_STEPS / case.steps()
    began = loops.start(task_of(recipe, case.seed), case.seed)

    def scaled(trained: Params, state: Any, batch: Batch, step: Any) -> tuple[Params, Any, Any]:
        return inner_step(trained, state, batch, np.float32(step * scale))

    return began._replace(inner_step=scaled)


def settings_of(case: Case) -> RunSettings:
    """The case's settings, checked as those of any run."""
    document: dict[str, Any] = {
        # Never at its end by its clock, which runs ahead of the steps of most learners.
        "run": {"name": "sweep", "steps": 2 * case.steps(), "seed": case.seed},
        "store": {"url": "/nowhere"},
    }
    for key, value in (SMALL | case.settings if case.task == "student" else case.settings).items():
        section, _, name = key.partition(".")
        document.setdefault(section, {})[name] = value
    return make_config(document, source=case.key).settings()


def run(case: Case) -> dict[str, Any]:
    """What a case came to: its loss, and for the system what `emulate.Outcome` says."""
    task, start = task_of(Recipe.of(case), case.seed), start_of(case)
    if case.data_parallel or case.alone:
        learners = 1 if case.alone else cases.LEARNERS
        loss = loops.data_parallel(
            task, steps=case.budget, seed=case.seed, learners=learners, began=start
        )
        return {"loss": loss, "share_of_tokens": 1.0}
    settings = settings_of(case)
    layout = tree.task_layout(task, settings.sync)
    outcome = emulate.emulate(settings, emulate.Start(task, layout, start), case.weather())
    tokens = case.budget * cases.LEARNERS * task.tokens_per_batch
    return outcome._asdict() | {"share_of_tokens": outcome.tokens / tokens}


def known(path: Path) -> dict[str, dict[str, Any]]:
    """Results by key; a line that a kill cut off is no result."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        found[result["key"]] = result
    return found


def _is_wanted(case: Case, options: argparse.Namespace) -> bool:
    groups = options.only.split(",") if options.only else [case.group]
    seeds = options.seeds.split(",") if options.seeds else [str(case.seed)]
    named = re.search(options.named, case.name)
    return case.group in groups and str(case.seed) in seeds and named is not None


def main() -> None:
    """Run what is not yet there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--task", default="language", choices=get_args(Kind))
    parser.add_argument("--only", default="", help="groups, joined by commas")
    parser.add_argument("--seeds", default="", help="joined by commas")
    parser.add_argument(
        "--named", default="", help="cases whose names match this, a regular expression"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    options = parser.parse_args()
    wanted = [case for case in cases.matrix(options.task) if _is_wanted(case, options)]
    there = known(options.results)
    missing = [case for case in wanted if case.key not in there]
    print(f"{len(wanted)} cases, {len(missing)} to run", flush=True)
    for case in missing:
        if options.list:
            print(case.key)
            continue
        began_s = time.perf_counter()
        result = run(case)
        line = {"key": case.key, **asdict(case), **result}
        line["cpu_s"] = round(time.perf_counter() - began_s, 1)
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{line['cpu_s']:6.1f} s  {result['loss']:.4f}  {case.key}", flush=True)


if __name__ == "__main__":
    main()
