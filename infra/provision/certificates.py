"""Checks the certificates of NATS servers: present, of one authority, and valid long enough."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from diloco.infra.provision.fleet import FleetFinding

# Days for which a certificate should still be valid.
LEAST_DAYS = 30


def check_certificates(
    folder: Path, addresses: Sequence[str], now: datetime
) -> Iterator[FleetFinding]:
    """Yields a finding for each fault of the authority, or of a server's certificate or key.

    Args:
        folder: the folder `tls` in the folder of `diloco auth`.
        addresses: IP addresses of the servers nats-1, nats-2 and so on.
        now: the present time, with a time zone.
    """
    try:
        authority = _certificate(folder / "ca.pem")
    except (OSError, ValueError) as error:
        yield FleetFinding(_unreadable(folder / "ca.pem", error))
        return
    yield from _valid(folder / "ca.pem", authority, now)
    for number, address in enumerate(addresses, 1):
        path = folder / f"nats-{number}.pem"
        try:
            found = _certificate(path)
        except (OSError, ValueError) as error:
            yield FleetFinding(_unreadable(path, error))
            continue
        yield from _valid(path, found, now)
        yield from _of_server(path, found, authority, address)


def _certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def _unreadable(path: Path, error: Exception) -> str:
    why = error.strerror if isinstance(error, OSError) else "it is no certificate or key in PEM"
    return f"cannot read {path}: {why}; diloco auth init makes it"


def _valid(path: Path, found: x509.Certificate, now: datetime) -> Iterator[FleetFinding]:
    until = found.not_valid_after_utc
    if not found.not_valid_before_utc <= now < until:
        yield FleetFinding(
            f"{path} is valid from {found.not_valid_before_utc:%Y-%m-%d} to {until:%Y-%m-%d}: make "
            "a new folder with diloco auth init"
        )
    elif until < now + timedelta(days=LEAST_DAYS):
        yield FleetFinding(f"{path} is valid only until {until:%Y-%m-%d}", refused=False)


def _of_server(
    path: Path, found: x509.Certificate, authority: x509.Certificate, address: str
) -> Iterator[FleetFinding]:
    key = path.with_suffix(".key")
    try:
        public = load_pem_private_key(key.read_bytes(), None).public_key()
    except (OSError, ValueError, TypeError) as error:
        yield FleetFinding(_unreadable(key, error))
    else:
        if public != found.public_key():
            yield FleetFinding(f"{key} is not the key of {path}")
    try:
        found.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        yield FleetFinding(f"{path} is of another authority than ca.pem beside it")
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if ip_address(address) not in names.get_values_for_type(x509.IPAddress):
        yield FleetFinding(
            f"{path} is not for {address}, the address of its server: diloco auth init --host"
        )
