"""Rules about settings that are known to train worse, each with its cost and its evidence.

A rule recognizes settings that break it, and states the evidence: this project's own sweep
(docs/benchmarks.md), or a paper. Rules warn and refuse nothing: users who measured otherwise for
their own model know better.
"""

from collections.abc import Callable
from typing import NamedTuple

from diloco.common.process.config.run import RunSettings

# With fewer rounds of a fragment than this, a momentum of 0.8 or more lost in every sweep.
FEW_ROUNDS = 200


class Broken(NamedTuple):
    """A rule that settings break.

    Attributes:
        sentence: names the settings that break the rule, and the cost that was measured.
        evidence: the source of that measurement.
        about: the keys that the rule examines, joined by ", ".
    """

    sentence: str
    evidence: str
    about: str


class Rule(NamedTuple):
    """Advice against a region of settings.

    Attributes:
        about: the keys that the rule examines, joined by ", ".
        cost: the cost that was measured in this region.
        evidence: the source of that measurement.
        broken: returns the part of the sentence that names the settings; None if they keep the
            rule.
    """

    about: str
    cost: str
    evidence: str
    broken: Callable[[RunSettings], str | None]


def planned_rounds(settings: RunSettings) -> int:
    """Returns the number of versions of a fragment that the run makes: steps / H, rounded down."""
    return settings.run.steps // settings.sync.interval_steps


def _tiny_interval(settings: RunSettings) -> str | None:
    sync = settings.sync
    if sync.codec == "float32" or sync.interval_steps >= 5:
        return None
    return f"sync.interval_steps = {sync.interval_steps} with sync.codec = {sync.codec!r}"


def _no_grace(settings: RunSettings) -> str | None:
    quorum = settings.quorum
    alone = quorum.min_learners == 1 and not quorum.grace_fraction
    return "a quorum of 1 without grace" if alone else None


def _no_pace(settings: RunSettings) -> str | None:
    races = settings.quorum.pace == 0 and settings.sync.mode == "async"
    momentum = settings.outer.optimizer in ("nesterov", "momentum")
    return "quorum.pace = 0 with momentum" if races and momentum else None


def _too_far(settings: RunSettings) -> str | None:
    outer = settings.outer
    if outer.optimizer == "sgd" or outer.learning_rate / (1 - outer.momentum) <= 12:
        return None
    return f"outer.learning_rate {outer.learning_rate} with momentum {outer.momentum}"


def _too_far_by_sgd(settings: RunSettings) -> str | None:
    outer = settings.outer
    # An average is shorter than the updates, so it allows a higher learning rate.
    known = 1.2 if settings.merge == "rda" else 1.4
    if outer.optimizer != "sgd" or outer.learning_rate <= known:
        return None
    return (
        f"outer.learning_rate {outer.learning_rate} with outer.merge = {settings.merge!r} and SGD"
    )


def _much_momentum(settings: RunSettings) -> str | None:
    outer, rounds = settings.outer, planned_rounds(settings)
    few = rounds < FEW_ROUNDS and outer.learning_rate / (1 - outer.momentum) <= 12
    if outer.optimizer not in ("nesterov", "momentum") or outer.momentum < 0.8 or not few:
        return None
    return f"outer.momentum = {outer.momentum} in a run of {rounds} rounds of a fragment"


def _long_overlap(settings: RunSettings) -> str | None:
    steps = settings.sync.overlap_steps
    return f"sync.overlap_steps = {steps}" if steps > 10 else None


def _late_overwrite(settings: RunSettings) -> str | None:
    sync = settings.sync
    late = 2 * sync.overlap_steps >= sync.interval_steps
    overwrites = sync.adopt == "overwrite" and sync.alpha == 0 and sync.mode == "async"
    return (
        f"sync.adopt = 'overwrite' at tau = {sync.overlap_steps}" if late and overwrites else None
    )


def _short_average(settings: RunSettings) -> str | None:
    outer = settings.outer
    short = outer.optimizer == "sgd" and outer.learning_rate < 1
    return (
        f"outer.merge = 'average' with rate {outer.learning_rate}"
        if (short and settings.merge == "average")
        else None
    )


def _participation(settings: RunSettings) -> str | None:
    return "outer.participation = true" if settings.outer.participation else None


RULES = (
    Rule(
        "sync.interval_steps, sync.codec",
        "H near 2 has cost about 9 %",
        "an independent implementation of Streaming DiLoCo, fine-tuning",
        _tiny_interval,
    ),
    Rule(
        "quorum.min_learners, quorum.grace_fraction",
        "51.4 / 25.7 where grace gave 55.3 / 37.0, with learners of unequal speed",
        "arXiv 2604.21428, table 5",
        _no_grace,
    ),
    Rule(
        "quorum.pace, outer.optimizer",
        "small rounds race, each with a step's momentum",
        "arXiv 2401.09135: 44.3 perplexity against 41.4",
        _no_pace,
    ),
    Rule(
        "outer.learning_rate, outer.momentum",
        "steps further than any setting that is known to work",
        "no paper or sweep has rate / (1 - momentum) above 12",
        _too_far,
    ),
    Rule(
        "outer.learning_rate, outer.merge",
        "SGD at 1.3 with RDA, and at 1.5 with an average, has cost 2.3 %; nothing above was tried",
        "own sweep, language, 400 steps",
        _too_far_by_sgd,
    ),
    Rule(
        "outer.momentum, run.steps, sync.interval_steps",
        "0.8 has cost 0.9 to 1.8 % and 0.9 has cost 9 %",
        "own sweep, 15 rounds, two tasks",
        _much_momentum,
    ),
    Rule(
        "sync.overlap_steps",
        "up to 5 is advised, and 10 was harmless",
        "arXiv 2501.18512",
        _long_overlap,
    ),
    Rule(
        "sync.adopt, sync.overlap_steps",
        "2.2 to 2.8 % at an overlap of H, and 4.1 % in an unequal fleet",
        "own sweep, two tasks",
        _late_overwrite,
    ),
    Rule(
        "outer.merge, outer.learning_rate",
        "0.9 has cost 0.9 % on one of two tasks: an average is shorter than what it averages",
        "own sweep, two tasks",
        _short_average,
    ),
    Rule(
        "outer.participation",
        "0.4 to 1.6 % in unequal fleets, 0.2 to 0.4 % with kills",
        "own sweep, two tasks",
        _participation,
    ),
)


def broken(settings: RunSettings) -> list[Broken]:
    """Returns the rules that `settings` break."""
    found = [(rule, rule.broken(settings)) for rule in RULES]
    return [
        Broken(f"{named}: {rule.cost}", rule.evidence, rule.about) for rule, named in found if named
    ]


def warnings(settings: RunSettings) -> list[str]:
    """Returns a sentence, with evidence, for each rule that `settings` break."""
    return [f"{one.sentence} ({one.evidence})" for one in broken(settings)]
