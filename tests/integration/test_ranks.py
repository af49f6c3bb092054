"""One learner on four ranks of PyTorch, under FSDP2 and DDP: `make test-extras`."""

import os
import re
import sys

import pytest
from audit import read_tape

torch = pytest.importorskip("torch")

import rank_loop  # noqa: E402

import diloco.torch  # noqa: E402
from diloco.common.process.nats_server import free_port  # noqa: E402
from diloco.common.protocol.layout import make_layout  # noqa: E402
from diloco.learner.tensors.tree import tensors_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = {"steps": 160, "tokens_per_step": 128}
SYNC = {"interval_steps": 8, "fragments": 3, "block": 16, "min_steps": 3}
RANKS = 4


@pytest.fixture
def world(new_world):
    world = new_world(create=False, run=RUN, outer={"optimizer": "sgd", "learning_rate": 1.0})
    del world.document["task"]
    world.document["sync"] = SYNC
    world.variant("run", {})
    diloco.torch.create(world.config_path, rank_loop.model())
    return world


def begin(world, kind, *does, ranks=RANKS, programs=()):
    port = str(free_port())
    return [
        world.start(
            f"a.{rank}", str(world.config_path), "a", port, str(ranks), str(rank), kind, *does,
            program=programs[rank] if programs else ("rank_loop",),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def on_machines(world, *settings):
    """`rank_loop` on two machines of two ranks each, which share this one's loopback."""
    at = {"machine-0": "127.0.0.2", "machine-1": "127.0.0.3"}
    hosts = world.folder / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for name, address in at.items()))
    loop = ("env", *settings, sys.executable, "-m", "rank_loop")
    return [("own_machine", name, str(hosts), *loop) for name in at for _ in (0, 1)]


def loss(world):
    module = rank_loop.model()
    diloco.torch.load(world.config_path, module)
    with torch.no_grad():
        return float(rank_loop.loss_of(module, 10**6, 0))


def most_bytes():
    """Of a view: a rank's parts, what ranks cannot divide equally, and one fragment, in float32."""
    tensors = list(rank_loop.model().parameters())
    parts = sum(one.numel() // (RANKS if len(one) % RANKS == 0 else 1) for one in tensors)
    named = tensors_of({str(at): one.detach().numpy() for at, one in enumerate(tensors)})
    layout = make_layout(named, fragments=SYNC["fragments"], block=SYNC["block"])
    return 4 * (parts + max(fragment.size for fragment in layout.fragments))


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_dead_rank_ends_the_life_and_the_next_goes_on(world, kind):
    world.aggregator()
    fresh = loss(world)
    first = begin(world, kind)
    world.until(lambda: len(read_tape(world).manifests) >= 6, "updates of the first life")
    first[2].kill()
    for process in first:
        assert process.wait() != 0
    again = begin(world, kind)
    for process in again:
        assert process.wait() == 0, process.log()
    ends = [re.findall(r"done at (\d+), (\d+) bytes", process.log())[0] for process in again]
    assert len({position for position, _ in ends}) == 1
    if kind == "fsdp":
        assert max(int(held) for _, held in ends) <= most_bytes()
    lives = {manifest.incarnation for _, manifest in read_tape(world).manifests}
    assert len(lives) == 2
    assert loss(world) < 0.5 * fresh


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to make machines")
def test_ranks_of_several_machines_are_one_learner(world):
    world.aggregator()
    fresh = loss(world)
    ranks = begin(world, "fsdp", programs=on_machines(world, "MASTER_ADDR=127.0.0.2"))
    for process in ranks:
        assert process.wait() == 0, process.log()
    assert {manifest.learner for _, manifest in read_tape(world).manifests} == {"a"}
    assert loss(world) < 0.5 * fresh


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to make machines")
def test_ranks_of_several_machines_that_do_not_know_rank_0_are_refused(world):
    for process in begin(world, "ddp", programs=on_machines(world)):
        assert process.wait() != 0
        assert "machine-0, machine-1, and nothing says where rank 0 is" in process.log()


@pytest.mark.parametrize(
    ("does", "words"),
    [("alone", "their parameters would drift apart"), ("anew", "is sharded in another way")],
)
def test_ranks_whose_parameters_are_not_one_or_change_are_refused(world, does, words):
    for process in begin(world, "fsdp", does, ranks=2):
        assert process.wait() != 0
        assert words in process.log()
