"""A learner of several slices: its settings, its mesh, its batch, and who may be its supervisor."""

import asyncio
import contextlib
import errno
import shutil
import time
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest

from diloco.common.process.config import LearnerSection, MeshSection, load_config, make_config
from diloco.common.process.nats_server import LOOPBACK, free_port
from diloco.common.process.tasks import Tasks, cancel
from diloco.common.protocol.errors import CheckpointError, ConfigError
from diloco.common.storage.store import DirectoryStore
from diloco.learner.core import formation
from diloco.learner.core.formation import MOST_HOSTS, Begin, Formation, TrainingProcess
from diloco.learner.hosts import supervisor
from diloco.learner.hosts.messages import PartAsked, Report, frame
from diloco.learner.island import task_of_slices
from diloco.learner.task import Task
from diloco.learner.tensors.checkpoint import Facts, HostCheckpoint, PartFolder
from diloco.learner.tensors.mesh import make_mesh

PEERS = tuple(f"10.0.0.{host}:8470" for host in range(4))
GIVEN = {"slices": 2, "peers": PEERS, "checkpoint_dir": "/checkpoints"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"min_slices": 3}, "min_slices is 3, but there are 2 slices"),
        ({"peers": PEERS[:3]}, "names 3 hosts, which 2 slices cannot have in equal numbers"),
        ({"peers": ()}, "names 0 hosts"),
        ({"peers": (*PEERS[:3], PEERS[0])}, "names a host twice"),
        ({"peers": (*PEERS[:3], "10.0.0.9")}, "'10.0.0.9', which is not host:port"),
        ({"peers": (*PEERS[:3], "http://10.0.0.9:1")}, "which is not host:port"),
        ({"peers": (*PEERS[:3], "10.0.0.9:99999")}, "ports are 1 to 65535"),
        ({"hosts": 2}, "leave hosts out"),
        ({"host": 4}, "host 4 of 4"),
        ({"coordinator": "10.0.0.0:1"}, "choose the coordinator"),
        ({"checkpoint_dir": None}, "set checkpoint_dir"),
        ({"checkpoint_keep": 1}, "checkpoint_keep is 1, but hosts finish a checkpoint one after"),
        ({"peers": (*PEERS[:3], PEERS[0].replace(":", ":0"))}, "ports .*, without zeros before"),
        ({"peers": (*PEERS[:3], "0.0.0.0:7000")}, "'0.0.0.0:7000', which each machine has as its"),
        ({"peers": (*PEERS[:3], "127.0.0.1:7000")}, "'127.0.0.1:7000', which each machine has"),
        ({"peers": (*PEERS[:3], "LocalHost:7000")}, "'LocalHost:7000', which each machine has"),
        ({"peers": tuple(f"0.0.0.0:{port}" for port in range(7000, 7004))}, "each machine has"),
        ({"silent_s": 0.5}, "silent_s is 0.5, but supervisors report every quarter"),
        ({"silent_s": 1e9}, "silent_s is 1e.09, .* give 1 to 600"),
        ({"slices": 1}, "peers names the hosts of several slices, but slices is 1"),
        ({"warm_start": True}, "set warm_start to false"),
        (
            {"peers": tuple(f"10.0.{host >> 8}.{host & 255}:1" for host in range(1026))},
            "peers names 1026 hosts, and 1024 supervisors",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        LearnerSection.model_validate(GIVEN | wrong)


def test_settings_of_a_training_process_come_from_variables():
    given = GIVEN | {"formation": "0,1", "hosts": 4, "host": 3, "coordinator": "10.0.0.0:1"}
    section = LearnerSection.model_validate(given)
    assert section.formation == (0, 1)
    assert section.slice_hosts == 2


@pytest.mark.parametrize(("trains", "numbers"), [("1", [2, 3]), ("0,1", [0, 1, 2, 3])])
def test_ranks_of_the_slices_that_train_are_told_as_the_hosts_of_peers(trains, numbers):
    given = {"formation": trains, "hosts": len(numbers), "coordinator": "10.0.0.0:1"}
    section = LearnerSection.model_validate(GIVEN | given)
    assert [section.number_of(rank) for rank in range(len(numbers))] == numbers


def test_a_file_cannot_say_which_slices_train(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[learner]\nformation = [0]\n")
    with pytest.raises(ConfigError, match="which the supervisor decides"):
        load_config(path)


def test_snapshots_where_no_life_goes_on_with_them_are_refused():
    document = {
        "run": {"name": "r", "steps": 1},
        "store": {"url": "memory"},
        "sync": {"adopt": "overwrite"},
        "learner": {"snapshot_steps": 4, "checkpoint_dir": "c"},
    }
    with pytest.raises(ConfigError, match="no life resumes unsent work"):
        make_config(document, source="test")


def test_each_slice_has_the_whole_mesh():
    devices = jax.devices()[:4]
    mesh = make_mesh(MeshSection(fsdp=2), devices, slices=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 1}
    assert mesh.devices[0].ravel().tolist() == devices[:2]
    assert mesh.devices[1].ravel().tolist() == devices[2:]


def task_of(rows, accumulate=1):
    def batches(_learner, _position):
        while True:
            yield np.zeros((rows, 3), np.float32)

    return Task(
        init=lambda _key: {"w": jnp.zeros(3)},
        loss=lambda params, batch: (batch @ params["w"]).mean(),
        batches=batches,
        evaluate=lambda _params: 0.0,
        tokens_per_batch=rows * 10,
        optimizer=optax.sgd(0.1),
        accumulate=accumulate,
    )


def of_slices(rows, present, slices, accumulate=1, **settings):
    peers = tuple(f"h:{number}" for number in range(1, slices + 1))
    section = LearnerSection.model_validate(
        {
            "slices": slices,
            "peers": peers,
            "checkpoint_dir": "/c",
            "formation": tuple(range(present)),
            "hosts": present,
            "coordinator": "h:9",
            **settings,
        }
    )
    task = task_of(rows, accumulate)
    mesh = SimpleNamespace(shape={"data": present, "fsdp": 2, "expert": 1, "tensor": 1})
    return task_of_slices(task, next(task.batches("a", 0)), section, mesh)


def test_the_whole_batch_is_taken_in_more_parts():
    found = {present: of_slices(48, present, 4) for present in (1, 2, 3, 4)}
    assert {present: task.accumulate for present, task in found.items()} == {1: 4, 2: 2, 3: 2, 4: 1}
    assert {task.tokens_per_batch for task in found.values()} == {480}
    assert of_slices(48, 1, 2, accumulate=2).accumulate == 4


def test_fewer_slices_take_their_share_of_the_rows():
    found = {present: of_slices(32, present, 4, keep_batch=False) for present in (1, 2, 3, 4)}
    assert {present: task.tokens_per_batch for present, task in found.items()} == {
        1: 80,
        2: 160,
        3: 240,
        4: 320,
    }
    assert {task.accumulate for task in found.values()} == {1}


@pytest.mark.parametrize(
    ("rows", "settings"),
    [(32, {}), (20, {"keep_batch": False}), (48, {"min_slices": 1, "slices": 5})],
)
def test_a_batch_that_some_number_of_slices_cannot_divide_is_refused(rows, settings):
    slices = settings.pop("slices", 4)
    with pytest.raises(ConfigError, match=f"a batch of {rows} rows cannot be divided over"):
        of_slices(rows, slices, slices, **settings)


def test_fewest_slices_that_are_not_asked_for_need_no_division():
    assert of_slices(32, 4, 4, min_slices=4).accumulate == 1


# --- Supervisors


def supervisor_of(tmp_path, peers, host):
    config = make_config(
        {
            "run": {"name": "r", "steps": 1},
            "task": {"build": "a:b"},
            "bus": {"url": "nats://127.0.0.1:1"},
            "store": {"url": str(tmp_path / "store")},
            "learner": {
                "slices": 2,
                "peers": peers,
                "host": host,
                "checkpoint_dir": str(tmp_path / f"host-{host}"),
            },
        },
        source="test",
    )
    return supervisor._Supervisor(config, "a", ())


def write_part(folder, incarnation, local_step, keep=2):
    facts = Facts(
        run="r", learner="a", layout="0" * 32, epoch=0, incarnation=incarnation,
        local_step=local_step, tokens=1, position=1, global_step=1, leaves=(),
    )  # fmt: skip
    PartFolder(folder, keep).write(HostCheckpoint(facts, {}))


def test_the_newest_part_is_found_by_its_header(tmp_path):
    assert supervisor.newest_part(tmp_path / "none") is None
    write_part(tmp_path, 5, 10)
    write_part(tmp_path, 5, 20)
    assert supervisor.newest_part(tmp_path) == (5, 20)
    nested = b"[" * 100_000
    for wrong in (b"cut", b"\xff" * 8 + b"{}", len(nested).to_bytes(8, "little") + nested):
        (tmp_path / "9.safetensors").write_bytes(wrong)
        assert supervisor.newest_part(tmp_path) == (5, 20)
    write_part(tmp_path / "other", 5, 1 << 60)
    shutil.copy(tmp_path / "other" / "1.safetensors", tmp_path / "9.safetensors")
    assert supervisor.newest_part(tmp_path) == (5, 20)


def test_a_header_that_is_too_long_is_not_read(tmp_path):
    with (tmp_path / "1.safetensors").open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(1 << 33)
    tracemalloc.start()
    assert supervisor.newest_part(tmp_path) is None
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_supervisors_own_proof_opens_nothing(tmp_path):
    """Who is called without knowing the secret shows the caller's own proof to the caller."""
    ports = [free_port(), free_port()]
    peers = tuple(f"{LOOPBACK}:{port}" for port in ports)

    async def reflected():
        here = supervisor_of(tmp_path, peers, 0)
        server = await here._listen()
        given: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def liar(reader, writer):
            other_reader, other = await asyncio.open_connection(LOOPBACK, ports[0])
            writer.write(await other_reader.readexactly(32))
            other.write(await reader.readexactly(64))
            given.set_result(await other_reader.read(32))
            writer.write(given.result())
            other.close()
            writer.close()

        lying = await asyncio.start_server(liar, LOOPBACK, ports[1])
        with pytest.raises((OSError, EOFError)):
            await here._call(1)
        server.close()
        lying.close()
        return await given

    assert asyncio.run(reflected()) == b""


def test_a_part_stays_until_the_next_one_is_stored(tmp_path, monkeypatch):
    write_part(tmp_path, 5, 10, keep=1)

    def full(*_args):
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryStore, "put", full)
        with pytest.raises(CheckpointError):
            write_part(tmp_path, 5, 20, keep=1)
    assert supervisor.newest_part(tmp_path) == (5, 10)
    write_part(tmp_path, 5, 30, keep=1)
    assert supervisor.newest_part(tmp_path) == (5, 30)


def test_half_a_part_that_a_killed_process_left_goes_with_the_next_one(tmp_path):
    (tmp_path / ".tmp").mkdir()
    left = tmp_path / ".tmp" / "left"
    left.write_bytes(b"half")
    write_part(tmp_path, 5, 10)
    assert not left.exists()


def test_a_part_is_copied_from_a_supervisor_that_knows_the_secret(tmp_path):
    peers = tuple(f"{LOOPBACK}:{free_port()}" for _ in range(2))

    async def copied(change=lambda _supervisor: None):
        here, there = (supervisor_of(tmp_path, peers, host) for host in (0, 1))
        change(there)
        for local_step in (20, 30):
            write_part(there._folder, 7, local_step)
            write_part(here._folder, 5, local_step)
        server = await there._listen()
        try:
            await here._copy_parts(1)
        finally:
            server.close()
        return PartFolder(here._folder, keep=2)

    def forget(one):
        one._key = bytes(32)

    def parts(here):
        found = [here.facts(number) for number in here.numbers()]
        return [(one.incarnation, one.local_step) for one in found]

    assert parts(asyncio.run(copied(forget))) == [(5, 30), (5, 20)]
    # All of them: of the newest another host of the slice may have no part. They take the places of
    # this host's own, for which a disk may have no more room.
    assert parts(asyncio.run(copied())) == [(7, 30), (7, 20)]


def test_a_part_that_is_cut_short_is_copied_from_another_slice(tmp_path, capsys):
    peers = tuple(f"{LOOPBACK}:{free_port()}" for _ in range(4))

    async def scenario():
        here, there, other = (supervisor_of(tmp_path, peers, host) for host in range(3))

        async def denied(_writer):
            raise PermissionError("a part that this user may not read")

        there._send_parts = denied
        write_part(other._folder, 7, 30)
        servers = [await there._listen(), await other._listen()]
        made = Formation(MOST_HOSTS, (0, 1), ("",) * 4, f"{LOOPBACK}:3")
        process = TrainingProcess(made.number, "running")
        here._state = replace(here._state, me=here._state.me._replace(process=process))
        # It would start a training process then.
        here._child = SimpleNamespace(process=SimpleNamespace(wait=asyncio.Event().wait))
        begins = asyncio.ensure_future(here._begin(Begin(made, 0, (1, 2))))
        async with asyncio.timeout(60.0):
            while supervisor.newest_part(here._folder) is None:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        await cancel(begins)
        for server in servers:
            server.close()

    asyncio.run(scenario())
    assert "part_not_copied" in capsys.readouterr().out


def test_who_cannot_be_called_is_heard_as_it_calls(tmp_path):
    """Its port is closed: reports come over the connection that it has opened itself."""
    peers = tuple(f"{LOOPBACK}:{free_port()}" for _ in range(2))

    async def scenario():
        called, caller = (supervisor_of(tmp_path, peers, host) for host in (0, 1))
        server = await called._listen()
        calls = asyncio.ensure_future(caller._report_to(0))
        async with asyncio.timeout(30.0):
            while not (called._state.heard and caller._state.heard):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        assert set(called._state.called_s) == {1}
        assert set(caller._state.called_s) == set()
        await cancel(calls)
        async with asyncio.timeout(30.0):
            while called._state.heard:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        assert not called._state.called_s
        server.close()

    asyncio.run(scenario())


def test_a_part_is_not_copied_twice_at_once(tmp_path):
    """A formation may break while it is copied, and the next one begins."""
    peers = tuple(f"{LOOPBACK}:{free_port()}" for _ in range(2))

    async def scenario():
        here, there = (supervisor_of(tmp_path, peers, host) for host in (0, 1))
        copies, second = [], asyncio.Event()

        async def slowly(_writer):
            copies.append(here._state.me.process.formation)
            if len(copies) == 2:
                second.set()
            await asyncio.sleep(0.3)

        there._send_parts = slowly
        server, tasks = await there._listen(), Tasks()
        for number in (MOST_HOSTS, 2 * MOST_HOSTS, 3 * MOST_HOSTS):
            made = Formation(number, (0, 1), ("one", "other"), f"{LOOPBACK}:3")
            process = TrainingProcess(number, "running")
            me = here._state.me._replace(process=process, formation=made)
            here._state = replace(here._state, me=me)
            tasks.start(here._begin(Begin(made, 0, (1,))))
            await asyncio.sleep(0.1)
        await second.wait()
        await tasks.stop()
        server.close()
        return copies

    # What is over before its turn is not copied for.
    assert asyncio.run(scenario()) == [MOST_HOSTS, 3 * MOST_HOSTS]


def test_who_has_another_list_of_peers_is_not_heard(tmp_path, capsys):
    peers = tuple(f"{LOOPBACK}:{free_port()}" for _ in range(2))

    async def scenario():
        here, there = supervisor_of(tmp_path, peers, 0), supervisor_of(tmp_path, peers, 1)
        server = await here._listen()
        for host in (2, -1, 0):
            for _ in range(2):
                reader, writer = await there._call(0)
                writer.write(frame(Report(report=there._state.me._replace(host=host))))
                assert await reader.read() == b""
                writer.close()
        server.close()
        return here._state.heard

    assert not asyncio.run(scenario())
    assert capsys.readouterr().out.count("supervisor_unexpected") == 3


@pytest.mark.parametrize(
    ("peer", "why"),
    [("127.1:1", "Connect call failed"), ("host..name:7000", "label empty or too long")],
)
def test_a_supervisor_that_is_not_reached_is_told_of_once(tmp_path, capsys, monkeypatch, peer, why):
    monkeypatch.setattr(supervisor, "UNREACHED_S", 0.3)
    # A name of loopback's that the configuration does not know as one.
    here = supervisor_of(tmp_path, (f"127.1:{free_port()}", peer), 0)

    async def scenario():
        async with asyncio.timeout(2.0):
            await here._report_to(1)

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    said = capsys.readouterr().out
    assert said.count("supervisor_unreached") == 1
    assert why in said


def test_reports_end_though_they_are_cancelled_as_one_is_sent(tmp_path):
    """A supervisor that is to end waited for them until systemd killed it."""
    here = supervisor_of(tmp_path, (f"{LOOPBACK}:{free_port()}", f"{LOOPBACK}:1"), 0)

    async def scenario():
        reports = asyncio.ensure_future(here._report_to(1))

        async def drain():
            reports.cancel()

        async def called(_host):
            return asyncio.StreamReader(), SimpleNamespace(write=len, drain=drain, close=int)

        here._call = called
        await asyncio.wait([reports], timeout=2.0)
        assert reports.cancelled()

    asyncio.run(scenario())


def test_a_supervisor_goes_on_without_a_spare_process(tmp_path, capsys, monkeypatch):
    here = supervisor_of(tmp_path, (f"{LOOPBACK}:{free_port()}", f"{LOOPBACK}:1"), 0)
    here._child, here._words.ready = supervisor._Child(None, 1), True

    async def refused(module, *_arguments, **_how):
        if module == "diloco.spare":
            raise BlockingIOError("no more processes")
        return "a new process"

    async def scenario():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4 * supervisor.REPORT_S):
                await here._keep_spare()
        assert await here._start((), {}) == "a new process"
        here._spare = SimpleNamespace(returncode=-9)
        assert await here._start((), {}) == "a new process"

    monkeypatch.setattr(supervisor, "_python", refused)
    asyncio.run(scenario())
    said = capsys.readouterr().out
    assert said.count("no_spare_process") == 2
    assert "no more processes" in said
    assert "it ended: -9" in said


