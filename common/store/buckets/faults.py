"""Which errors of the client pass, and what the others are among ours.

Most are of one class: what they are stands in their text.
"""

import contextlib
import re
from collections.abc import Iterator

from obstore import exceptions as theirs

from diloco.common.errors import StoreError, StoreUnavailableError
from diloco.common.store.buckets.place import CREDENTIALS, HTTP, Place
from diloco.common.store.protocol import object_missing

_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound")
# Whom clients ask for a machine's own credentials where the environment has none.
_METADATA = re.compile(r"169\.254\.\d+\.\d+")
# Nothing was sent: what the environment says does not do.
_UNSENT = re.compile(r"must be specified|Missing[A-Z]\w+|builder error|invalid peer certificate")
_PLAIN = "builder error"


def names_no_bucket(error: BaseException) -> bool:
    """Whether an object is missing because its bucket is."""
    return bool(_NO_BUCKET.search(str(error)))


@contextlib.contextmanager
def our_errors(action: str, place: Place, name: str) -> Iterator[None]:
    """Turn what the client raises into our errors.

    Args:
        action: what is tried: "store", "read", "list" or "delete".
        place: where.
        name: of the object, without the prefix.
    """
    where = place.url(name)
    try:
        yield
    except FileNotFoundError as error:
        if action in {"store", "list"} or names_no_bucket(error):
            raise _no_bucket(action, where, place) from error
        raise object_missing(name) from error
    except (theirs.PermissionDeniedError, theirs.UnauthenticatedError) as error:
        raise StoreError(
            f"cannot {action} {where!r}: {_brief(error)}",
            hint=f"let this daemon's account {action} in {place.bucket!r}; see docs/stores.md",
        ) from error
    except (theirs.BaseError, OSError) as error:
        raise _fault(action, where, place, error) from error


def _fault(action: str, where: str, place: Place, error: BaseException) -> StoreError:
    """What an error without a class of its own means."""
    text, status = str(error), _status_of(error)
    told = f"cannot {action} {where!r}: {_brief(error)}"
    if names_no_bucket(error):
        return _no_bucket(action, where, place)
    if _METADATA.search(text):
        # It may be away for a moment where a machine has one.
        fault = StoreUnavailableError if status is None or status in _PASSING else StoreError
        return fault(
            f"the environment names nobody, and {told}", hint=f"set {CREDENTIALS[place.scheme]}"
        )
    if status is None and _UNSENT.search(text):
        plain = f"of an endpoint without TLS, set {HTTP[place.scheme]}=true"
        return StoreError(told, hint=plain if _PLAIN in text else None)
    if status is None or status in _PASSING:
        return StoreUnavailableError(
            told, hint="this is retried; see runbooks/store-away.md if it lasts"
        )
    return StoreError(told)


def _no_bucket(action: str, where: str, place: Place) -> StoreError:
    return StoreError(
        f"cannot {action} {where!r}: there is no bucket {place.bucket!r}",
        hint="correct store.url, or make the bucket",
    )


def _brief(error: BaseException) -> str:
    """An error in one line that a log can hold, without the client's own structures."""
    told = str(error).partition("Debug source")[0]
    return " ".join(f"{type(error).__name__}: {told}".split())[:300]


def _status_of(error: BaseException) -> int | None:
    """The status of the answer over HTTP, if there was one."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None
