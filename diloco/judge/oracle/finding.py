"""The oracle's findings: a rule, a message of the tape, the expected value and the value found."""

from typing import Any, NamedTuple


class Violation(NamedTuple):
    """One breach of a rule on the tape.

    Attributes:
        rule: the rule's short name; `RULES` has its sentence.
        seq: stream sequence of the message that breaks it.
        about: for people: "fragment 0 version 5", "learner a fragment 0", an update, or "run".
        field: the field of the message, as its class names it; may be empty.
        expected: the value that follows from the tape; `found` is the message's.
    """

    rule: str
    seq: int
    about: str
    field: str
    expected: Any
    found: Any

    @property
    def where(self) -> str:
        """`about`, and the message's stream sequence."""
        return f"{self.about}, message {self.seq}"

    @property
    def what(self) -> str:
        """The rule's sentence, the expected value, and the value found."""
        of = f"{self.field}: " if self.field else ""
        return (
            f"{RULES[self.rule]}; {of}expected {_short(self.expected)}, found {_short(self.found)}"
        )

    @property
    def sentence(self) -> str:
        """The violation as a sentence."""
        return f"{self.where}: {self.what}"


RULES = {
    "chain": "versions are 0, 1, 2 ..., each built on the record before it",
    "clock": "the run's clock follows from the version's place in its interval",
    "admission": "who is merged or rejected follows from manifest, tape and objects",
    "weight": "weight, staleness, discount and clip follow from manifest and base version",
    "round": "when a round opens and closes follows from announcements, pace, grace and deadline",
    "overdue": "no round waits beyond the time that its rules give it",
    "cut": "a round is cut at an update of its fragment, not older than the last one read",
    "observation": "a recorded observation is of an event that was possible then",
    "memory": "the machine's memory follows from the record before and what came since",
    "position": "the position is the lowest sequence that is not resolved",
    "totals": "sums grow by what the record resolves",
    "settings": "rate and momentum are those in force, times the round's share of the fleet",
    "objects": "snapshots, deltas and outer states are those that the settings ask for",
    "input": "what is merged is what its manifest announced, byte for byte",
    "coefficients": "an input's coefficient is its weight's share, rounded to bfloat16",
    "factors": "the factor gives the merged outer gradient its length",
    "arrays": "the recorded inputs give view and outer state of the record, bit for bit",
    "delta": "the delta is the quantized difference of master parameters and old view",
    "restore": "a rollback repeats an earlier version, and takes nothing of what came since",
    "once": "every update ends in exactly one record",
    "data": "a learner's updates follow each other without gap or repeat, over all its lives",
    "shares": "an update is of shares that its learner holds, and each batch is merged once",
    "stop": "the stop comes once every fragment has all its versions, or enough tokens",
    "end": "the end comes once every fragment has its last version",
    "quarantine": "an aggregator quarantines after `bounds.quarantine_offences` offences",
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
