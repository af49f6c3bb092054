"""A learner as a process: connect, check the run, load its newest versions, train until it ends."""

import asyncio
import threading
from collections.abc import Callable

import jax

from common import bus_nats, log, names, wire
from common.bus import Bus
from common.config import Config, ServiceManager, check_same_run, parse_settings
from common.errors import ConfigError
from common.health import step_limit_s
from common.manager import report, tell, tell_stopping
from common.probes import Probes, make_probes, serving
from common.service import Runtime, on_signals
from common.store import open_store
from common.tape import load_specification
from learner import instruments, sync, tree
from learner.adopt import starts
from learner.background import Background, run_loop
from learner.publish import Context
from learner.recovery import Saver, open_folder, restore
from learner.replica import Replica
from learner.task import Params, Task, params_shapes, run_task
from learner.train import Meter, Trainer, make_inner_step

CONNECT_S = 60.0


def serve(config: Config, learner: str) -> None:
    """Run a learner until the run ends or a signal asks it to leave.

    Raises:
        DilocoError: what stops it for good, with what to do.
    """
    if not names.valid_name(learner):
        raise ConfigError(
            f"{learner!r} cannot name a learner",
            hint="use lower-case letters, digits and '-', at most 40, a letter or digit first",
        )
    asked = threading.Event()
    on_signals(asked.set)
    if config.learner.compile_cache:
        jax.config.update("jax_compilation_cache_dir", config.learner.compile_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    runtime = Runtime()
    probes = make_probes(runtime.waits, run=config.run.name, learner=learner)
    loop, stop_loop = run_loop()
    try:
        with serving(config.metrics, probes):
            _serve(config, learner, asked.is_set, loop, runtime, probes)
    finally:
        stop_loop()


def _serve(
    config: Config,
    learner: str,
    asked: Callable[[], bool],
    loop: asyncio.AbstractEventLoop,
    runtime: Runtime,
    probes: Probes,
) -> None:
    settings = config.settings()
    task = run_task(settings)
    layout = tree.task_layout(task, settings.sync)
    bus: Bus = asyncio.run_coroutine_threadsafe(
        bus_nats.connect(
            config.bus.url,
            name=learner,
            credentials=config.bus.credentials,
            tls_ca=config.bus.tls_ca,
            connect_timeout_s=CONNECT_S,
        ),
        loop,
    ).result()
    try:
        specification = asyncio.run_coroutine_threadsafe(
            load_specification(bus, settings.run.name), loop
        ).result()
        context = Context(
            settings=settings,
            layout=layout,
            epoch=specification.epoch,
            bus=bus,
            store=open_store(config.store.url, emulator=config.store.emulator),
            runtime=runtime,
            logger=log.get(run=settings.run.name, learner=learner),
            learner=learner,
            metrics=probes.metrics,
            health=probes.health,
        )
        _live(config, context, task, specification, asked, loop, probes.manager)
    finally:
        asyncio.run_coroutine_threadsafe(bus.close(), loop).result()


def _live(
    config: Config,
    context: Context,
    task: Task,
    specification: wire.Specification,
    asked: Callable[[], bool],
    loop: asyncio.AbstractEventLoop,
    manager: ServiceManager,
) -> None:
    """One life, from the newest versions to the leave."""
    background = Background(context, loop)
    try:
        constants = _check_run(context, task, specification)
        trainer = _prepare(config, context, task, constants, background, asked)
        context.logger.info("started", position=trainer.position)
        background.watch(report(context.health, manager))
        tell(manager, READY="1")
        trainer.train()
        tell_stopping(manager)
        trainer.flush(config.learner.leave_s)
        lost = sync.unsent(trainer.state)
        if lost and not trainer.state.ended:
            context.logger.warning("left_unsent", fragments=len(lost), steps=sum(lost.values()))
        trainer.meter.state = "leaving"
        background.leave(trainer.position, config.learner.leave_s)
        if trainer.saver is not None:
            trainer.saver.close()
        why = "run ended" if trainer.state.stopping else "asked to"
        context.logger.info("left", why=why, local_step=trainer.meter.local_step)
    finally:
        background.close()


def _check_run(context: Context, task: Task, specification: wire.Specification) -> Params:
    """Refuse a run that is not this configuration's; the run's constants.

    Raises:
        RunMismatchError: settings or layout that disagree.
    """
    theirs = parse_settings(specification.settings)
    check_same_run(context.settings, theirs, context.layout.digest, specification.layout)
    _, constants = tree.split(params_shapes(task))
    if specification.constants is None:
        return constants
    data = context.store.get(specification.constants)
    return tree.unpack_constants(data, constants, specification.constants.rsplit("-", 1)[1])


def _prepare(
    config: Config,
    context: Context,
    task: Task,
    constants: Params,
    background: Background,
    asked: Callable[[], bool],
) -> Trainer:
    """Everything before the first step: versions, programs, the join, and the place in the data."""
    settings = context.settings
    loaded = background.load()
    trained, _ = tree.split(params_shapes(task))
    replica = Replica(settings.sync, context.layout, trained, [item.view for item in loaded])
    meter = Meter(context.learner, context.traffic)
    rules = sync.sync_rules(settings.sync)
    inner_step = make_inner_step(task, constants)
    trainer = Trainer(
        task=task,
        replica=replica,
        inner_step=inner_step,
        batches=task.batches(context.learner, 0),
        position=0,
        background=background,
        rules=rules,
        state=sync.begin(rules, starts(loaded)),
        meter=meter,
        asked_to_leave=asked,
        turned=context.health.turned,
        speed=config.learner.speed.get(context.learner, 1.0),
    )
    trainer.compile()
    folder = open_folder(context, config.learner)
    like = jax.eval_shape(task.optimizer.init, replica.trained)
    restored = restore(context, config.learner, folder, like, background.fetch)
    if restored is not None:
        trainer.optimizer_state = restored.state
        meter.local_step, meter.earlier_tokens = restored.local_step, restored.tokens
    incarnation = background.join(meter.heartbeat, config.learner.heartbeat_s)
    if folder is not None:
        trainer.saver = Saver(context, config.learner, folder, incarnation)
    # Not before: an update of an earlier life that is still on its way is merged if it is stored
    # before the join, and rejected behind it.
    trainer.seek(background.position())
    context.metrics.on_scrape(lambda: instruments.show(context.metrics, trainer))
    hang_s = config.learner.hang_s
    context.health.limit_s = lambda: step_limit_s(hang_s, meter.step_time_s)
    context.health.view = lambda: instruments.view(meter)
    return trainer
