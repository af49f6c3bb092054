"""The context that all parts of one aggregator process share."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from diloco.common.process.config import AggregatorSection, GcSection
from diloco.common.process.health import Health
from diloco.common.process.metrics import Metrics
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import RunMismatchError
from diloco.common.storage.tape import RunContext

if TYPE_CHECKING:
    from diloco.aggregator.arrays.arithmetic import Arithmetic


@dataclass(frozen=True, kw_only=True)
class Context(RunContext):
    """The state that all parts of one aggregator process share.

    Attributes:
        name: the name of the process, which its records state.
        record_bytes: the greatest length of a record in bytes; the body of a longer record is
            stored as an object.
        most_positions: the most data positions in a specification; more are stored as an object.
        gc: the settings of garbage collection.
        share_expiry_s: silence in seconds after which a learner's shares of the data become free.
        arithmetic: numeric functions for arrays; None for production's, which load Numba when they
            are first used: operators' commands have a context too, and need no Numba.
        metrics: the metrics of the process.
        health: the health of the process.
    """

    name: str
    record_bytes: int = field(default_factory=lambda: wire.RECORD_BYTES)
    most_positions: int = wire.MAX_KEYS
    gc: GcSection = field(default_factory=GcSection)
    share_expiry_s: float = AggregatorSection().share_expiry_s
    arithmetic: "Arithmetic | None" = None
    metrics: Metrics = field(default_factory=Metrics)
    health: Health = field(default_factory=Health)


async def put_proof(context: Context) -> None:
    """Stores a small object, each time the same, which proves that this process can write.

    Raises:
        StoreError: the store does not answer, is full, or does not permit it.
    """
    name = names.proof(names.global_prefix(context.run))
    await context.runtime.call(context.store.put, name, name.encode())


def resumed_since(context: RunContext, epoch: int) -> RunMismatchError:
    """Returns the error for a process whose run was resumed on a newer tape, of epoch `epoch`."""
    return RunMismatchError(
        f"run {context.run!r} was resumed as epoch {epoch}, this is epoch {context.epoch}",
        hint="this process is connected to the server of an earlier tape: stop it",
    )
