"""docs/commands.md: every command with its options, from the Typer application."""

import inspect
import re
from collections.abc import Iterator

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from diloco.program import app
from docs.generate.markdown import fence, table

Command = TyperCommand | TyperGroup


def walk(name: str, command: Command) -> Iterator[tuple[str, Command]]:
    """Yields (full name, command) of a command and all below it, groups before their commands."""
    yield name, command
    if isinstance(command, TyperGroup):
        for below in sorted(command.commands):
            found = command.commands[below]
            assert isinstance(found, Command)
            yield from walk(f"{name} {below}", found)


def usage(name: str, command: Command) -> str:
    """Returns the line that shows how to call a command, such as `diloco report [OPTIONS] RUN`."""
    arguments = [
        one.metavar or one.name or "" for one in command.params if isinstance(one, TyperArgument)
    ]
    parts = [name, "[OPTIONS]", *(word.upper() for word in arguments)]
    if isinstance(command, TyperGroup):
        parts.append("COMMAND ...")
    return " ".join(parts)


def value_of(option: TyperOption) -> str:
    """Returns all spellings of an option, with the name of its value unless it is a flag."""
    names = ", ".join(f"`{spelling}`" for spelling in [*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    return f"{names} `{option.metavar or 'VALUE'}`"


def default_of(option: TyperOption) -> str:
    """Returns an option's default as Markdown: "required", or "-" if the help must say it."""
    if option.required:
        return "required"
    value = option.default
    if value is None or option.is_flag or value in ((), []) or callable(value):
        return "-"
    return f"`{value}`"


def described(name: str, command: Command) -> str:
    """Returns the section on a command: heading, help, usage, and tables of its parameters."""
    depth = "#" * min(4, 1 + len(name.split()))
    text = re.sub(r"\f.*", "", inspect.cleandoc(command.help or ""), flags=re.DOTALL)
    parts = [f"{depth} {name}", text.strip(), fence("text", usage(name, command))]
    given = [one for one in command.params if isinstance(one, TyperArgument)]
    if given:
        rows = [(f"`{(one.metavar or one.name or '').upper()}`", one.help or "") for one in given]
        parts.append(table(["argument", "meaning"], rows))
    options = [one for one in command.params if isinstance(one, TyperOption) and one.name != "help"]
    if options:
        found = [(value_of(one), default_of(one), one.help or "") for one in options]
        parts.append(table(["option", "default", "meaning"], found))
    return "\n\n".join(parts)


def blocks() -> dict[str, str]:
    """Returns the block "commands": the sections of all commands."""
    command = get_command(app)
    assert isinstance(command, Command)
    return {"commands": "\n\n".join(described(*found) for found in walk("diloco", command))}
