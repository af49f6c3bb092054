"""One life of a learner on host 0, which alone connects to NATS; a learner may have more hosts."""

import contextlib
import platform
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from diloco.common.process import log
from diloco.common.process.config import LearnerSection, check_same_run, parse_settings
from diloco.common.protocol import wire
from diloco.common.protocol.errors import DilocoError, SupersededError
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.data_share_allocation import Holding
from diloco.common.storage.tape import await_specification, has_ended
from diloco.learner.background import Context, NoOtherHosts
from diloco.learner.core import sync
from diloco.learner.core.carry import Carried, carry
from diloco.learner.core.events import (
    Start,
    SyncRules,
    sync_rules,
)
from diloco.learner.core.handover import CheckpointId, why_left
from diloco.learner.hosts import messages
from diloco.learner.hosts.coordinator import Coordinator, Listener, listen
from diloco.learner.hosts.messages import exchange_secret, meeting_place
from diloco.learner.life import (
    Host,
    Life,
    RunEndedError,
    compile_programs,
    ended_early,
    log_restored,
    make_replica,
    make_saver,
    own_folder,
    own_part,
    patient_fetch,
    prove_store,
    read_frozen,
    show_cache,
    show_series,
    show_slices,
)
from diloco.learner.synchronizer import Losses, Meter, Planner, Synchronizer, never
from diloco.learner.task import Params
from diloco.learner.tensors import tree
from diloco.learner.tensors.checkpoint import CheckpointFolder, Facts
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.wire.checkpoint_save_and_restore import (
    Restored,
    Saver,
    readable_parts,
    readable_snapshots,
    restore,
)
from diloco.learner.wire.claims import Claims
from diloco.learner.wire.fetch_versions import Receiver, VersionFetcher, load, start_at, whole
from diloco.learner.wire.incarnation import (
    Membership,
    end_when_superseded,
    join,
)
from diloco.learner.wire.publish import Publisher, Uploader
from diloco.learner.wire.resume_position import ResumePosition, place_after_join

# Seconds that the error which ends a life waits for the last heartbeat to be sent.
LAST_WORD_S = 3.0


@contextlib.contextmanager
def lead(host: Host) -> Iterator[Life]:
    """Connects host 0 to the run, joins, and yields the `Life`; closes all when the block ends.

    Raises:
        RunEndedError: the run has ended.
        RunMismatchError: the run has other settings or another layout.
        AskedToStopError: the learner was asked to end before it joined.
        DilocoError: an error that a retry cannot mend.
    """
    background = host.background
    host.probes.health.begin_phase("connecting to NATS")
    with ExitStack() as stack:
        bus = host.starting(_connect(host))
        stack.callback(lambda: background.call(bus.close()))
        host.probes.health.begin_phase("reading the run")
        specification = host.starting(_specification(host, bus))
        # With several hosts the workers must learn of the end too, which they do later.
        alone = jax.process_count() == 1
        if alone and host.starting(_has_ended(host, bus)):
            raise RunEndedError(host.config.run.name)
        store = host.open_store()
        layout = host.layout(store, specification.layout)
        host = replace(host, member=host.member.within(layout))
        context = host.context(bus, store, layout, specification.epoch)
        peers = NoOtherHosts() if alone else _meet(host, stack)
        host = host if alone else replace(host, gives_up=never)
        stack.callback(background.close)
        _check_run(context, specification)
        held = read_frozen(host, context, specification.constants)
        try:
            with host.naming_lost():
                life = _leading_life(host, context, specification, held, peers)
            with _telling_why(life), host.naming_lost():
                yield life
        except DilocoError as error:
            peers.give_up(error)
            raise


@contextlib.contextmanager
def _telling_why(life: Life) -> Iterator[None]:
    """Sends a last heartbeat with the error that ends the block, if an error does.

    Otherwise the run would see a learner that sends no more, without a reason.
    """
    try:
        yield
    except SupersededError:
        raise  # The newer process sends this learner's heartbeats.
    except Exception as error:
        why = error.message if isinstance(error, DilocoError) else repr(error)
        life.context.health.troubles["end"] = why
        life.synchronizer.meter.state = "failed"
        with contextlib.suppress(DilocoError, TimeoutError):
            life.last_word()
        raise


async def _connect(host: Host) -> Bus:
    config, learner = host.config, host.member.learner
    logger = log.get(run=config.run.name, learner=learner)
    return await jetstream.connect_or_wait(config.bus, "learner", learner, host.runtime, logger)


