"""`diloco auth`: the NATS server's configuration for a run, and each identity's credentials.

All files are in one folder, which belongs on the operator's machine:
    auth.toml            the identities, with their public keys
    accounts.conf        for the servers: accounts and permissions, rewritten at each change
    nats-1.conf ...      for the servers: all other settings, written once, to be changed by hand
    tls/                 the certificate authority, and a certificate for each server
    credentials/NAME.toml   secret, for one identity each, mode 0600

An identity is a party that connects: the operator, a learner, an aggregator or a reader.
"""

import ipaddress
import os
import secrets
import tomllib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import nkeys
import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from pydantic import BaseModel, ConfigDict

from diloco.common.process.credentials import PROCESSES, Credentials, Role, render_credentials
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.names import valid_name
from diloco.operate.auth.permissions import Identity, render_accounts
from diloco.run.cli.folders import make_folder
from diloco.run.cli.opening import open_run

OPERATOR = "operator"
# Names that no learner, aggregator or reader may have, as the tape and the logs use them.
RESERVED = frozenset({OPERATOR, "guard"})
_STATE = "auth.toml"
_ACCOUNTS = "accounts.conf"
_VALID_DAYS = 3650
# Limits of the run's account. It has streams for tape, heartbeats and leases, and each of them some
# consumers for every daemon.
_MAX_STREAMS = 8
_MAX_CONSUMERS = 100_000


