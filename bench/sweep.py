"""The quality sweep: every case of the matrix in virtual time, one line of JSON for each.

    .venv/bin/python -m bench.sweep --results FILE [--task language|student|transfer|skills]
        [--only GROUP,...] [--seeds 0,1,...] [--named TEXT]

Cases that FILE has are not run again, so a sweep that was stopped goes on where it was.

A case is a plain record. A budget is in inner steps of one learner of `LEARNERS` equal ones: every
case of a budget trains over the same tokens. A fleet that is slower gets a longer run for it, and
its learning rate follows that run.

Of the task "skills", which is language with exercises (`diloco/models/bytes_lm/skills.py`), a line
also has loss and exact answers before and after the same short data-parallel fine-tuning.
"""

import argparse
import functools
import json
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np

from bench import emulate, tasks
from bench.emulate import LifeSpan, Weather
from bench.quality import DataParallel
from diloco.common.process.config import RunSettings, make_config
from diloco.learner.task import Batch, Params, Task, scores
from diloco.learner.tensors import tree
from diloco.learner.tensors.inner_step import InnerStep

# --- The matrix


LEARNERS = 4
BUDGETS = (120, 360, 1080, 3240)
MIDDLE, LONG = BUDGETS[1:3]
PROOF_SEEDS = tuple(range(8))
SEEDS = {
    "language": (0, 1, 2),
    "student": tuple(range(6)),
    "transfer": (0, 1, 2),
    "skills": PROOF_SEEDS,
}
# Cases of the proof that are run with every seed before the others.
FIRST = 5
UNEQUAL = (1.0, 1.0, 0.5, 0.25)
# Of the kills: a learner lives for so many steps on average, and is away for so many.
LIFE_STEPS, AWAY_STEPS = 200.0, 20.0
# Steps that die with a learner beside half an interval: those of the update that travels.
TRAVEL_STEPS = 1.0
EXTRA = (0.25, 0.5, 1.0, 3.0)

Kind = Literal["language", "student", "transfer", "skills"]
Inner = Literal["adamw", "muon"]
Fleet = Literal["equal", "unequal", "kills", "scavenging"]
Settings = dict[str, Any]

SYNCHRONOUS: Settings = {
    "sync.mode": "lockstep",
    "sync.fragments": 1,
    "sync.overlap_steps": 0,
    "sync.codec": "float32",
    "sync.delta_codec": "float32",
    "quorum.min_learners": LEARNERS,
}
# Four times the defaults' bytes: what a link carries that is not slow.
CLOSE: Settings = {
    "sync.interval_steps": 6,
    "sync.fragments": 6,
    "sync.min_steps": 3,
    "sync.overlap_steps": 4,
}
# Shares of the steps behind an update that stay when a version has it.
BLENDS = (0.5, 0.7, 0.85)
INT2: Settings = {"sync.codec": "int2", "sync.delta_codec": "int2"}
FLOAT32: Settings = {"sync.codec": "float32", "sync.delta_codec": "float32"}


