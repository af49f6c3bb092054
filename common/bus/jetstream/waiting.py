"""A daemon's first connection: while no server answers it waits for one, within the process."""

from pathlib import Path

from diloco.common import log
from diloco.common.bus.jetstream.nats_bus import NatsBus, connect
from diloco.common.config import BusSection
from diloco.common.credentials import Role, load_credentials
from diloco.common.errors import ConfigError
from diloco.common.service import Runtime

ATTEMPT_S = 5.0


async def connect_or_wait(
    section: BusSection, role: Role, name: str, runtime: Runtime, logger: log.Logger
) -> NatsBus:
    """Connect to NATS as a learner or an aggregator, whenever a server answers.

    Raises:
        BusError: the server refused the credentials.
        ConfigError: the URL or the credentials cannot be used, or are another's.
    """
    _check_owner(section, role, name, logger)

    async def attempt() -> NatsBus:
        return await connect(
            section.url,
            name=name,
            credentials=section.credentials,
            tls_ca=section.tls_ca,
            connect_timeout_s=ATTEMPT_S,
        )

    return await runtime.retry("connecting to NATS", attempt, logger=logger)


def _check_owner(section: BusSection, role: Role, name: str, logger: log.Logger) -> None:
    """Refuse another's credentials before anything is done with them.

    An aggregator's would let a learner join, which supersedes the life that holds the name, and
    then none of its updates. The operator's may do everything: they are warned of.

    Raises:
        ConfigError: they are another's.
    """
    own = None if section.credentials is None else load_credentials(Path(section.credentials))
    if own is None:
        return
    if own.role == "operator":
        logger.warning("operators_credentials", path=section.credentials, instead_of=role)
    # An aggregator's name stands in no subject, so that its file may have another.
    elif own.role != role or (role == "learner" and own.identity != name):
        raise ConfigError(
            f"{section.credentials!r} has the credentials of {own.role} {own.identity!r}, not "
            f"those of {role} {name!r}",
            hint=f"name the file that `diloco auth add-{role}` made for {name!r}, in "
            "bus.credentials or DILOCO_BUS_CREDENTIALS: runbooks/credentials.md",
        )
