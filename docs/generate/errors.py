"""docs/errors.md: every error, from `diloco.common.errors`."""

from diloco.common import errors
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
    """The table of errors."""
    rows = [
        (
            f"`{error.__name__}`",
            "-" if error is errors.DilocoError else f"`{error.__mro__[1].__name__}`",
            (error.__doc__ or "").partition("\n")[0],
            retried(error),
        )
        for error in classes()
    ]
    return {"errors": table(["error", "kind of", "meaning", "retried"], rows)}