@pytest.mark.parametrize("own", ["10.255.255.1:7000", "no-such-name.invalid:7000"])
def test_an_address_of_another_machine_is_refused_by_name(tmp_path, own):
    with pytest.raises(ConfigError, match=f"cannot listen on {own}, which learner.peers has for"):
        supervisor_of(tmp_path, (own, "10.0.0.9:1"), 0)


def test_a_stranger_is_told_nothing(tmp_path):
    peers = tuple(f"{LOOPBACK}:{free_port()}" for _ in range(2))

    async def answered():
        there = supervisor_of(tmp_path, peers, 1)
        write_part(there._folder, 7, 30)
        server = await there._listen()
        reader, writer = await asyncio.open_connection(*peers[1].split(":"))
        nonce = await reader.readexactly(32)
        writer.write(nonce + nonce + frame(PartAsked()))
        said = await reader.read()
        writer.close()
        server.close()
        return said

    assert asyncio.run(answered()) == b""


def test_of_hosts_whose_settings_differ_those_end_of_whom_there_are_fewer(tmp_path, capsys):
    here = supervisor_of(tmp_path, tuple(f"{LOOPBACK}:{free_port()}" for _ in range(4)), 1)
    me = here._state.me

    def hears(host, alike="other settings", made=None):
        report = me._replace(host=host, alike=alike, formation=made)
        assert here._expects(report) == (alike == me.alike)
        if alike == me.alike:
            here._state = formation.heard(here._state, report, time.monotonic(), called=True)

    here._end_if_unlike()
    hears(2)
    here._end_if_unlike()  # One of each: the lower host stays.
    made = Formation(MOST_HOSTS, (1,), ("one", "other"), f"{LOOPBACK}:3")
    hears(2, made=made)
    with pytest.raises(ConfigError, match="those of host 2 are other settings"):
        here._end_if_unlike()  # But the other one trains.
    hears(3, me.alike)
    here._end_if_unlike()
    hears(0)
    with pytest.raises(ConfigError, match="those of host 2, 0 are other settings"):
        here._end_if_unlike()
    assert "other settings" in capsys.readouterr().out


def test_the_workers_of_a_training_process_end_with_it(tmp_path, monkeypatch):
    here = supervisor_of(tmp_path, tuple(f"{LOOPBACK}:{free_port()}" for _ in range(2)), 0)
    begin, worker = asyncio.create_subprocess_exec, tmp_path / "worker"
    script = f"sleep 600 & echo $! > {worker}; kill -ABRT $$"

    async def crashing(*_words, preexec_fn, **given):
        del preexec_fn  # JAX, which a supervisor has not, warns of it.
        return await begin("sh", "-c", script, **given)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", crashing)
    made = Formation(MOST_HOSTS, (0, 1), ("one", "other"), f"{LOOPBACK}:3")
    process = TrainingProcess(MOST_HOSTS, "running")
    here._state = replace(here._state, me=here._state.me._replace(process=process, formation=made))
    asyncio.run(here._begin(Begin(made, 0, ())))
    assert here._state.me.process == (MOST_HOSTS, "ended", formation.ABORTED)
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(worker.read_text()))
        while left.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
