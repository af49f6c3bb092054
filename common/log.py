"""Logs: JSON lines on standard error, one event with fields per line (structlog).

The field `action` of every line is one of those listed in docs/logs.md; `run`, `learner`,
`fragment`, `version` are bound where they are known. Cores do not log; drivers log what they do.
"""

import logging
import sys
import warnings

import structlog

Logger = structlog.typing.FilteringBoundLogger


def configure(level: str = "info") -> None:
    """Send this process's logs to standard error as JSON lines."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("action"),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    warnings.showwarning = _show_warning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,  # noqa: ARG001 - as `warnings.showwarning`
    line: str | None = None,  # noqa: ARG001
) -> None:
    """A library's warning as a line like all others."""
    where = f"{filename}:{lineno}"
    logger = get()
    logger.warning("warned", category=category.__name__, message=str(message), where=where)


def get(**fields: object) -> Logger:
    """A logger with these fields bound."""
    logger: Logger = structlog.get_logger(**fields)
    return logger
