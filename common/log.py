"""Logs: JSON lines on standard error, one event with fields per line (structlog).

The field `action` of every line is one of those listed in docs/logs.md; `run`, `learner`,
`fragment`, `version` are bound where they are known. Cores do not log; drivers log what they do.
"""

import logging
import sys

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


def get(**fields: object) -> Logger:
    """A logger with these fields bound."""
    logger: Logger = structlog.get_logger(**fields)
    return logger