async def _specification(host: Host, bus: Bus) -> wire.Specification:
    run = host.config.run.name
    logger = log.get(run=run, learner=host.member.learner)
    return await host.runtime.retry(
        "reading the run",
        lambda: await_specification(bus, run, host.config.bus.wait_for_run_s),
        logger=logger,
    )


async def _has_ended(host: Host, bus: Bus) -> bool:
    run = host.config.run.name
    logger = log.get(run=run, learner=host.member.learner)
    return await host.runtime.retry("reading the run", lambda: has_ended(bus, run), logger=logger)


def _meet(host: Host, stack: ExitStack) -> Coordinator:
    """Waits for this learner's workers; returns the coordinator connected to them."""
    background = host.background
    address = host.config.learner.coordinator or meeting_place() or "127.0.0.1"
    interface = socket.gethostname() if address == "auto" else address.split(":")[0]
    listener = background.call(listen(interface))
    _, secret = exchange_secret(listener.address)
    coordinator = background.call(_coordinator(listener, secret, host))
    stack.callback(lambda: background.call(coordinator.close()))
    return coordinator


async def _coordinator(listener: Listener, secret: str, host: Host) -> Coordinator:
    number_of = host.config.learner.number_of
    connections = await listener.meet(jax.process_count(), secret, number_of)

    def lost(error: BaseException) -> None:
        host.lost_host(error)
        host.background.fail(error)

    return Coordinator(host.background.loop, connections, lost, number_of)


def _check_run(context: Context, specification: wire.Specification) -> None:
    """Compares the run's specification with this learner's settings and layout.

    Raises:
        RunMismatchError: settings or layout differ.
    """
    theirs = parse_settings(specification.settings)
    check_same_run(context.settings, theirs, context.layout.digest, specification.layout)


def _leading_life(
    host: Host,
    context: Context,
    specification: wire.Specification,
    held: Params,
    peers: NoOtherHosts,
) -> Life:
    """Prepares all that the first step needs: versions, programs, the join, the data position.

    Args:
        host: host 0.
        context: the life's context.
        specification: the run's specification, from the tape.
        held: the leaves that are not synchronized.
        peers: the learner's other hosts.
    """
    background = host.background
    layout, constants_object = context.layout.digest, specification.constants
    peers.say(
        messages.Begin(
            epoch=context.epoch,
            layout=layout,
            constants=constants_object,
            alike=host.alike(),
        )
    )
    prove_store(host, context)
    replica, starts = _load_views(host, context, peers)
    compile_programs(host, replica, held)
    host.probes.health.begin_phase("joining the run")
    folder = own_folder(host, context)
    meter = Meter(context.learner, context.traffic)
    meter.full_tokens_per_s = host.member.full_tokens_per_s()
    slices = slices_of(host.config.learner)
    show_slices(context.metrics, slices)
    life = host.starting(
        join(context, socket.gethostname(), platform_of(), slices, host.member.holds)
    )
    publisher = _publish_and_adopt(host, context, replica, meter, starts, peers, life)
    # Not before the join: an update of an earlier life that is still in flight is merged if it is
    # stored before the join, and rejected if after.
    place = host.starting(place_after_join(context, life.incarnation))
    rules = sync_rules(context.settings.sync, context.layout, paused=context.settings.run.paused)
    begun = _Begun(life, place, rules, starts)
    place, unsent, losses = _go_on(host, context, replica, peers, folder, begun)
    position = place.position
    if place.lost:
        context.logger.warning("work_lost", position=position, batches=list(place.lost))
    shares = _shares(host, context, peers, life, place)
    saver = make_saver(host, context, folder, life.incarnation, others_made=peers.made)
    state = carry(rules, sync.begin(rules, starts), unsent)
    planner = _planner(host, context, rules, state, peers, saver)
    if unsent:
        planner.snapshot_soon()
    first = planner.first_step()
    peers.say(messages.Go(incarnation=life.incarnation, position=position, global_step=first))
    synchronizer = Synchronizer(
        replica=replica,
        position=position,
        tokens_per_step=host.member.tokens_per_step,
        boundaries=planner,
        outbox=lambda word: background.spawn(publisher.say(word)),
        meter=meter,
        saver=saver,
        losses=losses,
        clock=context.runtime.clock,
        check_interval_versions=context.settings.sync.check_interval_versions,
    )
    context.metrics.on_scrape(lambda: show_series(context.metrics, synchronizer, planner.state))
    context.metrics.on_scrape(lambda: show_cache(context.metrics, context.store))
    return Life(
        host=host,
        context=context,
        synchronizer=synchronizer,
        params=tree.join(replica.trained, held),
        leave_run=lambda: _leave(host, context, publisher, planner, synchronizer, shares),
        give_up=planner.give_up if peers.hosts == 1 else ended_early,
        last_word=lambda: background.call(
            publisher.last_word(meter.heartbeat(life.incarnation, context.health.line())),
            LAST_WORD_S,
        ),
        find=lambda like, shardings: _find(host, context, folder, peers, like, shardings),
        shares=shares,
    )


