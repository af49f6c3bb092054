"""A learner as a process: connect, check the run, load its newest versions, train until it ends."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from diloco.common import bus_nats, log, names, wire
from diloco.common.bus import Bus, MemoryBus
from diloco.common.config import Config, check_same_run, parse_settings
from diloco.common.errors import ConfigError, HostLostError
from diloco.common.health import step_limit_s
from diloco.common.manager import report, tell, tell_stopping
from diloco.common.probes import Probes, make_probes, serving
from diloco.common.service import Runtime, on_signals
from diloco.common.store import open_store
from diloco.common.tape import load_specification
from diloco.common.views import assemble_view
from diloco.learner import instruments, sync, tree
from diloco.learner.adopt import Change, start_at, whole
from diloco.learner.background import Background, run_loop
from diloco.learner.checkpoint import Kept
from diloco.learner.director import Director
from diloco.learner.follower import Follower, check_same
from diloco.learner.hosts import (
    MEET_S,
    Crew,
    Link,
    end_if_hanging,
    exchange_secret,
    pack_change,
    unpack_change,
)
from diloco.learner.island import Island
from diloco.learner.publish import Context
from diloco.learner.recovery import (
    Fetch,
    Moment,
    Restored,
    Saver,
    open_folder,
    readable_parts,
    restore,
)
from diloco.learner.replica import Replica
from diloco.learner.task import Params
from diloco.learner.train import Meter, Outbox, Trainer

T = TypeVar("T")
CONNECT_S = 60.0
# Boundaries that the plans of a learner of several hosts are ahead (`director.py`).
LEAD = 2


def serve(config: Config, learner: str) -> None:
    """Run a learner until the run ends or a signal asks it to leave.

    Raises:
        DilocoError: what stops it for good, with what to do.
    """
    check_name(learner)
    asked = threading.Event()
    on_signals(asked.set)
    _configure(config)
    runtime = Runtime()
    probes = make_probes(runtime.waits, run=config.run.name, learner=learner)
    loop, stop_loop = run_loop()
    try:
        with serving(config.metrics, probes):
            life = _Life(config, learner, asked.is_set, loop, runtime, probes)
            if jax.process_index() == 0:
                life.lead()
            else:
                life.follow()
    except BaseException:
        if jax.process_count() > 1:
            # The other hosts may hold this one in a collective, or in JAX's shutdown.
            end_if_hanging()
        raise
    finally:
        stop_loop()
    if jax.process_count() > 1:
        jax.distributed.shutdown()


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
    if section.compile_cache:
        jax.config.update("jax_compilation_cache_dir", section.compile_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if section.cpu_devices:
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


class _Life:
    """One life of a learner, on one of its hosts."""

    def __init__(
        self,
        config: Config,
        learner: str,
        asked: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
        runtime: Runtime,
        probes: Probes,
    ) -> None:
        self._config = config
        self._asked = asked
        self._loop = loop
        self._probes = probes
        self._learner = learner
        self._runtime = runtime
        self._island = Island(config, learner)
        self._hosts = jax.process_count()

    # Host 0

    def lead(self) -> None:
        """As the only host, or as the one that speaks to the run."""
        config, settings = self._config, self._config.settings()
        crew = Crew(self._hosts, self._loop, self._lost) if self._hosts > 1 else None
        bus: Bus = self._run(
            bus_nats.connect(
                config.bus.url,
                name=self._learner,
                credentials=config.bus.credentials,
                tls_ca=config.bus.tls_ca,
                connect_timeout_s=CONNECT_S,
            )
        )
        try:
            specification = self._run(load_specification(bus, settings.run.name))
            context = self._context(bus, specification.epoch)
            self._background = Background(context, self._loop)
            if crew is not None:
                self._meet(crew)
            self._live(context, specification, crew)
        finally:
            if crew is not None:
                self._run(crew.close())
            self._run(bus.close())

    def _meet(self, crew: Crew) -> None:
        coordinator = self._config.learner.coordinator or ""
        interface = socket.gethostname() if coordinator == "auto" else coordinator.split(":")[0]
        _, secret = exchange_secret(self._run(crew.listen(interface)))
        self._run(crew.meet(secret))

    def _lost(self, error: BaseException) -> None:
        self._background.fail(error)

    def _live(self, context: Context, specification: wire.Specification, crew: Crew | None) -> None:
        """One life, from the newest versions to the leave."""
        background, manager = self._background, self._probes.manager
        try:
            constants = _check_run(context, self._island, specification)
            with self._island.context():
                trainer, director = self._prepare(context, specification, constants, crew)
                context.logger.info("started", position=trainer.position)
                background.watch(report(context.health, manager))
                tell(manager, READY="1")
                trainer.train()
            tell_stopping(manager)
            lost = sync.unsent(director.state)
            if lost and not director.ended:
                context.logger.warning("left_unsent", fragments=len(lost), steps=sum(lost.values()))
            trainer.meter.state = "leaving"
            background.leave(trainer.position, self._config.learner.leave_s)
            self._close(context, trainer, "run ended" if director.state.stopping else "asked to")
        finally:
            background.close()

    def _prepare(
        self,
        context: Context,
        specification: wire.Specification,
        constants: Params,
        crew: Crew | None,
    ) -> tuple[Trainer, Director]:
        """Everything before the first step: versions, programs, the join, the place in the data."""
        config, background, island = self._config, self._background, self._island
        starts: list[sync.Start] = []
        changes: list[Change] = []

        def views() -> Iterator[np.ndarray]:
            for fragment in range(len(context.layout.fragments)):
                loaded = background.load(fragment)
                starts.append(start_at(loaded))
                changes.append(whole(loaded))
                if crew is not None:
                    crew.tell({"kind": "load", "change": pack_change(changes[-1])})
                yield loaded.view

        if crew is not None:
            begin = {"epoch": context.epoch, "layout": context.layout.digest}
            crew.tell({"kind": "begin", "constants": specification.constants, **begin})
        replica = island.replica(views())
        background.attach(replica, crew)
        trainer = self._trainer(context, replica, constants, background)
        rules = sync.sync_rules(context.settings.sync)
        director = Director(
            rules=rules,
            state=sync.begin(rules, tuple(starts)),
            inbox=background,
            tokens_per_step=island.task.tokens_per_batch,
            asked_to_leave=lambda: self._asked() or (crew is not None and crew.asked_to_leave),
            lead=0 if crew is None else LEAD,
            leave_s=config.learner.leave_s,
            turned=context.health.turned,
        )
        trainer.plans = director
        folder = self._open_folder(context)
        if crew is None:
            self._restore(context, trainer, folder, background.fetch)
            moment = None
        else:
            parts = self._parts(context, folder)
            moment = max(
                set(parts).intersection(*self._run(crew.checkpoints())),
                key=lambda found: found[::-1],
                default=None,
            )
            self._go_on_from(context, trainer, None if moment is None else parts[moment]())
        meter = trainer.meter
        incarnation = background.join(meter.heartbeat, config.learner.heartbeat_s)
        if folder is not None:
            trainer.saver = Saver(context, config.learner, folder, incarnation, self._hosts)
            director.checkpoint_due = trainer.saver.due
        # Not before: an update of an earlier life that is still on its way is merged if it is
        # stored before the join, and rejected behind it.
        trainer.seek(background.position())
        if crew is not None:
            director.tell = crew.tell_plan
            words = {"position": trainer.position, "global_step": director.first_step()}
            crew.tell({"kind": "go", "incarnation": incarnation, "moment": moment, **words})
        context.metrics.on_scrape(
            lambda: instruments.show(context.metrics, trainer, director.state)
        )
        self._watch(context, meter)
        return trainer, director

    # The other hosts

    def follow(self) -> None:
        """As a host that does what host 0 says."""
        link = Link(jax.process_index(), self._loop)
        try:
            self._run(link.connect(*exchange_secret("")))
            begin = link.receive("begin")
            check_same("layout of the parameters", self._island.layout.digest, begin["layout"])
            # Nobody here speaks to the run.
            context = self._context(MemoryBus(), begin["epoch"])
            follower = Follower(context, link, self._loop, self._asked)
            try:
                self._follow(context, link, follower, begin["constants"])
            finally:
                self._run(follower.close())
        finally:
            self._run(link.close())

    def _follow(
        self, context: Context, link: Link, follower: Follower, constants_object: str | None
    ) -> None:
        manager = self._probes.manager
        with self._island.context():
            trainer = self._prepare_to_follow(context, link, follower, constants_object)
            context.logger.info("started", position=trainer.position)
            follower.watch(report(context.health, manager))
            tell(manager, READY="1")
            trainer.train()
        tell_stopping(manager)
        self._close(context, trainer, "host 0 said so")

    def _prepare_to_follow(
        self, context: Context, link: Link, follower: Follower, constants_object: str | None
    ) -> Trainer:
        island = self._island

        def views() -> Iterator[np.ndarray]:
            for _ in context.layout.fragments:
                change = unpack_change(link.receive("load")["change"])
                assert change.snapshot is not None
                view, read_bytes = assemble_view(
                    context, change.fragment, change.view_digest, change.snapshot, change.deltas
                )
                context.traffic.bytes_down += read_bytes
                yield view

        replica = island.replica(views())
        follower.attach(replica, self._hosts)
        constants = read_constants(context, island.constants, constants_object)
        trainer = self._trainer(context, replica, constants, follower)
        trainer.plans = follower
        folder = self._open_folder(context)
        parts = self._parts(context, folder)
        link.tell({"kind": "have", "moments": list(parts)})
        go = link.receive("go")
        moment = go["moment"]
        self._go_on_from(context, trainer, None if moment is None else parts[moment]())
        if folder is not None:
            trainer.saver = Saver(
                context, self._config.learner, folder, go["incarnation"], self._hosts
            )
        follower.begin(go["incarnation"], go["global_step"])
        trainer.seek(go["position"])
        self._watch(context, trainer.meter)
        return trainer

    # All hosts

    def _context(self, bus: Bus, epoch: int) -> Context:
        config, settings, probes = self._config, self._config.settings(), self._probes
        return Context(
            settings=settings,
            layout=self._island.layout,
            epoch=epoch,
            bus=bus,
            store=open_store(config.store.url, emulator=config.store.emulator),
            runtime=self._runtime,
            logger=self._logger(),
            learner=self._learner,
            metrics=probes.metrics,
            health=probes.health,
        )

    def _logger(self) -> log.Logger:
        logger = log.get(run=self._config.run.name, learner=self._learner)
        return logger if self._hosts == 1 else logger.bind(host=jax.process_index())

    def _trainer(
        self, context: Context, replica: Replica, constants: Params, outbox: Outbox
    ) -> Trainer:
        """With everything compiled."""
        island = self._island
        trainer = Trainer(
            task=island.task,
            replica=replica,
            inner_step=island.inner_step(constants),
            feed=island.feed,
            outbox=outbox,
            meter=Meter(context.learner, context.traffic),
            speed=self._config.learner.speed.get(context.learner, 1.0),
        )
        trainer.compile(island.init_state)
        return trainer

    def _open_folder(self, context: Context) -> Kept | None:
        """This host's folder of checkpoints.

        Raises:
            ConfigError: what a learner of several hosts cannot do is asked for.
        """
        section = self._config.learner
        if self._hosts > 1 and (section.checkpoint_upload or section.warm_start):
            raise ConfigError(
                "a learner of several hosts keeps its checkpoints on the hosts' disks only",
                hint="set learner.checkpoint_upload and learner.warm_start to false for it",
            )
        return open_folder(context, section, jax.process_index(), self._hosts)

    def _parts(self, context: Context, folder: Kept | None) -> dict[Moment, Callable[[], Restored]]:
        island = self._island
        return readable_parts(
            context, self._config.learner, folder, island.state, island.state_shardings
        )

    def _restore(
        self, context: Context, trainer: Trainer, folder: Kept | None, fetch: Fetch
    ) -> None:
        """Give the trainer its optimizer's state, of a checkpoint if there is one."""
        island, section = self._island, self._config.learner
        restored = restore(context, section, folder, island.state, fetch)
        if restored is not None:
            state = jax.device_put(restored.state, island.state_shardings)
            restored = restored._replace(state=state)
        self._go_on_from(context, trainer, restored)

    def _go_on_from(self, context: Context, trainer: Trainer, restored: Restored | None) -> None:
        if restored is None:
            trainer.optimizer_state = self._island.init_state(trainer.replica.trained)
            return
        trainer.optimizer_state = restored.state
        trainer.meter.local_step = restored.local_step
        trainer.meter.earlier_tokens = restored.tokens
        if self._hosts > 1:
            context.logger.info(
                "checkpoint_restored",
                where="folder",
                name=f"host-{jax.process_index()}-of-{self._hosts}",
                of=context.learner,
                local_step=restored.local_step,
            )

    def _watch(self, context: Context, meter: Meter) -> None:
        hang_s = self._config.learner.hang_s
        context.health.limit_s = lambda: step_limit_s(hang_s, meter.step_time_s)
        context.health.view = lambda: instruments.view(meter)

    def _close(self, context: Context, trainer: Trainer, why: str) -> None:
        if trainer.saver is not None:
            trainer.saver.close()
        context.logger.info("left", why=why, local_step=trainer.meter.local_step)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _check_run(context: Context, island: Island, specification: wire.Specification) -> Params:
    """Refuse a run that is not this configuration's; the run's constants.

    Raises:
        RunMismatchError: settings or layout that disagree.
    """
    theirs = parse_settings(specification.settings)
    check_same_run(context.settings, theirs, context.layout.digest, specification.layout)
    return read_constants(context, island.constants, specification.constants)


def read_constants(context: Context, like: Params, name: str | None) -> Params:
    """The run's constants, from the object of that name.

    Raises:
        IntegrityError: it is damaged.
    """
    if name is None:
        return like
    return tree.unpack_constants(context.store.get(name), like, name.rsplit("-", 1)[1])
