"""Devices that are not here, which their compiler knows all the same: `--platform tpu`.

libtpu compiles for any slice without a chip of it. Nothing can be put on these devices, and no
program be run: shapes are lowered and compiled for them, and the compiler says what it made.
"""

import re
from typing import Any

from jax.experimental import topologies

from diloco.common.config import environment
from diloco.common.errors import ConfigError

# A name of libtpu's: the chip, and how many of them there are along each axis of the slice.
_NAME = re.compile(r"v\d+[a-z]*:\d+(x\d+)*")


def tpu_devices(topology: str) -> list[Any]:
    """The devices of a slice.

    Args:
        topology: its chip and shape in libtpu's words: `v5e:2x4`, `v5p:4x4x4`, `v6e:8x8`.

    Raises:
        ConfigError: libtpu is not installed, or knows no such slice.
    """
    if not _NAME.fullmatch(topology):
        raise ConfigError(
            f"{topology!r} is not the name of a slice",
            hint="chip and shape, as v5e:2x4, v5p:4x4x4 or v6e:8x8",
        )
    environment.compile_without_tpu()
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        raise ConfigError(
            f"the TPU's compiler gives no slice {topology}: {str(error).splitlines()[0]}",
            hint="it is libtpu: pip install 'diloco[tpu]'; shapes are those of Cloud TPU",
        ) from error
    return list(found.devices)
