"""The checker of verdicts: on lies of hostile learners, damaged updates, quarantined learners."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping

from simchain import UpdateId, Violation, hold, update_id

from diloco.common.protocol import wire

# The learner that lies.
LIAR_INDEX = 15
LIAR = f"learner-{LIAR_INDEX}"
# Why an honest update may be rejected.
HONEST = {"superseded", "ended", "late", "missing", "rolled_back", "stale"}


class Admission:
    """Checks which updates one tape's records merge and reject.

    Args:
        rotten: names of the objects that the simulation has damaged.
        injected: number of injected faults so far, by kind.
        shut_out: learners that are quarantined when the tape begins.
    """

    def __init__(
        self, rotten: Container[str], injected: Mapping[str, int], shut_out: Iterable[str] = ()
    ) -> None:
        # Each update of a hostile learner, with its fragment: whether it may be merged.
        self.hostile: dict[tuple[int, UpdateId], bool] = {}
        self._rotten = rotten
        self._injected = injected
        # By learner: (sequence, active) of each quarantine message, oldest first.
        self._words: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
        for learner in shut_out:
            self._words[learner].append((0, True))

    def hear(self, word: wire.Quarantine, seq: int) -> None:
        """Note a quarantine message: only an operator may quarantine an honest learner."""
        self._words[word.learner].append((seq, word.active))
        honest = word.learner != LIAR and not self._injected["rot"]
        wrong = honest and word.active and word.by != "operator"
        hold(not wrong, "quarantine", word.learner, f"shut out by {word.by}: {word.reason}")

    def shut_out(self) -> bool:
        """Whether any learner is quarantined by the newest message about it."""
        return any(words[-1][1] for words in self._words.values())

    def check_merged(self, fragment: int, taken: wire.Input) -> None:
        """Checks that a merged update is no lie, not damaged, and not of a quarantined learner."""
        update = update_id(taken)
        if self.hostile.get((fragment, update)) is False:
            raise Violation("fooled", str(update), f"merged: {taken}")
        # No learner could take so many steps in a day of this world, by any clock.
        if taken.steps_credited >= 10**8:
            raise Violation("fooled", str(update), f"believed: {taken}")
        rotten = [one.name for one in taken.shards if one.name in self._rotten]
        hold(not rotten, "rot", update, f"{rotten} was merged")
        shut_out = self._was_shut_out(taken.learner, taken.stream_seq, taken.stream_seq)
        hold(not shut_out, "quarantine", update, f"merged, sent at {taken.stream_seq}")

    def check_rejected(self, record_seq: int, taken: wire.Rejected) -> None:
        """Checks that the reason for which an honest update is rejected is a true one."""
        about, what = update_id(taken), f"{taken.reason}: {taken.detail}"
        hold(self._may_be_rejected(record_seq, taken), "rejected", about, what)

    def _may_be_rejected(self, record_seq: int, taken: wire.Rejected) -> bool:
        if taken.learner == LIAR or taken.reason in HONEST:
            return True
        if taken.reason == "quarantined":
            return self._was_shut_out(taken.learner, taken.stream_seq, record_seq)
        return taken.reason == "checksum" and self._injected["rot"] > 0

    def _was_shut_out(self, learner: str, since_seq: int, until_seq: int) -> bool:
        """Whether a learner was quarantined at any time between two sequences of the tape."""
        counted = False
        for seq, active in self._words.get(learner, ()):
            if seq > until_seq:
                break
            counted = active or (counted and seq > since_seq)
        return counted
