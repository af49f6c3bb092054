"""Logs: JSON lines on standard error, one event with fields per line (structlog).

On a terminal each event is a line for people instead (`as_line`).

The field `action` of every line is one of those listed in docs/logs.md; `run`, `learner`,
`fragment`, `version` are bound where they are known. Cores (pure state machines) do not log;
drivers, which run the cores, log their actions.

A message of a library becomes an event too, with the action `said` and the library's logger.

If standard error is systemd's journal, each line begins with its priority, which the journal strips
off: `journalctl -p warning` then shows warnings and errors.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import structlog

Logger = structlog.typing.FilteringBoundLogger
STDOUT = 1
STDERR = 2
# The seconds that an ending process waits until its last lines are relayed.
LAST_WORDS_S = 2.0
# A module that only a notebook's process loads; its standard error is no terminal.
NOTEBOOK = "ipykernel.kernelapp"

ERROR = "<3>"
# As in sd-daemon(3).
PRIORITIES = {"critical": "<2>", "error": ERROR, "warning": "<4>", "info": "<6>", "debug": "<7>"}


def configure(level: str = "info") -> None:
    """Sends this process's events and Python warnings to standard error.

    Args:
        level: the least level that is logged: "debug", "info", "warning", "error" or "critical".
    """
    _to_stderr(level)
    warnings.showwarning = _show_warning


@contextlib.contextmanager
def within_anothers_program() -> Iterator[None]:
    """Configures logs at level "info" while the block runs, within a user's own program.

    Does nothing if the program has configured structlog itself. Without any configuration,
    structlog would print debug lines among the program's output.
    """
    if structlog.is_configured():
        yield
        return
    _to_stderr("info")
    try:
        yield
    finally:
        structlog.reset_defaults()


def _to_stderr(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.EventRenamer("action"),
            _renderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def _renderer() -> Callable[..., str | bytes]:
    if in_journal():
        return _prioritized
    return _line if on_terminal() else structlog.processors.JSONRenderer()


def on_terminal() -> bool:
    """True if standard error is a terminal, or this process is a notebook's."""
    try:
        return sys.stderr.isatty() or NOTEBOOK in sys.modules
    except ValueError:  # It is closed.
        return False


def end_within(within_s: float) -> None:
    """Ends the process after `within_s` seconds, unless `may_take_longer` is called before.

    The process prints a trace of each thread and ends with status 1. A thread that does not need
    Python's interpreter lock watches the time, so that a hanging thread cannot prevent the end.
    """
    faulthandler.dump_traceback_later(within_s, exit=True, file=STDERR)


def may_take_longer() -> None:
    """Cancels `end_within`."""
    faulthandler.cancel_dump_traceback_later()


def take_stderr() -> None:
    """Turns text that libraries write to standard error or standard output into log lines.

    `sys.stderr` still leads to the real standard error, for the log itself and the traces of bugs.
    A daemon calls this function once, before `configure` and before it loads other libraries.
    """
    real = os.dup(STDERR)
    ours, theirs = os.pipe()
    program = str(Path(__file__).with_name("stderr_lines.py"))
    relay = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-I", "-S", program, *_for_relay(real)],
        stdin=ours, stdout=real, stderr=real, cwd="/", start_new_session=True,
    )  # fmt: skip
    os.close(ours)
    # Standard output too, as Gloo writes there and a daemon does not.
    output = os.dup(STDOUT)
    os.dup2(theirs, STDOUT)
    os.dup2(theirs, STDERR)
    os.close(theirs)
    sys.stderr = os.fdopen(real, "w", buffering=1, errors="backslashreplace", closefd=False)
    faulthandler.enable(STDERR)
    logging.getLogger().addHandler(_LoggingHandler(logging.WARNING))

    def give_back() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(output, STDOUT)
        os.dup2(real, STDERR)
        # Bounded, as a child process may hold the pipe open and write on.
        with contextlib.suppress(subprocess.TimeoutExpired):
            relay.wait(LAST_WORDS_S)

    atexit.register(give_back)


