"""Repeats requests to Google that fail by a transient fault, with pauses, for a limited time.

`faults.py` says which faults are transient; `uploads.py` and `bucket.py` make the requests.
`common/process/retry.py` repeats whole operations, without end.
"""

import functools
import random
import time
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from google.api_core.retry import Retry

from diloco.common.storage.store.gcs.faults import is_transient

RETRY_S = 10.0
TIMEOUT_S = (10.0, 30.0)  # to connect, or to send a piece; between two bytes of an answer
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_LONGEST_ASKED_PAUSE_S = 60.0  # the longest pause that a service may ask for

P = ParamSpec("P")
R = TypeVar("R")


class TransientRetries(NamedTuple):
    """Repeats a call that fails by a transient fault, as Google's client does, for a limited time.

    Attributes:
        lasting_s: seconds after the first failure for which the call is repeated. The time before
            the first failure does not count, as a silent connection takes longer to fail.
    """

    lasting_s: float

    def __call__(self, call: Callable[P, R]) -> Callable[P, R]:
        """Returns a function that calls `call` until it succeeds or fails by another error.

        Raises:
            google.api_core.exceptions.RetryError: `call` failed for longer than `lasting_s`.
        """

        @functools.wraps(call)
        def tried(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if not is_transient(error):
                    raise
                _pause_as_asked(error)
            time.sleep(random.uniform(0, _FIRST_PAUSE_S))  # noqa: S311 - jitter is no secret
            again = Retry(
                predicate=is_transient,
                on_error=_pause_as_asked,
                initial=2 * _FIRST_PAUSE_S,
                maximum=_LONGEST_PAUSE_S,
                multiplier=2.0,
                timeout=self.lasting_s,
            )
            return again(call)(*args, **kwargs)

        return tried


def _pause_as_asked(error: Exception) -> None:
    """Sleeps for the seconds in the answer's header Retry-After, if there is one; at most 60 s."""
    response = getattr(error, "response", None)
    asked = "" if response is None else response.headers.get("Retry-After", "")
    if asked.isascii() and asked.isdigit():
        time.sleep(min(int(asked), _LONGEST_ASKED_PAUSE_S))
