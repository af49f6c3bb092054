"""Sequence numbers of a run's tapes, of which no two share one.

A run that is resumed begins a new tape. What a process that outlived the earlier one still asks for
(a trim, a swap, a reference to a message) names sequences that the new one does not have.
"""

# More than a tape ever holds: thirty thousand years of a message a second.
SPAN = 10**12


def first_sequence(epoch: int) -> int:
    """Sequence of the first message of an epoch's tape."""
    return epoch * SPAN + 1


def place_on_tape(seq: int) -> int:
    """Which message of its tape a sequence is; 1 is the first."""
    return (seq - 1) % SPAN + 1


def begins_tape(seq: int) -> bool:
    """Whether a sequence is that of a tape's first message."""
    return place_on_tape(seq) == 1


def same_tape(one_seq: int, other_seq: int) -> bool:
    """Whether two messages of a run may stand on one tape."""
    return (one_seq - 1) // SPAN == (other_seq - 1) // SPAN
