"""The text of `diloco --help`, on one screen; and errors that give former commands' new names."""

from typing import Any, ClassVar

from typer.core import TyperGroup

from diloco.common.protocol.errors import ConfigError
from diloco.run.cli.command import group

# A former command, and its present name.
FORMER = {
    "archive": "diloco bundle RUN FILE; then diloco run delete RUN --bundle FILE",
    "auth guard": "diloco host guard DIR RUN",
    "checkpoint": "diloco run checkpoint RUN",
    "config": "diloco check FILE",
    "config check": "diloco check FILE",
    "data check": "diloco check FOLDER|URL",
    "diff": "diloco show RUN --against OTHER",
    "gc": "diloco run gc RUN",
    "history": "diloco status RUN --history",
    "install-units": "diloco host units",
    "learners": "diloco status RUN --learners",
    "provision": "diloco host provision FILE",
    "provision check": "diloco check FILE",
    "provision plan": "diloco host provision FILE",
    "resume": "diloco run resume RUN",
    "rollback": "diloco run rollback RUN --to VERSIONS|TIME",
    "runs": "diloco status BUS",
    "tape": "diloco bundle RUN FILE --no-objects",
    "tape export": "diloco bundle RUN FILE --no-objects",
    "task": "diloco check FILE",
    "task check": "diloco check FILE",
    "tape import": "diloco restore FILE",
    "unbundle": "diloco restore FILE --logs DIR",
}

# Several packages add commands to it.
host = group("Set up machines: systemd units, a fleet's variables, a guard.")


class Parted(TyperGroup):
    """A group of commands whose help shows them under several titles.

    Attributes:
        parts: the names of the commands under each title, in the order of the help.
    """

    parts: ClassVar[dict[str, tuple[str, ...]]]

    def __init__(self, **attributes: Any) -> None:
        """Sorts the commands in the order of `parts`."""
        super().__init__(**attributes)
        self.commands = {name: self.commands[name] for part in self.parts.values() for name in part}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that the first arguments name, as `click.Group.resolve_command`.

        Raises:
            ConfigError: the command has a new name, which the hint gives.
        """
        for old in (" ".join(args[:2]), args[0]):
            if old in FORMER:
                raise ConfigError(
                    f"`diloco {old}` is not a command any more", hint=f"now: {FORMER[old]}"
                )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help: a line for each command under its title, then one for each option."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] COMMAND ...")
        formatter.write(f"\n{self.help}\n")
        # Two columns are a margin, and two separate a name from its sentence.
        room = formatter.width - max(map(len, self.commands)) - 4
        for title, names in self.parts.items():
            with formatter.section(title):
                found = [(name, self.commands[name]) for name in names]
                formatter.write_dl([(name, one.get_short_help_str(room)) for name, one in found])
        with formatter.section("Options"):
            shown = [one for one in self.get_params(ctx) if one.name != "show_completion"]
            formatter.write_dl([row for one in shown if (row := one.get_help_record(ctx))])
