"""The parts of `diloco --help`: what a person does with a run, in the order of a day."""

from typing import Any

from typer.core import TyperGroup

# A part's title, and its commands.
PARTS: dict[str, tuple[str, ...]] = {
    "Train": ("local", "task", "data", "plan", "config", "run", "aggregator", "learner"),
    "Look": (
        "dashboard", "status", "watch", "runs", "learners", "history", "report", "track",
        "evaluate", "sample", "export",
    ),
    "Operate": (
        "doctor", "checkpoint", "resume", "rollback", "gc", "archive", "auth", "provision",
        "install-units",
    ),
    "Debug": ("show", "diff", "replay", "bundle", "unbundle", "tape"),
}  # fmt: skip
_PART_OF = {name: part for part, names in PARTS.items() for name in names}


class Parted(TyperGroup):
    """A group whose help shows its commands part by part."""

    def __init__(self, **attributes: Any) -> None:
        """Sort the commands, and say of each which part it belongs to."""
        super().__init__(**attributes)
        found = dict(self.commands)
        self.commands = {name: found.pop(name) for name in _PART_OF if name in found} | found
        for name, command in self.commands.items():
            setattr(command, "rich_help_panel", _PART_OF.get(name))  # noqa: B010
