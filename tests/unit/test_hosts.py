"""Hosts of one learner: what they say to each other, and attempts that come to nothing."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import jax
import msgpack
import pytest
import structlog

from diloco.common.process.config import LearnerSection, RunSettings
from diloco.common.process.retry import Runtime
from diloco.common.process.tasks import cancel
from diloco.common.protocol import wire
from diloco.common.protocol.errors import (
    DilocoError,
    Exit,
    HostLostError,
    IntegrityError,
    ObjectMissingError,
    StoreError,
    SupersededError,
    WireError,
    status_of,
)
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.common.storage.bus import MemoryBus
from diloco.common.storage.catchup import Change
from diloco.common.storage.store import MemoryStore
from diloco.learner.background import Context
from diloco.learner.core.carry import Carried
from diloco.learner.core.events import (
    Adopt,
    Finished,
    Ready,
    Republish,
    Send,
    Start,
)
from diloco.learner.core.handover import Boundary, Outgoing
from diloco.learner.core.sync import NO_WORK, Work
from diloco.learner.hosts import messages
from diloco.learner.hosts.coordinator import Coordinator, listen
from diloco.learner.hosts.messages import host_gone
from diloco.learner.hosts.worker import HostLink, Worker, connect
from diloco.learner.leading_host import _common_checkpoint
from diloco.learner.library import _Hanging
from diloco.learner.synchronizer import never
from diloco.learner.wire.claims import GrantedShares
from diloco.learner.wire.fetch_versions import Receiver

REF = wire.ObjectRef(name="r/global/0/x", size_bytes=7, crc32c=9)
CHANGE = Change(0, 44, "4" * 32, None, (REF,))
READY = Ready(1, 7, 3, "2" * 32, 12, 4, rolled_back=True)
LAST = Boundary((), "end", 9)
NUMBERED = LearnerSection().number_of
SEND = Send(0, 2, 3, "3" * 32, 5, 50, final=True)
LEFT_OUT = Carried(NO_WORK, dropped=True, held=False)
EVERYTHING = [
    messages.Begin(epoch=1, layout="1" * 32, constants=None, alike="slices 1"),
    messages.Load(change=CHANGE._replace(snapshot=REF, deltas=(REF, REF))),
    messages.Go(incarnation=5, position=2, global_step=6),
    messages.GoOn(snapshot=(3, 8), found=(Carried(Work(2, 20), again=True), LEFT_OUT)),
    messages.Resume(checkpoint=(3, 8)),
    messages.Prepare(attempt=1, change=CHANGE),
    messages.Drop(attempt=1),
    messages.Hello(secret="s", host=1),
    messages.Have(checkpoints=((3, 8), (1, 2))),
    messages.HaveUnsent(snapshots=((3, 8),)),
    messages.Made(local_step=8),
    messages.Prepared(attempt=1, failure=messages.Failure(missing=True, text="gone")),
    messages.Uploaded(fragment=0, seq=1, shards=()),
    messages.LeaveAsked(),
]


def sent(message):
    return messages.unframe(messages.frame(message)[messages.LENGTH.size :])


@pytest.mark.parametrize("message", EVERYTHING, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_said(message):
    assert sent(message) == message


def test_the_other_hosts_read_what_host_0_plans():
    again, finished = Republish(0, 1, 1), Finished((0, 2))
    effects = (Adopt(READY, True, blended=True), SEND, again, finished)
    boundary = Boundary(effects, "hold", 9, "flushing", True)
    assert sent(messages.Turn(boundary=boundary)).boundary == boundary


def test_fields_go_by_name_so_that_a_new_one_shifts_no_other():
    boundary = Boundary((Adopt(READY, True), SEND), "step", 9)
    turn = messages.Turn(boundary=boundary)
    fields = msgpack.unpackb(messages.frame(turn)[messages.LENGTH.size :])
    adopt, send = fields["boundary"]["effects"]
    assert adopt["ready"] == READY._asdict()
    assert send == SEND._asdict()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": 1}, "schema"),
        ({"kind": "Rest"}, "schema"),
        ({"attempt": "1"}, "malformed"),
        ({"new": 1}, "malformed"),
    ],
)
def test_a_message_of_another_release_is_refused(changed, reason):
    fields = {"version": messages.VERSION, "kind": "Drop", "attempt": 1}
    assert messages.unframe(msgpack.packb(fields)) == messages.Drop(attempt=1)
    with pytest.raises(WireError) as caught:
        messages.unframe(msgpack.packb({**fields, **changed}))
    assert caught.value.reason == reason


# --- Attempts


def make_context() -> Context:
    settings = RunSettings.model_validate({"run": {"name": "r", "steps": 9}})
    layout = make_layout([Tensor(name="w", shape=(32,), dtype="float32")], fragments=1, block=16)
    return Context(
        settings=settings, layout=layout, epoch=0, bus=MemoryBus(), store=MemoryStore(),
        runtime=Runtime(), logger=structlog.get_logger(), learner="a",
    )  # fmt: skip


class Hands:
    """A fetcher that does as it is told: what each call brings, or raises."""

    def __init__(self, *answers) -> None:
        self.answers = list(answers)
        self.calls = 0
        self.gates: dict[int, asyncio.Event] = {}

    async def fetch(self, _change: Change):
        number, self.calls = self.calls, self.calls + 1
        if number in self.gates:
            await self.gates[number].wait()
        answer = self.answers[number]
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Pair:
    """A coordinator and one worker, over a real connection."""

    def __init__(
        self,
        coordinator: Coordinator,
        link: HostLink,
        worker: Worker,
        lost: list[BaseException],
    ) -> None:
        self.coordinator = coordinator
        self.link = link
        self.worker = worker
        # What either side has reported as a lost host.
        self.lost = lost

    def held(self):
        return [held.tensors for held in self.worker._held.values()]

    async def until(self, condition) -> None:
        async with asyncio.timeout(300):
            while not condition():  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def pair(hands: Hands) -> AsyncIterator[Pair]:
    loop, tasks = asyncio.get_running_loop(), set()

    def spawn(coroutine):
        tasks.add(asyncio.ensure_future(coroutine))

    listener = await listen("127.0.0.1")
    lost: list[BaseException] = []
    link = await connect(1, listener.address, "secret", lost.append)
    coordinator = Coordinator(
        loop, await listener.meet(2, "secret", NUMBERED), lost.append, NUMBERED
    )
    go = messages.Go(incarnation=1, position=0, global_step=0)
    context = make_context()
    shares = GrantedShares(context, link.check, never)
    worker = Worker(context, link, hands, None, spawn, never, go, shares)
    spawn(worker.serve())
    try:
        yield Pair(coordinator, link, worker, lost)
    finally:
        await cancel(*tasks)
        link._ended = True
        await coordinator.close()
        await link.close()


def test_a_host_says_that_its_part_is_uploaded_once_its_snapshot_is_stored(run_async):
    """Else an update is announced that the newest snapshot of all hosts does not know."""
    told = []

    class Uploads:
        async def store(self, *_args):
            told.append("stored")
            return SimpleNamespace(shards=())

    async def covered():
        told.append("covered")

    link = SimpleNamespace(tell=lambda message: told.append(type(message)))
    go = messages.Go(incarnation=1, position=0, global_step=0)
    worker = Worker(make_context(), link, None, Uploads(), None, never, go, None)
    outgoing = Outgoing(SEND, None, 5, 5, float, 1.0, 0.0, covered=covered)
    run_async(worker._store(outgoing))
    assert told == ["stored", "covered", messages.Uploaded]


def test_a_host_that_cannot_upload_its_part_ends_its_learner(run_async):
    """Host 0 would wait for the part for ever, and nothing more would be sent."""
    failed = []

    class Refuses:
        async def store(self, *_args):
            raise StoreError("not permitted")

    link = SimpleNamespace(tell=failed.append, fail=failed.append)
    go = messages.Go(incarnation=1, position=0, global_step=0)
    worker = Worker(make_context(), link, None, Refuses(), None, never, go, None)
    with pytest.raises(StoreError):
        run_async(worker._store(Outgoing(SEND, None, 5, 5, float, 1.0, 0.0)))
    assert [type(one) for one in failed] == [StoreError]


def test_a_lost_host_is_reported_and_ends_no_process_by_itself(run_async):
    """The process belongs to its training loop, which alone decides whether to go on."""

    async def scenario():
        reported = []
        listener = await listen("127.0.0.1")
        link = await connect(1, listener.address, "secret", lambda _: reported.append("link"))
        (connection,) = (await listener.meet(2, "secret", NUMBERED)).values()
        connection.writer.close()
        with pytest.raises(HostLostError, match="host 0 of this learner is gone"):
            await asyncio.to_thread(link.receive, messages.Turn)
        await link.close()
        return reported

    assert run_async(scenario()) == ["link"]
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


@pytest.mark.parametrize("status", [Exit.CONFIG, Exit.TASK, Exit.SHUT_OUT, Exit.MISMATCH])
@pytest.mark.parametrize("several", [False, True])
def test_a_fault_of_host_0s_machine_ends_the_other_slices_as_a_lost_host_does(
    run_async, status, several
):
    """Their supervisors then train on without its slice; a learner of one slice has no other."""
    own_fault = status is not Exit.MISMATCH

    async def scenario():
        listener = await listen("127.0.0.1")
        link = await connect(
            1, listener.address, "secret", lambda _: None, "host 3", several=several
        )
        (connection,) = (await listener.meet(2, "secret", NUMBERED)).values()
        ending = messages.Ending(status=status, message="no file of tokens", hint="copy it")
        connection.writer.write(messages.frame(ending))
        with pytest.raises(DilocoError, match="no file of tokens") as raised:
            await asyncio.to_thread(link.receive, messages.Turn)
        connection.writer.close()
        await link.close()
        return raised.value

    error = run_async(scenario())
    as_lost = several and own_fault
    assert status_of(error) == (HostLostError.status if as_lost else status)
    assert ("host 3 has ended" in error.message) is as_lost


def test_a_broken_collective_is_a_lost_host_where_one_is_said_to_be_gone():
    broken = jax.errors.JaxRuntimeError("Connection closed by peer")
    hanging = _Hanging(60.0)
    with contextlib.closing(hanging):
        with pytest.raises(jax.errors.JaxRuntimeError), hanging.named():
            raise broken
        hanging.begin(host_gone("host 1"))
        with pytest.raises(HostLostError, match="host 1 of this learner is gone"), hanging.named():
            raise broken


def test_what_failed_once_is_no_answer_to_the_next_attempt(run_async):
    async def scenario():
        async with pair(Hands(ObjectMissingError("gone"), "here")) as hosts:
            first = hosts.coordinator.prepare(CHANGE)
            with pytest.raises(ObjectMissingError, match="gone"):
                await first.ready()
            first.drop()
            await hosts.coordinator.prepare(CHANGE).ready()
            assert hosts.held() == ["here"]
            assert hosts.worker.payload(0, 44) == "here"

    run_async(scenario())


def test_a_checkpoint_is_made_once_the_other_host_is_done_with_its_part(run_async):
    async def scenario():
        async with pair(Hands()) as hosts:
            hosts.link.tell(messages.Made(local_step=7))
            await hosts.until(lambda: hosts.coordinator.made(7))
            assert not hosts.coordinator.made(8)

    run_async(scenario())


def test_one_record_may_be_prepared_twice_at_once(run_async):
    async def scenario():
        async with pair(Hands("delta", "view")) as hosts:
            first, second = (hosts.coordinator.prepare(CHANGE) for _ in range(2))
            await first.ready()
            await second.ready()
            assert hosts.held() == ["view"]

    run_async(scenario())


def test_what_a_dropped_attempt_brought_leaves_the_devices(run_async):
    async def scenario():
        async with pair(Hands("delta", "view")) as hosts:
            first = hosts.coordinator.prepare(CHANGE)
            await first.ready()
            first.drop()
            await hosts.until(lambda: not hosts.held())
            # What comes of the next attempt stays, although the first is dropped again.
            await hosts.coordinator.prepare(CHANGE).ready()
            first.drop()
            await asyncio.sleep(0.05)
            assert hosts.held() == ["view"]

    run_async(scenario())


def test_a_dropped_attempt_takes_no_other_record_with_it(run_async):
    async def scenario():
        async with pair(Hands("one", "other")) as hosts:
            await hosts.coordinator.prepare(CHANGE).ready()
            later = CHANGE.record_seq + 1
            other = hosts.coordinator.prepare(CHANGE._replace(record_seq=later))
            await other.ready()
            other.drop()
            await hosts.until(lambda: len(hosts.held()) < 2)
            assert hosts.held() == ["one"]

    run_async(scenario())


def test_a_host_that_goes_after_the_last_boundary_is_not_lost(run_async):
    async def scenario():
        async with pair(Hands()) as hosts:
            hosts.coordinator.tell(LAST)
            assert (await asyncio.to_thread(hosts.link.receive, messages.Turn)).boundary == LAST
            await hosts.link.close()
            listening = hosts.coordinator._tasks
            await asyncio.wait(listening, timeout=300)
            assert all(task.done() for task in listening)
            assert not hosts.lost

    run_async(scenario())


@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_goes_before_the_last_boundary_is_lost(run_async, gone):
    async def scenario():
        async with pair(Hands()) as hosts:
            hosts.coordinator.tell(LAST._replace(then="step"))
            await asyncio.to_thread(hosts.link.receive, messages.Turn)
            await (hosts.link if gone else hosts.coordinator).close()
            await hosts.until(lambda: hosts.lost)
            assert f"host {gone} of this learner is gone" in str(hosts.lost[0])

    run_async(scenario())


def test_hosts_resume_from_the_newest_life_s_checkpoint():
    """A group of hosts that was superseded may have gone on for longer."""
    older, newer, alone = (5, 100), (9, 20), (9, 110)
    assert _common_checkpoint([older, newer, alone], [{older, newer}, {newer, older}]) == newer
    assert _common_checkpoint([alone], [{older}]) is None


def test_a_dropped_attempt_is_not_gone_on_with(run_async):
    async def scenario():
        hands = Hands("late", "view")
        hands.gates[0] = asyncio.Event()
        async with pair(hands) as hosts:
            first = hosts.coordinator.prepare(CHANGE)
            await hosts.until(lambda: hands.calls == 1)
            first.drop()
            await hosts.coordinator.prepare(CHANGE).ready()
            hands.gates[0].set()
            await asyncio.sleep(0.05)
            assert hosts.held() == ["view"]

    run_async(scenario())


def test_host_0_drops_what_it_cannot_read_itself(run_async):
    """The workers have it: they are told to free it."""

    async def scenario():
        async with pair(Hands("here")) as hosts:
            start = Start(0, "0" * 32, 1, 0)
            own = Hands(IntegrityError("damaged"))
            own.gates[0] = asyncio.Event()
            receiver = Receiver(make_context(), lambda *_: None, own, hosts.coordinator, [start], 1)
            prepared = asyncio.ensure_future(receiver._prepare(CHANGE))
            await hosts.until(hosts.held)
            own.gates[0].set()
            with pytest.raises(IntegrityError):
                await prepared
            await hosts.until(lambda: not hosts.held())

    run_async(scenario())


def test_a_stranger_does_not_get_in(run_async):
    async def scenario():
        listener = await listen("127.0.0.1")
        strangers = [await connect(1, listener.address, "guess", lambda _: None) for _ in range(2)]
        friend = await connect(1, listener.address, "secret", lambda _: None)
        found = await listener.meet(2, "secret", NUMBERED)
        assert list(found) == [1]
        for link in (*strangers, friend):
            link._ended = True
            await link.close()
        for connection in found.values():
            connection.writer.close()

    run_async(scenario())


def test_what_ends_host_0_ends_the_others_for_the_same_reason(run_async):
    """With its status too: systemd must not start the hosts of a superseded learner again."""

    async def scenario():
        async with pair(Hands()) as hosts:
            hosts.coordinator.give_up(SupersededError("another has joined", hint="one at a time"))
            with pytest.raises(DilocoError, match="another has joined") as ended:
                await asyncio.to_thread(hosts.link.receive, messages.Turn)
            assert ended.value.hint == "one at a time"
            assert status_of(ended.value) == Exit.SUPERSEDED

    run_async(scenario())