@dataclass(frozen=True, kw_only=True)
class SweepCase:
    """One run.

    Attributes:
        group: the table it belongs to; `name`: its row.
        budget: inner steps of each of `LEARNERS` equal learners.
        data_parallel: no system: one learner with all batches in one.
        alone: no system: one learner with its own batches.
        optimizer: of the learners.
        rate: their peak rate; the task's for this optimizer, if None.
        settings: "section.key" -> value, on top of the defaults.
        latency_steps: that a message travels.
        extra: of scavenging: learners that join at half of the tokens, as a share of the others.
        checkpoint_steps: own steps between two checkpoints of the inner optimizer; 0 for none.
        task: what is trained.
    """

    group: str
    name: str
    budget: int
    seed: int
    data_parallel: bool = False
    alone: bool = False
    optimizer: Inner = "adamw"
    rate: float | None = None
    settings: Settings = field(default_factory=dict)
    fleet: Fleet = "equal"
    latency_steps: float = 0.5
    extra: float = 0.0
    checkpoint_steps: int = 60
    task: Kind = "language"

    @property
    def key(self) -> str:
        """Names the case in a file of results."""
        return f"{self.task}/{self.group}/{self.name}/{self.budget}/{self.seed}"

    def weather(self) -> Weather:
        """The weather of the case's learners."""
        latency = 0.0 if self.settings.get("sync.mode") == "lockstep" else self.latency_steps
        return Weather(
            self._speeds(),
            latency_steps=latency,
            lives=self._lives(),
            checkpoint_steps=self.checkpoint_steps,
            stop_steps=self.budget * LEARNERS,
        )

    def steps(self) -> int:
        """Length of its run on the global clock, so that the fleet trains over its tokens."""
        if self.fleet == "scavenging":
            return round(self.budget * expected_time(self.extra))
        if self.fleet == "kills":
            lost = self.settings.get("sync.interval_steps", 24) / 2 + TRAVEL_STEPS
            return _steps_until(self.budget * LEARNERS, self._lives(), lost)
        return round(self.budget * LEARNERS / sum(self._speeds()))

    def _speeds(self) -> tuple[float, ...]:
        if self.fleet == "unequal":
            return UNEQUAL
        return (1.0,) * round(LEARNERS * (1 + self.extra))

    def _lives(self) -> tuple[tuple[LifeSpan, ...], ...]:
        always = ((LifeSpan(),),) * LEARNERS
        if self.fleet == "kills":
            rng = np.random.default_rng([self.seed, self.budget])
            return tuple(_drawn_lives(rng, 2.0 * self.budget) for _ in range(LEARNERS))
        if self.fleet == "scavenging":
            joined = (LifeSpan(self.budget / 2),)
            return always + (joined,) * round(LEARNERS * self.extra)
        return ()


def expected_time(extra: float) -> float:
    """Time of a run, as a share, whose fleet grows by `extra` at half of its tokens."""
    return 0.5 + 0.5 / (1 + extra)


def _drawn_lives(rng: np.random.Generator, until_s: float) -> tuple[LifeSpan, ...]:
    """A learner's lives, from a Poisson process of kills and exponential times away."""
    lives, now_s = [], 0.0
    while now_s < until_s:
        ends_s = now_s + rng.exponential(LIFE_STEPS)
        lives.append(LifeSpan(now_s, ends_s))
        now_s = ends_s + rng.exponential(AWAY_STEPS)
    return tuple(lives)


def _steps_until(wanted: float, lives: tuple[tuple[LifeSpan, ...], ...], lost: float) -> int:
    """Virtual time by which learners at full speed have taken so many steps that count.

    With each learner that is killed `lost` steps die, on average over fragments.
    """
    done, step = 0.0, 0
    ends = sorted(life.until_s for learner in lives for life in learner)
    while done < wanted:
        alive = sum(life.from_s <= step < life.until_s for learner in lives for life in learner)
        killed = sum(step <= end < step + 1 for end in ends)
        done += alive - lost * killed
        step += 1
    return step


def main_cases(budget: int, seed: int) -> list[SweepCase]:
    """The five systems that are compared at every budget."""

    def case(name: str, **fields: Any) -> SweepCase:
        return SweepCase(group="main", name=name, budget=budget, seed=seed, **fields)

    return [
        case("data-parallel", data_parallel=True),
        case("synchronous", settings=SYNCHRONOUS),
        case("uniform"),
        case("unequal", fleet="unequal"),
        case("kills", fleet="kills"),
    ]


