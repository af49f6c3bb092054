"""A daemon's first connection: while no server answers it waits for one, within the process."""

from diloco.common import log
from diloco.common.bus.jetstream.nats_bus import NatsBus, connect
from diloco.common.config import BusSection
from diloco.common.service import Runtime

ATTEMPT_S = 5.0


async def connect_or_wait(
    section: BusSection, name: str, runtime: Runtime, logger: log.Logger
) -> NatsBus:
    """Connect to NATS, whenever a server answers.

    Raises:
        BusError: the server refused the credentials.
        ConfigError: the URL or the credentials cannot be used.
    """

    async def attempt() -> NatsBus:
        return await connect(
            section.url,
            name=name,
            credentials=section.credentials,
            tls_ca=section.tls_ca,
            connect_timeout_s=ATTEMPT_S,
        )

    return await runtime.retry("connecting to NATS", attempt, logger=logger)