def platform_of() -> str:
    """Returns the learner's devices, machine and Python version, as text for people."""
    devices = jax.devices()
    kind = f"{len(devices)} x {devices[0].device_kind}"
    return f"{kind}, {platform.machine()} {platform.system()}, Python {platform.python_version()}"


def slices_of(section: LearnerSection) -> wire.LearnerSlices | None:
    """Returns the slices that train in this life; None: the learner does not have several."""
    if not section.formation:
        return None
    return wire.LearnerSlices(
        present=len(section.formation), given=section.slices, least=section.min_slices
    )


def _shares(
    host: Host, context: Context, peers: NoOtherHosts, life: Membership, place: ResumePosition
) -> Claims:
    """Returns the learner's claims of data shares; granted shares are sent to its other hosts."""

    def told(holding: Holding, end: int) -> None:
        peers.write(messages.Granted(holding=holding, end=end))

    # Hosts end together, at a boundary.
    ends = host.asked_to_leave if peers.hosts == 1 else never
    return Claims(context, ends, life, place, background=host.background, told=told)


def _find(
    host: Host,
    context: Context,
    folder: CheckpointFolder | None,
    peers: NoOtherHosts,
    like: Any,
    shardings: Any,
) -> Restored | None:
    """Returns the checkpoint to resume from; None if there is none.

    With several hosts, each host must have its part of that checkpoint.
    """
    section, fetch = host.config.learner, patient_fetch(host, context)
    part = own_part(section)
    if not part:
        return restore(context, section, folder, like, fetch)
    parts = readable_parts(context, section, folder, like, shardings, fetch, part)
    chosen = _common_checkpoint(parts, host.background.call_unless_failed(peers.checkpoints()))
    peers.say(messages.Resume(checkpoint=chosen))
    if chosen is None:
        return None
    found = parts[chosen].restore()
    log_restored(context, found, parts[chosen].where, part)
    return found


def _publish_and_adopt(
    host: Host,
    context: Context,
    tensors: Replica,
    meter: Meter,
    starts: tuple[Start | None, ...],
    peers: NoOtherHosts,
    life: Membership,
) -> Publisher:
    """Starts the background's tasks; returns the publisher of updates.

    The tasks read records, send heartbeats, and detect that a newer process has joined under this
    learner's name.
    """
    background = host.background
    uploader = Uploader(context, tensors, hosts=peers.hosts)
    publisher = Publisher(context, background.post, uploader, peers, life)
    fetcher = VersionFetcher(context, tensors)
    receiver = Receiver(context, background.post, fetcher, peers, starts, life.incarnation)
    background.spawn(receiver.follow())
    background.spawn(end_when_superseded(context, life))
    every_s = host.config.learner.heartbeat_interval_s
    health = context.health
    background.spawn(
        publisher.beat(lambda: meter.heartbeat(life.incarnation, health.line()), every_s)
    )
    return publisher


def _load_views(
    host: Host, context: Context, peers: NoOtherHosts
) -> tuple[Replica, tuple[Start | None, ...]]:
    """Loads the newest view of every fragment that the learner holds.

    Returns:
        The learner's tensors with these views, and each fragment's version as a `Start`; None for a
        fragment that it does not hold.
    """
    starts: list[Start | None] = [None] * len(context.layout.fragments)

    def views() -> Iterator[np.ndarray]:
        held = context.layout.held(host.member.holds)
        for place, fragment in enumerate(held, start=1):
            host.probes.health.begin_phase(f"loading fragment {place} of {len(held)}")
            loaded = host.starting(load(context, fragment.index))
            starts[fragment.index] = start_at(loaded)
            peers.say(messages.Load(change=whole(loaded)))
            yield loaded.view

    return make_replica(host, context, views()), tuple(starts)


