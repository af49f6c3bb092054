"""Which machine an aggregator needs: pure."""

from collections.abc import Iterator

from diloco.common.config import RunSettings
from diloco.plan.traffic import equal_fragments, sizes
from diloco.provision.findings import Finding
from diloco.provision.fleet import Fleet
from diloco.provision.known import Known

# Beside the arrays that `diloco plan` counts: the system, the interpreter, and room to breathe.
REST_BYTES = 4 * 10**9


def memory_needed(fleet: Fleet, settings: RunSettings) -> int:
    """Of one aggregator: each must be able to own every fragment when the others are lost."""
    return sizes(settings, equal_fragments(settings, fleet.parameters)).resident_bytes + REST_BYTES


def machines(fleet: Fleet, known: Known, needed_bytes: int) -> dict[str, str | None]:
    """Each aggregator's machine: the one that is named, else the smallest that holds the run."""
    found = known.machine_with(needed_bytes)
    return {name: one.machine_type or found for name, one in fleet.aggregators.items()}


def check_memory(fleet: Fleet, known: Known, needed_bytes: int) -> Iterator[Finding]:
    """Whether the model fits into each aggregator."""
    needed = f"{needed_bytes / 1e9:.0f} GB for {fleet.parameters / 1e9:g} billion parameters"
    fitting = known.machine_with(needed_bytes)
    hint = f"the smallest known here is {fitting}" if fitting else "none known here has as much"
    for name, machine in machines(fleet, known, needed_bytes).items():
        if machine is None:
            yield Finding(f"aggregators.{name}: needs {needed}; {hint}: name a machine_type")
        elif (has := known.memory_bytes(machine)) is None:
            yield Finding(
                f"aggregators.{name}: the memory of {machine} is not known here; it must have "
                f"{needed}",
                refused=False,
            )
        elif has < needed_bytes:
            yield Finding(
                f"aggregators.{name}: {machine} has {has / 1e9:.0f} GB of memory, and needs "
                f"{needed}; {hint}"
            )
