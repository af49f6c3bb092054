"""A host of a learner beside host 0: it does what host 0 says, and speaks to nobody of the run."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from diloco.common.errors import DilocoError, IntegrityError, ObjectMissingError
from diloco.common.service import cancel
from diloco.learner import sync
from diloco.learner.adopt import Change, Fetcher
from diloco.learner.director import Plan
from diloco.learner.hosts import Link, unpack_plan
from diloco.learner.publish import Context, Outgoing, Tensors, Uploader


class Follower:
    """Plans and outbox of a training loop that host 0 directs.

    Args:
        context: the learner's; its bus is used by nobody here.
        link: to host 0.
        loop: the event loop of the background.
        asked_to_leave: whether somebody wants this host to end.
    """

    def __init__(
        self,
        context: Context,
        link: Link,
        loop: asyncio.AbstractEventLoop,
        asked_to_leave: Callable[[], bool],
    ) -> None:
        self._context = context
        self._link = link
        self._loop = loop
        self._asked = asked_to_leave
        self._told = False
        self._closed = False
        self._payloads: dict[tuple[int, int], Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, tensors: Tensors, hosts: int) -> None:
        """Say whose tensors are sent and moved; from now on changes are prepared."""
        self._fetcher = Fetcher(self._context, tensors)
        self._uploader = Uploader(self._context, tensors, self._link.host, hosts)
        self._link.asked_for = lambda change: self._spawn(self._prepare(change))

    def begin(self, incarnation: int, global_step: int) -> None:
        """The life that begins."""
        self._incarnation = incarnation
        self._global_step = global_step

    def watch(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine beside training, until `close`."""
        self._spawn(coroutine)

    # For the training loop

    def first_step(self) -> int:
        """The run's clock for the step before the first boundary."""
        return self._global_step

    def next(self) -> Plan:
        """The plan of the next boundary, which host 0 made some boundaries ago.

        Raises:
            HostLostError: host 0 is gone.
        """
        self._context.health.turned()
        if self._asked() and not self._told:
            self._told = True
            self._link.tell({"kind": "leave"})
        return unpack_plan(self._link.receive("plan"))

    def payload(self, fragment: int, record_seq: int) -> Any:
        """What a record brought, once; host 0 plans it only when it is here."""
        return self._payloads.pop((fragment, record_seq), None)

    def send(self, outgoing: Outgoing) -> None:
        """Store this host's shards, and tell host 0."""
        self._spawn(self._store(outgoing))

    def republish(self, again: sync.Republish) -> None:
        """Host 0 does that."""

    def finished(self, position: int, fragments: tuple[int, ...]) -> None:
        """Host 0 does that."""

    async def close(self) -> None:
        """End what still runs for this host; nobody waits for it any more."""
        self._closed = True
        await cancel(*self._tasks)

    # On the event loop

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._loop.call_soon_threadsafe(self._begin_task, coroutine)

    def _begin_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if self._closed:  # what host 0 asked for while this host was ending
            coroutine.close()
            return
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._link.fail(error)

    async def _prepare(self, change: Change) -> None:
        why = None
        try:
            payload = await self._context.runtime.retry(
                "reading a version",
                lambda: self._fetcher.fetch(change),
                logger=self._context.logger,
            )
            self._payloads[change.fragment, change.record_seq] = payload
        except (ObjectMissingError, IntegrityError) as error:
            why = ("missing" if isinstance(error, ObjectMissingError) else "integrity", str(error))
        self._link.tell({"kind": "ready", "of": [change.fragment, change.record_seq], "why": why})

    async def _store(self, outgoing: Outgoing) -> None:
        send = outgoing.send
        stored = await self._uploader.store(self._incarnation, send, outgoing.codes)
        shards = [shard.model_dump() for shard in stored.shards]
        self._link.tell({"kind": "stored", "of": [send.fragment, send.seq], "shards": shards})
        self._context.traffic.updates_sent += 1


def check_same(what: str, here: str, there: str) -> None:
    """Refuse to train with host 0 on something else.

    Raises:
        DilocoError: the two differ.
    """
    if here != there:
        raise DilocoError(
            f"this host's {what} is {here}, that of host 0 {there}",
            hint="give all hosts of a learner the same configuration and release",
        )
