"""Nothing that somebody else has written makes a decoder fail otherwise than with our own errors.

Nor does it make one take memory for what is only claimed. `make fuzz` feeds a million inputs.
"""

from pathlib import Path

import pytest
from decoders import Decoder, decoders
from fuzzing import BATCH, CaseError, check, damage, fuzz
from hypothesis import strategies as st

from diloco.common.protocol.errors import WireError
from diloco.common.protocol.reasons import Reason

CASES = 8 * BATCH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", decoders(Path("unused")))
def test_only_our_own_errors(name, folder):
    ends = fuzz(decoders(folder)[name], CASES, first_seed=len(name))
    assert ends.total() >= BATCH


def test_examples_are_taken(folder):
    """The inputs that damages begin from are valid: else no damage would pass the first check."""
    for name, decoder in decoders(folder).items():
        for example in decoder.examples:
            assert check(decoder, example) == "taken", name


def test_an_error_of_another_kind_is_found():
    def decode(data):
        if b"\xdc" in data:
            raise KeyError(data)
        raise WireError(Reason.MALFORMED, "refused")

    with pytest.raises(CaseError, match="KeyError"):
        fuzz(Decoder(st.just(b"right"), (b"right",), decode), 100 * BATCH, first_seed=1)


def test_memory_beyond_the_limit_is_found():
    decoder = Decoder(st.just(b"right"), (b"right",), lambda data: bytes(data[0] << 16))
    check(decoder, b"\x10")
    with pytest.raises(CaseError, match="bytes of memory"):
        check(decoder, b"\xff")


def test_damages_are_the_same_for_the_same_seed():
    import random

    first, second = (
        [damage(b"right" * 9, random.Random(5), (b"other",)) for _ in range(9)] for _ in range(2)
    )
    assert first == second
