"""The other hosts of a learner, as the parts of host 0 see them: of one host, none."""

from typing import Any

from diloco.common.protocol import wire
from diloco.common.protocol.errors import DilocoError
from diloco.learner.core.boundary import Boundary
from diloco.learner.core.catchup import Change


class Preparation:
    """One attempt to bring a change onto the devices of all other hosts: of none, done at once."""

    async def ready(self) -> None:
        """Wait until they all have it.

        Raises:
            ObjectMissingError, IntegrityError: as one of them says.
        """

    def drop(self) -> None:
        """Nobody will adopt it: they free what they have of it."""


class Alone:
    """A learner of one host; `hosts.coordinator.Coordinator` is that of several.

    Attributes:
        hosts: how many the learner has, this one included.
        lookahead: boundaries that plans are ahead, so that nobody waits for word of them.
    """

    hosts = 1
    lookahead = 0

    def asked_to_leave(self) -> bool:
        """Whether another host was asked to end."""
        return False

    def say(self, message: Any) -> None:
        """Send a `hosts.messages` message to the others; may be called from any thread."""

    def write(self, message: Any) -> None:
        """Send a message to all other hosts; on the event loop."""

    def tell(self, boundary: Boundary) -> None:
        """Send them a boundary; may be called from any thread."""

    def give_up(self, _error: DilocoError) -> None:
        """Tell them what ends this life; may be called from any thread."""

    def prepare(self, _change: Change) -> Preparation:
        """Ask them to bring a change onto their devices; on the event loop."""
        return Preparation()

    async def stored(self, _fragment: int, _seq: int) -> tuple[wire.Shard, ...]:
        """Wait until they have stored their shards of an update; the shards."""
        return ()
