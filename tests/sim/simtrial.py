"""Derives a simulation from a seed: the run's settings, the kinds of faults, their frequency.

Each kind of fault has its own random numbers, so leaving out a kind does not change the others.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from simadmission import LIAR_INDEX
from simchain import Violation
from simfault_rates import Faults
from simworld import World

# Kinds of faults of single operations, with the greatest probability of each.
OPERATIONS = {
    "delay": 1.0,
    "lost_request": 0.2,
    "lost_answer": 0.2,
    "late_request": 0.1,
    "duplicate": 0.2,
    "redelivered": 0.2,
    "lost_broadcast": 1.0,
    "stale_read": 0.5,
    "store_refused": 0.2,
    "store_lost_answer": 0.2,
    "store_slow": 0.1,
    "late_object": 0.1,
}
# Kinds of faults that befall whole processes.
PROCESSES = (
    "crash",
    "crash_at_effect",
    "pause",
    "partition",
    "skew",
    "speeds",
    "meshes",
    "membership",
    "operator",
    "resume",
    "standby",
    "rivals",
    "clock_step",
    "twin",
)
KINDS = (*OPERATIONS, *PROCESSES)
# Further kinds of a full world: faults of single operations, then faults of the whole run.
MORE_OPERATIONS = {
    "false_answer": 0.3,
    "rot": 0.1,
    "rot_version": 0.05,
    "rot_message": 0.2,
    "rot_record": 0.05,
    "host_loss": 0.1,
    "removed": 0.3,
    "interleaved": 0.5,
}
WORLDS = (
    *MORE_OPERATIONS,
    "disk_full",
    "commands",
    "hostile",
    "bodies",
    "outlived",
    "numbers",
    "checkpoints",
    "carried",
    "power_cut",
    "releases",
    "revoked",
    "tail_lost",
    "averaged",
    "overwrite",
    "blend",
    "life",
    "shares",
    "crash_loop",
    "bad_machine",
    "together",
    "slices",
    "modules",
)
FULL = (*KINDS, *WORLDS)
CODECS = ("float32", "bfloat16", "int8", "int4")
OPTIMIZERS = ("sgd", "momentum", "nesterov", "delayed_nesterov")
# Kinds in a sixteenth of full worlds: production arithmetic and many versions cost time, and a tape
# that has lost messages cannot be checked any more. An eighth of full worlds have a learner of slices.
RARE = {"numbers": 0.125, "tail_lost": 0.125, "together": 0.125, "slices": 0.25, "modules": 0.5}

# The most honest learners: the next name is the liar's.
MOST = LIAR_INDEX


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The parameters of a simulation.

    The constructor raises `ValueError` for parameters that cannot be simulated.

    Attributes:
        kinds: kinds of faults that may occur; the seed chooses among them.
        intensity: factor of the default frequency of faults, which is far above that of real runs.
        dense: True for dense ledgers as tensors, with the production arithmetic.
    """

    seed: int
    minutes: float = 2.0
    learners: int = 4
    fragments: int = 2
    kinds: tuple[str, ...] = KINDS
    intensity: float = 1.0
    dense: bool = False
    traced: bool = False

    def __post_init__(self) -> None:
        unknown = sorted({*self.kinds} - {*FULL})
        wrong = [
            f"{name} is {value:g}, {expected} was expected"
            for name, value, expected, fits in (
                ("the seed", self.seed, "0 or more", self.seed >= 0),
                ("minutes", self.minutes, "more than 0", self.minutes > 0),
                ("learners", self.learners, f"1 to {MOST}", 1 <= self.learners <= MOST),
                ("fragments", self.fragments, "1 or more", self.fragments >= 1),
                ("intensity", self.intensity, "more than 0", self.intensity > 0),
            )
            if not fits
        ]
        if unknown:
            wrong.append(f"there is no kind {', '.join(unknown)}: simtrial.py lists all")
        if wrong:
            raise ValueError(f"no such world can be simulated: {'; '.join(wrong)}")

    def rng(self, of: str) -> random.Random:
        """Returns the seed's random numbers for one purpose."""
        return random.Random(f"{self.seed}-{of}")

    def has(self, kind: str) -> bool:
        """Whether this seed has a kind of fault: half of all seeds do, fewer for the `RARE` kinds."""
        if kind not in self.kinds or self.rng(f"has-{kind}").random() >= 0.5:
            return False
        return kind not in RARE or self.rng(kind).random() < RARE[kind]


@dataclass
class Outcome:
    """The result of a simulation."""

    plan: Trial
    violation: Violation | None = None
    injected: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    events: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    world: World | None = None


def settings(plan: Trial) -> dict[str, Any]:
    """Returns the settings of a plan's run."""
    rng, codecs, rng_of_blend = plan.rng("settings"), plan.rng("codecs"), plan.rng("blend share")
    interval, fragments = rng.choice([4, 8, 12]), plan.fragments
    if plan.has("together"):
        # Several fragments are due at one step.
        interval, fragments = 2, max(3, fragments)
    codec, delta_codec, optimizer, merge = "float32", "float32", "sgd", "average"
    if plan.has("numbers"):
        codec, delta_codec = codecs.choice(CODECS), codecs.choice(CODECS)
        optimizer, merge = codecs.choice(OPTIMIZERS), codecs.choice(["rda", "average", ""])
    return {
        "run": {
            "name": "sim",
            "steps": max(interval, int(plan.minutes * 60 * 0.8)),
            "trust": "own" if merge else "others",
        },
        "sync": {
            "interval_steps": interval,
            "fragments": fragments,
            "min_steps": min(interval, rng.choice([1, 2, 4])),
            "adopt": _adopt(plan),
            "blend": rng_of_blend.choice([0.3, 0.5, 0.75]),
            "codec": codec,
            "delta_codec": delta_codec,
            "block": 16,
            "shard_elements": 1 << 20 if plan.dense else 1024,
            "snapshot_interval_versions": max(rng.choice([1, 2, 5]), fragments // 3),
            "overlap_steps": rng.choice([0, 2]),
            "reannounce_timeout_s": rng.choice([4.0, 20.0]),
        },
        "outer": {
            "optimizer": optimizer,
            # Not that of averaged state, so that it shows which of them a version was made with.
            "learning_rate": 0.7 if plan.has("numbers") or plan.has("averaged") else 1.0,
            "merge": merge or "average",
            "participation": rng.random() < 0.3,
        },
        "staleness": {"max_versions": rng.choice([0, 0, 3])},
        "quorum": {
            "min_learners": rng.choice([1, 2, 3]),
            "liveness_timeout_s": rng.choice([3.0, 6.0]),
            "deadline_s": rng.choice([8.0, 20.0]),
        },
        "bounds": {"norm_clip": 1e8},
    }


def _adopt(plan: Trial) -> str:
    if plan.has("overwrite"):
        return "overwrite"
    # A ledger counts whole steps, and a blend keeps a share of each.
    return "blend" if plan.has("blend") and not plan.dense else "rebase"


def faults(plan: Trial) -> Faults:
    """Returns the probabilities and durations of faults of single operations."""
    rates = {
        kind: plan.intensity * greatest * plan.rng(kind).random() ** 2
        for kind, greatest in (OPERATIONS | MORE_OPERATIONS).items()
        if plan.has(kind)
    }
    rng = plan.rng("durations")
    return Faults(
        **rates,
        delay_s=rng.choice([0.01, 0.1, 0.5]),
        late_s=rng.choice([1.0, 5.0]),
        slow_s=rng.choice([1.0, 5.0]),
        visible_s=rng.choice([0.2, 3.0]),
        stale_messages=rng.choice([2, 20, 200]),
    )
