"""docs/provision.md followed literally in a copy of the repository, from nothing to destroy.

All blocks run in one shell, as for a person who has one terminal. `make terraform` runs them with Terraform
itself and the stand-in of Google's provider, which TF_CLI_CONFIG_FILE names, and with NATS servers and a bucket
of the tests; `gcloud` and `make release` are only noted. The log is `walk.log` in the test's folder.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from cluster import NODES, Cluster, Node, Ports
from harness import ROOT

from diloco.common.process.nats_server import free_port

sys.path.insert(0, str(Path(__file__).parents[1]))
from gcs_server import GcsServer
from small_release import archive_of

PAGE = ROOT / "docs" / "provision.md"
EXAMPLES = ROOT / "infra/terraform/examples"
BUCKET = "my-project-demo-diloco"
# What the page has somebody do without a command, in its own words.
BY_HAND = "to `build/fleet.toml`, and change project, paths (relative to the file),"
NOTED = """#!/bin/sh
echo "${0##*/} $*" >>"$WALK/asked"
"""
needs_standin = pytest.mark.skipif(
    shutil.which("terraform") is None or "TF_CLI_CONFIG_FILE" not in os.environ,
    reason="there is no terraform, or TF_CLI_CONFIG_FILE names no stand-in: make terraform",
)


class Step(NamedTuple):
    """A command of the page, and the heading below which it stands."""

    heading: str
    text: str


def steps() -> list[Step]:
    """The blocks of the page in order, and the commands within the sentences of `Later`."""
    found, heading, rest = [], "", PAGE.read_text()
    for part in re.split(r"^(?=##)", rest, flags=re.MULTILINE):
        heading = part.partition("\n")[0].lstrip("# ")
        blocks = re.findall(r"^```sh\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
        if heading == "Later":
            said = re.findall(r"`((?:terraform|gcloud) [^`]* [^`]*)`", part)
            blocks += [f"cd infra/terraform\n{one}\ncd ../..\n" for one in said]
        found += [Step(heading, block) for block in blocks]
    return found


class Walk:
    """One shell: what a step exports, and the folder in which it ends, is what the next one has."""

    def __init__(self, folder: Path, *noted: str) -> None:
        self.home, self.folder = folder / "diloco", folder
        self.log, self.state = folder / "walk.log", folder / "state"
        self.state.write_text(f"cd {self.home}\n")
        programs = folder / "bin"
        programs.mkdir()
        for name in noted:
            (programs / name).write_text(NOTED)
            (programs / name).chmod(0o755)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TF_VAR_")},
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.home),
            "WALK": str(folder),
            "TF_IN_AUTOMATION": "1",
            "TF_CLI_ARGS": "-no-color",
            "CHECKPOINT_DISABLE": "1",
            "DILOCO_STORE_EMULATOR": "true",
        }

    def copy(self, *paths: str) -> None:
        """Copies the tree as it is now, or parts of it, into a repository: for `git checkout`."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *paths],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\0")  # fmt: skip
        for name in filter(None, listed):
            if (ROOT / name).is_symlink() or (ROOT / name).exists():
                (self.home / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.home / name, follow_symlinks=False)
        told = (
            "git init -q; git add .; git -c user.name=a -c user.email=a@example.org commit -qm all"
        )
        self.step(Step("Before", told))
        # The run's file, as section 2 says.
        (self.home / "build").mkdir()
        shutil.copy(EXAMPLES / "run.toml", self.home / "build")

    def step(self, step: Step) -> str:
        """Runs a step as it stands; returns what it said."""
        # To each question of Terraform's the person answers yes.
        script = f"exec < <(yes yes)\nsource {self.state}\n{step.text}\n(export -p; echo cd $(pwd)) >{self.state}\n"
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script], env=self.environment, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        with self.log.open("a") as log:
            log.write(f"--- {step.heading} ({done.returncode})\n{step.text}\n{done.stdout}\n")
        assert done.returncode == 0, f"{step.text}\n{done.stdout[-3000:]}"
        assert "Traceback" not in done.stdout, done.stdout[-3000:]
        return done.stdout

    def asked(self) -> list[str]:
        """The commands that are only noted, in order."""
        return (self.folder / "asked").read_text().splitlines()

    def check_files(self) -> None:
        """No command of the page has written over what a person wrote, or left a module changed."""
        assert (self.home / "build/run.toml").read_text() == (EXAMPLES / "run.toml").read_text()
        changed = ["git", "status", "--porcelain", "--untracked-files=no"]
        assert subprocess.run(changed, cwd=self.home, capture_output=True, check=True).stdout == b""


