"""`diloco auth`: what it writes, and that nats-server takes it."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.common.process import log
from diloco.common.process.credentials import Credentials, load_credentials, render_credentials
from diloco.common.process.nats_server import find_binary
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError
from diloco.operate.auth import nats_config_and_credentials as auth
from diloco.operate.auth.permissions import Identity, grants
from diloco.program import app


def checked(configuration: Path) -> None:
    """nats-server understands the file, and all that it includes."""
    done = subprocess.run(
        [str(find_binary()), "-t", "-c", str(configuration)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("hosts", [["localhost"], ["a.example", "10.0.0.7", "fd00::1"]])
def test_the_templates_of_servers_are_valid(tmp_path: Path, hosts: list[str]) -> None:
    folder = tmp_path / "auth"
    _, servers = auth.init(folder, "demo", hosts)
    auth.add(folder, "berlin", "learner")
    auth.add(folder, "one", "aggregator")
    assert [path.name for path in servers] == [f"nats-{n + 1}.conf" for n in range(len(hosts))]
    for server in servers:
        checked(server)
        text = server.read_text()
        assert "sync_interval: always" in text
        assert f"{folder}/tls/{server.stem}.pem" in text
        assert ("routes" in text) == (len(hosts) == 3)
        assert f"max_file_store: {10 << 30}" in text
    # What an account may store is counted on all servers together.
    assert f"max_file: {(10 << 30) * len(hosts)}," in (folder / "accounts.conf").read_text()
    auth.revoke(folder, "berlin")
    checked(servers[0])
    assert "berlin" not in (folder / "accounts.conf").read_text()


def test_servers_are_told_where_their_machines_have_what(tmp_path: Path) -> None:
    _, servers = auth.init(
        tmp_path / "auth", "demo", ["localhost"],
        installed_at=Path("/etc/nats"), streams_at=Path("/var/lib/nats/jetstream"),
    )  # fmt: skip
    text = servers[0].read_text()
    assert 'key_file: "/etc/nats/tls/nats-1.key"' in text
    assert 'store_dir: "/var/lib/nats/jetstream/nats-1"' in text
    assert str(tmp_path) not in text


def test_a_configuration_that_is_cut_short_is_not_valid(tmp_path: Path) -> None:
    _, servers = auth.init(tmp_path, "demo", ["localhost"])
    accounts = tmp_path / "accounts.conf"
    accounts.write_text(accounts.read_text().rstrip()[:-1])
    with pytest.raises(AssertionError):
        checked(servers[0])


def test_secrets_are_for_their_owner_alone(tmp_path: Path) -> None:
    own, _ = auth.init(tmp_path, "demo", ["localhost"])
    added = auth.add(tmp_path, "berlin", "learner")
    secret = [own, added, tmp_path / "tls/ca.key", tmp_path / "tls/nats-1.key"]
    for path in secret:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    public = "".join(p.read_text() for p in tmp_path.glob("*.*"))
    for path in secret:
        seed = [line for line in path.read_text().splitlines() if "seed" in line or "SU" in line]
        assert all(line not in public for line in seed)
    theirs = load_credentials(added)
    assert theirs is not None
    assert (theirs.run, theirs.identity, theirs.role) == ("demo", "berlin", "learner")
    auth.revoke(tmp_path, "berlin")
    assert not added.exists()


def test_wrong_use_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no credentials"):
        auth.add(tmp_path, "a", "learner")
    auth.init(tmp_path, "demo", ["localhost"])
    with pytest.raises(ConfigError, match="already"):
        auth.init(tmp_path, "demo", ["localhost"])
    auth.add(tmp_path, "a", "learner")
    for reserved in ("operator", "guard"):
        with pytest.raises(ConfigError, match="what the run calls its own"):
            auth.add(tmp_path, reserved, "learner")
    with pytest.raises(ConfigError, match=r"'a' in .* already"):
        auth.add(tmp_path, "a", "aggregator")
    with pytest.raises(ConfigError, match="no identity 'b'"):
        auth.revoke(tmp_path, "b")
    for name in ("../a", "A", "a.b", "a*", ">", ""):
        with pytest.raises(ConfigError, match="is not a valid name"):
            auth.add(tmp_path, name, "learner")


@pytest.mark.parametrize(
    "text", ["", "seed = 3", "not toml", 'run = "r"\nidentity = "i"\nrole = "king"\nseed = "SUX"']
)
def test_a_file_that_is_none_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a credentials file") as caught:
        load_credentials(path)
    assert "SUX" not in caught.value.message


def test_credentials_survive_the_file(tmp_path: Path) -> None:
    one = Credentials(run="r", identity="i", role="learner", seed="SU")
    path = tmp_path / "c.toml"
    path.write_text(render_credentials(one))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640: others can read it"):
        load_credentials(path)
    path.chmod(0o400)
    assert load_credentials(path) == one


def test_the_command_says_what_to_do_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "configure", lambda _level: None)
    folder = tmp_path / "auth"

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["auth", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    told = run("init", str(folder), "--run", "demo", "--host", "nats.example")
    assert "tls://nats.example:4222" in told
    assert str(folder / "credentials/operator.toml") in told
    assert str(folder / "credentials/berlin.toml") in run("add-learner", str(folder), "berlin")
    assert "reload" in run("add-aggregator", str(folder), "one")
    listed = run("list", str(folder))
    assert [line.split()[:2] for line in listed.splitlines()] == [
        ["operator", "operator"],
        ["learner", "berlin"],
        ["aggregator", "one"],
    ]
    assert "berlin" in run("revoke", str(folder), "berlin")
    assert "berlin" not in run("list", str(folder))


def test_the_fragments_of_a_learner_survive_the_file(tmp_path: Path) -> None:
    auth.init(tmp_path / "auth", "demo", ["localhost"])
    auth.add(tmp_path / "auth", "berlin", "learner", fragments=(2, 5))
    auth.add(tmp_path / "auth", "paris", "learner")
    _, berlin, paris = auth.identities(tmp_path / "auth")
    assert (berlin.fragments, paris.fragments) == ((2, 5), ())
    sent = {subject for subject in grants("demo", berlin).requests if ".update." in subject}
    assert {names.update("demo", "berlin", 2), names.update("demo", "berlin", 5)} <= sent
    assert names.update("demo", "berlin", "*") not in sent
    listed = CliRunner().invoke(app, ["auth", "list", str(tmp_path / "auth")]).output
    assert "fragments 2, 5 alone" in listed
    told = CliRunner().invoke(app, ["auth", "add-learner", "x", "rome", "--holds", "plus"])
    assert "--holds and --run belong together" in str(told.exception)


def test_no_learner_may_write_what_another_may() -> None:
    one, other = (set(grants("r", Identity(n, "learner", "")).requests) for n in ("a", "b"))
    written = {subject for subject in one if subject.startswith("diloco.")}
    assert written
    assert not written & other
    assert all(".a" in subject for subject in written), json.dumps(sorted(written))


@pytest.mark.parametrize(
    ("unit", "named", "missing"),
    [
        ("diloco-aggregator.service", "aggregator", "aggregator"),
        ("diloco-learner@island-a.service", "%i", "island-a"),
    ],
)
def test_what_a_unit_hands_over_for_a_missing_file_names_it(
    tmp_path: Path, unit: str, named: str, missing: str
) -> None:
    path = tmp_path / unit / "bus.toml"
    path.parent.mkdir()
    path.write_text(f"# no file: /etc/diloco/credentials/{named}.toml")
    with pytest.raises(ConfigError, match=f"file /etc/diloco/credentials/{missing}.toml,"):
        load_credentials(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_may_let_a_group_read_credentials(tmp_path: Path) -> None:
    path = tmp_path / "operator.toml"
    path.write_text(
        render_credentials(Credentials(run="demo", identity="me", role="operator", seed="SU"))
    )
    os.chown(path, 0, 1000)
    path.chmod(0o640)
    assert load_credentials(path) is not None
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        load_credentials(path)