def proof(budget: int, seed: int) -> list[SweepCase]:
    """Muon inside against both data-parallel baselines, the case that carries the claim first."""

    def case(name: str, optimizer: Inner = "muon", **fields: Any) -> SweepCase:
        return SweepCase(
            group="proof", name=name, budget=budget, seed=seed, optimizer=optimizer, **fields
        )

    # An update and its version travel in three messages: two steps of a learner a whole H.
    late: Settings = CLOSE | {"sync.overlap_steps": 6}
    near: Settings = CLOSE | {"sync.overlap_steps": 2}
    return [
        case("adamw, data-parallel", "adamw", data_parallel=True),
        case("data-parallel", data_parallel=True),
        case("kills", settings=CLOSE, fleet="kills"),
        case("equal", settings=CLOSE),
        case("unequal, tau = 2", settings=near, fleet="unequal"),
        case("kills, tau = 2", settings=near, fleet="kills"),
        case("equal, tau = 2", settings=near),
        case("nesterov 0.5/0.5, kills", settings=CLOSE | outer("nesterov 0.5/0.5"), fleet="kills"),
        case("unequal", settings=CLOSE, fleet="unequal"),
        case("no latency", settings=CLOSE, latency_steps=0.0),
        case("a travel of H", settings=late, latency_steps=2.0),
        *(
            case(
                f"a travel of H, blend {share}",
                settings=late | {"sync.adopt": "blend", "sync.blend": share},
                latency_steps=2.0,
            )
            for share in BLENDS
        ),
        *(
            case(
                f"{fleet}, tau = 2, blend {share}",
                settings=near | {"sync.adopt": "blend", "sync.blend": share},
                fleet=fleet,
            )
            for share in BLENDS
            for fleet in ("kills", "equal", "unequal")
        ),
        case("adamw, kills", "adamw", settings=CLOSE, fleet="kills"),
        case("H = 24, kills", fleet="kills"),
        case("synchronous, H = 6", settings=SYNCHRONOUS | {"sync.interval_steps": 6}),
        case("alone", alone=True),
    ]


def skills(budget: int, seed: int) -> list[SweepCase]:
    """Data-parallel training beside the system, of loss and skills, the most telling first."""
    near: Settings = CLOSE | {"sync.overlap_steps": 2}

    def case(name: str, optimizer: Inner = "muon", **fields: Any) -> SweepCase:
        return SweepCase(
            group="skills", name=name, budget=budget, seed=seed, optimizer=optimizer, **fields
        )

    return [
        case("data-parallel", data_parallel=True),
        case("kills, tau = 2", settings=near, fleet="kills"),
        case("equal, tau = 2", settings=near),
        case("adamw, data-parallel", "adamw", data_parallel=True),
        case("adamw, H = 24, kills", "adamw", fleet="kills"),
    ]


def rates(kind: Kind) -> list[SweepCase]:
    """Peak rates of each inner optimizer, in data-parallel and in the system."""
    choices = {"adamw": (4e-3, 8e-3, 1.6e-2), "muon": (4e-3, 8e-3, 1.6e-2, 3.2e-2)}
    return [
        SweepCase(
            group="rates",
            name=f"{optimizer}, {system}, {rate:g}",
            budget=LONG if kind != "student" else MIDDLE,
            seed=0,
            optimizer=optimizer,
            rate=rate,
            data_parallel=system == "data-parallel",
            settings={} if system == "data-parallel" else CLOSE,
        )
        for system in ("data-parallel", "system")
        for optimizer in get_args(Inner)
        for rate in choices[optimizer]
    ]


def outer_cases(seed: int) -> list[SweepCase]:
    """Outer optimizers and merges, of this system and of synchronous DiLoCo."""
    choices: dict[str, Settings] = {
        f"{merge} {text}": {"outer.merge": merge, **outer(text)}
        for merge, texts in {
            "rda": (
                "sgd 0.7",
                "sgd 0.9",
                "sgd 1.1",
                "nesterov 0.4/0.5",
                "nesterov 0.6/0.3",
                "nesterov 0.3/0.8",
                "nesterov 0.7/0.9",
            ),
            "average": ("sgd 1.0", "sgd 1.3", "nesterov 0.9/0.3", "nesterov 0.7/0.5"),
        }.items()
        for text in texts
    }
    cases = [
        SweepCase(group="outer", name=name, budget=MIDDLE, seed=seed, settings=settings)
        for name, settings in choices.items()
    ]
    lockstep = ("average sgd 1.0", "average nesterov 0.9/0.3", "average nesterov 0.7/0.9")
    choices["average nesterov 0.7/0.9"] = {"outer.merge": "average", **outer("nesterov 0.7/0.9")}
    return cases + [
        SweepCase(
            group="outer",
            name=f"synchronous, {name}",
            budget=MIDDLE,
            seed=seed,
            settings=SYNCHRONOUS | choices[name],
        )
        for name in lockstep
    ]


