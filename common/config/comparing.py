"""Two configurations side by side: who may take part in a run, and what it may change."""

from typing import Any

from diloco.common.config.run import BUILT_IN_TASK, BUILT_IN_TASK_0_1, RunSettings
from diloco.common.errors import ConfigError, RunMismatchError

_BUILT_IN_NAMES = frozenset({BUILT_IN_TASK, BUILT_IN_TASK_0_1})

# What a run may change while it goes on: section -> keys, None for all of them.
CHANGEABLE: dict[str, frozenset[str] | None] = {
    "run": frozenset({"steps", "tokens", "paused"}),
    "sync": frozenset({"interval_steps", "min_steps", "overlap_steps", "reannounce_timeout_s"}),
    "outer": frozenset({"learning_rate", "momentum", "participation", "clip_radius"}),
    "staleness": None,
    "quorum": None,
    "bounds": None,
}


def is_changeable(section: str, key: str) -> bool:
    """Whether a run may change a setting while it goes on."""
    keys = CHANGEABLE.get(section, frozenset())
    return keys is None or key in keys


def differences(ours: RunSettings, theirs: RunSettings) -> list[str]:
    """Each setting in which two configurations of a run differ: 'sync.codec: int4 here, ...'."""
    # A run without a task is its parameters, which the layout compares.
    taskless = not (ours.task.build and theirs.task.build)
    return [
        f"{key}: {ours!r} here, {theirs!r} in the run"
        for key, ours, theirs in _unequal(ours, theirs)
        if key != "task.build" or {ours, theirs} != _BUILT_IN_NAMES
        if not (taskless and key.startswith("task."))
    ]


def changes(before: RunSettings, after: RunSettings) -> list[str]:
    """Each setting that is another after a change: 'outer.learning_rate: 0.9 -> 0.5'."""
    return [f"{key}: {old!r} -> {new!r}" for key, old, new in _unequal(before, after)]


def check_changeable(ours: RunSettings, theirs: RunSettings) -> None:
    """Refuse settings that a run cannot have come to from those it was created with.

    Raises:
        ConfigError: names each setting that differs and may not.
    """
    fixed = [key for key, _, _ in _unequal(ours, theirs) if not is_changeable(*key.split(".", 1))]
    if fixed:
        allowed = ", ".join(
            f"{section}.*" if keys is None else ", ".join(f"{section}.{k}" for k in sorted(keys))
            for section, keys in CHANGEABLE.items()
        )
        raise ConfigError(
            f"a run that exists cannot change {', '.join(fixed)}",
            hint=f"it can change {allowed}; for the rest create another run",
        )


def check_same_run(
    ours: RunSettings, theirs: RunSettings, our_layout: str, their_layout: str
) -> None:
    """Refuse a daemon whose file or model is not the run's.

    Raises:
        RunMismatchError: names each difference, with both sides.
    """
    found = differences(ours, theirs)
    if our_layout != their_layout:
        found.append(f"layout digest: {our_layout} here, {their_layout} in the run")
    if found:
        raise RunMismatchError(
            f"this configuration is not that of run {theirs.run.name!r}: " + "; ".join(found),
            hint="use the file the run was created with, or create another run",
        )


def _unequal(one: RunSettings, other: RunSettings) -> list[tuple[str, Any, Any]]:
    first, second = one.model_dump(), other.model_dump()
    return [
        (f"{section}.{key}", first[section][key], second[section][key])
        for section in RunSettings.model_fields
        for key in first[section]
        if first[section][key] != second[section][key]
    ]
