"""Text from the built-in model: what it was trained on comes back, and the same seed repeats it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.models.bytes_lm.model import make_sampler

LENGTH = 8
TEXT = "abcdé"
CODES = TEXT.encode()


class Cycle:
    """A model that knows one text: after each of its bytes the next, sure of it."""

    def apply(self, certainty, tokens_BxL):
        following = np.zeros((256, 300), np.float32)
        for one, other in itertools.pairwise(CODES + CODES[:1]):
            following[one, other] = 1.0
        following[ord("\n"), ord("a")] = 1.0
        following[:, 280] = 99.0  # beyond the bytes: never chosen
        return certainty * jnp.asarray(following)[tokens_BxL]


def written(count, prompt="a", *, temperature=0.0, seed=0, certainty=50.0):
    pieces = make_sampler(Cycle(), LENGTH)(certainty, prompt, jax.random.key(seed), temperature)
    return list(itertools.islice(pieces, count))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_sure_model_repeats_its_text_beyond_its_window(temperature):
    assert "".join(written(5 * len(CODES) - 1, temperature=temperature)) == (TEXT * 5)[1:]


def test_there_is_a_piece_for_each_byte():
    assert written(6) == ["b", "c", "d", "", "é", "a"]


def test_a_prompt_longer_than_the_window_and_none():
    assert "".join(written(3, "abcdé" * 9 + "a")) == "bcd"
    assert "".join(written(3, "")) == "abc"


def test_chance_follows_the_seed():
    def text(seed):
        return written(40, temperature=1.0, seed=seed, certainty=2.0)

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_bytes_that_are_no_text_do_no_harm():
    assert all(isinstance(piece, str) for piece in written(64, temperature=50.0))
