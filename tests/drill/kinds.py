"""The troubles of the drill: kinds and sizes, drawn before any check was read.

    python tests/drill/kinds.py        prints what was drawn

A first screen names a kind if its first finding, or one as severe, matches `named` and, where a
learner is at fault, names that learner and no other.
"""

import random
from dataclasses import dataclass, field
from typing import Any

# Of the commit that this drawing stands on: nobody chose it.
SEED = 0xC0C74AE9
DRAWN = 18
HONEST_RUNS = 20
LEARNERS = ("ada", "bea", "cai", "dov")
Value = int | float | str
# The least and the greatest value of a number, or the words that one is drawn of.
Range = tuple[int, int] | tuple[float, float] | tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """One kind of trouble: what it does to a run, within which limits, and how it may be named."""

    does: str
    named: str
    of_learner: bool = True
    ranges: dict[str, Range] = field(default_factory=dict)


@dataclass(frozen=True)
class Planted:
    """One kind with the parameters that were drawn for it; `culprit` is empty for no learner."""

    kind: str
    culprit: str
    parameters: dict[str, Value]


KINDS = {
    "labels": Kind(
        "a share of the targets are those of other examples",
        r"other data or labels|labels",
        ranges={"share": (0.5, 1.0)},
    ),
    "data": Kind(
        "batches come of another source than the others' and the held-out data",
        r"other data",
        ranges={"source": (1, 1000)},
    ),
    "repeated": Kind(
        "from a step on it trains on the same few batches over and over",
        r"same (few )?batch|over and over|repeat",
        ranges={"batches": (1, 3), "after": (0, 60)},
    ),
    "shifted": Kind(
        "targets are tokens further on than those that follow",
        r"shifted|other data or labels",
        ranges={"by": (1, 4)},
    ),
    "sign": Kind(
        "the gradient has the wrong sign from a step on",
        r"sign|against the others|opposite",
        ranges={"after": (0, 60)},
    ),
    "decay": Kind(
        "each step takes away a share of its parameters, and outweighs the gradient",
        r"decay",
        ranges={"share": (0.03, 0.15)},
    ),
    "rate": Kind(
        "the learning rate grows by a factor with each step",
        r"rate|longer and longer|grow",
        ranges={"growth": (1.02, 1.08)},
    ),
    "frozen": Kind(
        "one tensor takes no part: its gradient is zero",
        r"frozen|zero|does not train",
        ranges={"tensor": ("embedding", "hidden", "output")},
    ),
    "nan": Kind(
        "a loss and its gradient are NaN every so many steps",
        r"NaN|not finite|non-finite",
        ranges={"every": (10, 40)},
    ),
    "overflow": Kind(
        "gradients overflow every so many steps: elements of the parameters become huge",
        r"overflow|not finite|huge|too large",
        ranges={"every": (15, 60), "exponent": (15, 35)},
    ),
    "claims": Kind(
        "updates claim more tokens than they cover",
        r"claim",
        ranges={"times": (4.0, 50.0)},
    ),
    "release": Kind(
        "another release: views are decoded some percent off",
        r"view differs|release",
        ranges={"percent": (2.0, 10.0)},
    ),
    "memory": Kind(
        "a bit of a parameter flips every so many steps",
        r"memory",
        ranges={"every": (5, 30), "bit": (23, 29)},
    ),
    "leak": Kind(
        "it trains on the held-out data",
        r"held-out|held out",
        ranges={"share": (0.7, 1.0)},
    ),
    "link": Kind(
        "its writes to the store are slow",
        r"slow|upload|link",
        ranges={"seconds": (1.0, 4.0)},
    ),
    "twice": Kind(
        "a second process runs under the same name",
        r"twice|two processes|same name",
        ranges={"after_versions": (3, 9)},
    ),
    "aggregator": Kind(
        "the aggregator is killed again and again, and returns",
        r"aggregator",
        of_learner=False,
        ranges={"every_s": (4.0, 8.0), "kills": (4, 7)},
    ),
    "setting": Kind(
        "an operator changes a setting to a bad value",
        r"outer\.learning_rate|outer\.momentum|quorum\.pace",
        of_learner=False,
        ranges={"rate": (3.0, 12.0), "after_versions": (6, 15)},
    ),
    "away": Kind(
        "the store's folder is moved away",
        r"store",
        of_learner=False,
        ranges={"after_versions": (6, 15)},
    ),
    "old": Kind(
        "an object of a version has the bytes of an earlier version's",
        r"bytes of version",
        of_learner=False,
        ranges={"after_versions": (8, 15), "back": (1, 4)},
    ),
    "damaged": Kind(
        "an object of a version has damaged bytes",
        r"damaged|bytes",
        of_learner=False,
        ranges={"after_versions": (8, 15), "bytes": (1, 64)},
    ),
    "deleted": Kind(
        "a shard that is merged is deleted; the folder's copy answers for it",
        r"deleted|copy",
        ranges={"after_versions": (8, 15)},
    ),
    "clock": Kind(
        "its clock is off",
        r"clock",
        ranges={"seconds": (600.0, 90_000.0)},
    ),
    "useless": Kind(
        "its updates are a tiny part as long as they should be",
        r"tiny|short|useless|hardly",
        ranges={"exponent": (-9, -4)},
    ),
}
# What honest fleets do that may look like trouble; a run has two of these.
HONEST = {
    "unequal": "one takes three to six times as long for a step",
    "unpaced": "quorum.pace is 0",
    "restarts": "one is killed and started again, several times",
    "own data": "each trains on a part of the data of its own, of other lengths",
    "busy": "other processes keep the machine busy",
    "late": "one joins after a third of the run",
    "leaves": "one leaves after two thirds of it",
    "two": "only two learners are there",
}


def drawn(seed: int = SEED) -> list[Planted]:
    """Returns kinds, learners and sizes of the troubles, in the shuffled order of judging."""
    rng = random.Random(seed)
    return [planted(name, rng) for name in rng.sample(sorted(KINDS), DRAWN)]


def planted(name: str, rng: random.Random) -> Planted:
    kind = KINDS[name]
    culprit = rng.choice(LEARNERS) if kind.of_learner else ""
    return Planted(name, culprit, {key: _value(rng, of) for key, of in kind.ranges.items()})


def honest(seed: int = SEED) -> list[tuple[str, str]]:
    """The two conditions of each honest run."""
    rng = random.Random(seed + 1)
    return [(one, two) for one, two in (rng.sample(sorted(HONEST), 2) for _ in range(HONEST_RUNS))]


def _value(rng: random.Random, of: Range) -> Value:
    low, high = of[0], of[-1]
    if isinstance(low, str) or isinstance(high, str):
        return str(rng.choice(of))
    if isinstance(low, int) and isinstance(high, int):
        return rng.randint(low, high)
    return round(rng.uniform(low, high), 3)


def main() -> None:
    for index, one in enumerate(drawn(), 1):
        values: dict[str, Any] = {"culprit": one.culprit or "nobody", **one.parameters}
        print(f"{index:2} {one.kind:11}", *(f"{key}={value}" for key, value in values.items()))
    print(*(f"{' + '.join(pair)}" for pair in honest()), sep="\n")


if __name__ == "__main__":
    main()
