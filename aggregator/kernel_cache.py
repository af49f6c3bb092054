"""Kernels that were compiled, kept on disk by Numba, so that no accident with its files matters.

Numba's own keeping takes three things for granted that a machine does not give: that a file is
whole (a power failure leaves a part of it, or nothing), that there is room for one, and that one
process writes at a time (of two, the second may take the place of the first's code while the index
still names the first's types, and every later process calls the wrong code).
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from numba.core.caching import FunctionCache

_LOCK: Final = "lock"


class KeptKernel(FunctionCache):
    """One kernel's compiled forms: what cannot be read is compiled again."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The form for arguments of some types; None: compile it."""
        try:
            with self._alone():
                return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - what the start of a pickle gives may be any
            # Nothing of this index is believed any more; what is compiled now replaces it.
            with contextlib.suppress(OSError), self._alone():
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a form that was compiled, if that can be: it works from memory all the same."""
        with contextlib.suppress(OSError), self._alone():
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process reads or writes in the folder."""
        with (Path(self.cache_path) / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
