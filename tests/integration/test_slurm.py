"""A learner as a job of Slurm's: requeued it trains on, and without a coordinator it says so.

By a real slurmctld, slurmd and munged on loopback, of Debian's packages `slurmctld`, `slurmd`,
`slurm-client` and `munge`: installed, or unpacked (`dpkg -x`) into the folder SLURM. `make
test-slurm`.
"""

import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_machine
import pytest
from audit import read_tape
from harness import ENDLESS, ROOT, World, environment, eventually

from diloco.common.process.nats_server import LOOPBACK, free_port
from diloco.common.protocol.errors import Exit

SLURM = Path(os.environ.get("SLURM") or "/")
PLUGINS = SLURM / "usr/lib/x86_64-linux-gnu/slurm-wlm"
NEEDED = [SLURM / "usr/sbin" / name for name in ("munged", "slurmctld-wlm", "slurmd-wlm")]
NEEDED += [SLURM / "usr/bin" / name for name in ("sbatch", "scancel", "scontrol", "srun")]
MISSING = [str(path) for path in NEEDED if not path.exists()]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        bool(MISSING) or os.geteuid() != 0,
        reason=f"it takes root, and Debian's slurmctld, slurmd, slurm-client and munge: {MISSING}",
    ),
]
ISLAND = ROOT / "examples" / "slurm_island.sh"
# Credentials that expire at once: a job that is requeued waits for as long.
SETTINGS = """
ClusterName=test
SlurmctldHost=localhost({loopback})
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
PluginDir={plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES
"""
# As machines of their own that share this one's loopback.
NODES = ("node-0", "node-1")


class Cluster:
    """Two nodes of Slurm's, on loopback alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o600)
        self.hosts = folder / "hosts"
        self.hosts.write_text(f"{LOOPBACK} localhost {' '.join(NODES)}\n")
        nodes = [f"NodeName={n} NodeAddr={LOOPBACK} Port={free_port()} CPUs=8" for n in NODES]
        self.settings = folder / "slurm.conf"
        self.settings.write_text(
            SETTINGS.format(
                folder=folder,
                plugins=PLUGINS,
                loopback=LOOPBACK,
                controller=free_port(),
                nodes="\n".join(nodes),
            )
        )
        programs = f"{SLURM / 'usr/bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        libraries = {"LD_LIBRARY_PATH": f"{PLUGINS.parent}:{PLUGINS}"} if SLURM.name else {}
        self.environment = environment() | libraries
        self.environment |= {"SLURM_CONF": str(self.settings), "PATH": programs}

    def daemon(self, name: str, *words: object, node: str = "") -> subprocess.Popen[bytes]:
        there = [sys.executable, own_machine.__file__, node, self.hosts] if node else []
        with (self.folder / f"{name}{node}.log").open("wb") as log:
            return subprocess.Popen(
                [*there, SLURM / "usr/sbin" / name, *map(str, words)],
                env=self.environment, stdout=log, stderr=log,
            )  # fmt: skip

    def do(self, *words: object, status: int = 0, cwd: Path | None = None) -> str:
        done = subprocess.run(
            [*map(str, words)], check=False, env=self.environment, cwd=cwd,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, world: World, *words: object) -> str:
        """Submit the example of an island: two tasks on each of two nodes."""
        given = ("--nodes=2", "--ntasks-per-node=2", "--output=job.log", ISLAND, *words)
        return self.do("sbatch", "--parsable", *given, cwd=world.folder).strip()

    def job(self, number: str) -> dict[str, str]:
        """Returns Slurm's state of a job."""
        return dict(re.findall(r"(\w+)=(\S+)", self.do("scontrol", "show", "job", number)))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "slurm")
    folder = made.folder
    with contextlib.ExitStack() as stack:

        def begin(name: str, *words: object, node: str = "") -> None:
            process = made.daemon(name, *words, node=node)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        files = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid",
                 "seed-file": "seed", "log-file": "munge.log"}  # fmt: skip
        begin(
            "munged", "--foreground", "--force", *(f"--{k}={folder / v}" for k, v in files.items())
        )
        eventually((folder / "munge.socket").exists, "munged listens")
        begin("slurmctld-wlm", "-D", "-f", made.settings)
        steps = ("-d", SLURM / "usr/sbin/slurmstepd-wlm")
        for node in NODES:
            begin("slurmd-wlm", "-D", "-f", made.settings, *steps, node=node)
        up = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        eventually(lambda: made.do(*up).split() == [str(len(NODES))], "the nodes are up")
        yield made


def said(world: World) -> str:
    """The job's log; of an earlier life too."""
    path = world.folder / "job.log"
    return path.read_text(errors="replace") if path.exists() else ""


def test_a_requeued_job_trains_on_in_the_same_run(cluster: Cluster, new_world: Any) -> None:
    checkpoints = {"checkpoint_dir": "checkpoints", "cpu_devices": 1}
    world = new_world(run=ENDLESS, learner=checkpoints)
    world.aggregator()
    job = cluster.submit(world, world.config_path, "a")

    def note_log() -> str:
        return f"{cluster.job(job)}\n{said(world)}"

    try:
        world.until(lambda: world.steps("a") > 20, "the first life trains")
        # What Slurm does some minutes before the time limit, by --signal=B:USR1.
        cluster.do("scancel", "--batch", "--signal=USR1", job)
        world.until(lambda: said(world).count('"action": "left"') >= 1, "it leaves")
        world.until(lambda: cluster.job(job)["Restarts"] == "1", "it is requeued")
        drawn = world.steps("a")
        world.until(lambda: world.steps("a") > drawn + 20, "the second life trains")
        assert len(read_tape(world).lives("a")) == 2
        assert said(world).count('"action": "checkpoint_restored"') == 4  # on each host
        world.stop()
        world.until(lambda: cluster.job(job)["JobState"] == "COMPLETED", "it ends with the run")
    except AssertionError as error:
        error.add_note(note_log())
        raise
    assert cluster.job(job)["Restarts"] == "1"


def test_what_no_restart_mends_is_not_requeued(cluster: Cluster, new_world: Any) -> None:
    world = new_world(create=False)
    job = cluster.submit(world, world.folder / "missing.toml", "a")
    eventually(lambda: cluster.job(job)["JobState"] == "FAILED", "it ends")
    assert cluster.job(job)["ExitCode"] == f"{int(Exit.CONFIG)}:0"
    assert "missing.toml" in said(world)


def test_an_error_at_once_is_not_requeued(cluster: Cluster, new_world: Any) -> None:
    world = new_world(create=False)
    program = world.folder / "bin" / "diloco"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho a traceback; exit 1\n")
    program.chmod(0o755)
    cluster.environment["PATH"] = f"{program.parent}:{cluster.environment['PATH']}"
    job = cluster.submit(world, world.config_path, "a")
    eventually(lambda: cluster.job(job)["JobState"] == "FAILED", "it ends")
    assert cluster.job(job)["ExitCode"] == "1:0"
    assert cluster.job(job)["Restarts"] == "0"


def test_tasks_without_a_coordinator_are_refused(cluster: Cluster, new_world: Any) -> None:
    world = new_world()
    learner = ("diloco", "learner", "--config", world.config_path, "--learner", "a")
    words = cluster.do("srun", "--ntasks=2", *learner, status=int(Exit.CONFIG), cwd=world.folder)
    assert "one of 2 tasks of a step of Slurm, but 'a' has no coordinator" in words
    assert "--coordinator auto" in words
    assert not world.steps("a")
