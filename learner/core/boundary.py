"""The data that training loop and background pass to each other at each step boundary.

In come a `Boundary` (what to do now) and the payloads of versions; out go what the learner has to
say. Plain data: whoever makes it and whoever carries it out need not know each other.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from diloco.learner.core.events import (
    Effect,
    Event,
    Republish,
    Send,
)

Then = Literal["step", "hold", "end"]


class Boundary(NamedTuple):
    """The plan for one step boundary.

    Attributes:
        effects: in order.
        then: what comes before the next boundary: a "step", nothing ("hold"), or no boundary
            follows ("end").
        global_step: the run's clock for that step.
        state: as the heartbeat says it.
        checkpoint: make one here.
    """

    effects: tuple[Effect, ...]
    then: Then
    global_step: int
    state: str = "training"
    checkpoint: bool = False


# --- In


class Decoded(NamedTuple):
    """A record's tensors on the devices; `release` is called when they are adopted."""

    tensors: Any
    release: Callable[[], object] = lambda: None


NOTHING = Decoded(None)


class Arrived(NamedTuple):
    """An event for the core, with the arrays that it carries."""

    event: Event
    payload: Decoded = NOTHING


class Post(Protocol):
    """Hands an event and its arrays to the training loop."""

    def __call__(self, event: Event, payload: Decoded = NOTHING) -> None:
        """May be called from the background thread."""


# --- Out


class Outgoing(NamedTuple):
    """One update, as the training loop hands it over; `codes` may still be computing.

    Attributes:
        loss: gives the mean training loss over the steps that it covers; it waits for the last.
        digest: gives that of the view that the codes are taken against, as it is held; None: it is
            not asked for this time.
    """

    send: Send
    codes: Any
    position: int
    local_step: int
    loss: Callable[[], float]
    step_time_s: float
    dispatched_at_s: float
    digest: Callable[[], str] | None = None


class Done(NamedTuple):
    """The last word on these fragments: nothing more comes of them; with the data position."""

    position: int
    fragments: tuple[int, ...]


# Takes what a learner has to say; nothing in it waits.
Outbox = Callable[[Outgoing | Republish | Done], None]