def _for_relay(real: int) -> list[str]:
    if in_journal():
        return ["--journal"]
    return ["--plain"] if os.isatty(real) else []


class _LoggingHandler(logging.Handler):
    """Passes on the log records that libraries write with Python's own `logging`."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{logging.Formatter().formatException(record.exc_info)}"
        # At most a warning: a library's error is not necessarily one of the daemon.
        level = min(record.levelno, logging.WARNING)
        get().log(level, "said", logger=record.name, message=message)


def in_journal() -> bool:
    """True if this process's standard error is systemd's journal."""
    # Imported late, as only commands and daemons need the configuration's classes.
    from diloco.common.process.config import is_journal

    try:
        return is_journal(sys.stderr.fileno())
    except (OSError, ValueError):  # In tests it may not be a file.
        return False


def errors(text: str) -> str:
    """Returns `text` for standard error; in the journal, each line has the priority "error"."""
    return "\n".join(ERROR + line for line in text.splitlines()) if in_journal() else text


_render: Callable[..., str | bytes] = structlog.processors.JSONRenderer()


def _prioritized(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
    return f"{PRIORITIES.get(event.get('level', ''), '')}{_render(logger, name, event)!s}"


def _line(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> str:
    return as_line(event)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,  # noqa: ARG001 - as `warnings.showwarning`
    line: str | None = None,  # noqa: ARG001
) -> None:
    """Logs a Python warning as an event; takes the place of `warnings.showwarning`."""
    where = f"{filename}:{lineno}"
    logger = get()
    logger.warning("warned", category=category.__name__, message=str(message), where=where)


def get(**fields: object) -> Logger:
    """Returns a logger that adds `fields` to each event."""
    logger: Logger = structlog.get_logger(**fields)
    return logger


# Fields that all lines of a process share, which terminal lines leave out.
_KNOWN = ("action", "level", "timestamp", "run", "aggregator", "exception")
_MARKS = {"warning": "warning: ", "error": "error: ", "critical": "error: "}
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def as_line(event: Mapping[str, Any], zone: tzinfo | None = None) -> str:
    """Returns an event as a line for people, followed by the exception's trace if it has one.

    Args:
        event: the fields of the event's JSON line.
        zone: the reader's time zone; None: this machine's.
    """
    at = datetime.fromisoformat(event["timestamp"]).astimezone(zone)
    # A learner's own lines need not name it; an aggregator's lines are about many learners.
    hidden = _KNOWN if "aggregator" in event else (*_KNOWN, "learner")
    words = [_words(key, value) for key, value in event.items() if key not in hidden]
    mark = _MARKS.get(event.get("level", ""), "")
    said = event["action"].replace("_", " ")
    line = f"{at:%H:%M:%S}  {mark}{said}{': ' if words else ''}{', '.join(words)}"
    trace = event.get("exception")
    return f"{line}\n{trace}" if trace else line


def _words(key: str, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.endswith("_per_s"):
            return f"{value:,.0f} {_spaced(key.removesuffix('_per_s'))}/s"
        if key.endswith("_s"):
            return f"{_spaced(key.removesuffix('_s'))} {value:.3g} s"
        if key.endswith("_bytes"):
            return f"{_spaced(key.removesuffix('_bytes'))} {_bytes(value)}"
    return f"{_spaced(key)} {_shown(value)}"


def _spaced(key: str) -> str:
    return key.replace("_", " ")


def _bytes(count: float) -> str:
    return next((f"{count / one:.1f} {name}" for one, name in _UNITS if count >= one), f"{count} B")


def _shown(value: Any) -> str:
    match value:
        case bool() | str() | None:
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
        case Mapping():
            return " ".join(f"{key}={_shown(item)}" for key, item in value.items()) or "none"
        case Iterable():
            return " ".join(_shown(item) for item in value) or "none"
    return str(value)
