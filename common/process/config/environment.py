"""The environment's variables; the only module that reads them. The only module that reads it.

DILOCO_<SECTION>_<KEY> overrides a key of the daemon sections.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diloco.common.process.config.daemon import DAEMON_SECTIONS
from diloco.common.protocol.errors import ConfigError


def store_url() -> str | None:
    """The object store that the environment names."""
    return os.environ.get("DILOCO_STORE_URL")


def webhook() -> tuple[str | None, str | None]:
    """The webhook's URL and token: secrets, which a command line would show to everybody."""
    return os.environ.get("DILOCO_WEBHOOK_URL"), os.environ.get("DILOCO_WEBHOOK_TOKEN")


def storage_emulator(*, asked_for: bool) -> str | None:
    """Address of the server that stands for Google Cloud Storage in tests; None for the real one.

    Raises:
        ConfigError: the environment has one that the configuration did not ask for, or lacks it.
    """
    host = os.environ.get("STORAGE_EMULATOR_HOST")
    if asked_for and not host:
        raise ConfigError(
            "store.emulator is true, but STORAGE_EMULATOR_HOST is not set",
            hint="set it to the server's address, such as http://127.0.0.1:9000",
        )
    if host and not asked_for:
        raise ConfigError(
            f"STORAGE_EMULATOR_HOST is set to {host!r}, but store.emulator is false: it would"
            " take the place of Google Cloud Storage, without credentials",
            hint="unset it; for a test, set store.emulator = true",
        )
    return host if not host or "://" in host else f"http://{host}"


def store_emulator() -> bool:
    """Whether gs:// is a test's server, for commands that have no run's file to say it."""
    return os.environ.get("DILOCO_STORE_EMULATOR", "").lower() in {"1", "true"}


def allows_http(name: str) -> bool:
    """Whether a variable such as AWS_ALLOW_HTTP lets a store be asked without TLS."""
    return os.environ.get(name, "").lower() in {"1", "true"}


class ServiceManager(NamedTuple):
    """The systemd that started this process.

    Attributes:
        address: of the socket on which it wants to hear of the process; "" for none.
        watchdog_s: longest silence of the main loop that systemd allows, in seconds; 0: any.
    """

    address: str = ""
    watchdog_s: float = 0.0


def service_manager() -> ServiceManager:
    """The service manager that started this process and asks for its status."""
    watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watchdog_us = os.environ.get("WATCHDOG_USEC", "0") if watched else "0"
    return ServiceManager(os.environ.get("NOTIFY_SOCKET", ""), int(watchdog_us) / 1e6)


class _Platforms:
    """The platforms that JAX would have chosen from without `keep_off_accelerators`."""

    pinned = False
    found: str | None = None


def keep_off_accelerators() -> None:
    """Limit JAX to the CPU in this process; call it before JAX is imported.

    A process that starts JAX on an accelerator takes it from the learner beside it: whole (a TPU
    has one owner), or three quarters of its memory (a GPU). And sums are tested on the CPU.
    """
    if not _Platforms.pinned:
        _Platforms.found = os.environ.get("JAX_PLATFORMS")
        _Platforms.pinned = True
    os.environ["JAX_PLATFORMS"] = "cpu"


def allows_accelerators() -> bool:
    """Whether the user lets JAX have something else than the CPU."""
    return _asked_for() != "cpu"


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of a child, as this process found it but for `changes`; None: unset."""
    merged = {**os.environ, "JAX_PLATFORMS": _asked_for(), **changes}
    return {key: value for key, value in merged.items() if value is not None}


def _asked_for() -> str | None:
    return _Platforms.found if _Platforms.pinned else os.environ.get("JAX_PLATFORMS")


def tasks_of_step() -> tuple[int, bool]:
    """Number of tasks of the Slurm step that this process is in, and whether each is a node's only.

    (1, True) where there is no step.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    each = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return int(tasks), each.partition("(")[0] == "1"


def first_rank() -> str | None:
    """Address of rank 0 of a process group, as torchrun tells all ranks."""
    return os.environ.get("MASTER_ADDR")


def visible_devices(variable: str) -> tuple[str, ...] | None:
    """The devices to which the environment restricts a library; None for all."""
    value = os.environ.get(variable)
    return None if value is None else tuple(value.replace(",", " ").split())


def is_journal(descriptor: int) -> bool:
    """Whether systemd's journal receives the text that is written to an open file."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def with_environment(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document, with DILOCO_BUS_URL and the like over the keys of the daemon sections."""
    merged = dict(document)
    for variable, value in os.environ.items():
        parts = variable.lower().split("_", 2)
        if len(parts) == 3 and parts[0] == "diloco" and parts[1] in DAEMON_SECTIONS:
            section = merged.get(parts[1], {})
            if isinstance(section, dict):  # What is no table is refused with the rest of the file.
                merged[parts[1]] = {**section, parts[2]: value}
    return merged


def cache_home() -> Path:
    """The folder of the user's caches.

    Raises:
        RuntimeError: the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # What is not absolute does not count, by the convention.
    return Path(base) if base.startswith("/") else Path.home() / ".cache"


def compile_without_tpu() -> None:
    """Use libtpu as a compiler only, without a TPU, also in several processes at once."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def encode_on_threads(count: int) -> None:
    """Limit the threads of tokenizers in this process; call it before the first is encoded."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(count)


def keep_offline(cache: str) -> None:
    """Keep `datasets` off the network and the home folder; call it before it is imported."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": cache}
