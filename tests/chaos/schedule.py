"""The schedule of faults: a function of the seed, with every kind at least once."""

import random
from collections import Counter
from typing import NamedTuple

# Kind of fault: how often it comes beside the others, and how long it lasts at least and at most.
KINDS = {
    "kill learner": (4, 0.0, 0.0),
    "pause learner": (3, 1.0, 6.0),
    "kill aggregator": (4, 0.0, 8.0),
    "pause aggregator": (4, 1.0, 12.0),
    "kill nats-server": (2, 0.0, 3.0),
    "pause nats-server": (2, 1.0, 5.0),
    "cut network": (3, 0.5, 5.0),
    "stall network": (3, 0.5, 6.0),
    "full disk": (2, 1.0, 5.0),
}
# So long after a fault its victim is left alone: a learner that is killed over and over never trains.
REST_S = {"kill learner": 10.0}
ALL = "all"


class Fault(NamedTuple):
    """A fault, its target, and its time in seconds from the beginning."""

    at_s: float
    kind: str
    victim: str
    lasts_s: float


def make_schedule(
    seed: int, seconds: float, learners: list[str], aggregators: list[str], *, disk: bool
) -> list[Fault]:
    """Faults in order of time; all have ended after `seconds`.

    Several may overlap, but never two on one victim. `disk` tells whether the disk can be filled.
    """
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if disk or kind != "full disk"]
    weights = [KINDS[kind][0] for kind in kinds]
    first = rng.sample(kinds, len(kinds))
    # All kinds must fit in, and there is more to see with several at once.
    pause_s = min(2.5, 0.4 * seconds / len(kinds))
    busy_until_s: Counter[str] = Counter()
    faults = []
    at_s = 0.0
    while True:
        at_s += rng.uniform(0.3, 1.7) * pause_s
        must = bool(first)
        kind = first.pop() if must else rng.choices(kinds, weights)[0]
        possible = victims(kind, learners, aggregators)
        free = [name for name in possible if busy_until_s[name] <= at_s]
        victim = rng.choice(free or possible)
        lasts_s = rng.uniform(*KINDS[kind][1:])
        if must:
            at_s = max(at_s, busy_until_s[victim])
            lasts_s = min(lasts_s, seconds - at_s)
        if at_s + lasts_s > seconds or lasts_s < 0:
            return faults
        if at_s >= busy_until_s[victim]:
            faults.append(Fault(at_s, kind, victim, lasts_s))
            busy_until_s[victim] = at_s + lasts_s + REST_S.get(kind, 1.0)


def victims(kind: str, learners: list[str], aggregators: list[str]) -> list[str]:
    """Whom a fault can hit."""
    if kind.endswith("learner"):
        return learners
    if kind.endswith("aggregator"):
        return aggregators
    if kind.endswith("network"):
        # The whole, about as often as any one.
        return [*learners, *aggregators, ALL, ALL]
    return [kind.split()[1]]
