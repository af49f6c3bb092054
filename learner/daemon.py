"""A learner as a process: from the command to the training loop, and out again."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from diloco.common import log, names
from diloco.common.accelerators import find_accelerators, unused
from diloco.common.bus.jetstream import AskedToStopError
from diloco.common.config import Config, allows_accelerators
from diloco.common.errors import ConfigError, HostLostError, status_of
from diloco.common.manager import tell
from diloco.common.probes import make_probes, serving
from diloco.common.service import Runtime, on_signals
from diloco.learner.background import Background, running_loop
from diloco.learner.follow import follow
from diloco.learner.hosts.channel import MEET_S, end_if_hanging
from diloco.learner.island import Island
from diloco.learner.lead import lead
from diloco.learner.life import Host, RunEndedError


def serve(config: Config, learner: str) -> None:
    """Run a learner until the run ends or a signal asks it to leave.

    Raises:
        DilocoError: what stops it for good, with what to do.
    """
    check_name(learner)
    asked = threading.Event()
    on_signals(asked.set)
    runtime = Runtime()
    probes = make_probes(runtime.retries, run=config.run.name, learner=learner)
    with running_loop() as loop, serving(config.metrics, probes):
        if config.learner.coordinator is not None:
            probes.health.begin_phase("meeting the learner's other hosts")
        _configure(config)
        warn_of_unused_accelerators(config)
        with _together():
            probes.health.begin_phase("building the task")
            host = Host(
                config=config,
                island=Island(config, learner),
                runtime=runtime,
                probes=probes,
                background=Background(loop),
                asked_to_leave=asked.is_set,
            )
            try:
                with lead(host) if jax.process_index() == 0 else follow(host) as life:
                    life.begin()
                    life.trainer.train()
                    life.leave()
            except RunEndedError:
                _end_before_it_began(host, "run ended")
            except AskedToStopError:
                _end_before_it_began(host, "asked to")


def _end_before_it_began(host: Host, why: str) -> None:
    """No life; systemd takes it for a start all the same, and for a clean end."""
    logger = log.get(run=host.config.run.name, learner=host.island.learner)
    logger.info("left", why=why)
    host.probes.start.over()
    tell(host.probes.manager, READY="1", STATUS=f"left: {why}")


def warn_of_unused_accelerators(config: Config) -> None:
    """Say so if JAX trains on the CPU of a machine that has something better."""
    wanted = not config.learner.cpu_devices and allows_accelerators()
    if not wanted or jax.default_backend() != "cpu":
        return
    found = find_accelerators()
    if found is not None:
        logger = log.get(run=config.run.name)
        logger.warning(
            "accelerator_unused", found=found.count(len(found.names)), advice=unused(found)
        )


def check_name(learner: str) -> None:
    """Refuse what is not a valid learner name.

    Raises:
        ConfigError: it is no name.
    """
    if not names.valid_name(learner):
        raise ConfigError(
            f"{learner!r} is not a valid learner name",
            hint="use lower-case letters, digits and '-', at most 40, a letter or digit first",
        )


def _configure(config: Config) -> None:
    """Settings of JAX, before it looks for devices; the learner's hosts meet here.

    Raises:
        HostLostError: they did not.
    """
    section = config.learner
    if section.compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", section.compilation_cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if section.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", section.cpu_devices)
    if section.coordinator is None:
        return
    # It would take SIGTERM for itself, by which a learner is asked to leave.
    jax.config.update("jax_enable_preemption_service", False)
    where: dict[str, Any] = {}
    if section.coordinator != "auto":
        where = {
            "coordinator_address": section.coordinator,
            "num_processes": section.hosts,
            "process_id": section.host,
        }
    try:
        jax.distributed.initialize(initialization_timeout=int(MEET_S), **where)
    except RuntimeError as error:
        raise HostLostError(
            f"the hosts of this learner did not meet at {section.coordinator}: {error}",
            hint="start all of them; learner.coordinator is host 0's address, as others see it: "
            "runbooks/lost-host.md",
        ) from error


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """The hosts of a learner end together, whatever the reason."""
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            # The other hosts may hold this one in a collective, or in JAX's shutdown.
            end_if_hanging(status_of(error))
        raise
    if jax.process_count() > 1:
        jax.distributed.shutdown()