def outer(text: str) -> Settings:
    """Settings of "nesterov rate/momentum" or "sgd rate"."""
    optimizer, _, numbers = text.partition(" ")
    rate, _, momentum = numbers.partition("/")
    settings: Settings = {"outer.optimizer": optimizer, "outer.learning_rate": float(rate)}
    return settings | ({"outer.momentum": float(momentum)} if momentum else {})


def ablations(seed: int) -> list[SweepCase]:
    """One thing changed at a time, at the middle budget; the rows that are not changed are main's.

    An overlap is what an update and its version travel together, in three messages.
    """

    def case(group: str, name: str, settings: Settings, **fields: Any) -> SweepCase:
        return SweepCase(
            group=group, name=name, budget=MIDDLE, seed=seed, settings=settings, **fields
        )

    overwrite: Settings = {"sync.adopt": "overwrite"}
    short, whole = 2 / 3, 23 / 3
    late: Settings = {"sync.overlap_steps": 24}
    share: Settings = {"outer.participation": True}
    return [
        case("codec", "float32 both ways", FLOAT32),
        case("codec", "int8 both ways", {"sync.codec": "int8", "sync.delta_codec": "int8"}),
        case("codec", "int4 up, float32 down", {"sync.delta_codec": "float32"}),
        case("codec", "int2 both ways", INT2),
        case("codec", "int2 up, int4 down", {"sync.codec": "int2"}),
        case("overlap", "rebase, at once", {}, latency_steps=0.0),
        case("overlap", "rebase, 2 steps", {}, latency_steps=short),
        case("overlap", "overwrite, 2 steps", overwrite, latency_steps=short),
        case("overlap", "rebase, H steps", late, latency_steps=whole),
        case("overlap", "overwrite, H steps", overwrite | late, latency_steps=whole),
        case("merge", "average", {"outer.merge": "average"}),
        case("participation", "unequal", share, fleet="unequal"),
        case("participation", "kills", share, fleet="kills"),
        case("interval", "H = 6", {"sync.interval_steps": 6, "sync.fragments": 6}),
        case("interval", "H = 12", {"sync.interval_steps": 12}),
        case("interval", "H = 48", {"sync.interval_steps": 48}),
        case("interval", "H = 6 for a tenth", {"sync.warmup_steps": MIDDLE // 10}),
        case("interval", "H = 6 for a quarter", {"sync.warmup_steps": MIDDLE // 4}),
        case("fragments", "P = 1", {"sync.fragments": 1}),
        case("fragments", "P = 4", {"sync.fragments": 4}),
        case("fragments", "synchronous, P = 4", SYNCHRONOUS | {"sync.fragments": 4}),
        case("grace", "tau = 4", {"sync.overlap_steps": 4}),
        case("grace", "tau = 8", {"sync.overlap_steps": 8}),
        case("recovery", "kills, no checkpoints", {}, fleet="kills", checkpoint_steps=0),
        case("staleness", "unequal, constant", {"staleness.rule": "constant"}, fleet="unequal"),
    ]


def long_cases(seed: int) -> list[SweepCase]:
    """Cases that could make long runs better, or tell why they are not."""
    overwrite: Settings = {"sync.adopt": "overwrite"}
    choices: dict[str, tuple[Settings, dict[str, Any]]] = {
        "overwrite": (overwrite, {}),
        "overwrite, kills": (overwrite, {"fleet": "kills"}),
        "overwrite, unequal": (overwrite, {"fleet": "unequal"}),
        "rebase, at once": ({}, {"latency_steps": 0.0}),
        "float32 both ways": (FLOAT32, {}),
        "quorum of all": ({"quorum.min_learners": LEARNERS}, {}),
        "tau = 4": ({"sync.overlap_steps": 4}, {}),
        "tau = 4, unequal": ({"sync.overlap_steps": 4}, {"fleet": "unequal"}),
        "tau = 4, kills": ({"sync.overlap_steps": 4}, {"fleet": "kills"}),
        "nesterov 0.4/0.5": (outer("nesterov 0.4/0.5"), {}),
        "synchronous, nesterov 0.4/0.5": (SYNCHRONOUS | outer("nesterov 0.4/0.5"), {}),
    }
    return [
        SweepCase(group="long", name=name, budget=LONG, seed=seed, settings=settings, **fields)
        for name, (settings, fields) in choices.items()
    ]


def scavenging(seed: int) -> list[SweepCase]:
    """Learners that join at half of the tokens."""
    return [
        SweepCase(
            group="scavenging",
            name=f"+{extra:.0%}",
            budget=MIDDLE,
            seed=seed,
            fleet="scavenging",
            extra=extra,
        )
        for extra in (0.0, *EXTRA)
    ]


def matrix(task: Kind) -> list[SweepCase]:
    """All cases of a task, the most telling first."""
    if task == "skills":
        return [replace(c, task=task) for seed in PROOF_SEEDS for c in skills(2 * LONG, seed)]
    seeds, cases = SEEDS[task], rates(task)
    proofs = [proof(LONG, seed) for seed in PROOF_SEEDS]
    for part in (slice(0, FIRST), slice(FIRST, None)):
        cases += [case for proof in proofs for case in proof[part]]
    if task == "transfer":
        return [replace(case, task=task) for case in cases]
    for budget in (MIDDLE, LONG, BUDGETS[0]):
        for seed in seeds:
            cases += main_cases(budget, seed)
    for seed in seeds:
        cases += scavenging(seed) + ablations(seed)
    for seed in seeds:
        cases += outer_cases(seed)
    for seed in seeds:
        cases += long_cases(seed)
    for seed in seeds[:3]:
        cases += main_cases(BUDGETS[-1], seed)
    return [replace(case, task=task) for case in cases]


# --- Running it


# 41,000 parameters: a core takes 2.6 ms for a step over 256 bytes.
LANGUAGE_OPTIONS: dict[str, Any] = {
    "preset": "sweep",
    "batch": 4,
    "length": 64,
    "eval_batches": 256,
}
# Of the task "skills": the share of rows that are exercises; and of its fine-tuning, which is on
# other batches, with a new AdamW, by all learners' batches in one.
SKILLS_SHARE = 0.75
TUNING_SHARE, TUNING_STEPS, TUNING_RATE, TUNING_SEED = 1.0, 120, 2e-3, 1000
# Settings that fit the student's few tensors.
STUDENT_SETTINGS: Settings = {"sync.fragments": 4, "sync.block": 16}
# Length of the schedule that every case's run is scaled to: so all share one compiled step.
SCHEDULE_STEPS = 1000


class Recipe(NamedTuple):
    """A task and its inner optimizer, to compile; a rate of 0 is the task's own.

    `skills`: the share of rows that are exercises.
    """

    kind: Kind
    optimizer: Inner
    rate: float
    skills: float = 0.0

    @classmethod
    def of(cls, case: SweepCase) -> Self:
        """A case's."""
        share = SKILLS_SHARE if case.task == "skills" else 0.0
        return cls(case.task, case.optimizer, case.rate or 0.0, share)


@functools.cache
def task_of(recipe: Recipe, seed: int) -> Task:
    """The task of a seed; it is measured with the functions of seed 0, which are compiled."""
    options: dict[str, Any] = {
        "optimizer": recipe.optimizer,
        "learning_rate": recipe.rate or None,
    }
    if recipe.skills:
        options["skills"] = recipe.skills
    if recipe.kind == "student":
        task = tasks.student(steps=SCHEDULE_STEPS, seed=seed, **options)
    else:
        text = tasks.other_text() if recipe.kind == "transfer" else {}
        task = tasks.build(steps=SCHEDULE_STEPS, seed=seed, **text, **LANGUAGE_OPTIONS, **options)
    return task if seed == 0 else replace(task, evaluate=task_of(recipe, 0).evaluate)


@functools.cache
def _inner_step(recipe: Recipe) -> InnerStep:
    return emulate.first(task_of(recipe, 0), 0).inner_step


def start_of(case: SweepCase) -> emulate.Begun:
    """The start of a case; its learning rate goes through its schedule once in its run."""
    recipe = Recipe.of(case)
    began = emulate.first(task_of(recipe, case.seed), case.seed)
    return began._replace(inner_step=_scaled(recipe, case.steps()))


def _scaled(recipe: Recipe, steps: int) -> InnerStep:
    """The inner step of a run of so many steps."""
    inner_step, scale = _inner_step(recipe), SCHEDULE_STEPS / steps

    def scaled(trained: Params, state: Any, batch: Batch, step: Any) -> tuple[Params, Any, Any]:
        return inner_step(trained, state, batch, np.float32(step * scale))

    return scaled


def settings_of(case: SweepCase) -> RunSettings:
    """The case's settings, checked as those of any run."""
    document: dict[str, Any] = {
        # Never at its end by its clock, which runs ahead of the steps of most learners.
        "run": {"name": "sweep", "steps": 2 * case.steps(), "seed": case.seed},
        "store": {"url": "/nowhere"},
    }
    for key, value in (
        STUDENT_SETTINGS | case.settings if case.task == "student" else case.settings
    ).items():
        section, _, name = key.partition(".")
        document.setdefault(section, {})[name] = value
    return make_config(document, source=case.key).settings()


def run(case: SweepCase) -> dict[str, Any]:
    """Run a case: its loss, and for the system the fields of `emulate.RunOutcome`."""
    task, start = task_of(Recipe.of(case), case.seed), start_of(case)
    if case.data_parallel or case.alone:
        learners = 1 if case.alone else LEARNERS
        parallel = DataParallel(task, start, learners, case.budget)
        result = {"loss": parallel.run(), "share_of_tokens": 1.0}
        return result | (_skills_of(case, parallel.params) if case.task == "skills" else {})
    settings = settings_of(case)
    layout = tree.task_layout(task, settings.sync)
    world = emulate.World(settings, emulate.Start(task, layout, start), case.weather())
    outcome = world.run()
    assert outcome is not None
    tokens = case.budget * LEARNERS * task.tokens_per_batch
    result = outcome._asdict() | {"share_of_tokens": outcome.tokens / tokens}
    return result | (_skills_of(case, world.view()) if case.task == "skills" else {})


def _skills_of(case: SweepCase, trained: Params) -> dict[str, Any]:
    """Loss and exact answers of each skill, before and after the fine-tuning."""
    recipe = Recipe("skills", "adamw", TUNING_RATE, TUNING_SHARE)
    task = task_of(recipe, 0)
    before = scores(task.evaluate(trained))
    drawn = task_of(recipe, TUNING_SEED + case.seed)
    began = emulate.Begun(trained, _scaled(recipe, TUNING_STEPS))
    tuned = DataParallel(drawn, began, LEARNERS, TUNING_STEPS)
    tuned.run()
    after = scores(task.evaluate(tuned.params))
    return {"before": before._asdict(), "after": after._asdict()}


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


def _is_wanted(case: SweepCase, options: argparse.Namespace) -> bool:
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
    wanted = [case for case in matrix(options.task) if _is_wanted(case, options)]
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
