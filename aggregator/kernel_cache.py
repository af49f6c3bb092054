"""Caches compiled kernels on disk, by Numba's own cache, made safe against damaged files.

Numba's cache assumes three things that a machine does not guarantee: that a file is complete (a
power failure may leave a part of it), that the disk has room, and that one process writes at a
time. (If two write at once, the second may replace the first's code while the index still has the
first's types, and every later process calls the wrong code.)
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numba
from numba.core.caching import FunctionCache

from diloco.common.process.file_lock import file_lock
from diloco.common.protocol.errors import ConfigError

_LOCK: Final = "lock"


class CachedKernel(FunctionCache):
    """The disk cache of one kernel: its compiled code for each combination of argument types.

    Code that cannot be read is compiled again. So is code that was compiled before a change of any
    file in the kernel's folder, as kernels call each other and Numba checks only the kernel's file.

    Attributes:
        patience_s: seconds to wait while another process has locked the folder. Becomes 0 after a
            wait without success, as that process may hang: then no kernel waits for the lock.
    """

    patience_s = 10.0

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        folder = Path(inspect.getfile(function)).parent
        states = ((path.name, path.stat()) for path in sorted(folder.glob("*.py")))
        stamp = tuple((name, state.st_mtime, state.st_size) for name, state in states)
        self._cache_file._source_stamp = stamp  # noqa: SLF001 - it is nowhere to be given

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns the cached code for the argument types `sig`; None if it must be compiled."""
        try:
            with self._alone():
                return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except BlockingIOError:
            return None
        except Exception:  # noqa: BLE001 - what the start of a pickle gives may be any
            # The index is damaged, so drop it; newly compiled code replaces it.
            with contextlib.suppress(OSError), self._alone():
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Stores compiled code if the folder is writable; else the code stays in memory only."""
        with contextlib.suppress(OSError), self._alone():
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks the folder against other processes while the block runs."""
        try:
            with file_lock(Path(self.cache_path) / _LOCK, self.patience_s):
                yield
        except BlockingIOError:
            CachedKernel.patience_s = 0.0
            raise


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel: `function`, compiled at its first call with each combination of types.

    The compiled code is cached on disk.

    If Numba's compiler is disabled, calls raise `ConfigError`, as kernels cannot run uncompiled.
    """
    if vars(numba.config)["DISABLE_JIT"]:
        return _not_compiled
    kernel: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")(function)
    # Without a cache if neither this package's folder nor the user's cache is writable.
    with contextlib.suppress(RuntimeError):
        # The same as "cache=True" does.
        kernel._cache = CachedKernel(function)  # type: ignore  # noqa: SLF001, PGH003
    return kernel


def _not_compiled(*_: Any) -> None:
    raise ConfigError(
        "NUMBA_DISABLE_JIT is set in the environment, and only compiled code merges",
        hint="unset NUMBA_DISABLE_JIT",
    )
