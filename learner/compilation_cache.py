"""JAX's persistent cache of compiled programs: one folder of the user, for all runs and processes.

Learners with equal tasks and meshes have equal programs: one process compiles the programs, the
others wait and load them. JAX's keys depend on the programs and XLA's options, but not on the
folder's path, since `jax_persistent_cache_enable_xla_caches` is "none".
"""

import contextlib
import hashlib
import platform
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import jax

from diloco.common.process import cores, log
from diloco.common.process.config import cache_home
from diloco.common.process.file_lock import file_lock

# The most bytes of all cached programs together; the least recently used programs are deleted.
MOST_BYTES: Final = 1 << 30
# The most seconds to wait for another process that compiles the same programs: it may be suspended.
PATIENCE_S: Final = 120.0
_READING: Final = "Error reading persistent compilation cache entry"
_WRITING: Final = "Error writing persistent compilation cache entry"
ADVICE: Final = (
    "set learner.compilation_cache_dir to a folder where this user may write, or nothing is kept"
)


@dataclass(frozen=True)
class CompiledPrograms:
    """The folder of cached programs.

    Attributes:
        folder: the folder; None: this object handles no folder.
        logger: logs a warning if a program cannot be cached or read.
    """

    folder: Path | None
    logger: log.Logger

    @contextlib.contextmanager
    def compiling(self, what: str | None) -> Iterator[None]:
        """A block that compiles programs; processes with equal `what` run their blocks in turn.

        If a cached program cannot be read, JAX compiles it anew, and its file is deleted so that
        the next process can cache it.

        Args:
            what: a key that is equal for processes with equal programs; None: the block does not
                wait for other processes.
        """
        with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", f"{_READING}|{_WRITING}")
            if self.folder is not None and what is not None:
                name = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
                with contextlib.suppress(OSError):
                    stack.enter_context(file_lock(self.folder / f"{name}.lock", PATIENCE_S))
            yield
        troubles = []
        for one in caught:
            if (words := str(one.message)).startswith((_READING, _WRITING)):
                troubles.append(words)
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if troubles:
            self._drop([words.split("'")[1] for words in troubles if words.startswith(_READING)])
            self.logger.warning("cache_unusable", error=troubles[0], advice=ADVICE)

    def _drop(self, damaged: Iterable[str]) -> None:
        """Deletes the files of damaged programs by name, since JAX replaces no existing file."""
        if self.folder is None:
            return
        for name in damaged:
            for path in self.folder.glob(f"{name}-*"):
                path.unlink(missing_ok=True)


def keep_programs(given: str | None, logger: log.Logger) -> CompiledPrograms:
    """Configures JAX to cache compiled programs on disk; call it before anything is compiled.

    Args:
        given: a folder; None: the folder of JAX's own settings if there is one, otherwise
            `diloco` in the user's cache folder.
        logger: logs a warning if the folder cannot be used; then nothing is cached.
    """
    if given is None and getattr(jax.config, "jax_compilation_cache_dir", None):
        return CompiledPrograms(None, logger)
    try:
        root = cache_home() / "diloco" if given is None else Path(given)
        folder = root / _machine()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / ".writable").write_bytes(b"")
        _bound(root)
    except (OSError, RuntimeError) as error:
        logger.warning("cache_unusable", error=str(error), advice=ADVICE)
        return CompiledPrograms(None, logger)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return CompiledPrograms(folder, logger)


def _machine() -> str:
    """Returns a digest of the CPU's model and instruction sets, and the number of cores.

    Programs depend on these, but JAX's keys do not.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    said = f"{platform.machine()} {platform.processor()} {sorted(set(features))}"
    digest = hashlib.blake2b(said.encode(), digest_size=6).hexdigest()
    return f"{digest}-{cores.available()}"


def _bound(root: Path) -> None:
    """Deletes the least recently used programs until at most `MOST_BYTES` remain."""
    found = []
    for path in root.glob("*/*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process may delete it too
            state = path.stat()
            found.append((max(state.st_atime, state.st_mtime), state.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size
