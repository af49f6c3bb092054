"""The sequences of tapes: each epoch has its own, and its first message begins its tape."""

from hypothesis import given
from hypothesis import strategies as st

from diloco.common.protocol.sequences import begins_tape, first_sequence, place_on_tape, same_tape

EPOCHS = st.integers(0, 10**6)
PLACES = st.integers(1, 10**11)


@given(EPOCHS, PLACES)
def test_a_message_knows_its_place_on_its_epochs_tape(epoch, place):
    seq = first_sequence(epoch) + place - 1
    assert place_on_tape(seq) == place
    assert begins_tape(seq) == (place == 1)


@given(EPOCHS, PLACES, EPOCHS, PLACES)
def test_two_messages_are_of_one_tape_if_their_epochs_are_the_same(one, here, other, there):
    sequences = first_sequence(one) + here - 1, first_sequence(other) + there - 1
    assert same_tape(*sequences) == (one == other)
    assert same_tape(first_sequence(one), sequences[0])
