"""Whether a learner trains on the CPU of a machine that has something better."""

import jax

from diloco.common import log
from diloco.common.accelerators import find_accelerators, unused
from diloco.common.config import allows_accelerators
from diloco.learner.member import Member


def warn_of_unused_accelerators(run: str, member: Member) -> None:
    """Say so, unless somebody wants it: whoever has host arrays computes elsewhere."""
    in_jax = any(sharding is not None for sharding in member.shardings.values())
    if not in_jax or wants_cpu() or jax.default_backend() != "cpu":
        return
    found = find_accelerators()
    if found is not None:
        logger = log.get(run=run, learner=member.learner)
        logger.warning(
            "accelerator_unused", found=found.count(len(found.names)), advice=unused(found)
        )


def wants_cpu() -> bool:
    """Whether the user keeps JAX on the CPU, by the environment or in the program."""
    return getattr(jax.config, "jax_platforms", None) == "cpu" or not allows_accelerators()
