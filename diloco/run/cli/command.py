"""Turns functions, and dataclasses of options, into commands of Typer.

A dataclass of options is frozen, and its fields are annotated as Typer requires. So each option is
declared once, and all are passed as one value from the command line to the code that uses them.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from diloco.common.process import log

F = TypeVar("F", bound=Callable[..., int | None])


def group(summary: str | None = None) -> typer.Typer:
    """Returns a group of commands.

    Args:
        summary: the group's help; None: the commands become commands of the group that this one is
            added to.
    """
    return typer.Typer(help=summary, no_args_is_help=True)


def command(
    app: typer.Typer, name: str | None = None, *, daemon: bool = False, logs: str = "error"
) -> Callable[[F], F]:
    """Returns a decorator that makes a function a command, with its docstring as the help.

    The function's parameters become options, and so do the fields of a parameter that is a
    dataclass of options. The function returns the exit status; None is 0.

    Args:
        app: the group that gets the command.
        name: the command's name; None: the function's.
        daemon: whether the function sets its log level itself, and whether errors on files keep
            their traceback instead of becoming a sentence.
        logs: the least level of log entries that are shown, except for a daemon.
    """

    def add(function: F) -> F:
        app.command(name)(_runner(function if daemon else _told(function, logs)))
        return function

    return add


def _told(function: F, logs: str) -> F:
    """Wraps a command: sets the log level `logs`, and reports errors of files as sentences."""

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> int | None:
        log.configure(logs)
        try:
            return function(*given, **named)
        except OSError as error:
            from diloco.run.cli.failing import as_failure

            if (failure := as_failure(error)) is None:
                raise
            raise failure from error

    return typing.cast("F", run)


def _runner(function: Callable[..., int | None]) -> Callable[..., None]:
    parameters, records = _flatten(function)

    @functools.wraps(function)
    def run(**given: Any) -> None:
        for parameter, record in records.items():
            fields = {field.name: given.pop(field.name) for field in dataclasses.fields(record)}
            given[parameter] = record(**fields)
        if status := function(**given):
            raise typer.Exit(status)

    # Typer asks the signature for defaults, and the annotations for types.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flatten(
    function: Callable[..., Any],
) -> tuple[list[inspect.Parameter], dict[str, type[Any]]]:
    """Returns a command's options, and the dataclasses of options, by name of the parameter."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    records: dict[str, type[Any]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            record = typing.cast("type[Any]", hints[name])
            records[name] = record
            parameters += _fields(record)
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))
    return parameters, records


def _fields(record: type[Any]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(record, include_extras=True)
    return [
        _parameter(field.name, hints[field.name], _default(field))
        for field in dataclasses.fields(record)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    missing = field.default is dataclasses.MISSING
    return inspect.Parameter.empty if missing else field.default


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
