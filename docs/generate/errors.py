"""docs/errors.md: every error and every exit status, from `errors` and `exits` of `common`."""

from diloco.common.protocol import errors
from diloco.common.protocol.errors import Exit
from docs.generate.markdown import table


def classes() -> list[type[errors.DilocoError]]:
    """Every error that is raised on purpose, its base before it."""
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.DilocoError)
    ]


def retried(error: type[errors.DilocoError]) -> str:
    """Whether daemons try again."""
    if not error.retry:
        return "no"
    return "for ever" if error.patience_s is None else f"for {error.patience_s:g} s"


def blocks() -> dict[str, str]:
    """The tables of errors and of exit statuses."""
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
    """A row for each status."""
    return [
        (
            str(int(one)),
            f"`{one.name}`",
            one.text,
            "-" if not one else "yes" if one.restart else "no",
        )
        for one in Exit
    ]
