"""The release for machines without accelerators, in a container that has no network at all.

RELEASE=ARCHIVE tries one that is there; else it is made with Debian's interpreter, of this machine.
"""

import os
import shutil
from pathlib import Path

import pytest
from test_container import LIMIT_S, boot, make_rootfs, make_sources, why_not

from diloco.infra import make_release
from diloco.operate.auth import nats_config_and_credentials as auth

RUN = """
[run]
name = "demo"
steps = 1000000
seed = 7
[task]
build = "diloco.models.bytes_lm:build"
options = { preset = "1m", corpus = "stdlib" }
[sync]
interval_steps = 8
fragments = 2
[bus]
url = "tls://127.0.0.1:4222"
tls_ca = "/etc/diloco/ca.pem"
[store]
url = "/srv/diloco"
[metrics]
port = 9464
"""


def released() -> Path:
    given = os.environ.get("RELEASE")
    return (
        Path(given)
        if given
        else make_release.make("cpu", Path("/usr"), make_release.ROOT / "build")
    )


def make_cloud(folder: Path) -> Path:
    """Makes the objects and secrets that Terraform would have made."""
    objects, secrets, own = folder / "objects", folder / "secrets", folder / "auth"
    auth.init(own, "demo", ["127.0.0.1"], installed_at=Path("/etc/nats"),
              streams_at=Path("/var/lib/nats/jetstream"))  # fmt: skip
    auth.add(own, "aggregator-a", "aggregator")
    auth.add(own, "island-a", "learner")
    auth.add(own, "cellar", "learner")
    objects.mkdir()
    for path in (own / "nats-1.conf", own / "accounts.conf", *own.glob("tls/*.pem")):
        shutil.copy(path, objects)
    (objects / "run.toml").write_text(RUN)
    shutil.copytree(own / "credentials", secrets)
    shutil.copy(own / "tls/nats-1.key", secrets)
    shutil.copy(released(), objects / "cpu.tar.gz")
    make_release.write_join(objects / "join")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.skipif(not Path("/usr/bin/python3.11").exists(), reason="this is no Debian 12")
def test_a_release_is_all_that_a_machine_needs(tmp_path: Path) -> None:
    make_rootfs()
    found = {make_sources(tmp_path / "src"): "/opt/src", make_cloud(tmp_path / "cloud"): "/cloud"}
    options = [f"--bind-ro={source}:{target}" for source, target in found.items()]
    driver = Path(__file__).parent / "released" / "released_machine.py"
    assert boot(tmp_path, driver, *options).rstrip().endswith("all passed")
