"""Errors of Google's client: which are transient, and which errors of this project they become."""

import contextlib
import re
from collections.abc import Iterator
from http import HTTPStatus

import requests
from google.api_core import exceptions as api
from google.auth import exceptions as auth

from diloco.common.protocol.errors import StoreError, StoreUnavailableError
from diloco.common.storage.store.protocol import object_missing

_PASSING_CODES = {408, 429, 500, 502, 503, 504}
BROKEN = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
    auth.TransportError,
    ConnectionError,
)


class MalformedAnswerError(Exception):
    """An answer lacks what the service always sends: the network cut or changed the answer."""


def header(response: requests.Response, name: str, pattern: str) -> str:
    """Returns the first group of the regular expression `pattern` in a response's header `name`.

    Raises:
        MalformedAnswerError: the header is missing, or does not match.
    """
    text = response.headers.get(name, "")
    if (found := re.search(pattern, text)) is None:
        raise MalformedAnswerError(f"an answer has the header {name} {text!r}, not /{pattern}/")
    return found[1]


@contextlib.contextmanager
def our_errors(action: str, bucket: str, prefix: str, name: str, permission: str) -> Iterator[None]:
    """Turns the client's errors into this project's errors.

    Args:
        action: the attempt: "store", "read", "look up", "list" or "delete".
        bucket: name of the bucket.
        prefix: the prefix of the store's objects there.
        name: the object's name without the prefix.
        permission: the right that the account needs for the action.

    Raises:
        ObjectMissingError: the service has no object of that name.
        StoreUnavailableError: a transient fault.
        StoreError: any other error.
    """
    where = f"gs://{bucket}/{prefix}{name}"
    try:
        yield
    except api.RetryError as error:
        raise _away(action, where, error.cause or error) from error
    except api.NotFound as error:
        if action in {"store", "list"} or "bucket does not exist" in str(error):
            raise StoreError(
                f"cannot {action} {where!r}: there is no bucket {bucket!r}",
                hint="correct store.url, or make the bucket; names are global",
            ) from error
        raise object_missing(name) from error
    except api.Forbidden as error:
        # An account that may read but not list gets this answer for a missing object.
        if action in {"read", "look up"} and "storage.objects.list" in str(error):
            raise object_missing(name) from error
        raise StoreError(
            f"cannot {action} {where!r}: {brief(error)}",
            hint=f"grant {permission} on bucket {bucket!r} to this daemon's account",
        ) from error
    except (api.Unauthorized, auth.GoogleAuthError) as error:
        if is_transient(error):
            raise _away(action, where, error) from error
        raise no_credentials(f"cannot {action} {where!r}: {brief(error)}") from error
    except (
        api.GoogleAPICallError,
        requests.RequestException,
        ConnectionError,
        MalformedAnswerError,
    ) as error:
        if is_transient(error):
            raise _away(action, where, error) from error
        raise StoreError(f"cannot {action} {where!r}: {brief(error)}") from error


def is_transient(error: BaseException) -> bool:
    """True if the same request may succeed later: an overloaded service, a broken connection."""
    if isinstance(error, api.GoogleAPICallError):
        return error.code in _PASSING_CODES or is_damage(error)
    if isinstance(error, auth.GoogleAuthError):
        return bool(error.retryable) or _is_unreachable(error) or _is_unreachable(error.__cause__)
    return isinstance(error, (*BROKEN, MalformedAnswerError))


def _is_unreachable(error: BaseException | None) -> bool:
    """True if the metadata server, or another source of tokens, did not answer.

    A metadata server that answers 404 knows of no service account, so retrying is useless.
    """
    if not isinstance(error, auth.TransportError):
        return False
    return all(getattr(part, "status", None) != HTTPStatus.NOT_FOUND for part in error.args)


def is_damage(error: api.GoogleAPICallError) -> bool:
    """True if an upload was refused because its bytes were changed on the way."""
    return error.code == HTTPStatus.BAD_REQUEST and "CRC32C" in str(error)


def _away(action: str, where: str, error: BaseException) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"cannot {action} {where!r}: {brief(error)}",
        hint="this is retried; see runbooks/store-away.md if it lasts",
    )


def no_credentials(message: str) -> StoreError:
    """Returns the error for a daemon that has no credentials."""
    return StoreError(
        message,
        hint="give this daemon a service account, or run 'gcloud auth application-default login'",
    )


def brief(error: BaseException) -> str:
    """Returns an error as one line for a log."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