class _State(BaseModel):
    """The contents of `auth.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str
    max_file_bytes: int
    servers: int = 1
    identities: tuple[Identity, ...]


def init(
    folder: Path,
    run: str,
    hosts: list[str],
    *,
    installed_at: Path | None = None,
    streams_at: Path | None = None,
    max_file_bytes: int = 10 << 30,
) -> tuple[Path, list[Path]]:
    """Creates the folder with all files of a run, and the operator's credentials.

    Args:
        folder: the folder to make; must not have such files yet.
        run: the only run that these credentials are for.
        hosts: names or addresses by which clients reach the servers: one for each server.
        installed_at: path of the folder on the servers' machines; `folder` if None.
        streams_at: where the servers keep their streams; `jetstream` in that folder if None.
        max_file_bytes: the most that the run's streams may take on a server's disk.

    Returns:
        The path of the operator's credentials, and those of the servers' configurations.

    Raises:
        ConfigError: the folder is in use, or a name is invalid.
    """
    _check_name(run, "run")
    if (folder / _STATE).exists():
        raise ConfigError(
            f"{folder} holds the credentials of a run already",
            hint="add to it with: diloco auth add-learner; or give each run a folder of its own",
        )
    make_folder(folder)
    _write_certificates(folder / "tls", run, hosts)
    home = installed_at or folder.absolute()
    streams = streams_at or home / "jetstream"
    servers = _write_servers(folder, run, hosts, home, streams, max_file_bytes)
    state = _State(run=run, max_file_bytes=max_file_bytes, servers=len(hosts), identities=())
    path = _add(folder, state, OPERATOR, "operator")
    return path, servers


def add(
    folder: Path,
    name: str,
    role: Role,
    processes: int = PROCESSES,
    fragments: tuple[int, ...] = (),
) -> Path:
    """Makes credentials for a new identity, and returns their path.

    The identity can connect once the servers have reloaded, with up to `processes` processes at
    once. A learner may send updates of `fragments` alone; if empty, of all.

    Raises:
        ConfigError: an identity has that name already, or `init` was not called.
    """
    _check_name(name, role)
    if name in RESERVED:
        raise ConfigError(
            f"{name!r} is what the run calls its own: no {role} can have that name",
            hint="take another name",
        )
    state = _load(folder)
    if any(one.name == name for one in state.identities):
        raise ConfigError(
            f"there is an identity {name!r} in {folder} already",
            hint="take another name; to give it new keys, revoke it first",
        )
    return _add(folder, state, name, role, processes, fragments)


async def fragments_of(target: str, modules: Sequence[str]) -> tuple[int, ...]:
    """Returns the indices of the fragments of some modules of a run.

    Args:
        target: RUN, which must have been created, as its layout divides modules into fragments.
        modules: names of modules.

    Raises:
        TaskError: no tensor of the run is in such a module.
        DilocoError: the run cannot be opened.
    """
    async with open_run(target, reads=True) as opened:
        layout = opened.context.layout
    held = layout.in_order(modules, "--holds gives the learner")
    return tuple(fragment.index for fragment in layout.held(held))


def revoke(folder: Path, name: str) -> None:
    """Removes an identity and its credentials; the servers disconnect it once they have reloaded.

    Raises:
        ConfigError: no identity has that name.
    """
    state = _load(folder)
    left = tuple(one for one in state.identities if one.name != name)
    if len(left) == len(state.identities):
        known = ", ".join(one.name for one in state.identities)
        raise ConfigError(f"there is no identity {name!r} in {folder}", hint=f"known: {known}")
    _save(folder, state.model_copy(update={"identities": left}))
    _credentials_path(folder, name).unlink(missing_ok=True)


def identities(folder: Path) -> tuple[Identity, ...]:
    """Returns the identities in a folder of `diloco auth`.

    Raises:
        ConfigError: `init` was not called.
    """
    return _load(folder).identities


def public_key(credentials: Credentials) -> str:
    """Returns the public key (nkey) by which the servers know an identity."""
    public: str = nkeys.from_seed(bytearray(credentials.seed.encode())).public_key.decode()
    return public


def _add(
    folder: Path,
    state: _State,
    name: str,
    role: Role,
    processes: int = PROCESSES,
    fragments: tuple[int, ...] = (),
) -> Path:
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    credentials = Credentials(
        run=state.run, identity=name, role=role, seed=seed.decode(), processes=processes
    )
    path = _credentials_path(folder, name)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _write(path, render_credentials(credentials).encode(), secret=True)
    one = Identity(name, role, public_key(credentials), processes, fragments)
    more = (*state.identities, one)
    _save(folder, state.model_copy(update={"identities": more}))
    return path


def _credentials_path(folder: Path, name: str) -> Path:
    return folder / "credentials" / f"{name}.toml"


def _check_name(name: str, what: str) -> None:
    if not valid_name(name):
        raise ConfigError(
            f"{name!r} is not a valid name of a {what}",
            hint="up to 40 lower-case letters, digits and hyphens, a letter or digit first",
        )


def _load(folder: Path) -> _State:
    path = folder / _STATE
    try:
        return _State.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} holds no credentials", hint=f"begin with: diloco auth init {folder}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error


def _save(folder: Path, state: _State) -> None:
    document: dict[str, Any] = {
        "run": state.run,
        "max_file_bytes": state.max_file_bytes,
        "servers": state.servers,
        "identities": [one._asdict() for one in state.identities],
    }
    limits = {
        # A cluster sums an account's storage over all its servers.
        "max_file": state.max_file_bytes * state.servers,
        "max_streams": _MAX_STREAMS,
        "max_consumers": _MAX_CONSUMERS,
    }
    # The accounts first: if the state is not written, the identity can be added or revoked again.
    _write(folder / _ACCOUNTS, render_accounts(state.run, state.identities, limits).encode())
    _write(folder / _STATE, tomli_w.dumps(document).encode())


def _write(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Writes a file whole or not at all; a secret file is at no time readable by others."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _server_names(hosts: list[str]) -> list[str]:
    return [f"nats-{number}" for number in range(1, len(hosts) + 1)]


def _write_servers(
    folder: Path, run: str, hosts: list[str], home: Path, streams: Path, max_file_bytes: int
) -> list[Path]:
    template = "single.conf" if len(hosts) == 1 else "cluster.conf"
    text = resources.files("diloco.infra.nats").joinpath(template).read_text()
    written = []
    for name in _server_names(hosts):
        filled = Template(text).substitute(
            server_name=name,
            cluster_name=f"diloco-{run}",
            folder=home,
            store_dir=streams / name,
            max_file_store=max_file_bytes,
            routes=", ".join(f'"tls://{_in_url(host)}:6222"' for host in hosts),
        )
        path = folder / f"{name}.conf"
        _write(path, filled.encode())
        written.append(path)
    return written


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# Certificates


def _write_certificates(folder: Path, run: str, hosts: list[str]) -> None:
    """Writes a certificate authority, and by it a certificate for each server.

    Servers use their certificate towards clients and towards other servers.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"diloco {run} authority")])
    authority = (
        _certificate(name, name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    _write(folder / "ca.pem", authority.public_bytes(serialization.Encoding.PEM))
    _write(folder / "ca.key", _private(authority_key), secret=True)
    for server, host in zip(_server_names(hosts), hosts, strict=True):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, server)])
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issued = (
            _certificate(subject, name, key)
            .add_extension(x509.SubjectAlternativeName(_alternatives(host)), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
                critical=False,
            )
            .sign(authority_key, hashes.SHA256())
        )
        _write(folder / f"{server}.pem", issued.public_bytes(serialization.Encoding.PEM))
        _write(folder / f"{server}.key", _private(key), secret=True)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=_VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives(host: str) -> Iterable[x509.GeneralName]:
    """Returns the names in a server's certificate: `host`, and loopback for its own machine."""
    found: list[x509.GeneralName] = []
    for one in dict.fromkeys((host, "localhost", "127.0.0.1")):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(one)))
        except ValueError:
            found.append(x509.DNSName(one))
    return found


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
