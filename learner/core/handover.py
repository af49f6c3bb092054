"""The data that the training loop and the background exchange at each step boundary.

The background is the event loop beside training, which does all network traffic. The training loop
takes a `Boundary`, which says what to do now, and the tensors of versions; it gives the learner's
outgoing messages. All are plain data: producer and consumer need not know each other.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple, Protocol

from diloco.learner.core.carry import Unsent
from diloco.learner.core.events import (
    Effect,
    Event,
    Republish,
    Send,
)

# Incarnation and local step, which the hosts' parts of one checkpoint have in common.
CheckpointId = tuple[int, int]
Then = Literal["step", "hold", "end"]


class Boundary(NamedTuple):
    """The plan for one step boundary.

    Attributes:
        effects: the effects to carry out, in order.
        then: "step": one inner step is taken before the next boundary; "hold": no step is taken
            before the next boundary; "end": this is the last boundary.
        global_step: the run's clock for the step that follows.
        state: the learner's state, as its heartbeat reports it.
        checkpoint: whether to make a checkpoint at this boundary.
        stopping: whether the run's stop or end was read.
        unsent: if the checkpoint is a snapshot, each fragment's unsent work after the effects.
    """

    effects: tuple[Effect, ...]
    then: Then
    global_step: int
    state: str = "training"
    checkpoint: bool = False
    stopping: bool = False
    unsent: tuple[Unsent, ...] = ()


def why_left(*, stopping: bool) -> str:
    """Returns why a learner leaves; `stopping` as in `Boundary`."""
    return "run ended" if stopping else "asked to"


# --- In


class Decoded(NamedTuple):
    """A record's tensors on the devices; None if the record needs no tensors.

    `release` is to be called when the tensors are taken for adoption, to make room for others.
    """

    tensors: Any
    release: Callable[[], object] = lambda: None


NOTHING = Decoded(None)


class Arrived(NamedTuple):
    """An event for the core, with the tensors of its record if the event is a `Ready`."""

    event: Event
    payload: Decoded = NOTHING


class Post(Protocol):
    """A function by which the background gives an event to the training loop."""

    def __call__(self, event: Event, payload: Decoded = NOTHING) -> None:
        """Gives `event` with the tensors `payload` to the training loop, from any thread."""


# --- Out


class Outgoing(NamedTuple):
    """One update, which the training loop gives to the background to upload and announce.

    Attributes:
        send: the update's number, base version, steps and tokens.
        codes: the quantized update on the devices, which may still be computing.
        position: the learner's position in its data, in batches.
        local_step: the learner's count of inner steps.
        loss: returns the mean training loss over the update's steps; waits for the last step.
        step_time_s: moving average of the seconds of an inner step.
        dispatched_at_s: time when the encoding of `codes` was dispatched to the devices.
        digest: computes the digest of the view that the codes are taken against, from the
            learner's arrays; None: the manifest has no such digest.
        covered: waits until a snapshot that knows of the update is stored; None: it does not wait.
    """

    send: Send
    codes: Any
    position: int
    local_step: int
    loss: Callable[[], float]
    step_time_s: float
    dispatched_at_s: float
    digest: Callable[[], str] | None = None
    covered: Callable[[], Awaitable[None]] | None = None


class Done(NamedTuple):
    """The learner sends no more updates of `fragments`; its data position is batch `position`."""

    position: int
    fragments: tuple[int, ...]


# Takes a learner's outgoing message; never blocks.
Outbox = Callable[[Outgoing | Republish | Done], None]
