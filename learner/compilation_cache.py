"""JAX's persistent cache of compiled programs: one folder of the user, for all runs and processes.

Learners with equal tasks and meshes have equal programs: one process compiles the programs, the
others wait and load them. JAX's keys depend on the programs and XLA's options, but not on the
folder's path, since `jax_persistent_cache_enable_xla_caches` is "none". Each host of a learner of
several has a folder of its own, since their disks may be, and keeps all that it compiles.
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
from jax._src import cache_key, distributed  # JAX has no public names for these.

from diloco.common.process import cores, log
from diloco.common.process.config import cache_home
from diloco.common.process.file_lock import file_lock
from diloco.common.process.release import lock, release

# The most bytes of all cached programs together; the least recently used programs are deleted.
MOST_BYTES: Final = 1 << 30
# The most seconds to wait for another process that compiles the same programs: it may be suspended.
PATIENCE_S: Final = 120.0
_READING: Final = "Error reading persistent compilation cache entry"
_WRITING: Final = "Error writing persistent compilation cache entry"
# What the file of a rehearsal has: a letter for each try that has not come back, or that it passed.
_PASSED: Final = "passed"
_BEGUN: Final = "."
_MOST_TRIES: Final = 2
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
            stack.enter_context(_kept_by_every_host())
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

    @contextlib.contextmanager
    def rehearsing(self, what: str) -> Iterator[bool]:
        """A block that compiles programs for later; yields whether there is nothing more to do.

        An error in it is only logged: without these programs a later start takes longer. What has
        ended this process twice is not tried again.

        Args:
            what: a key that is equal for equal programs.
        """
        key = f"{what} {release()} {lock()}"
        name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        mark = None if self.folder is None else self.folder / f"{name}.rehearsed"
        tries = mark.read_text() if mark is not None and mark.exists() else ""
        if mark is None or tries in (_PASSED, _BEGUN * _MOST_TRIES):
            yield True
            return
        self.logger.info("rehearsing")
        try:
            mark.write_text(tries + _BEGUN)
            yield False
            mark.write_text(_PASSED)
        except Exception as error:  # noqa: BLE001 - this learner trains without them
            with contextlib.suppress(OSError):
                mark.unlink()
            self.logger.warning("rehearsal_failed", error=str(error))

    def _drop(self, damaged: Iterable[str]) -> None:
        """Deletes the files of damaged programs by name, since JAX replaces no existing file."""
        if self.folder is None:
            return
        for name in damaged:
            for path in self.folder.glob(f"{name}-*"):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _kept_by_every_host() -> Iterator[None]:
    """A block in which JAX caches what this process compiles, under the same keys on all hosts.

    JAX lets process 0 alone write, for the sake of disks that hosts share; here each has a folder.
    For CPUs its keys depend on the process's number, which changes when a slice is lost.
    """
    jax.devices()  # Connects the processes, by their numbers.
    with contextlib.ExitStack() as stack:
        stack.enter_context(_changed(distributed.global_state, "process_id", 0))
        by_kind = getattr(cache_key, "_hash_devices", None)
        if jax.default_backend() == "cpu" and by_kind is not None:
            stack.enter_context(_changed(cache_key, "_hash_accelerator_config", by_kind))
        yield


@contextlib.contextmanager
def _changed(of: object, name: str, value: object) -> Iterator[None]:
    """A block in which an attribute has another value."""
    before = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, before)


def keep_programs(
    given: str | None, logger: log.Logger, host: int | None = None
) -> CompiledPrograms:
    """Configures JAX to cache compiled programs on disk; call it before anything is compiled.

    Args:
        given: a folder; None: the folder of JAX's own settings if there is one, otherwise
            `diloco` in the user's cache folder.
        logger: logs a warning if the folder cannot be used; then nothing is cached.
        host: the number of this host of a learner of several; None: it has one.
    """
    if given is None and getattr(jax.config, "jax_compilation_cache_dir", None):
        return CompiledPrograms(None, logger)
    try:
        root = cache_home() / "diloco" if given is None else Path(given)
        folder = root / (_machine() if host is None else f"{_machine()}-host-{host}")
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
