"""How far a local run has read its tape, and how long the run is by now. Pure."""

from dataclasses import dataclass

from diloco.common import wire
from diloco.common.config import parse_settings
from diloco.common.tape import Entry, Item


@dataclass
class Reading:
    """A run that is resumed has a past: what its tape says of it is not how the run stands.

    `steps`: the length of the run, which an operator may change; `past_seq`: where the tape ended
    when the reading began.
    """

    steps: int
    past_seq: int
    seq: int = 0

    @property
    def is_of_now(self) -> bool:
        """Whether the past is read."""
        return self.seq >= self.past_seq

    def hear(self, item: Item) -> None:
        """Note what comes next on the tape."""
        self.seq = item.seq
        # Settings of the past may be older than those that the reading began with.
        if self.is_of_now and isinstance(item, Entry) and isinstance(item.body, wire.Settings):
            self.steps = parse_settings(item.body.settings).run.steps
