#!/usr/bin/python3
"""Machines of a release, without a network: from an empty disk to versions, upgrades, and back."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import time
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")
sys.path.insert(0, "/opt/src/tests/systemd/released")

import page
from cloud import OBJECTS, Cloud
from rig import (
    AGGREGATOR,
    NATS,
    TASK,
    A,
    active,
    check,
    drop_in,
    events,
    run,
    scenario,
    show,
    try_versions,
    until,
    versions_go_on,
)

OPT = Path("/opt")
CELLAR = "diloco-learner@cellar.service"
STORE = "[Service]\nDynamicUser=no\nUser=root\nReadWritePaths=/srv/diloco\n"
here = Path("/srv/objects")
cloud = Cloud(here)


def release(name):
    """Describes a release, which is an object, as a machine is told of it."""
    digest = hashlib.sha256()
    with (here / name).open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return {"object": name, "sha256": digest.hexdigest()}


def used():
    return (OPT / "diloco").resolve()


def kept():
    """Returns the releases on the machine, and the remains of others."""
    return {path.name for path in OPT.iterdir() if re.match("diloco-[0-9a-f]{16}", path.name)}


def learner(archive="cpu.tar.gz"):
    return {
        "role": "learner", "name": "island-a", "release": release(archive),
        "files": {"/etc/diloco/run.toml": "run.toml", "/etc/diloco/ca.pem": "ca.pem"},
        "secrets": {"/etc/diloco/credentials/island-a.toml": "island-a.toml"},
        "environment": {"DILOCO_METRICS_PORT": "9465"}, "units": [A],
    }  # fmt: skip


def process_of(unit):
    pid = int(show(unit, "MainPID"))
    words = Path(f"/proc/{pid}/cmdline").read_bytes() if pid else b""
    return b"learner" in words and b"/python" in words


def an_empty_machine():
    here.mkdir()
    for path in OBJECTS.iterdir():
        (here / path.name).symlink_to(path)
    Path("/srv/diloco").mkdir()
    for unit in (AGGREGATOR, "diloco-learner@.service"):
        drop_in(unit, STORE)
    run("bash", "-c", "! getent hosts iana.org")
    assert [path.name for path in Path("/sys/class/net").iterdir()] == ["lo"]
    assert shutil.which("pip") is None
    used_s = os.times()
    began = time.monotonic()
    status, said = cloud.boot(**learner())
    assert status == 0, said
    until(lambda: process_of(A), "the learner's process runs")
    print(f"   a learner's process runs {time.monotonic() - began:.1f} s after the script's start")
    took = os.times()
    cpu_s = sum(took[2:4]) - sum(used_s[2:4])
    print(f"   the script and its commands took {cpu_s:.1f} s of a core", flush=True)
    until(lambda: events(A), "it says something")
    print(f"   and says something after {time.monotonic() - began:.1f} s", flush=True)
    check("from an empty disk to a learner's process, with no network")


def a_run():
    TASK.mkdir()
    # Where there is no disk to mount.
    Path("/var/lib/nats/jetstream").mkdir(parents=True)
    status, _ = cloud.boot(
        role="nats", name="nats-1", release=release("cpu.tar.gz"),
        files={"/etc/nats/nats.conf": "nats-1.conf", "/etc/nats/accounts.conf": "accounts.conf",
               "/etc/nats/tls/nats-1.pem": "nats-1.pem", "/etc/nats/tls/ca.pem": "ca.pem"},
        secrets={"/etc/nats/tls/nats-1.key": "nats-1.key"}, environment={}, units=[NATS],
    )  # fmt: skip
    assert status == 0
    until(lambda: active(NATS), "NATS runs")
    Path("/root/operator.toml").write_bytes(Path("/cloud/secrets/operator.toml").read_bytes())
    Path("/root/operator.toml").chmod(0o600)
    os.environ["DILOCO_BUS_CREDENTIALS"] = "/root/operator.toml"
    run("/opt/diloco/bin/diloco", "run", "create", "--config", "/etc/diloco/run.toml")
    status, _ = cloud.boot(
        role="aggregator", name="aggregator-a", release=release("cpu.tar.gz"),
        files={"/etc/diloco/run.toml": "run.toml", "/etc/diloco/ca.pem": "ca.pem"},
        secrets={"/etc/diloco/credentials/aggregator.toml": "aggregator-a.toml"},
        environment={"DILOCO_AGGREGATOR_NAME": "aggregator-a"}, units=[AGGREGATOR],
    )  # fmt: skip
    assert status == 0
    until(lambda: active(AGGREGATOR) and active(A), "aggregator and learner are ready", 240)
    until(lambda: try_versions() > 2, "versions are made")
    check("a NATS server, an aggregator and a learner of the release make versions")
    assert cloud.server.attributes == {"diloco/run": "goes-on"}
    check("the learner's machine says that its run goes on")


def an_upgrade():
    """The same files in other bytes are another release."""
    with (here / "second.tar.gz").open("wb") as file:
        file.write((here / "cpu.tar.gz").read_bytes() + gzip.compress(b""))
    before = used()
    status, _ = cloud.boot(**learner("second.tar.gz"))
    assert status == 0
    assert used() != before
    assert (OPT / "diloco-before").resolve() == before
    assert str(used()) in show(A, "ExecStart")
    until(lambda: active(A), "the learner is back")
    versions_go_on()
    check("a new release takes the place of the old one")


def refused(name, sentence, **changed):
    manifest = json.loads((used() / "manifest.json").read_text()) | changed
    pack(name, {"manifest.json": json.dumps(manifest)})
    before, pid = used(), show(A, "MainPID")
    status, said = cloud.boot(**learner(name))
    assert status == 1
    assert re.search(sentence, said), said
    assert used() == before
    assert show(A, "MainPID") == pid


def what_does_not_fit():
    refused("arm.tar.gz", "refused: the release is for aarch64, and this machine is x86_64",
            architecture="aarch64")  # fmt: skip
    refused("new.tar.gz", r"refused: the release needs glibc 9\.9, and this machine has 2\.",
            glibc="9.9")  # fmt: skip
    refused("tpu.tar.gz", "refused: the release is for tpu, and this machine is of kind cpu",
            kind="tpu")  # fmt: skip
    refused("part.tar.gz", "refused: its programs do not run here")
    assert kept() == {used().name, (OPT / "diloco-before").resolve().name}
    check("what does not fit is refused with a sentence, and nothing is disturbed")


def what_does_not_start():
    """Programs that say their version, and do nothing else."""
    old = used()
    program = (
        f"#!/bin/sh\ncase $1 in learner) exit 1;; host) shift 2; exec {old}/bin/diloco "
        f"host units $(echo $* | sed s,{old},$(dirname $(dirname $0)),);; esac\n"
    )
    files = {
        "manifest.json": (old / "manifest.json").read_text(),
        "bin/diloco": program,
        "bin/nats-server": "#!/bin/sh\n",
        "bin/python": f'#!/bin/sh\nexec {old}/bin/python "$@"\n',
    }
    sums = [
        f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in files.items()
    ]
    pack("broken.tar.gz", files | {"digests": "".join(sums)})
    status, said = cloud.boot(**learner("broken.tar.gz"))
    assert status == 1
    assert f"does not start: back to {old.name}" in said, said
    assert used() == old
    until(lambda: active(A), "the learner is back")
    versions_go_on()
    assert len(kept()) == 2, kept()
    check("what does not start gives way to the release before; two are kept")


def another_host():
    """Does on a second machine the steps that the page asks of an operator."""
    for name in ("cellar.toml", "ca.pem", "run.toml", "join"):
        source = Path("/cloud") / ("secrets" if name == "cellar.toml" else "objects") / name
        shutil.copy(source, Path("/root") / name)
    Path("/root/diloco-0.tar.gz").symlink_to(here / "second.tar.gz")
    drop_in(CELLAR, STORE)
    (command,) = page.blocks(Path("/opt/src/docs/release.md")).values()
    print(run("bash", "-e", "-c", command, cwd="/root"), flush=True)
    until(lambda: active(CELLAR), "it has joined")
    assert active(A)
    check("one command joins another learner to the run")


def pack(name, files):
    with tarfile.open(here / name, "w:gz") as tar:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"diloco/{path}")
            entry.size, entry.mode = len(text), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))


scenario(an_empty_machine, a_run, an_upgrade, what_does_not_fit, what_does_not_start, another_host)
