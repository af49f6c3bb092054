"""Reads and sets environment variables; no other module reads any.

A variable DILOCO_<SECTION>_<KEY>, such as DILOCO_BUS_URL, overrides a key of a section that
configures one daemon (`daemon.py`).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diloco.common.process.config.daemon import DAEMON_SECTIONS
from diloco.common.protocol.errors import ConfigError


def store_url() -> str | None:
    """Returns the object store's URL from DILOCO_STORE_URL; None if the variable is not set."""
    return os.environ.get("DILOCO_STORE_URL")


def webhook() -> tuple[str | None, str | None]:
    """Returns the URL and the token of the webhook for alerts; None for one that is not set.

    Both are secrets, which a command line would show to every user of the machine.
    """
    return os.environ.get("DILOCO_WEBHOOK_URL"), os.environ.get("DILOCO_WEBHOOK_TOKEN")


def storage_emulator(*, asked_for: bool) -> str | None:
    """Returns the URL of the tests' emulator of Google Cloud Storage; None: the real service.

    Args:
        asked_for: the configuration's `store.emulator`.

    Raises:
        ConfigError: the environment names an emulator that the configuration does not allow, or
            the configuration requires one and the environment names none.
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
    """True if gs:// means an emulator; for commands that read no configuration file."""
    return os.environ.get("DILOCO_STORE_EMULATOR", "").lower() in {"1", "true"}


def allows_http(name: str) -> bool:
    """True if the variable `name`, such as AWS_ALLOW_HTTP, permits requests without TLS."""
    return os.environ.get(name, "").lower() in {"1", "true"}


class ServiceManager(NamedTuple):
    """The systemd that started this process.

    Attributes:
        address: address of the socket for notifications (sd_notify); "" for none.
        watchdog_s: the longest time in seconds between notifications; 0: no watchdog.
    """

    address: str = ""
    watchdog_s: float = 0.0


def service_manager() -> ServiceManager:
    """Returns the systemd that started this process; without systemd, its fields are "" and 0."""
    watched = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    watchdog_us = os.environ.get("WATCHDOG_USEC", "0") if watched else "0"
    return ServiceManager(os.environ.get("NOTIFY_SOCKET", ""), int(watchdog_us) / 1e6)


class _Platforms:
    """The value of JAX_PLATFORMS before `keep_off_accelerators` replaced it.

    Attributes:
        pinned: True once `keep_off_accelerators` was called.
        found: the value at that time; None if the variable was not set.
    """

    pinned = False
    found: str | None = None


def keep_off_accelerators() -> None:
    """Limits JAX to the CPU in this process; call it before JAX is imported.

    A process that starts JAX on an accelerator takes it away from the learner on the same machine:
    a whole TPU, which has one owner, or three quarters of a GPU's memory. Besides, this project
    tests on CPUs alone that sums have the same bits everywhere.
    """
    if not _Platforms.pinned:
        _Platforms.found = os.environ.get("JAX_PLATFORMS")
        _Platforms.pinned = True
    os.environ["JAX_PLATFORMS"] = "cpu"


def keras_on_jax() -> None:
    """Makes Keras compute with JAX in this process; call it before Keras is imported."""
    os.environ["KERAS_BACKEND"] = "jax"


def allows_accelerators() -> bool:
    """True unless the user has set JAX_PLATFORMS to "cpu"."""
    return _asked_for() != "cpu"


def environment_with(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Returns a child process's environment: this process's own, with `changes`.

    JAX_PLATFORMS has the user's value, also after `keep_off_accelerators`. A variable whose value
    in `changes` is None is not set.
    """
    merged = {**os.environ, "JAX_PLATFORMS": _asked_for(), **changes}
    return {key: value for key, value in merged.items() if value is not None}


def change_environment(changes: Mapping[str, str | None]) -> None:
    """Sets variables of this process; one whose value in `changes` is None is unset."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _asked_for() -> str | None:
    return _Platforms.found if _Platforms.pinned else os.environ.get("JAX_PLATFORMS")


def tasks_of_step() -> tuple[int, bool]:
    """Returns the number of tasks of this process's Slurm step, and if each has its own node.

    Outside of Slurm, returns (1, True).
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    each = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return int(tasks), each.partition("(")[0] == "1"


def first_rank() -> str | None:
    """Returns the address of a process group's rank 0, as torchrun sets it; None if unset."""
    return os.environ.get("MASTER_ADDR")


def visible_devices(variable: str) -> tuple[str, ...] | None:
    """Returns the devices listed in `variable`, such as CUDA_VISIBLE_DEVICES; None if it is unset.

    An unset variable permits all devices.
    """
    value = os.environ.get(variable)
    return None if value is None else tuple(value.replace(",", " ").split())


def is_journal(descriptor: int) -> bool:
    """True if an open file descriptor leads to systemd's journal."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def with_environment(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration `document` (section -> key -> value), overridden by variables.

    A variable such as DILOCO_BUS_URL replaces the key `url` of the section `bus`.
    """
    merged = dict(document)
    for variable, value in os.environ.items():
        parts = variable.lower().split("_", 2)
        if len(parts) == 3 and parts[0] == "diloco" and parts[1] in DAEMON_SECTIONS:
            section = merged.get(parts[1], {})
            if isinstance(section, dict):  # Other types are refused later.
                merged[parts[1]] = {**section, parts[2]: value}
    return merged


def cache_home() -> Path:
    """Returns the folder of the user's caches.

    Raises:
        RuntimeError: the user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG convention a relative path is ignored.
    return Path(base) if base.startswith("/") else Path.home() / ".cache"


def compile_without_tpu() -> None:
    """Lets libtpu compile without a TPU, and in several processes at once."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


def encode_on_threads(count: int) -> None:
    """Makes tokenizers use `count` threads; call it before the first text is tokenized."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(count)


def keep_offline(cache: str) -> None:
    """Makes the package `datasets` use no network, and the folder `cache` for its files.

    Call this function before `datasets` is imported.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HOME": cache}
