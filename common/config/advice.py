"""Settings that are known to train badly (docs/design/paper.md)."""

from diloco.common.config.run import RunSettings


def warnings(settings: RunSettings) -> list[str]:
    """Sentences on settings in regions that are known to train badly (docs/design/paper.md)."""
    found = []
    outer, sync = settings.outer, settings.sync
    if sync.codec != "float32" and sync.interval_steps < 5:
        found.append(f"sync.interval_steps = {sync.interval_steps}: H near 2 has cost about 9 %")
    if settings.quorum.min_learners == 1 and not settings.quorum.grace_fraction:
        found.append("a quorum of 1 without grace ruins quality with unequal learners (Table 5)")
    races = settings.quorum.pace == 0 and sync.mode == "async"
    if races and outer.optimizer in ("nesterov", "momentum"):
        found.append("quorum.pace = 0 with momentum: small rounds race, and quality is lost")
    if outer.optimizer != "sgd" and outer.learning_rate / (1 - outer.momentum) > 12:
        found.append(
            f"outer.learning_rate {outer.learning_rate} with momentum {outer.momentum} "
            "steps further than any setting that is known to work"
        )
    if sync.overlap_steps > 10:
        found.append(f"sync.overlap_steps = {sync.overlap_steps}: up to 5 is advised")
    return found
