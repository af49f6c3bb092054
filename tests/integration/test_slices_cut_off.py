"""Slices of a learner whose links are cut: each has a network namespace of its own, on a bridge."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import ENDLESS
from proxy import Network
from test_elastic_slices import WHOLE, end, life, until_merged_by

FAULTS = int(os.environ.get("TESTS_FAULTS", "4"))
PORT = 8091


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Place(NamedTuple):
    """A namespace, its address, and the bridge's end of its link."""

    namespace: str
    address: str
    link: str

    @property
    def enter(self) -> tuple[str, ...]:
        """The words before a command that is to run there."""
        return ("ip", "netns", "exec", self.namespace)

    def away(self) -> None:
        """Cuts it off from all, NATS too."""
        ip("link", "set", self.link, "down")

    def apart(self) -> None:
        """Cuts it off from other places, not from NATS: no link between isolated ones."""
        ip("link", "set", self.link, "type", "bridge_slave", "isolated", "on")

    def heal(self) -> None:
        ip("link", "set", self.link, "type", "bridge_slave", "isolated", "off")
        ip("link", "set", self.link, "up")


@contextlib.contextmanager
def places(count: int) -> Iterator[tuple[str, list[Place]]]:
    """The bridge's address, and places that reach it and each other."""
    mine = os.getpid()
    bridge, subnet = f"dl{mine}", f"10.98.{mine % 250}"
    made = [
        Place(f"dl{mine}-{index}", f"{subnet}.{index + 2}", f"dl{mine}-{index}")
        for index in range(count)
    ]
    with contextlib.ExitStack() as undo:
        ip("link", "add", bridge, "type", "bridge")
        undo.callback(ip, "link", "del", bridge)
        ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for place in made:
            lead_to(place, bridge, undo)
        yield f"{subnet}.1", made


def lead_to(place: Place, bridge: str, undo: contextlib.ExitStack) -> None:
    ip("netns", "add", place.namespace)
    undo.callback(ip, "netns", "del", place.namespace)
    ip("link", "add", place.link, "type", "veth", "peer", "name", "eth0", "netns", place.namespace)
    ip("link", "set", place.link, "master", bridge, "up")
    ip("-n", place.namespace, "addr", "add", f"{place.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        ip("-n", place.namespace, "link", "set", device, "up")
    # gloo listens where the machine's own name leads.
    own = Path("/etc/netns", place.namespace)
    own.mkdir(parents=True)
    undo.callback(shutil.rmtree, own)
    (own / "hosts").write_text(f"127.0.0.1 localhost\n{place.address} {socket.gethostname()}\n")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, and ip")
@pytest.mark.timeout(120 * FAULTS + 600)
def test_links_may_be_cut_at_any_moment(new_world, nats_server, capsys):
    """By a seed: one slice or the links between them, for moments or until the rest goes on."""
    rng = random.Random(int(os.environ.get("TESTS_SEED", "1")))
    with places(2) as (gateway, both), Network() as network:
        bus = network.proxy(nats_server.port, gateway)
        world = new_world(run=ENDLESS, gc=WHOLE)
        world.aggregator()
        for host, place in enumerate(both):
            learner = {
                "slices": 2, "host": host, "peers": [f"{each.address}:{PORT}" for each in both],
                "cpu_devices": 1, "heartbeat_interval_s": 0.25, "checkpoint_interval_s": 0.5,
                "snapshot_steps": 2, "checkpoint_dir": f"checkpoints-{host}",
            }  # fmt: skip
            config = world.variant(f"host-{host}", {"learner": learner, "bus": {"url": bus.url}})
            arguments = ("learner", "--config", str(config), "--learner", "a")
            world.start(f"a.{host}", *arguments, within=place.enter)
        until_merged_by(world, 2)
        for _ in range(FAULTS):
            time.sleep(rng.uniform(0, 3))
            place, kind, brief = rng.choice(both), rng.choice(["apart", "away"]), rng.random() < 0.5
            before, began_s = life(world), time.monotonic()
            # A bridge keeps only isolated places from each other.
            for each in both if kind == "apart" else [place]:
                getattr(each, kind)()
            if brief:
                time.sleep(rng.uniform(0, 8))
            else:
                until_merged_by(world, 1)
            cut_s = time.monotonic() - began_s
            for each in both:
                each.heal()
            until_merged_by(world, 2)
            with capsys.disabled():
                print(
                    f"{kind} for {cut_s:.1f} s: all train after {time.monotonic() - began_s:.1f} s"
                    + (" in a new life" if life(world) > before else ""),
                    flush=True,
                )
        assert len(end(world).lives("a")) > 1
