"""The stream sequence numbers of each epoch's tape. Pure.

The tapes of a run's epochs share no sequence number: epoch e has those from e x `SPAN` + 1 on.
"""

# The number of sequence numbers of an epoch: thirty thousand years at a message a second.
SPAN = 10**12


def first_sequence(epoch: int) -> int:
    """Returns the sequence of the first message of an epoch's tape."""
    return epoch * SPAN + 1


def epoch_of(seq: int) -> int:
    """Returns the epoch of the tape that a sequence belongs to."""
    return (seq - 1) // SPAN


def place_on_tape(seq: int) -> int:
    """Returns the number of a message on its tape (1: the first message), from its sequence."""
    return (seq - 1) % SPAN + 1


def begins_tape(seq: int) -> bool:
    """True if `seq` is the sequence of a tape's first message."""
    return place_on_tape(seq) == 1


def same_tape(one_seq: int, other_seq: int) -> bool:
    """True if two sequences belong to the same tape."""
    return epoch_of(one_seq) == epoch_of(other_seq)
