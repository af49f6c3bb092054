"""The other hosts of a learner, as the parts of host 0 see them; `Alone`: there are none."""

from typing import Protocol

from diloco.common import wire
from diloco.common.errors import DilocoError
from diloco.learner.boundary import Boundary
from diloco.learner.fetch import Change


class Preparation(Protocol):
    """One attempt to bring a change onto the devices of all other hosts."""

    async def ready(self) -> None:
        """Wait until they all have it.

        Raises:
            ObjectMissingError, IntegrityError: as one of them says.
        """

    def drop(self) -> None:
        """Nobody will adopt it: they free what they have of it."""


class Peers(Protocol):
    """The other hosts.

    Attributes:
        hosts: how many the learner has, this one included.
        lookahead: boundaries that plans are ahead, so that nobody waits for word of them.
    """

    hosts: int
    lookahead: int

    def asked_to_leave(self) -> bool:
        """Whether one of them was asked to end."""

    def tell(self, boundary: Boundary) -> None:
        """Send them a boundary; may be called from any thread."""

    def give_up(self, error: DilocoError) -> None:
        """Tell them what ends this life; may be called from any thread."""

    def prepare(self, change: Change) -> Preparation:
        """Ask them to bring a change onto their devices; on the event loop."""

    async def stored(self, fragment: int, seq: int) -> tuple[wire.Shard, ...]:
        """Wait until they have stored their shards of an update; the shards."""


class _Prepared:
    """Nobody has to be waited for."""

    async def ready(self) -> None:
        """At once."""

    def drop(self) -> None:
        """Nobody has anything of it."""


class Alone:
    """A learner of one host."""

    hosts = 1
    lookahead = 0

    def asked_to_leave(self) -> bool:
        """Nobody else can be."""
        return False

    def tell(self, boundary: Boundary) -> None:
        """Nobody has to know."""

    def give_up(self, _error: DilocoError) -> None:
        """Nobody has to know."""

    def prepare(self, _change: Change) -> Preparation:
        """There is nobody to do it."""
        return _Prepared()

    async def stored(self, _fragment: int, _seq: int) -> tuple[wire.Shard, ...]:
        """Nothing but what this host stores."""
        return ()
