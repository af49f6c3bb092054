"""Whether the run's file says of each learner what its slice can be: pure."""

import math
from collections.abc import Iterator

from diloco.common.config import Config, MeshSection
from diloco.provision.findings import Finding
from diloco.provision.fleet import Fleet, Learner

# A chip of these is one device to JAX. Of others it is not known here.
_ONE_DEVICE = frozenset({"v5p", "v6e"})


def check_meshes(fleet: Fleet, config: Config) -> Iterator[Finding]:
    """Meshes that do not fit their slices, and islands of nobody."""
    for name, learner in fleet.learners.items():
        chips = chips_of(learner)
        if learner.kind not in _ONE_DEVICE or not chips:
            continue
        mesh = config.learner.island(name).mesh or config.learner.mesh
        if not _fits(mesh, chips):
            words = f"data={mesh.data}, fsdp={mesh.fsdp}, tensor={mesh.tensor}"
            yield Finding(
                f"learners.{name}: the mesh of the run's file ({words}) does not fit its {chips} "
                "chips: sizes must multiply to them, and 0 takes what the others leave; give it "
                f"one of its own under [learner.islands.{name}]"
            )
    for name in sorted(config.learner.islands.keys() - fleet.learners.keys()):
        yield Finding(
            f"the run's file has [learner.islands.{name}], and the fleet no such learner",
            refused=False,
        )


def chips_of(learner: Learner) -> int:
    """Of all its hosts; 0 of a machine without."""
    if learner.topology is None:
        return learner.chips or 0
    return math.prod(int(side) for side in learner.topology.split("x"))


def _fits(mesh: MeshSection, devices: int) -> bool:
    sizes = (mesh.data, mesh.fsdp, mesh.tensor)
    given = math.prod(size for size in sizes if size)
    return devices % given == 0 if 0 in sizes else devices == given
