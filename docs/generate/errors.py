"""docs/errors.md: every error and every exit status, from `diloco.common.protocol.errors`."""

from diloco.common.protocol import errors
from diloco.common.protocol.errors import Exit
from docs.generate.markdown import table


def classes() -> list[type[errors.DilocoError]]:
    """Returns the classes of the project's errors, each after its base class."""
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.DilocoError)
    ]


def retried(error: type[errors.DilocoError]) -> str:
    """Returns for how long daemons retry after an error: "no", "for ever", or the seconds."""
    if not error.retry:
        return "no"
    return "for ever" if error.patience_s is None else f"for {error.patience_s:g} s"


def blocks() -> dict[str, str]:
    """Returns the blocks "errors" and "exit statuses": a table each."""
    rows = [
        (
            f"`{error.__name__}`",
            "-" if error is errors.DilocoError else f"`{error.__mro__[1].__name__}`",
            (error.__doc__ or "").partition("\n")[0],
            retried(error),
            str(int(error.status)),
        )
        for error in classes()
    ]
    return {
        "errors": table(["error", "kind of", "meaning", "retried", "exit status"], rows),
        "exit statuses": table(["status", "name", "meaning", "restart"], statuses()),
    }


def statuses() -> list[tuple[str, ...]]:
    """Returns a row for each exit status: number, name, meaning, whether systemd restarts."""
    return [
        (
            str(int(one)),
            f"`{one.name}`",
            one.text,
            "-" if not one else "yes" if one.restart else "no",
        )
        for one in Exit
    ]
