"""The mean loss that an update states, of the steps that it covers."""

import jax.numpy as jnp
import pytest

from diloco.common.protocol.errors import DivergedError
from diloco.learner.synchronizer import Losses


def test_the_mean_is_of_the_steps_that_an_update_covers():
    losses = Losses()
    losses.stepped(None, 4.0)
    assert losses.mean(1)() == 4.0
    losses.stepped(4.0, jnp.float32(2.0))
    losses.stepped(2.0, jnp.float32(3.0))
    assert losses.mean(2)() == 2.5
    assert losses.mean(3)() == 3.0
    losses.stepped(3.0, jnp.float32(jnp.nan))
    with pytest.raises(DivergedError):
        losses.mean(2)()


def test_work_of_the_life_before_has_its_loss_also_before_the_first_step():
    """A life that goes on with it may have to send it at once, as at the run's end."""
    losses = Losses(carried=3, mean=2.0)
    assert losses.mean(3)() == 2.0
    losses.stepped(None, 6.0)
    assert losses.mean(4)() == 3.0
    assert losses.mean(2)() == 4.0
