"""A life as a host that does what host 0 says."""

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack

import jax
import numpy as np

from diloco.common.bus import MemoryBus
from diloco.common.errors import status_of
from diloco.common.views import assemble_view
from diloco.learner.context import Context
from diloco.learner.fetch import Fetcher
from diloco.learner.hosts import messages
from diloco.learner.hosts.channel import end_if_hanging, exchange_secret
from diloco.learner.hosts.worker import Link, Worker, check_same, connect
from diloco.learner.life import (
    Host,
    Life,
    compiled,
    make_parts,
    make_saver,
    make_trainer,
    own_folder,
    own_parts,
    read_constants,
)
from diloco.learner.publish import Uploader


@contextlib.contextmanager
def follow(host: Host) -> Iterator[Life]:
    """A life as a host that does what host 0 says."""
    background = host.background
    with ExitStack() as stack:
        address, secret = exchange_secret("")
        link = background.call(connect(jax.process_index(), address, secret, _lost))
        stack.callback(lambda: background.call(link.close()))
        begin = link.receive(messages.Begin)
        check_same("layout of the parameters", host.island.layout.digest, begin.layout)
        # Nobody here speaks to the run.
        context = host.context(MemoryBus(), begin.epoch)
        stack.callback(background.close)
        stack.enter_context(host.island.context())
        yield _following_life(host, context, link, begin.constants)


def _lost(error: BaseException) -> None:
    end_if_hanging(status_of(error))  # training may wait for host 0 in a collective


def _following_life(host: Host, context: Context, link: Link, constants_object: str | None) -> Life:
    background = host.background
    replica = host.island.replica(_told_views(context, link))
    constants = read_constants(context, host.island.constants, constants_object)
    inner_step = compiled(host, replica, constants)
    folder = own_folder(host, context)
    checkpoints = own_parts(host, context, folder)
    link.tell(messages.Have(checkpoints=tuple(checkpoints)))
    go = link.receive(messages.Go)
    found = None if go.checkpoint is None else checkpoints[go.checkpoint]()
    parts = make_parts(host, context, replica, inner_step, found)
    fetcher = Fetcher(context, replica)
    uploader = Uploader(context, replica, jax.process_index(), jax.process_count())
    worker = Worker(context, link, fetcher, uploader, background.spawn, host.asked_to_leave, go)
    background.spawn(worker.serve())
    trainer = make_trainer(
        host,
        parts,
        position=go.position,
        boundaries=worker,
        outbox=worker.say,
        saver=make_saver(host, context, folder, go.incarnation),
    )
    return Life(host=host, context=context, trainer=trainer, leave_run=lambda: "host 0 said so")


def _told_views(context: Context, link: Link) -> Iterator[np.ndarray]:
    """Every fragment's view, as host 0 has it."""
    for _ in context.layout.fragments:
        change = link.receive(messages.Load).change
        assert change.snapshot is not None
        view, read_bytes = assemble_view(
            context, change.fragment, change.view_digest, change.snapshot, change.deltas
        )
        context.traffic.bytes_down += read_bytes
        yield view
