"""What the parts of one learner share: its run, its counters, what is asked of its tensors."""

import dataclasses
from typing import Any, Protocol

import numpy as np

from diloco.common.codec import Encoded
from diloco.common.health import Health
from diloco.common.metrics import Metrics
from diloco.common.tape import RunContext
from diloco.learner.answers import Answers


class Traffic:
    """Bytes and updates of this life, for heartbeats."""

    def __init__(self) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.updates_sent = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context(RunContext):
    """What the background side of one learner shares."""

    learner: str
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    answers: Answers = dataclasses.field(default_factory=Answers)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    health: Health = dataclasses.field(default_factory=Health)


class Tensors(Protocol):
    """What the background needs of a host's tensors: `replica.Replica`."""

    def owned(self, fragment: int) -> np.ndarray:
        """Numbers of the blocks that this host uploads, ascending, int64 [n]."""

    def held(self, fragment: int) -> np.ndarray:
        """Numbers of the blocks that this host's devices hold, ascending, int64 [n]."""

    def collect(self, fragment: int, codes: Any) -> Encoded:
        """The rows owned of an update, once the devices have computed them."""

    def place(self, fragment: int, rows: Encoded) -> Any:
        """The rows held of a version delta, on the devices."""

    def place_view(self, fragment: int, view: np.ndarray) -> Any:
        """A whole view, float32 [N], on the devices."""