def _common_checkpoint(
    parts: Iterable[CheckpointId], others: list[set[CheckpointId]]
) -> CheckpointId | None:
    """Returns the newest of the checkpoints of which every host has its part.

    That of the newest life: a group of hosts that was superseded may have gone on for longer.

    Args:
        parts: checkpoints of which this host has its part.
        others: the same for each other host.
    """
    return max(set(parts).intersection(*others), default=None)


class _Begun(NamedTuple):
    """What a life knows of its beginning: its join, data position, rules and versions."""

    life: Membership
    place: ResumePosition
    rules: SyncRules
    starts: tuple[Start | None, ...]


def _go_on(
    host: Host,
    context: Context,
    replica: Replica,
    peers: NoOtherHosts,
    folder: CheckpointFolder | None,
    begun: _Begun,
) -> tuple[ResumePosition, tuple[Carried, ...], Losses]:
    """Takes over the unsent work of the life before, if a snapshot has it on all hosts.

    Returns:
        The data position, by fragment how the work was taken over, and the losses of its steps;
        nothing of both if none was.
    """
    section, place = host.config.learner, begun.place
    if not section.snapshot_steps or folder is None:
        return place, (), Losses()
    here = readable_snapshots(context, section, folder, replica.unsent_shapes())
    common = set(here).intersection(*host.background.call_unless_failed(peers.snapshots()))
    for number in sorted(common, reverse=True):
        facts, values = here[number]
        found = place.fits(facts, begun.life, begun.rules, begun.starts)
        if found is not None:
            peers.say(messages.GoOn(snapshot=number, found=found))
            replica.carry(values(), found)
            steps = [one.work.steps for one in found]
            context.logger.info("work_carried", position=facts.position, steps=steps)
            return place.going_on(facts.position, found), found, losses_of(facts, found)
    peers.say(messages.GoOn(snapshot=None))
    return place, (), Losses()


def losses_of(facts: Facts, found: Sequence[Carried]) -> Losses:
    """Returns the losses of the steps of a snapshot's unsent work, `found`."""
    assert facts.loss is not None
    return Losses(max(one.work.steps for one in found), facts.loss)


def _planner(
    host: Host,
    context: Context,
    rules: SyncRules,
    state: sync.State,
    peers: NoOtherHosts,
    saver: Saver | None,
) -> Planner:
    return Planner(
        rules=rules,
        state=state,
        inbox=host.background,
        tokens_per_step=host.member.tokens_per_step,
        asked_to_leave=lambda: host.asked_to_leave() or peers.asked_to_leave(),
        lookahead=peers.lookahead,
        drain_timeout_s=host.config.learner.drain_timeout_s,
        checkpoint_due=never if saver is None else saver.due,
        snapshot_steps=host.config.learner.snapshot_steps,
        saver_idle=never if saver is None else saver.idle,
        tell=peers.tell,
        turned=context.health.turned,
        clock=context.runtime.clock,
    )


def _leave(
    host: Host,
    context: Context,
    publisher: Publisher,
    planner: Planner,
    synchronizer: Synchronizer,
    shares: Claims,
) -> str:
    """Announces that this learner leaves, within the drain timeout; returns why it leaves."""
    lost = sync.unsent(planner.state)
    if lost and not planner.state.ended:
        context.logger.warning("left_unsent", fragments=len(lost), steps=sum(lost.values()))
    synchronizer.meter.state = "leaving"
    within_s = host.config.learner.drain_timeout_s
    rest = leaves_snapshot(planner)
    said = say_end(publisher, shares, synchronizer.position, snapshot=rest)
    try:
        host.background.call(said, within_s)
    except TimeoutError:
        context.logger.warning("left_silently", waited_s=within_s)
    return why_left(stopping=planner.state.stopping)


def leaves_snapshot(planner: Planner) -> bool:
    """True if a learner leaves unsent work behind, of which a snapshot is made."""
    state = planner.state
    return planner.snapshot_steps > 0 and not state.ended and bool(sync.unsent(state))


async def say_end(
    publisher: Publisher, shares: Claims, position: int, *, snapshot: bool = False
) -> None:
    """Publishes that this learner leaves, and frees its shares of the data.

    Args:
        publisher: publishes the leave.
        shares: the learner's claims.
        position: the learner's position in its data, in batches.
        snapshot: whether a snapshot has unsent work. The leave then has the position 0, since all
            before a leave's position counts as sent.
    """
    # In this order: the leave comes before the end of the claims.
    await publisher.leave(0 if snapshot else position)
    await shares.end(position)
