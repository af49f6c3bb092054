"""The process of `diloco learner`: builds a task, joins a run, and trains until either ends."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from diloco.common.process import log
from diloco.common.process.config import Config, tasks_of_step
from diloco.common.process.health import tell, tell_stopping
from diloco.common.process.probes import Probes, make_probes, serving
from diloco.common.process.retry import Runtime
from diloco.common.process.signals import AskedToStopError, on_signals
from diloco.common.protocol.errors import ConfigError, Exit, HostLostError, status_of
from diloco.learner.compilation_cache import CompiledPrograms, keep_programs
from diloco.learner.core.handover import why_left
from diloco.learner.hosts.messages import MEET_S, end_if_hanging, meeting
from diloco.learner.island import Island
from diloco.learner.library import check_name, joined, member_of
from diloco.learner.life import RunEndedError
from diloco.learner.tensors.tree import loaded_frozen
from diloco.learner.train import TaskProgram


def serve(config: Config, learner: str) -> Exit:
    """Runs a learner until the run ends or a signal asks it to leave.

    Returns:
        The exit status: `Exit.LEFT` if a formation of slices was asked to leave; else `Exit.ENDED`.

    Raises:
        DilocoError: an error that a retry cannot mend; its hint says what to do.
    """
    check_name(learner)
    asked = threading.Event()
    on_signals(asked.set)
    runtime = Runtime()
    probes = make_probes(runtime.retries, run=config.run.name, learner=learner)
    with serving(config.metrics, probes):
        if config.learner.coordinator is not None:
            probes.health.begin_phase("meeting the learner's other hosts")
        programs = _configure(config, learner)
        with _together(probes):
            probes.health.begin_phase("building the task")
            island = Island(config, learner)
            program, task = TaskProgram(island), island.task
            compiling = partial(programs.compiling, _programs_key(config, learner))
            if config.bus.wait_for_run_s:
                with compiling():
                    program.compile()
            member = replace(
                member_of(config, learner, island.whole, island.hint, task.tokens_per_batch, None),
                holds=island.holds,
                load_frozen=partial(loaded_frozen, task),
                compiling=compiling,
                warm_up=lambda _copies: _compile(program, config, learner, programs),
                flops_per_token=task.flops_per_token,
            )
            try:
                with island.context(), joined(config, member, asked, runtime, probes) as life:
                    program.train(life, config.learner.speed.get(learner, 1.0))
                why = life.why
            except (RunEndedError, AskedToStopError) as error:
                why = why_left(stopping=isinstance(error, RunEndedError))
                _end_before_it_began(config, learner, probes, why)
    left = config.learner.formation and why != why_left(stopping=True)
    return Exit.LEFT if left else Exit.ENDED


def _end_before_it_began(config: Config, learner: str, probes: Probes, why: str) -> None:
    """Tells systemd that the process started and ends without error, although it did not join."""
    logger = log.get(run=config.run.name, learner=learner)
    logger.info("left", why=why)
    probes.start.over()
    tell(probes.manager, READY="1", STATUS=f"left: {why}")


def _programs_key(config: Config, learner: str) -> str | None:
    """Returns a key that is equal for learners that compile the same programs.

    Processes with equal keys compile one after the other. Returns None for a learner of several
    hosts: a host that waits for its turn would keep the others waiting in a collective.
    """
    if config.learner.formation or jax.process_count() > 1:
        return None
    return f"{config.settings()!r} {config.learner.island(learner)!r} {config.learner.cpu_devices}"


def _compile(
    program: TaskProgram, config: Config, learner: str, programs: CompiledPrograms
) -> None:
    """Compiles the inner step; with all slices of a learner of several, also that of one fewer.

    The step of fewer slices is only kept: when a slice is lost, no host has to compile it.
    """
    program.compile()
    section = config.learner
    fewer = section.formation[:-1]
    if len(section.formation) < section.slices or len(fewer) < section.min_slices or not fewer:
        return
    changed = section.model_copy(update={"formation": fewer})
    smaller = config.model_copy(update={"learner": changed})
    hosts = len(fewer) * section.slice_hosts
    devices = [device for device in jax.devices() if device.process_index < hosts]
    what = f"{config.settings()!r} {section.island(learner)!r} {section.cpu_devices}"
    with programs.rehearsing(f"{what} {len(fewer)} {section.keep_batch}") as kept:
        if not kept:
            TaskProgram(Island(smaller, learner, devices)).compile()


def _configure(config: Config, learner: str) -> CompiledPrograms:
    """Configures JAX before it searches for devices; returns the cache of compiled programs.

    With `learner.coordinator`, starts JAX's distributed runtime, which waits for the learner's
    other hosts for at most `MEET_S` seconds.

    Raises:
        ConfigError: no setting gives the address of host 0, or Slurm's tasks have no coordinator.
        HostLostError: a host did not connect in time.
    """
    section = config.learner
    logger = log.get(run=config.run.name, learner=learner)
    if section.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", section.cpu_devices)
    tasks, one_a_node = tasks_of_step()
    if section.coordinator is None and tasks > 1:
        raise ConfigError(
            f"this is one of {tasks} tasks of a step of Slurm, but {learner!r} has no coordinator:"
            " each task would be that learner",
            hint="add --coordinator auto; of several learners each is a step: srun --ntasks=1",
        )
    if section.coordinator is None:
        return keep_programs(section.compilation_cache_dir, logger)
    # JAX's service would catch SIGTERM, by which a learner is asked to leave.
    jax.config.update("jax_enable_preemption_service", False)
    # Else JAX takes one device for each task of a Slurm node, though the task is alone there.
    where: dict[str, Any] = {"local_device_ids": []} if one_a_node else {}
    if section.coordinator != "auto":
        where |= {
            "coordinator_address": section.coordinator,
            "num_processes": section.hosts,
            "process_id": section.host,
        }
    try:
        with meeting():
            jax.distributed.initialize(initialization_timeout=int(MEET_S), **where)
    except ValueError as error:
        raise ConfigError(
            f"nothing says where the hosts of this learner meet, and learner.coordinator is"
            f" {section.coordinator!r}: {error}",
            hint="auto is for tasks that srun starts, and for Cloud TPU; elsewhere give HOST:PORT"
            " of host 0, --hosts and --host",
        ) from error
    except RuntimeError as error:
        raise HostLostError(
            f"the hosts of this learner did not meet at {section.coordinator}: {error}",
            hint="start all of them; learner.coordinator is host 0's address, as others see it: "
            "runbooks/lost-host.md",
        ) from error
    host = section.number_of(jax.process_index())
    return keep_programs(section.compilation_cache_dir, logger, host)


@contextlib.contextmanager
def _together(probes: Probes) -> Iterator[None]:
    """Makes all hosts of a learner end together when the block ends, with or without an error."""
    try:
        yield
    except BaseException as error:
        if jax.process_count() > 1:
            # The other hosts may hold this one in a collective, or in JAX's shutdown. Whoever kills
            # what is silent must wait for its status, which says whether to start it again.
            tell_stopping(probes.manager)
            end_if_hanging(status_of(error))
        raise
    if jax.process_count() > 1:
        jax.distributed.shutdown()
