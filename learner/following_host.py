"""One life of a learner on a host other than host 0: a worker, which host 0 directs."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from diloco.common.storage.bus import MemoryBus
from diloco.common.storage.views import assemble_view
from diloco.learner.background import Context
from diloco.learner.hosts import messages
from diloco.learner.hosts.messages import exchange_secret
from diloco.learner.hosts.worker import HostLink, Worker, check_same, connect
from diloco.learner.life import (
    Host,
    Life,
    compile_programs,
    ended_early,
    log_restored,
    make_replica,
    make_saver,
    own_folder,
    own_part,
    patient_fetch,
    read_frozen,
)
from diloco.learner.synchronizer import Meter, Synchronizer, never
from diloco.learner.tensors import tree
from diloco.learner.tensors.checkpoint import CheckpointFolder
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.wire.checkpoint_save_and_restore import (
    Restored,
    readable_parts,
    readable_snapshots,
)
from diloco.learner.wire.claims import GrantedShares
from diloco.learner.wire.fetch_versions import VersionFetcher
from diloco.learner.wire.publish import Uploader


@contextlib.contextmanager
def follow(host: Host) -> Iterator[Life]:
    """Connects this host to host 0, and yields the `Life`; closes all when the block ends.

    Raises:
        HostLostError: host 0 is gone.
        ConfigError: this host's layout differs from that of host 0.
        DilocoError: an error that a retry cannot mend, here or on host 0.
    """
    background = host.background
    with ExitStack() as stack:
        address, secret = exchange_secret("")
        leader = f"host {host.config.learner.number_of(0)}"
        link = background.call(
            connect(
                jax.process_index(),
                address,
                secret,
                host.lost_host,
                leader,
                several=host.config.learner.slices > 1,
            )
        )
        stack.callback(lambda: background.call(link.close()))
        begin = link.receive(messages.Begin)
        store = host.open_store()
        layout = host.layout(store, begin.layout)
        check_same("layout of the parameters", layout.digest, begin.layout)
        check_same("settings of the learner", host.alike(), begin.alike)
        # This host has no connection to the bus.
        context = host.context(MemoryBus(), store, layout, begin.epoch)
        stack.callback(background.close)
        with host.naming_lost():
            yield _following_life(host, context, link, begin.constants)


def _following_life(
    host: Host, context: Context, link: HostLink, constants_object: str | None
) -> Life:
    background = host.background
    replica = make_replica(host, context, _told_views(host, context, link))
    held = read_frozen(host, context, constants_object)
    compile_programs(host, replica, held)
    folder = own_folder(host, context)
    if host.config.learner.snapshot_steps and folder is not None:
        _go_on(host, context, replica, link, folder)
    go = link.receive(messages.Go)
    fetcher = VersionFetcher(context, replica)
    uploader = Uploader(context, replica, jax.process_index(), jax.process_count())
    shares = GrantedShares(context, link.check, never)
    worker = Worker(
        context, link, fetcher, uploader, background.spawn, host.asked_to_leave, go, shares
    )
    background.spawn(worker.serve())

    def find(like: Any, shardings: Any) -> Restored | None:
        fetch, section = patient_fetch(host, context), host.config.learner
        part = own_part(section)
        parts = readable_parts(context, section, folder, like, shardings, fetch, part)
        link.tell(messages.Have(checkpoints=tuple(parts)))
        chosen = link.receive(messages.Resume).checkpoint
        if chosen is None:
            return None
        found = parts[chosen].restore()
        log_restored(context, found, parts[chosen].where, part)
        return found

    def made(local_step: int) -> None:
        link.tell(messages.Made(local_step=local_step))

    return Life(
        host=host,
        context=context,
        synchronizer=Synchronizer(
            replica=replica,
            position=go.position,
            tokens_per_step=host.member.tokens_per_step,
            boundaries=worker,
            outbox=worker.say,
            meter=Meter(context.learner, context.traffic),
            saver=make_saver(host, context, folder, go.incarnation, made=made),
            clock=context.runtime.clock,
        ),
        params=tree.join(replica.trained, held),
        leave_run=worker.why,
        give_up=ended_early,
        find=find,
        shares=shares,
    )


def _go_on(
    host: Host, context: Context, replica: Replica, link: HostLink, folder: CheckpointFolder
) -> None:
    """Takes over this host's part of the unsent work of the life before, as host 0 says."""
    section = host.config.learner
    here = readable_snapshots(context, section, folder, replica.unsent_shapes())
    link.tell(messages.HaveUnsent(snapshots=tuple(here)))
    told = link.receive(messages.GoOn)
    if told.snapshot is not None:
        replica.carry(here[told.snapshot].values(), told.found)


def _told_views(host: Host, context: Context, link: HostLink) -> Iterator[np.ndarray]:
    """Yields each held fragment's view, in order, from objects that host 0 names; float32 [N]."""
    for _ in context.layout.held(host.member.holds):
        change = link.receive(messages.Load).change
        assert change.snapshot is not None
        view, read_bytes = assemble_view(
            context, change.fragment, change.view_digest, change.snapshot, change.deltas
        )
        context.traffic.bytes_down += read_bytes
        yield view
