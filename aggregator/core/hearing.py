"""Which lives are heard of: heartbeats and signs on the tape, by incarnation. Times are arguments.

A life is dead once it was silent for long while anybody was heard: when nobody is heard it is the
bus that is silent, and nobody is taken for dead. Only a learner's newest life can be live, and only
by its own signs: one that a newer join has superseded may send heartbeats for ever.
"""

from collections import defaultdict

from diloco.aggregator.core.members import Member
from diloco.aggregator.core.memory import LIVES


class Hearing:
    """Heartbeats and other signs of life that an aggregator has heard, for all fragments.

    Args:
        now_s: when it begins to listen.
    """

    def __init__(self, now_s: float) -> None:
        self._newest_s = now_s
        # Nobody counts as silent since before this.
        self._since_s = now_s
        self._heard_at_s: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._signs: dict[tuple[int, str], tuple[int, float]] = {}

    def beat(self, learner: str, incarnation: int, now_s: float, timeout_s: float) -> None:
        """A heartbeat has come; `timeout_s` is the longest silence of a live learner."""
        if now_s - self._newest_s > timeout_s:
            # After a silence of all, everybody has as long again to be heard.
            self._since_s = now_s
        self._newest_s = now_s
        self._hear(learner, incarnation, now_s)

    @property
    def newest_s(self) -> float:
        """When any learner was heard of last, or when this began to listen."""
        return self._newest_s

    def silent_s(self, learner: str, incarnation: int) -> float:
        """For how long a life, and those after it, were silent while anybody was heard."""
        lives = self._heard_at_s[learner]
        heard = [at_s for life, at_s in lives.items() if life >= incarnation]
        return self._newest_s - max([self._since_s, *heard])

    def is_live(
        self, fragment: int, learner: str, member: Member, now_s: float, timeout_s: float
    ) -> bool:
        """Whether a member of a fragment's machine is to count as live."""
        # Joins and updates are signs of life too, from when we see them: the server's clock, which
        # their times are of, may differ from ours by hours. One that was never heard of counts from
        # its join, or from our own beginning.
        key, sign = (fragment, learner), (member.incarnation, member.heard_at_s)
        if self._signs.get(key) != sign:
            self._signs[key] = sign
            self._hear(learner, member.incarnation, now_s)
        heard_at_s = self._heard_at_s[learner].get(member.incarnation, self._since_s)
        return self._newest_s - max(heard_at_s, self._since_s) < timeout_s

    def _hear(self, learner: str, incarnation: int, now_s: float) -> None:
        lives = self._heard_at_s[learner]
        # The newest last, so that what is forgotten is what was not heard of for longest: numbers
        # that a learner makes up take only its own places.
        lives.pop(incarnation, None)
        lives[incarnation] = now_s
        if len(lives) > LIVES:
            del lives[next(iter(lives))]
