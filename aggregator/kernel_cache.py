"""Kernels that were compiled, kept on disk by Numba, so that no accident with its files matters.

Numba's own keeping takes three things for granted that a machine does not give: that a file is
whole (a power failure leaves a part of it, or nothing), that there is room for one, and that one
process writes at a time (of two, the second may take the place of the first's code while the index
still names the first's types, and every later process calls the wrong code).
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
    """One kernel's compiled forms; a form that cannot be read is compiled again.

    So is what was made before any file of the kernel's folder changed: kernels are made of each
    other, and Numba looks at the file of the one alone.

    Attributes:
        patience_s: so long it waits for another process that has the folder, which may be stopped
            for ever; 0 once one took longer: then nothing is read or kept.
    """

    patience_s = 10.0

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        folder = Path(inspect.getfile(function)).parent
        states = ((path.name, path.stat()) for path in sorted(folder.glob("*.py")))
        stamp = tuple((name, state.st_mtime, state.st_size) for name, state in states)
        self._cache_file._source_stamp = stamp  # noqa: SLF001 - it is nowhere to be given

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The form for arguments of some types; None: compile it."""
        try:
            with self._alone():
                return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except BlockingIOError:
            return None
        except Exception:  # noqa: BLE001 - what the start of a pickle gives may be any
            # Nothing of this index is believed any more; what is compiled now replaces it.
            with contextlib.suppress(OSError), self._alone():
                self.flush()  # type: ignore[no-untyped-call]
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a compiled form if the folder allows it; else the kernel works from memory."""
        with contextlib.suppress(OSError), self._alone():
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from reading or writing in the folder, within the block."""
        try:
            with file_lock(Path(self.cache_path) / _LOCK, self.patience_s):
                yield
        except BlockingIOError:
            CachedKernel.patience_s = 0.0
            raise


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel, compiled at its first call with arrays of some types, and kept on disk.

    Where Numba is told not to compile, a call raises `ConfigError`: nothing else can run them.
    """
    if vars(numba.config)["DISABLE_JIT"]:
        return _not_compiled
    kernel: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")(function)
    # Where neither this package's folder nor the user's cache can be written, it is not kept.
    with contextlib.suppress(RuntimeError):
        # As "cache=True" does.
        kernel._cache = CachedKernel(function)  # type: ignore  # noqa: SLF001, PGH003
    return kernel


def _not_compiled(*_: Any) -> None:
    raise ConfigError(
        "NUMBA_DISABLE_JIT is set in the environment: versions are merged by compiled code alone",
        hint="unset NUMBA_DISABLE_JIT",
    )
