"""The data that training loop and background pass to each other at each step boundary.

The loop is given a `Boundary` (what to do now) and the payloads of versions; it hands over the
learner's outgoing messages. All are plain data: producer and consumer need not know each other.
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
        effects: the effects to carry out, in order.
        then: "step": a step comes before the next boundary; "hold": no step does; "end": no
            boundary follows.
        global_step: the run's clock for that step.
        state: the learner's state, as its heartbeat reports it.
        checkpoint: whether to make a checkpoint at this boundary.
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
        """Hands over `event` with `payload`; may be called from the background thread."""


# --- Out


class Outgoing(NamedTuple):
    """One update, as the training loop hands it over; `codes` may still be computing.

    Attributes:
        loss: returns the mean training loss over the update's steps; waits for the last of them.
        digest: returns the digest of the view that the codes are taken against, as the learner
            holds it; None if this update is to carry no digest.
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
    """The learner sends no more updates of `fragments`; its data position is `position`."""

    position: int
    fragments: tuple[int, ...]


# Takes a learner's outgoing message; never blocks.
Outbox = Callable[[Outgoing | Republish | Done], None]