def start_nats(walk: Walk) -> Cluster:
    """The three servers of the page's credentials, on ports of this machine."""
    folder = walk.folder / "servers"
    shutil.copytree(walk.home / "build/auth", folder)
    ports = [Ports(free_port(), free_port(), free_port()) for _ in range(NODES)]
    routes = ",".join(f"tls://127.0.0.1:{port.cluster}" for port in ports)
    cluster = Cluster(folder, "demo")
    for number, own in enumerate(ports, 1):
        config = folder / f"nats-{number}.conf"
        text = config.read_text().replace("/etc/nats", str(folder))
        config.write_text(text.replace("/var/lib/nats/jetstream", f"{folder}/streams-{number}"))
        cluster.nodes.append(Node(config.stem, config, own, routes))
    for node in cluster.nodes:
        node.start()
    cluster.wait_healthy()
    return cluster


def write_fleet(walk: Walk) -> None:
    """Does what section 5 asks of a person: the example beside the run's file, with right paths."""
    text, before = (EXAMPLES / "small.toml").read_text(), '"../../../build/'
    assert before in text
    (walk.home / "build/fleet.toml").write_text(text.replace(before, '"'))


def make_releases(walk: Walk) -> None:
    for kind in ("cpu", "tpu"):
        assert f"make release KIND={kind}" in walk.asked()
        archive_of(walk.home / "build" / f"{kind}.tar.gz", kind=kind)


def names_in(text: str) -> set[str]:
    """The names of machines, groups and buckets in a command."""
    found = re.findall(r"(?:^|[ '])(?:gs://)?((?:diloco-demo|my-project)-[a-z0-9-]+\w)", text)
    return set(found)


def test_the_page_is_for_one_shell_and_keeps_what_a_person_wrote(tmp_path: Path) -> None:
    """Where each block begins is where the block before it has ended; no program of it runs."""
    walk = Walk(tmp_path, "gcloud", "make", "terraform", "diloco", "jq")
    walk.copy("infra/terraform")
    for step in steps():
        walk.step(step)
    walk.check_files()
    found = {command.split()[0] for command in walk.asked()}
    assert found == {"gcloud", "make", "terraform", "diloco", "jq"}
    assert len(walk.asked()) > 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_standin
def test_the_page_leads_from_nothing_to_destroy(tmp_path: Path) -> None:
    assert BY_HAND in PAGE.read_text()
    walk = Walk(tmp_path, "gcloud", "make")
    walk.copy()
    cluster: Cluster | None = None
    shown = ""
    with GcsServer(tmp_path / "bucket", BUCKET) as server:
        walk.environment["STORAGE_EMULATOR_HOST"] = server.url
        try:
            for step in steps():
                text = step.text
                if text.startswith("diloco check"):
                    make_releases(walk)
                    write_fleet(walk)
                if "run create" in text:
                    cluster = start_nats(walk)
                    # The tunnel of the other terminal leads to the first of them.
                    port = cluster.nodes[0].ports.client
                    tunnel = rf"\g<0>\nexport DILOCO_BUS_URL=tls://127.0.0.1:{port}"
                    text = re.sub(r"^eval .*$", tunnel, text, flags=re.MULTILINE)
                    # A doctor finds that no machine has started a daemon.
                    text = text.replace("diloco doctor build/demo.toml", "diloco doctor --help")
                walk.step(Step(step.heading, text))
                if "terraform apply plan" in text:
                    show = "terraform -chdir=infra/terraform show -json"
                    shown = walk.step(Step("besides", show))
        finally:
            if cluster is not None:
                cluster.end()
    walk.check_files()
    left = walk.step(Step("besides", "terraform state list"))
    assert not left.strip(), left
    for command in walk.asked():
        for name in names_in(command):
            assert f'"{name}"' in shown, f"{command}: {name} is not made"
